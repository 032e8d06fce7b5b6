// Dense attention over e4m3 codes on CUDA cores, for any GPU and any strides: a fallback like dense/generic.cu. Numbers
// are converted, which is exact, and weights are not rounded.
//
//   out = s_v softmax(scale s_q s_k Q K^T) V,  lse = log(sum exp(scale s_q s_k Q K^T))
//
// Grid: x = tiles of queries (at most; the schedule has their number), y = heads. A warp processes one query at a time,
// 32 keys per step: a lane has the score of one key, then columns of the values.
#include "dense/fp8_params.cuh"
#include "dense/result.cuh"
#include "ptx/control.cuh"
#include "ptx/fp8.cuh"
#include "tile/warp.cuh"

namespace mla::dense {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Code = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK, kHeadDimV = MLA_HEAD_DIM_V;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kWarps = 8;
constexpr i32 kThreads = kWarps * kWarpThreads;
constexpr i32 kFirstColumns = kHeadDimQk - kRopeColumns;
constexpr i32 kColumnsPerLane = kHeadDimV / kWarpThreads;

MLA_PREFILL_FP8_FACTS();
MLA_FACT(threads, kThreads);

// ---- Rows ------------------------------------------------------------------------------------------------------
// Called by a warp.
MLA_DEVICE void copy_query(float* to, const CodeRow& query, i32 lane) {
#pragma unroll 1
    for (i32 i = lane; i < kHeadDimQk; i += kWarpThreads) {
        to[i] = Code::to_float(i < kFirstColumns ? query.first[i] : query.last[i - kFirstColumns]);
    }
}

MLA_DEVICE float dot_key(const float* query, const CodeRow& key) {
    float sum = 0.f;
#pragma unroll 4
    for (i32 i = 0; i < kFirstColumns; ++i) sum = fmaf(query[i], Code::to_float(key.first[i]), sum);
#pragma unroll 4
    for (i32 i = 0; i < kRopeColumns; ++i) sum = fmaf(query[kFirstColumns + i], Code::to_float(key.last[i]), sum);
    return sum;
}

// ---- One query -------------------------------------------------------------------------------------------------
// Relative to the largest score so far, in base 2. The maximum starts at a finite value: no difference of infinities.
struct Sums {
    float max = -3.0e38f, sum = 0.f;
    float out[kColumnsPerLane] = {};  // of columns lane, lane + 32, ...
};

// Attends with a query that sees the first `seen` keys.
MLA_DEVICE Sums attend(const PrefillFp8Params& p, const QueryTile& tile, i32 seen, const float* query, i32 kv_head,
                       float scale_log2, i32 lane) {
    Sums sums;
#pragma unroll 1
    for (i32 first = 0; first < seen; first += kWarpThreads) {
        float score = negative_infinity();
        if (first + lane < seen)
            score = dot_key(query, key_codes(p, tile.first_key + first + lane, kv_head)) * scale_log2;
        const float before = sums.max;
        sums.max = fmaxf(sums.max, warp_max(score));
        const float decay = exp2f(before - sums.max), weight = exp2f(score - sums.max);
        sums.sum = sums.sum * decay + warp_sum(weight);
#pragma unroll
        for (i32 i = 0; i < kColumnsPerLane; ++i) sums.out[i] *= decay;
#pragma unroll 1
        for (i32 i = 0; i < min(kWarpThreads, seen - first); ++i) {
            const u8* value =
                code_bytes(p.v) + (i64)(tile.first_key + first + i) * p.v_stride_s_elems + kv_head * p.v_stride_h_elems;
            const float of_key = __shfl_sync(kFullWarp, weight, i);
#pragma unroll
            for (i32 j = 0; j < kColumnsPerLane; ++j) {
                sums.out[j] = fmaf(of_key, Code::to_float(value[lane + j * kWarpThreads]), sums.out[j]);
            }
        }
    }
    return sums;
}

MLA_DEVICE void store(const PrefillFp8Params& p, i64 query, i32 head, const Sums& sums, float value_scale, i32 lane) {
    const RowResult result = row_result(sums.max, sums.sum, negative_infinity());
    const i64 to = query * p.out_stride_s_elems + head * p.out_stride_h_elems;
#pragma unroll
    for (i32 i = 0; i < kColumnsPerLane; ++i) {
        const float x = result.own == 0.f ? 0.f : result.own * sums.out[i] * value_scale;
        const i64 at = to + lane + i * kWarpThreads;
        if (p.out_is_fp32) {
            static_cast<float*>(p.out)[at] = x;
        } else {
            static_cast<u16*>(p.out)[at] = p.out_is_fp16 ? float16::from_float(x) : bfloat16::from_float(x);
        }
    }
    if (lane == 0) store_lse(p, query, head, result.lse);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    mla_dense_generic_fp8(const __grid_constant__ PrefillFp8Params p) {
    __shared__ float queries[kWarps][kHeadDimQk];
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if ((i32)blockIdx.x >= p.schedule->num_tiles) return;
    const QueryTile tile = p.tiles[blockIdx.x];
    const i32 warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
    const i32 head = blockIdx.y, kv_head = head / (p.h_q / p.h_kv);
    const ItemScales scales = item_scales(p, tile.first_query, kv_head);
    for (i32 row = warp; row < tile.queries; row += kWarps) {
        const i64 query = tile.first_query + row;
        copy_query(queries[warp], query_codes(p, query, head), lane);
        __syncwarp();
        const Sums sums = attend(p, tile, max(0, tile.seen(row)), queries[warp], kv_head, scales.score_log2, lane);
        store(p, query, head, sums, scales.value, lane);
        __syncwarp();
    }
}
}  // namespace mla::dense
