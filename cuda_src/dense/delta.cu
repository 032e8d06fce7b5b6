// The statistics of each query and head for the backward of dense attention.
//
//   delta = sum(out * dout) - dlse,   lse2 = lse log2(e)
//
// Grid: x = tiles of queries (at most; the schedule knows how many), then heads, which change faster. A row's 16-byte
// pieces are as many lanes. Where lse is infinite, nothing else is read: delta is 0 and lse2 is +inf, so that
// exp2(s - lse2) is 0. So are the rows between a sequence's last query and the next multiple of kRowGroup.
//
// The sums that the kernel of keys adds to become 0 here, too: these stores run beside the loads.
#include "dense/backward_params.cuh"
#include "ptx/control.cuh"
#include "tile/elements.cuh"

namespace mla::dense {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK, kHeadDimV = MLA_HEAD_DIM_V;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kRowLanes = kHeadDimV / kChunkElems;
constexpr i32 kRowsAtOnce = kThreads / kRowLanes;
static_assert(kWarpThreads % kRowLanes == 0, "a row is within a warp");

MLA_PREFILL_BACKWARD_FACTS();
MLA_FACT(threads, kThreads);

// ---- One row ---------------------------------------------------------------------------------------------------
struct Statistics {
    float lse2, delta;
};

MLA_DEVICE float row_sum(float x) {
#pragma unroll
    for (i32 step = kRowLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
    return x;
}

// The lane's part of sum(out * dout).
MLA_DEVICE float partial_delta(const PrefillBackwardParams& p, i64 query, i32 head, i32 column) {
    const i64 at = query * p.out_stride_s_elems + head * p.out_stride_h_elems + column;
    float x[kChunkElems], y[kChunkElems], sum = 0.f;
    if (p.out_is_fp32) {
        load_chunk<Element>(x, static_cast<const float*>(p.out) + at);
    } else {
        load_chunk<Element>(x, static_cast<const u16*>(p.out) + at);
    }
    load_chunk<Element>(y, p.dout + query * p.dout_stride_s_elems + head * p.dout_stride_h_elems + column);
#pragma unroll
    for (i32 i = 0; i < kChunkElems; ++i) sum = fmaf(x[i], y[i], sum);
    return sum;
}

// By the lanes of a row; all lanes of the warp take part.
MLA_DEVICE Statistics statistics(const PrefillBackwardParams& p, i64 query, i32 head, bool there, i32 lane) {
    const float none = negative_infinity();
    const float lse = there ? p.lse[query * p.lse_stride_s_elems + head * p.lse_stride_h_elems] : none;
    const bool empty = fabsf(lse) == -none;
    const float delta = row_sum(empty ? 0.f : partial_delta(p, query, head, lane * kChunkElems));
    if (empty) return Statistics{-none, 0.f};
    const float dlse = p.dlse == nullptr ? 0.f : p.dlse[query * p.dlse_stride_s_elems + head * p.dlse_stride_h_elems];
    return Statistics{lse * kLog2E, delta - dlse};
}

// ---- Sums ------------------------------------------------------------------------------------------------------
MLA_DEVICE void clear(float* from, i64 first, i64 count, i64 step) {
#pragma unroll 4
    for (i64 i = first; i < count / 4; i += step) reinterpret_cast<float4*>(from)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_dense_delta(const __grid_constant__ PrefillBackwardParams p) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const i32 index = blockIdx.x / p.h_q, head = blockIdx.x % p.h_q;
    if (p.dk_rope_sums != nullptr && p.dk_rope_sums_stride_h_elems == 0) {
        clear(p.dk_rope_sums, (i64)blockIdx.x * kThreads + threadIdx.x, (i64)p.s_kv * kRopeColumns,
              (i64)gridDim.x * kThreads);
    }
    if (index >= p.schedule->num_tiles) return;
    const QueryTile tile = p.tiles[index];
    const i32 lane = threadIdx.x % kRowLanes, rows = ceil_div(tile.queries, kRowGroup) * kRowGroup;
    const i64 first = (i64)head * p.num_rows + tile.first_row;
    if (p.dq_sums != nullptr) clear(p.dq_sums + first * kHeadDimQk, threadIdx.x, rows * kHeadDimQk, kThreads);
#pragma unroll 2
    for (i32 from = 0; from < rows; from += kRowsAtOnce) {
        const i32 row = from + threadIdx.x / kRowLanes;
        const Statistics found = statistics(p, (i64)tile.first_query + row, head, row < tile.queries, lane);
        if (lane == 0 && row < rows) {
            p.lse2[first + row] = found.lse2;
            p.delta[first + row] = found.delta;
        }
    }
}
}  // namespace mla::dense
