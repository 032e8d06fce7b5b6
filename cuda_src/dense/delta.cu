// The statistics of each query and head for the backward of dense attention.
//
//   delta = sum(out * dout) - dlse,   lse2 = lse log2(e)
//
// Grid: x = tiles of queries (at most; the schedule has their number), then heads, which change faster. One lane per
// 16-byte piece of a row. Where lse is infinite or huge, nothing else is read: delta is 0 and lse2 is +inf, so that
// exp2(s - lse2) is 0. The rows between a sequence's last query and the next multiple of kRowGroup get the same values.
//
// This kernel also clears the sums that the kernel of keys adds to: these stores overlap with the loads.
//
// The tiles of a single sequence follow from its ends: such a call launches no schedule kernel, and the first block
// writes the schedule for the later kernels.
#include "dense/backward_params.cuh"
#include "dense/one_sequence.cuh"
#include "ptx/control.cuh"
#include "tile/elements.cuh"
#include "tile/huge_lse.cuh"

namespace mla::dense {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK, kHeadDimV = MLA_HEAD_DIM_V;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kRowLanes = kHeadDimV / kChunkElems;
constexpr i32 kRowsAtOnce = kThreads / kRowLanes;
static_assert(kWarpThreads % kRowLanes == 0, "a row is within a warp");

// ---- Params ----------------------------------------------------------------------------------------------------
struct DenseDeltaParams {
    const void* out;  // these as in PrefillBackwardParams
    const u16* dout;
    const float* lse;
    const float* dlse;
    float* lse2;
    float* delta;
    float* dq_sums;
    float* dk_rope_sums;
    Schedule* schedule;
    Schedule* key_schedule;
    QueryTile* tiles;
    KeyTile* key_tiles;
    const i32* cu_seqlens_q;   // (2,), or null; read where there is one sequence
    const i32* cu_seqlens_kv;  // (2,), or null
    i64 out_stride_s_elems, out_stride_h_elems;
    i64 dout_stride_s_elems, dout_stride_h_elems;
    i64 lse_stride_s_elems, lse_stride_h_elems;
    i64 dlse_stride_s_elems, dlse_stride_h_elems;
    i64 dk_rope_sums_stride_h_elems;
    i64 cu_seqlens_q_stride_elems, cu_seqlens_kv_stride_elems;
    i32 s_q, s_kv, h_q;
    i32 num_rows;
    i32 out_is_fp32;
    i32 one_sequence;  // 1: no schedule kernel has run
    i32 causal;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(DenseDeltaParams, out_stride_s_elems), MLA_OFFSET(DenseDeltaParams, s_q),
              (int)sizeof(DenseDeltaParams));
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
MLA_DEVICE float partial_delta(const DenseDeltaParams& p, i64 query, i32 head, i32 column) {
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

// Called by the lanes of a row; all lanes of the warp take part.
MLA_DEVICE Statistics statistics(const DenseDeltaParams& p, i64 query, i32 head, bool there, i32 lane) {
    const float none = negative_infinity();
    const float lse = there ? p.lse[query * p.lse_stride_s_elems + head * p.lse_stride_h_elems] : none;
    const float lse2 = lse2_of_weights(lse * kLog2E);
    const bool empty = lse2 == -none;
    const float delta = row_sum(empty ? 0.f : partial_delta(p, query, head, lane * kChunkElems));
    if (empty) return Statistics{-none, 0.f};
    const float dlse = p.dlse == nullptr ? 0.f : p.dlse[query * p.dlse_stride_s_elems + head * p.dlse_stride_h_elems];
    return Statistics{lse2, delta - dlse};
}

// ---- Sums ------------------------------------------------------------------------------------------------------
MLA_DEVICE void clear(float* from, i64 first, i64 count, i64 step) {
#pragma unroll 4
    for (i64 i = first; i < count / 4; i += step) reinterpret_cast<float4*>(from)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// ---- One sequence ----------------------------------------------------------------------------------------------
// First workspace row of a tile: queries before the sequence come first, then its own, then those after it.
MLA_DEVICE i32 first_row(const OneSequence& one, const QueryTile& tile) {
    const i32 own = ceil_div(one.first_query, kRowGroup) * kRowGroup;
    const i32 after = own + ceil_div(one.queries, kRowGroup) * kRowGroup, past = one.first_query + one.queries;
    if (tile.first_query < one.first_query) return tile.first_query;
    return tile.first_query < past ? own + tile.first_query - one.first_query : after + tile.first_query - past;
}

MLA_DEVICE QueryTile query_tile(const DenseDeltaParams& p, const OneSequence& one, i32 index) {
    QueryTile tile = one.tile(p, index);
    tile.first_row = first_row(one, tile);
    return tile;
}

// Tiles with most queries first, then the tiles of keys before and after the sequence, which no query sees.
MLA_DEVICE KeyTile key_tile(const DenseDeltaParams& p, const OneSequence& one, i32 index, i32 own, i32 before) {
    const bool is_own = index < own, is_before = !is_own && index < own + before;
    const i32 begin = is_own ? one.first_key : is_before ? 0 : one.first_key + one.keys;
    const i32 end = is_own ? one.first_key + one.keys : is_before ? one.first_key : p.s_kv;
    const i32 first = (index - (is_own ? 0 : is_before ? own : own + before)) * kKeyTileKeys;
    const i32 queries = is_own ? one.queries : 0;
    return KeyTile{begin + first,
                   min(kKeyTileKeys, end - begin - first),
                   one.first_query,
                   queries,
                   p.causal ? first - (end - begin - queries) : -kKeyTileKeys,
                   ceil_div(one.first_query, kRowGroup) * kRowGroup,
                   {}};
}

// Called by one block.
MLA_DEVICE void write_schedule(const DenseDeltaParams& p, const OneSequence& one, i32 thread) {
    const i32 own = ceil_div(one.keys, kKeyTileKeys), before = ceil_div(one.first_key, kKeyTileKeys);
    const i32 key_tiles = own + before + ceil_div(p.s_kv - one.first_key - one.keys, kKeyTileKeys);
    for (i32 i = thread; i < one.all_tiles; i += kThreads) p.tiles[i] = query_tile(p, one, i);
    for (i32 i = thread; i < key_tiles; i += kThreads) p.key_tiles[i] = key_tile(p, one, i, own, before);
    if (thread == 0) {
        *p.schedule = Schedule{one.all_tiles, 0};
        *p.key_schedule = Schedule{key_tiles, 0};
    }
}

// The block's tile; one without queries if there are fewer.
MLA_DEVICE QueryTile tile_of_block(const DenseDeltaParams& p, i32 index) {
    if (!p.one_sequence) return index < p.schedule->num_tiles ? p.tiles[index] : QueryTile{};
    OneSequence one;
    one.find(p);
    if (blockIdx.x == 0) write_schedule(p, one, threadIdx.x);
    return index < one.all_tiles ? query_tile(p, one, index) : QueryTile{};
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) mla_dense_delta(const __grid_constant__ DenseDeltaParams p) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const i32 index = blockIdx.x / p.h_q, head = blockIdx.x % p.h_q;
    if (p.dk_rope_sums != nullptr && p.dk_rope_sums_stride_h_elems == 0) {
        clear(p.dk_rope_sums, (i64)blockIdx.x * kThreads + threadIdx.x, (i64)p.s_kv * kRopeColumns,
              (i64)gridDim.x * kThreads);
    }
    const QueryTile tile = tile_of_block(p, index);
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
