// The seesaw where keys come late, half a tile after half a tile: between the scores of the two halves of its tile, a
// warpgroup adds the values of the tile before.
//
// The split of decode/sm90_seesaw.cu: the left warpgroup scores the even tiles and the right one the odd ones, and each
// multiplies every P with its own half of the values. Both run the same steps, half a pair of tiles apart:
//
//   left     S0_right | softmax 0 | O_L += P0 V0_L   | S0'_left | O_L += P1 V1_L | S0'_right | softmax 0' | ...
//   right               S1_left | O_R += P0 V0_R   | S1_right | softmax 1 | O_R += P1 V1_R | S1'_left ...
//   dequant  K1_left ->        K1_right ->       K0'_left ->           K0'_right ->
//
// So half of the scores are done when the right half of the keys arrives, and releasing the previous tile does not wait
// for it. No tile is complete before both warpgroups are done with the tile two before it.
//
// All rows of a block see the same tokens, so V is not cleaned.
#pragma once
#include "attention/sm90/turned_result.cuh"
#include "attention/sm90/two_warpgroups.cuh"

namespace mla::attention::sm90 {
// Named barriers, from the warpgroup that scores the tile in stage 0 (1) to the other one: P is in p(0) (p(1)), and the
// maximum after the tile in running_max[0] ([1]).
enum TurnBarrier : i32 { EvenReady = FirstFreeBarrier, OddReady };

MLA_DEVICE constexpr i32 p_ready(i32 stage) { return stage == 0 ? EvenReady : OddReady; }

// The stage of this warpgroup's tiles, and of the other one's.
template <bool kRight>
constexpr i32 kOwnStage = kRight ? 1 : 0;
template <bool kRight>
constexpr i32 kOtherStage = kOwnStage<!kRight>;

template <bool kRight, class Storage>
MLA_DEVICE void release_values(Storage& s, i32 stage, i32 thread) {
    release(kRight ? s.kv_empty[stage].right : s.kv_empty[stage].left, thread);
}

// Starts O += P V of the other warpgroup's tile.
template <bool kRight, class Storage>
MLA_DEVICE void start_other_tile(Storage& s, Math& math, i32 thread) {
    constexpr i32 kStage = kOtherStage<kRight>;
    float maxima[kFragmentRows];
    bar_sync(p_ready(kStage), kMathThreads);
    load_rows(maxima, s.running_max[kStage], thread);
    const RowScale scale = math.rows.move_max(maxima);
    finish(math);  // scores: no branch while products are in flight
    rescale(math.out, scale);
    start_other_product<kRight>(s, math, kStage);
}

// The last tile: none follows.
template <bool kRight, class Storage>
MLA_DEVICE void add_other_tile(Storage& s, Math& math, i32 thread) {
    start_other_tile<kRight>(s, math, thread);
    finish(math);
    release_values<kRight>(s, kOtherStage<kRight>, thread);
}

// S of the own tile, and O += P V of the one before it.
template <bool kRight, class Storage>
MLA_DEVICE void score_beside_other_tile(Storage& s, Math& math, i32 thread) {
    const ScoreOperands operands(s, math, kOwnStage<kRight>);
    pin(math.scores);
    issue_scores<false>(s, math, kOwnStage<kRight>, operands);
    wgmma_commit_group();
    start_other_tile<kRight>(s, math, thread);
    issue_scores<true>(s, math, kOwnStage<kRight>, operands);
    wgmma_commit_group();
    wgmma_wait_group<1>();
    release_values<kRight>(s, kOtherStage<kRight>, thread);
    finish(math);
}

// Masks the absent tokens of a tile, the same for all rows.
MLA_DEVICE void mask_absent(Math& math, u64 present, i32 thread) {
    if (present == ~0ull) return;
    opaque(thread);  // values derived from it are not worth registers across the loop
    mask_scores(math.scores, TileMask{{kTileTokens, kTileTokens}, present}, thread);
}

// The rows' maxima over a tile, as the running ones follow them. Not fused with the scale: that spills (NVRTC 12.9).
template <i32 kRaisedLog2, i32 kCount>
MLA_DEVICE void followed_max(float (&to)[kFragmentRows], const float (&scores)[kCount],
                             const float (&scale_log2)[kFragmentRows]) {
    tile_max(to, scores, scale_log2);
    if constexpr (kRaisedLog2 != 0) {
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) to[r] = __fadd_rn(to[r], -(float)kRaisedLog2);
    }
}

// Factors that bring the scores of the thread's rows to base 2. Where queries were scaled, they also undo that scale,
// a power of two, so the product is exact.
template <class Block>
MLA_DEVICE void score_scales(float (&to)[kFragmentRows], const Block& block, i32 thread) {
    to[0] = to[1] = block.p.scale_log2;
    if constexpr (Block::Tile::kScaledQueries) {
        float factors[kFragmentRows];
        load_rows(factors, block.s.extra.q_factors, thread);
        to[0] *= factors[0];
        to[1] *= factors[1];
    }
}

// The softmax of the own tile, which has been scored, and O += P V.
template <bool kRight, class Block>
MLA_DEVICE void add_own_tile(Block& block, Math& math, i32 thread) {
    using Tile = typename Block::Tile;
    constexpr i32 kStage = kOwnStage<kRight>;
    typename Block::Storage& s = block.s;
    float scale_log2[kFragmentRows], tile_maxima[kFragmentRows], maxima[kFragmentRows];

    mask_absent(math, s.notes.present[kStage], thread);
    score_scales(scale_log2, block, thread);
    followed_max<Tile::kRaisedLog2>(tile_maxima, math.scores, scale_log2);
    lazy_max(maxima, math.rows, tile_maxima);
    store_rows(s.running_max[kStage], maxima, thread);
    const RowScale scale = math.rows.move_max(maxima);
    exponentiate<typename Tile::Latent>(math.p_fragment, math.rows, math.scores, scale_log2);
    if (kRight) bar_sync(own_barrier(kRight), kWarpgroupThreads);  // P may take the place of keys that all have scored
    store_sw128(s.p(kStage), math.p_fragment, thread);
    bar_arrive(p_ready(kStage), kMathThreads);

    rescale(math.out, scale);
    start_own_product<kRight>(s, math, kStage);
    finish(math);
    release_values<kRight>(s, kStage, thread);
    math.ring.advance(kStage);
}

// ---- Roles -----------------------------------------------------------------------------------------------------
template <class Block>
MLA_DEVICE void add_left_tiles(Block& block, Math& math, const WorkItem& item, i32 thread) {
    i32 tile = item.tile_begin;
    start_scores(block.s, math, kOwnStage<false>);  // the first tile has no predecessor
    finish(math);
#pragma unroll 1
    while (true) {
        add_own_tile<false>(block, math, thread);
        tile += 2;
        if (tile >= item.tile_end) break;
        score_beside_other_tile<false>(block.s, math, thread);
    }
    if (tile == item.tile_end) add_other_tile<false>(block.s, math, thread);
}

template <class Block>
MLA_DEVICE void add_right_tiles(Block& block, Math& math, const WorkItem& item, i32 thread) {
    i32 tile = item.tile_begin + 1;
#pragma unroll 1
    for (; tile < item.tile_end; tile += 2) {
        score_beside_other_tile<true>(block.s, math, thread);
        add_own_tile<true>(block, math, thread);
    }
    if (tile == item.tile_end) add_other_tile<true>(block.s, math, thread);
}

template <bool kRight, class Block>
MLA_DEVICE void run_math_in_turns(Block& block, i32 thread) {
    using Work = typename Block::Work;
    using Tile = typename Block::Tile;
    Math math;
    typename Work::HeldItem item;
    for (WorkIteratorOf<Work> walk(block.p, block.split, block.hidden); walk.next(block.p, item);) {
        math.reset();
        float sums[kFragmentRows] = {0.f, 0.f};
        if (item.tile_begin < item.tile_end) {
            load_q_resident(block.s, math, thread);
            if constexpr (kRight) {
                add_right_tiles(block, math, item, thread);
            } else {
                add_left_tiles(block, math, item, thread);
            }
            total_sums<kRight>(sums, block.s, math, thread);
            release(block.s.q_empty, thread);  // not earlier: the next work item may overwrite data that was read above
        }
        i32 row0 = block.row0;
        if constexpr (Work::kForms) {
            walk.describe_again(block.p, item);
            if constexpr (kRight && Tile::kHeadDimQk == kHeadDimV) turn_back(block, item, math, thread);
            opaque(row0);  // or the row would be kept across the loop, and spilled
        }
        store_result<kRight>(block, item, math, sums, row0, thread, Tile::kValueScale ? block.p.value_scale : 1.f);
    }
}
}  // namespace mla::attention::sm90
