// Turns results of sparse decode back: the inverse of RoPE on the last 64 columns, for values that include the keys'
// RoPE part.
//
//   (x, y) = columns (2i, 2i + 1)   ->   (x cos + y sin, y cos - x sin)      angles of the query's position
//
// In place, after everything else: in 16 bits these columns are rounded a second time. A separate launch, since the
// math warps of the Hopper kernels have no registers for it, and it serves all kernels.
//
// Grid: x = warps, one per four heads of a query, a lane per pair.
#include "common/facts.cuh"
#include "common/types.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/element.cuh"
#include "tile/warp.cuh"

namespace mla::sparse_decode {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256, kWarps = kThreads / kWarpThreads;
constexpr i32 kHeads = 4;  // of a warp
constexpr i32 kPairs = kWarpThreads;
constexpr i32 kFirstColumn = 512 - 2 * kPairs;

// ---- Params ----------------------------------------------------------------------------------------------------
struct SparseDecodeTurnParams {
    void* out;         // (queries, h_q, 512), float32 or 16 bits
    const float* cos;  // (max_position, 32)
    const float* sin;
    const u8* positions;  // (b, s_q), i32 or i64
    i64 out_stride_query_elems, out_stride_h_elems, cos_stride_elems, sin_stride_elems;
    i64 positions_stride_b_bytes, positions_stride_s_bytes;
    i32 queries, s_q, h_q, max_position;
    i32 positions_are_64, out_is_fp32, out_is_bf16;
    i32 padding;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(SparseDecodeTurnParams, out_stride_query_elems),
              MLA_OFFSET(SparseDecodeTurnParams, queries), (int)sizeof(SparseDecodeTurnParams));
MLA_FACT(threads, kThreads);
MLA_FACT(heads_per_warp, kHeads);

// ---- Pairs -----------------------------------------------------------------------------------------------------
MLA_DEVICE float2 load_pair(const SparseDecodeTurnParams& p, i64 at) {
    if (p.out_is_fp32) return *reinterpret_cast<const float2*>(static_cast<const float*>(p.out) + at);
    const u32 pair = *reinterpret_cast<const u32*>(static_cast<const u16*>(p.out) + at);
    const u16 x = (u16)pair, y = (u16)(pair >> 16);
    if (p.out_is_bf16) return make_float2(bfloat16::to_float(x), bfloat16::to_float(y));
    return make_float2(float16::to_float(x), float16::to_float(y));
}

MLA_DEVICE void store_pair(const SparseDecodeTurnParams& p, i64 at, float2 pair) {
    if (p.out_is_fp32) {
        *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = pair;
    } else {
        *reinterpret_cast<u32*>(static_cast<u16*>(p.out) + at) =
            p.out_is_bf16 ? cvt_x2(bfloat16{}, pair.x, pair.y) : cvt_x2(float16{}, pair.x, pair.y);
    }
}

MLA_DEVICE i64 position_of(const SparseDecodeTurnParams& p, i32 query) {
    const u8* from =
        p.positions + query / p.s_q * p.positions_stride_b_bytes + query % p.s_q * p.positions_stride_s_bytes;
    const i64 position =
        p.positions_are_64 ? *reinterpret_cast<const i64*>(from) : (i64) * reinterpret_cast<const i32*>(from);
    return max(0ll, min(position, (i64)p.max_position - 1));
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_sparse_decode_turn_results(const __grid_constant__ SparseDecodeTurnParams p) {
    const i32 lane = threadIdx.x % kWarpThreads;
    const i64 warp = (i64)blockIdx.x * kWarps + threadIdx.x / kWarpThreads;
    const i32 of_query = ceil_div(p.h_q, kHeads);
    const i64 query = warp / of_query;
    const i32 first = (i32)(warp % of_query) * kHeads;
    griddepcontrol_wait();
    if (query < p.queries) {
        const i64 position = position_of(p, (i32)query);
        const float cos = p.cos[position * p.cos_stride_elems + lane],
                    sin = p.sin[position * p.sin_stride_elems + lane];
        const i64 at = query * p.out_stride_query_elems + kFirstColumn + 2 * lane;
        float2 pairs[kHeads];
#pragma unroll
        for (i32 i = 0; i < kHeads; ++i) {
            if (first + i < p.h_q) pairs[i] = load_pair(p, at + (first + i) * p.out_stride_h_elems);
        }
#pragma unroll
        for (i32 i = 0; i < kHeads; ++i) {
            const float2 x = pairs[i];
            const float2 turned = make_float2(x.x * cos + x.y * sin, x.y * cos - x.x * sin);
            if (first + i < p.h_q) store_pair(p, at + (first + i) * p.out_stride_h_elems, turned);
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::sparse_decode
