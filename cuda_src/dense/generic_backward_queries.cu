// The gradient of the queries of dense attention on CUDA cores, for any GPU and any strides: the fallback of tests and
// of unsupported calls.
//
//   P = exp(scale Q K^T - lse),   dS = P (dO V^T - delta),   dQ = scale dS K
//
// Grid: x = tiles of queries (at most; the schedule has their number), y = heads. A warp processes one query at a time,
// 32 keys per step: a lane has one key's products, then columns of the gradient.
#include "dense/generic_backward.cuh"
#include "ptx/control.cuh"
#include "ptx/element.cuh"

namespace mla::dense {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK, kHeadDimV = MLA_HEAD_DIM_V;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kWarps = 8;
constexpr i32 kThreads = kWarps * kWarpThreads;

// ---- Storage ---------------------------------------------------------------------------------------------------
struct Storage {
    float query[kWarps][kHeadDimQk], dout[kWarps][kHeadDimV];
};

MLA_PREFILL_BACKWARD_FACTS();
MLA_FACT(threads, kThreads);

// ---- One query -------------------------------------------------------------------------------------------------
MLA_DEVICE LaneColumns<kHeadDimQk> query_gradient(const PrefillBackwardParams& p, const QueryTile& tile, i32 row,
                                                  i32 head, const float* query, const float* dout, i32 lane) {
    const i32 kv_head = head / (p.h_q / p.h_kv), seen = tile.seen(row);
    const i64 at = (i64)head * p.num_rows + tile.first_row + row;
    const float lse2 = p.lse2[at], delta = p.delta[at];
    LaneColumns<kHeadDimQk> sums;
    if (lse2 == -negative_infinity()) return sums;
#pragma unroll 1
    for (i32 first = 0; first < seen; first += kWarpThreads) {
        const i64 key = (i64)tile.first_key + first, own = tile.first_key + min(first + lane, seen - 1);
        const float score = key_row<Element, kHeadDimQk>(p, own, kv_head).dot(query);
        const float dp = value_row<Element, kHeadDimV>(p, own, kv_head).dot(dout);
        const float gradient = pair_of(score * p.scale_log2, dp, lse2, delta).gradient;
#pragma unroll 1
        for (i32 i = 0; i < min(kWarpThreads, seen - first); ++i) {
            sums.add(__shfl_sync(kFullWarp, gradient, i), key_row<Element, kHeadDimQk>(p, key + i, kv_head), lane);
        }
    }
    return sums;
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    mla_dense_generic_backward_queries(const __grid_constant__ PrefillBackwardParams p) {
    __shared__ Storage s;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if ((i32)blockIdx.x >= p.schedule->num_tiles) return;
    const QueryTile tile = p.tiles[blockIdx.x];
    const i32 warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads, head = blockIdx.y;
    for (i32 row = warp; row < tile.queries; row += kWarps) {
        const i64 query = (i64)tile.first_query + row;
        query_row<Element, kHeadDimQk>(p, query, head).copy(s.query[warp], lane);
        dout_row<Element, kHeadDimV>(p, query, head).copy(s.dout[warp], lane);
        __syncwarp();
        const auto sums = query_gradient(p, tile, row, head, s.query[warp], s.dout[warp], lane);
        u16* to = p.dq + query * p.dq_stride_s_elems + head * p.dq_stride_h_elems;
        u16* last = p.dq_rope + query * p.dq_rope_stride_s_elems + head * p.dq_rope_stride_h_elems;
        store_pieces<Element>(to, last + p.q_rope_column, sums, p.scale, lane);
        __syncwarp();
    }
}
}  // namespace mla::dense
