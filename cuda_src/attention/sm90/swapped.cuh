// Attention with swapped operands on Hopper, for few query rows: S^T = K Q^T, O^T = V^T P^T.
//
// The tensor cores work on 64 rows of the first operand at a time, whatever the second one's width. With keys and
// values first, up to 32 query rows that share keys (here called heads) are not padded to 64. V^T is read from the tile
// of keys without a transpose.
//
// These are the steps of a math warpgroup for a tile of 64 keys; a kernel chooses the columns.
#pragma once
#include "attention/head_results.cuh"
#include "attention/output_rope.cuh"
#include "ptx/barrier.cuh"
#include "tile/product.cuh"
#include "tile/sw128.cuh"

namespace mla::attention::sm90 {
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

// The result of a work item.
template <bool kWithRowMax, class Element, i32 kHeads, i32 kSwTiles, class Work>
MLA_DEVICE void store_result(Element, const DecodeParams& p, const WorkItem& item, const BlockHeadsOf<Work>& block,
                             const SwappedMath<kHeads, kSwTiles>& math, float (&warps)[kWarpgroupWarps][kHeads],
                             HeadStats<kHeads>& stats, i32 first_column, bool reports, i32 barrier, i32 thread) {
    finish_heads<kWithRowMax>(p, item, block, math.heads, warps, stats, reports, barrier, thread);
    store_out<16, kSw128Columns>(Element{}, p, item, block, math.out, own_factors<kHeads>(stats.factor, thread),
                                 first_column, thread);
}
}  // namespace mla::attention::sm90
