// Merges n partial attention results over disjoint sets of keys.
//
//   lse = log sum_j exp(lse_j),   out = sum_j out_j exp(lse_j - lse)
//
// Grid: x = rows of (b, s_q, h_q), one warp each. A state whose lse is +Inf or -Inf is empty: it saw no key.
#include "common/facts.cuh"
#include "merge/state.cuh"
#include "ptx/control.cuh"
#include "ptx/element.cuh"

namespace mla::merge {
using Element = MLA_DTYPE;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kWarps = kThreads / kWarpThreads;

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
    i32 outs_are_fp32, out_is_fp32;
    float to_log2;     // from the caller's base to base 2
    float lse_factor;  // and back
    float empty_lse;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(MergeStatesParams, outs_stride_n_elems), MLA_OFFSET(MergeStatesParams, n),
              MLA_OFFSET(MergeStatesParams, to_log2), (int)sizeof(MergeStatesParams));
MLA_FACT(threads, kThreads);
MLA_FACT(rows_per_block, kWarps);

extern "C" __global__ void __launch_bounds__(kThreads) mla_merge_states(const __grid_constant__ MergeStatesParams p) {
    griddepcontrol_wait();
    const i32 lane = threadIdx.x % kWarpThreads;
    const i64 index = (i64)blockIdx.x * kWarps + threadIdx.x / kWarpThreads;
    if (index >= (i64)p.b * p.s_q * p.h_q) return;
    const i64 h = index % p.h_q, s = index / p.h_q % p.s_q, b = index / p.h_q / p.s_q;
    const float* lses = p.lses + b * p.lses_stride_b_elems + h * p.lses_stride_h_elems + s * p.lses_stride_s_elems;
    const i64 from = b * p.outs_stride_b_elems + s * p.outs_stride_s_elems + h * p.outs_stride_h_elems;
    const i64 to = b * p.out_stride_b_elems + s * p.out_stride_s_elems + h * p.out_stride_h_elems;

    float max_lse = negative_infinity(), sum = 0.f;
    for (i32 j = 0; j < p.n; ++j) max_lse = fmaxf(max_lse, state_lse2(lses[j * p.lses_stride_n_elems], p.to_log2));
    for (i32 j = 0; j < p.n; ++j) {
        const float lse = state_lse2(lses[j * p.lses_stride_n_elems], p.to_log2);
        if (lse != negative_infinity()) sum += exp2f(lse - max_lse);
    }
    const float total = total_lse2(max_lse, sum);
    for (i32 column = lane; column < p.d; column += kWarpThreads) {
        float merged = 0.f;
        for (i32 j = 0; j < p.n; ++j) {
            const float lse = state_lse2(lses[j * p.lses_stride_n_elems], p.to_log2);
            if (lse == negative_infinity()) continue;  // an empty state's output is never read
            const float x = read_element<Element>(p.outs, from + j * p.outs_stride_n_elems + column, p.outs_are_fp32);
            merged = fmaf(exp2f(lse - total), x, merged);
        }
        write_element<Element>(p.out, to + column, merged, p.out_is_fp32);
    }
    if (lane == 0) {
        p.lse[b * p.lse_stride_b_elems + h * p.lse_stride_h_elems + s * p.lse_stride_s_elems] =
            sum == 0.f ? p.empty_lse : total * p.lse_factor;
    }
}
}  // namespace mla::merge
