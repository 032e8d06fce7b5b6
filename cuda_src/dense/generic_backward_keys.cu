// The gradients of the keys and values of dense attention on CUDA cores, for any GPU and any strides: the fallback of
// tests and of unsupported calls.
//
//   P = exp(scale Q K^T - lse),   dS = P (dO V^T - delta),   dV = P^T dO,   dK = scale dS^T Q
//
// Grid: x = tiles of keys (at most; the schedule has their number), y = KV heads. A warp processes one key at a time,
// and 32 queries of each head of its group per step: a lane has one query's products, then columns of the gradients.
// The last columns of a key's gradient, shared by all KV heads, go to fp32 parts, which dense_dk_rope adds.
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
constexpr i32 kFirstColumns = kHeadDimQk - kRopeColumns;

// ---- Storage ---------------------------------------------------------------------------------------------------
struct Storage {
    float key[kWarps][kHeadDimQk], value[kWarps][kHeadDimV];
};

MLA_PREFILL_BACKWARD_FACTS();
MLA_FACT(threads, kThreads);

// ---- One key ---------------------------------------------------------------------------------------------------
struct Sums {
    LaneColumns<kHeadDimQk> dk;
    LaneColumns<kHeadDimV> dv;
};

// Adds the contribution of a head's queries.
MLA_DEVICE void add_head(Sums& sums, const PrefillBackwardParams& p, const KeyTile& tile, i32 row, i32 head,
                         const float* key, const float* value, i32 lane) {
    const i64 at = (i64)head * p.num_rows + tile.first_row;
#pragma unroll 1
    for (i32 first = tile.first_seer(row); first < tile.queries; first += kWarpThreads) {
        const i64 query = (i64)tile.first_query + first;
        const i32 own = min(first + lane, tile.queries - 1);
        const float lse2 = p.lse2[at + own], delta = p.delta[at + own];
        const float score = query_row<Element, kHeadDimQk>(p, tile.first_query + own, head).dot(key);
        const float dp = dout_row<Element, kHeadDimV>(p, tile.first_query + own, head).dot(value);
        const Pair pair = pair_of(score * p.scale_log2, dp, lse2, delta);
        const u32 counting = __ballot_sync(kFullWarp, first + lane < tile.queries && lse2 != -negative_infinity());
#pragma unroll 1
        for (u32 left = counting; left != 0; left &= left - 1) {
            const i32 i = __ffs(left) - 1;
            const float weight = __shfl_sync(kFullWarp, pair.weight, i);
            const float gradient = __shfl_sync(kFullWarp, pair.gradient, i);
            sums.dk.add(gradient, query_row<Element, kHeadDimQk>(p, query + i, head), lane);
            sums.dv.add(weight, dout_row<Element, kHeadDimV>(p, query + i, head), lane);
        }
    }
}

MLA_DEVICE void store(const PrefillBackwardParams& p, const Sums& sums, i64 key, i32 kv_head, i32 lane) {
    u16* dk = p.dk + key * p.dk_stride_s_elems + kv_head * p.dk_stride_h_elems;
    u16* dv = p.dv + key * p.dv_stride_s_elems + kv_head * p.dv_stride_h_elems;
    if (p.dk_rope_sums == nullptr) {
        u16* last = p.dk_rope + key * p.dk_rope_stride_s_elems + kv_head * p.dk_rope_stride_h_elems;
        store_pieces<Element>(dk, last + p.k_rope_column, sums.dk, p.scale, lane);
    } else {
        float* part = p.dk_rope_sums + key * p.dk_rope_sums_stride_s_elems + kv_head * p.dk_rope_sums_stride_h_elems;
#pragma unroll
        for (i32 i = 0; i < kHeadDimQk / kWarpThreads; ++i) {
            const i32 column = lane + i * kWarpThreads;
            const float x = sums.dk.x[i] * p.scale;
            if (column < kFirstColumns) {
                dk[column] = Element::from_float(x);
            } else {
                part[column - kFirstColumns] = x;
            }
        }
    }
#pragma unroll
    for (i32 i = 0; i < kHeadDimV / kWarpThreads; ++i) dv[lane + i * kWarpThreads] = Element::from_float(sums.dv.x[i]);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    mla_dense_generic_backward_keys(const __grid_constant__ PrefillBackwardParams p) {
    __shared__ Storage s;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if ((i32)blockIdx.x >= p.key_schedule->num_tiles) return;
    const KeyTile tile = p.key_tiles[blockIdx.x];
    const i32 warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
    const i32 kv_head = blockIdx.y, group = p.h_q / p.h_kv;
    for (i32 row = warp; row < tile.keys; row += kWarps) {
        const i64 key = (i64)tile.first_key + row;
        key_row<Element, kHeadDimQk>(p, key, kv_head).copy(s.key[warp], lane);
        value_row<Element, kHeadDimV>(p, key, kv_head).copy(s.value[warp], lane);
        __syncwarp();
        Sums sums;
        for (i32 head = kv_head * group; head < (kv_head + 1) * group; ++head) {
            add_head(sums, p, tile, row, head, s.key[warp], s.value[warp], lane);
        }
        store(p, sums, key, kv_head, lane);
        __syncwarp();
    }
}
}  // namespace mla::dense
