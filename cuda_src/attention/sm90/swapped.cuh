// Attention with swapped operands on Hopper, for few query rows: S^T = K Q^T, O^T = V^T P^T.
//
// The tensor cores work on 64 rows of the first operand at a time, whatever the second one's width. With keys and
// values first, up to 32 query rows that share keys (here called heads) are not padded to 64. V^T is read from the tile
// of keys without a transpose.
//
// These are the steps of a math warpgroup for a tile of 64 keys; a kernel chooses the columns.
#pragma once
#include "attention/decode_output.cuh"
#include "attention/head_softmax.cuh"
#include "attention/output_rope.cuh"
#include "ptx/barrier.cuh"
#include "ptx/matrix.cuh"
#include "tile/product.cuh"
#include "tile/sw128.cuh"

namespace mla::attention::sm90 {
// A SW128 tile of Q or P: 64 columns of all heads.
template <i32 kHeads>
constexpr u32 kHeadSwTileBytes = kHeads * kSw128RowBytes;

// A thread's share of S^T, and of O^T for kSwTiles x 64 columns of the values.
template <i32 kHeads, i32 kSwTiles>
struct SwappedMath {
    float scores[kHeads / 2];
    float out[kSwTiles][kHeads / 2];
    HeadState<kHeads> heads;

    MLA_DEVICE void reset() {
        heads.reset();
#pragma unroll
        for (auto& columns : out) {
#pragma unroll
            for (float& x : columns) x = 0.f;
        }
    }
};

// Updates the heads' running maxima and rescales the accumulators where a maximum moved. `warps` is in shared memory,
// `barrier` the warpgroup's own. PERF(H200, 2026-11-23, by halves: from FP8 records -1 %, with 32 query rows of dense
// decode -4 %; sparse forward from 16-bit rows +3 %, dense decode at batch 1 +1 %)
template <bool kByHalves = false, i32 kHeads, i32 kSwTiles>
MLA_DEVICE void update_maxima(SwappedMath<kHeads, kSwTiles>& math, float (&warps)[kWarpgroupWarps][kHeads],
                              float scale_log2, i32 barrier, i32 thread) {
    if constexpr (kByHalves) {
        store_warp_maxima_by_halves<kHeads>(warps[thread / kWarpThreads], math.scores, thread);
    } else {
        store_warp_maxima<kHeads>(warps[thread / kWarpThreads], math.scores, thread);
    }
    bar_sync(barrier, kWarpgroupThreads);
    const HeadValues<kHeads> scale = math.heads.move_max(warps, scale_log2, thread);
    if (!scale.any_but_one()) return;
#pragma unroll
    for (auto& columns : math.out) scale.multiply(columns);
}

// P^T from registers to [head][key] in shared memory, for WGMMA to read after a barrier.
template <class Element, i32 kHeads, i32 kSwTiles>
MLA_DEVICE void store_p(Element, SwappedMath<kHeads, kSwTiles>& math, SmemAddr p, float scale_log2, i32 thread) {
    // Matrix lane / 8: heads 8 * (lane / 16) on from the first, keys 8 * (lane / 8 % 2) on from the warp's first.
    const i32 lane = thread % kWarpThreads, head = lane / 16 * 8 + lane % 8;
    const i32 chunk = thread / kWarpThreads * 2 + lane / 8 % 2;
    constexpr i32 kWords = kHeads / 4;  // two for each eight heads: keys 0..7 and 8..15 of the warp's
    u32 words[kWords];
    math.heads.exponentiate(Element{}, words, math.scores, scale_log2);
#pragma unroll
    for (i32 i = 0; i + 4 <= kWords; i += 4) {
        stmatrix_x4_trans(p + sw128_offset(4 * i + head, chunk), {words[i], words[i + 1], words[i + 2], words[i + 3]});
    }
    if constexpr (kWords % 4 != 0) {
        stmatrix_x2_trans(p + sw128_offset(4 * (kWords - 2) + lane % 8, chunk), {words[kWords - 2], words[kWords - 1]});
    }
    fence_proxy_async();
}

// O^T += V^T P^T.
template <class Element, i32 kSwTiles, i32 kScores>
MLA_DEVICE void add_values(Element, float (&out)[kSwTiles][kScores], SmemDesc v, SmemDesc p) {
#pragma unroll
    for (auto& columns : out) pin(columns);
    wgmma_fence();
#pragma unroll
    for (i32 sw_tile = 0; sw_tile < kSwTiles; ++sw_tile) {
        multiply_atbt<kSw128MmaSteps>(Element{}, out[sw_tile], advance(v, sw_tile * kSw128Bytes), p, true);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
#pragma unroll
    for (auto& columns : out) pin(columns);
}

// ---- Epilogue --------------------------------------------------------------------------------------------------
// It runs once per work item, so its instructions are rarely in the cache: whatever takes divisions is computed by one
// thread per head and shared.

// The heads of a thread block: rows [row0, row0 + kHeads) of a KV head, those below `rows`; and what a split holds.
template <class Work_>
struct BlockHeadsOf {
    using Work = Work_;
    i32 kv_head, row0, rows;
};
using BlockHeads = BlockHeadsOf<ScheduledWork>;

// A warpgroup's statistics of each head at the end of a work item, in shared memory.
template <i32 kHeads>
struct HeadStats {
    float max[kHeads], row_max[kHeads];  // see HeadState
    float factor[kHeads];                // what turns the sum of weighted values into the result
};

// By one thread per head: its factor and, if this warpgroup `reports`, the statistics of the result.
template <bool kWithRowMax, i32 kHeads, class Work>
MLA_DEVICE void finish_head(const DecodeParams& p, const WorkItem& item, const BlockHeadsOf<Work>& block,
                            HeadStats<kHeads>& stats, const float (&warps)[kWarpgroupWarps][kHeads], bool reports,
                            i32 head) {
    if (head >= kHeads) return;
    const i32 row = block.row0 + head;
    stats.factor[head] = 0.f;
    if (row >= block.rows) return;
    float sum = 0.f;
#pragma unroll
    for (i32 warp = 0; warp < kWarpgroupWarps; ++warp) sum += warps[warp][head];
    stats.factor[head] = output_factor(p, item, block.kv_head, row, stats.max[head], sum);
    if (!reports) return;
    store_row_lse<Work>(p, item, block.kv_head, row, row_lse2(stats.max[head], sum));
    if (kWithRowMax) store_row_max(p, item, block.kv_head, row, with_nan_of(sum, stats.row_max[head]));
}

// Turns the last columns back: `out` is the last SW128 tile of them. A pair's elements are in lanes four apart.
template <i32 kHeads>
MLA_DEVICE void turn_back(const DecodeParams& p, const GroupItem& item, i32 row0, float (&out)[kHeads / 2],
                          i32 thread) {
    if (!turns_back(p)) return;
    const i32 first = kFirstTurnedColumn + thread / kWarpThreads * 16 + thread % kWarpThreads / 4;
#pragma unroll
    for (i32 i = 0; i < kHeads / 2; ++i) {
        const float other = __shfl_xor_sync(kFullWarp, out[i], 4);
        const RowAngles angles = angles_of_row(p, item, row0 + head_of(i, thread));
        out[i] = turned_element(angles, first + 8 * fragment_half(i), out[i], other);
    }
}

// Writes columns [first_column, + kSwTiles * 64) of each head. Lane i computes where the i-th head begins.
template <class Element, i32 kHeads, i32 kSwTiles, class Work>
MLA_DEVICE void store_out(Element, const DecodeParams& p, const WorkItem& item, const BlockHeadsOf<Work>& block,
                          const float (&out)[kSwTiles][kHeads / 2], const HeadValues<kHeads>& factors, i32 first_column,
                          i32 thread) {
    static_assert(kHeads <= kWarpThreads, "a lane for each head");
    const bool whole = item.partial_index == kNotSplit;
    const i32 lane = thread % kWarpThreads, heads = block.rows - block.row0;
    const i32 my_row = block.row0 + min(lane, heads - 1);
    const i64 my_offset = whole ? item_out_offset<Work>(p, item, block.kv_head, my_row)
                                : workspace_row(p, item.partial_index, block.kv_head, my_row) * kHeadDimV;
    const i32 column0 = first_column + thread / kWarpThreads * 16;  // of the warp, in the first SW128 tile
    if (!whole || p.out_is_fp32) {
        float* const base = (whole ? static_cast<float*>(p.out) : p.partial_out) + column0 + lane / 4;
#pragma unroll
        for (i32 i = 0; i < kHeads / 2; ++i) {
            const i32 head = head_of(i, thread);
            float* const to = base + __shfl_sync(kFullWarp, my_offset, head) + 8 * fragment_half(i);
            if (head >= heads) continue;
#pragma unroll
            for (i32 sw_tile = 0; sw_tile < kSwTiles; ++sw_tile) {
                to[sw_tile * kSw128Columns] = out[sw_tile][i] * factors.of(i);
            }
        }
        return;
    }
    // Transposed, a quad holds one head: of two SW128 tiles, 16 columns each, four chunks of 16 bytes.
    u16* const base = static_cast<u16*>(p.out) + column0 + lane % 4 / 2 * kSw128Columns + lane % 2 * 8;
#pragma unroll
    for (i32 i = 0; i < kHeads / 2; i += 4) {
        const i32 head = 2 * i + lane / 4;
        u16* const to = base + __shfl_sync(kFullWarp, my_offset, head);
#pragma unroll
        for (i32 sw_tile = 0; sw_tile < kSwTiles; sw_tile += 2) {
            u32 words[4];
#pragma unroll
            for (i32 j = 0; j < 4; ++j) {
                const float (&columns)[kHeads / 2] = out[sw_tile + j / 2];
                const i32 d = i + 2 * (j % 2);
                words[j] =
                    movmatrix_trans(cvt_x2(Element{}, columns[d] * factors.of(d), columns[d + 1] * factors.of(d + 1)));
            }
            quad_transpose(words, lane % 4);
            if (head < heads) {
                *reinterpret_cast<uint4*>(to + sw_tile * kSw128Columns) =
                    make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
}

// The result of a work item.
template <bool kWithRowMax, class Element, i32 kHeads, i32 kSwTiles, class Work>
MLA_DEVICE void store_result(Element, const DecodeParams& p, const WorkItem& item, const BlockHeadsOf<Work>& block,
                             const SwappedMath<kHeads, kSwTiles>& math, float (&warps)[kWarpgroupWarps][kHeads],
                             HeadStats<kHeads>& stats, i32 first_column, bool reports, i32 barrier, i32 thread) {
    store_warp_sums<kHeads>(warps[thread / kWarpThreads], math.heads.sum, thread);
    if (thread < 4) {  // which hold every head
#pragma unroll
        for (i32 k = 0; k < kHeadsOfThread<kHeads>; ++k) {
            stats.max[kth_head(k, thread)] = math.heads.max.value[k];
            if (kWithRowMax) stats.row_max[kth_head(k, thread)] = math.heads.row_max.value[k];
        }
    }
    bar_sync(barrier, kWarpgroupThreads);
    finish_head<kWithRowMax>(p, item, block, stats, warps, reports, thread);
    bar_sync(barrier, kWarpgroupThreads);
    HeadValues<kHeads> factors;
#pragma unroll
    for (i32 k = 0; k < kHeadsOfThread<kHeads>; ++k) factors.value[k] = stats.factor[kth_head(k, thread)];
    store_out(Element{}, p, item, block, math.out, factors, first_column, thread);
}
}  // namespace mla::attention::sm90
