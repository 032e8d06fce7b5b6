// Dense attention on CUDA cores, for any GPU and any strides: the fallback of tests and of unsupported calls.
//
//   out = softmax(scale Q K^T) V,  lse = log(sum exp(scale Q K^T)),  merged with an earlier state
//
// Grid: x = tiles of queries (at most; the schedule knows how many), y = heads. A warp takes a query at a time, 32 keys
// a step: a lane has the score of one key, then columns of the values.
#include "dense/generic_rows.cuh"
#include "dense/mask.cuh"
#include "dense/result.cuh"
#include "ptx/control.cuh"
#include "tile/warp.cuh"

namespace mla::dense {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK, kHeadDimV = MLA_HEAD_DIM_V;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kWarps = 8;
constexpr i32 kThreads = kWarps * kWarpThreads;
constexpr i32 kColumnsPerLane = kHeadDimV / kWarpThreads;

MLA_PREFILL_FACTS();
MLA_FACT(threads, kThreads);

// ---- One query -------------------------------------------------------------------------------------------------
// Relative to the largest score so far. The maximum starts at a finite value: no difference of infinities.
struct Sums {
    float max = -3.0e38f, sum = 0.f;
    float out[kColumnsPerLane] = {};  // of columns lane, lane + 32, ...

    // Takes a score per lane; returns the lane's weight.
    MLA_DEVICE float add(float score) {
        const float before = max;
        max = fmaxf(max, warp_max(score));
        const float decay = exp2f(before - max), weight = exp2f(score - max);
        sum = sum * decay + warp_sum(weight);
#pragma unroll
        for (i32 i = 0; i < kColumnsPerLane; ++i) out[i] *= decay;
        return weight;
    }
    MLA_DEVICE void add_value(float weight, const u16* value, i32 lane) {
#pragma unroll
        for (i32 i = 0; i < kColumnsPerLane; ++i) {
            out[i] = fmaf(weight, Element::to_float(value[lane + i * kWarpThreads]), out[i]);
        }
    }
};

// Attends with query number `row`, which sees the first `seen` keys.
MLA_DEVICE Sums attend(const PrefillParams& p, const QueryTile& tile, i64 row, i32 seen, const float* query,
                       i32 kv_head, i32 lane) {
    Sums sums;
#pragma unroll 1
    for (i32 first = 0; first < seen; first += kWarpThreads) {
        const bool visible = first + lane < seen && (p.mask == nullptr || mask_bit(p, row, first + lane));
        float score = negative_infinity();
        if (visible) {
            score = key_row<Element, kHeadDimQk>(p, tile.first_key + first + lane, kv_head).dot(query) * p.scale_log2;
        }
        const float weight = sums.add(score);
        const u32 all_visible = __ballot_sync(kFullWarp, visible);
#pragma unroll 1
        for (i32 i = 0; i < min(kWarpThreads, seen - first); ++i) {
            if (!(all_visible >> i & 1)) continue;
            const u16* value =
                p.v + (i64)(tile.first_key + first + i) * p.v_stride_s_elems + kv_head * p.v_stride_h_elems;
            sums.add_value(__shfl_sync(kFullWarp, weight, i), value, lane);
        }
    }
    return sums;
}

MLA_DEVICE float state_element(const PrefillParams& p, i64 at) {
    return p.state_is_fp32 ? static_cast<const float*>(p.state_out)[at]
                           : Element::to_float(static_cast<const u16*>(p.state_out)[at]);
}

MLA_DEVICE void store(const PrefillParams& p, i64 query, i32 head, const Sums& sums, i32 lane) {
    const RowResult result = row_result(sums.max, sums.sum, earlier_lse(p, query, head));
    const i64 from = query * p.state_out_stride_s_elems + head * p.state_out_stride_h_elems;
    const i64 to = query * p.out_stride_s_elems + head * p.out_stride_h_elems;
#pragma unroll
    for (i32 i = 0; i < kColumnsPerLane; ++i) {
        const i32 column = lane + i * kWarpThreads;
        float x = result.own == 0.f ? 0.f : result.own * sums.out[i];
        if (result.earlier != 0.f) x = fmaf(result.earlier, state_element(p, from + column), x);
        if (p.out_is_fp32) {
            static_cast<float*>(p.out)[to + column] = x;
        } else {
            static_cast<u16*>(p.out)[to + column] = Element::from_float(x);
        }
    }
    __syncwarp();  // the earlier log-sum-exp may be where the new one goes
    if (lane == 0) store_lse(p, query, head, result.lse);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 2) mla_dense_generic(const __grid_constant__ PrefillParams p) {
    __shared__ float queries[kWarps][kHeadDimQk];
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if ((i32)blockIdx.x >= p.schedule->num_tiles) return;
    const QueryTile tile = p.tiles[blockIdx.x];
    const i32 warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
    const i32 head = blockIdx.y, kv_head = head / (p.h_q / p.h_kv);
    for (i32 row = warp; row < tile.queries; row += kWarps) {
        const i64 query = tile.first_query + row;
        query_row<Element, kHeadDimQk>(p, query, head).copy(queries[warp], lane);
        __syncwarp();
        store(p, query, head, attend(p, tile, query, max(0, tile.seen(row)), queries[warp], kv_head, lane), lane);
        __syncwarp();
    }
}
}  // namespace mla::dense
