// Merges n partial attention results over disjoint sets of keys.
//
//   lse = log sum_j exp(lse_j),   out = sum_j out_j exp(lse_j - lse)
//
// Grid: x = blocks of rows of (b, s_q, h_q). A row has one lane per eight columns, where rows are aligned: a block per
// row would be bound by latency. A state with an lse of +Inf or -Inf is empty: it saw no key.
#include "common/facts.cuh"
#include "common/lse.cuh"
#include "merge/state.cuh"
#include "ptx/control.cuh"
#include "ptx/element.cuh"

namespace mla::merge {
using Element = MLA_DTYPE;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kColumns = 8;   // of a lane
constexpr i32 kTogether = 2;  // states with outputs in flight at once

// ---- Params ----------------------------------------------------------------------------------------------------
struct MergeStatesParams {
    const void* outs;   // (n, b, s_q, h_q, d), Element or fp32
    const float* lses;  // (n, b, h_q, s_q)
    void* out;          // (b, s_q, h_q, d), Element or fp32
    float* lse;         // (b, h_q, s_q)
    i64 outs_stride_n_elems, outs_stride_b_elems, outs_stride_s_elems, outs_stride_h_elems;
    i64 lses_stride_n_elems, lses_stride_b_elems, lses_stride_h_elems, lses_stride_s_elems;
    i64 out_stride_b_elems, out_stride_s_elems, out_stride_h_elems;
    i64 lse_stride_b_elems, lse_stride_h_elems, lse_stride_s_elems;
    i32 n, b, s_q, h_q, d;
    i32 row_lanes;  // threads of a row: a power of two
    i32 outs_are_fp32, out_is_fp32;
    float to_log2;  // from the caller's base to base 2
    LseConvention lse_convention;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(MergeStatesParams, outs_stride_n_elems), MLA_OFFSET(MergeStatesParams, n),
              MLA_OFFSET(MergeStatesParams, to_log2), (int)sizeof(MergeStatesParams));
MLA_FACT(threads, kThreads);
MLA_FACT(lane_columns, kColumns);

// ---- One row ---------------------------------------------------------------------------------------------------

// Start of a row in each array, in elements.
struct Row {
    const float* lses;
    i64 from, to;
};

struct alignas(16) Elements8 {
    u16 x[kColumns];
};

// Weights are relative to the largest log-sum-exp and divided by their sum. Relative to the total they could add up to
// more than 1, because the total may round to the largest. The output of an empty state is never read.
struct Norm {
    float max_lse, factor;
};

MLA_DEVICE bool is_seen(const MergeStatesParams& p, const Row& row, i32 state, const Norm& norm, float& weight) {
    if (state >= p.n) return false;
    const float lse = state_lse2(row.lses[state * p.lses_stride_n_elems], p.to_log2);
    weight = exp2f(lse - norm.max_lse) * norm.factor;
    return lse != negative_infinity();
}

MLA_DEVICE bool is_aligned(const MergeStatesParams& p) {
    const i64 strides = p.outs_stride_n_elems | p.outs_stride_b_elems | p.outs_stride_s_elems | p.outs_stride_h_elems |
                        p.out_stride_b_elems | p.out_stride_s_elems | p.out_stride_h_elems | p.d;
    return strides % kColumns == 0 && (reinterpret_cast<u64>(p.outs) | reinterpret_cast<u64>(p.out)) % 16 == 0;
}

MLA_DEVICE void read_columns(float (&x)[kColumns], const void* from, i64 at, i32 is_fp32) {
    if (is_fp32) {
#pragma unroll
        for (i32 half = 0; half < 2; ++half) {
            const Floats4 four = read_elements4<Element>(from, at + 4 * half, true);
#pragma unroll
            for (i32 i = 0; i < 4; ++i) x[4 * half + i] = four.x[i];
        }
        return;
    }
    const Elements8 raw = *reinterpret_cast<const Elements8*>(static_cast<const u16*>(from) + at);
#pragma unroll
    for (i32 i = 0; i < kColumns; ++i) x[i] = Element::to_float(raw.x[i]);
}

MLA_DEVICE void write_columns(void* to, i64 at, const float (&x)[kColumns], i32 is_fp32) {
    if (is_fp32) {
#pragma unroll
        for (i32 i = 0; i < kColumns; i += 4) {
            write_elements4<Element>(to, at + i, Floats4{x[i], x[i + 1], x[i + 2], x[i + 3]}, true);
        }
        return;
    }
    Elements8 narrow;
#pragma unroll
    for (i32 i = 0; i < kColumns; ++i) narrow.x[i] = Element::from_float(x[i]);
    *reinterpret_cast<Elements8*>(static_cast<u16*>(to) + at) = narrow;
}

MLA_DEVICE void merge_columns(const MergeStatesParams& p, const Row& row, const Norm& norm, i32 column) {
    float merged[kColumns] = {};
#pragma unroll 1
    for (i32 first = 0; first < p.n; first += kTogether) {
        bool seen[kTogether];
        float weight[kTogether], x[kTogether][kColumns];
#pragma unroll
        for (i32 j = 0; j < kTogether; ++j) seen[j] = is_seen(p, row, first + j, norm, weight[j]);
#pragma unroll
        for (i32 j = 0; j < kTogether; ++j) {
            if (!seen[j]) continue;
            read_columns(x[j], p.outs, row.from + (first + j) * p.outs_stride_n_elems + column, p.outs_are_fp32);
        }
#pragma unroll
        for (i32 j = 0; j < kTogether; ++j) {
#pragma unroll
            for (i32 i = 0; i < kColumns; ++i) merged[i] = seen[j] ? fmaf(weight[j], x[j][i], merged[i]) : merged[i];
        }
    }
    write_columns(p.out, row.to + column, merged, p.out_is_fp32);
}

MLA_DEVICE void merge_column(const MergeStatesParams& p, const Row& row, const Norm& norm, i32 column) {
    float merged = 0.f;
    for (i32 state = 0; state < p.n; ++state) {
        float weight;
        if (!is_seen(p, row, state, norm, weight)) continue;
        const i64 at = row.from + state * p.outs_stride_n_elems + column;
        merged = fmaf(weight, read_element<Element>(p.outs, at, p.outs_are_fp32), merged);
    }
    write_element<Element>(p.out, row.to + column, merged, p.out_is_fp32);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) mla_merge_states(const __grid_constant__ MergeStatesParams p) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const u32 index = blockIdx.x * (u32)(kThreads / p.row_lanes) + threadIdx.x / p.row_lanes;
    if (index >= (u32)(p.b * p.s_q * p.h_q)) return;
    const i32 lane = threadIdx.x % p.row_lanes;
    const i64 h = index % p.h_q, s = index / p.h_q % p.s_q, b = index / p.h_q / p.s_q;
    const Row row{p.lses + b * p.lses_stride_b_elems + h * p.lses_stride_h_elems + s * p.lses_stride_s_elems,
                  b * p.outs_stride_b_elems + s * p.outs_stride_s_elems + h * p.outs_stride_h_elems,
                  b * p.out_stride_b_elems + s * p.out_stride_s_elems + h * p.out_stride_h_elems};

    float max_lse = negative_infinity(), sum = 0.f;
#pragma unroll 4
    for (i32 j = 0; j < p.n; ++j) max_lse = fmaxf(max_lse, state_lse2(row.lses[j * p.lses_stride_n_elems], p.to_log2));
#pragma unroll 4
    for (i32 j = 0; j < p.n; ++j) {
        const float lse = state_lse2(row.lses[j * p.lses_stride_n_elems], p.to_log2);
        if (lse != negative_infinity()) sum += exp2f(lse - max_lse);
    }
    const Norm norm{max_lse, 1.f / sum};
    if (is_aligned(p)) {
        for (i32 column = lane * kColumns; column < p.d; column += p.row_lanes * kColumns) {
            merge_columns(p, row, norm, column);
        }
    } else {
        for (i32 column = lane; column < p.d; column += p.row_lanes) merge_column(p, row, norm, column);
    }
    if (lane == 0) {
        p.lse[b * p.lse_stride_b_elems + h * p.lse_stride_h_elems + s * p.lse_stride_s_elems] =
            callers_lse(p.lse_convention, max_lse, sum);
    }
}
}  // namespace mla::merge
