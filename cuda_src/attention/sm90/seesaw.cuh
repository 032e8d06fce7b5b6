// The seesaw schedule of an attention block on Hopper: two warpgroups that alternate on the tensor cores.
//
// Tiles are processed in pairs: the left warpgroup scores the even tile, the right one the odd tile, and each
// multiplies both P's with its own half of the values, so that neither needs more than 64 x 256 accumulators. While one
// warpgroup is in its softmax, the other one has products to issue:
//
//   left    | softmax 0 | O_L += P0 V0_L |          | O_L += P1 V1_L | S0 = Q K0'            | softmax 0'
//   right   |   S1      |  softmax 1     | O_R += P0 V0_R | O_R += P1 V1_R | S1 = Q K1'      | ...
//   load    |           |       K0'_left ->  K1'_left, K0'_right ->  K1'_right ->
//
// Half a tile at a time: attention/sm90/turns.cuh.
//
// Source: the two-warpgroup split of O and the shared maximum are FlashMLA's idea (its "seesaw" schedule, 2025).
// What differs: separate loader warps; one running maximum instead of exchanged scales; both warpgroups add tile 0
// before tile 1, so P0 is written once and never rescaled; the maximum moves only by more than 2^8, so O is almost
// never rescaled.
#pragma once
#include "attention/sm90/math.cuh"

namespace mla::attention::sm90 {
// Named barriers: the first arrives, the second syncs (the mbarriers are in attention/sm90/block.cuh):
// MaxReady    left -> right   the maximum after tile 0 is in running_max[0]
// P0Ready     left -> right   P0 is in p(0)
// P1Ready     right -> left   the maximum after tile 1 is in running_max[1], and P1 in p(1)
enum NamedBarrier : i32 { MaxReady = FirstFreeBarrier, P0Ready, P1Ready };

// The left warpgroup's share of tiles `tile` and `tile + 1`.
template <class C>
MLA_DEVICE void left_pair(Block<C>& block, Math& math, const WorkItem& item, i32 tile, i32 thread) {
    Storage<C>& s = block.s;
    float scale_log2[kFragmentRows], tile_maxima[kFragmentRows], maxima[kFragmentRows];

    start_scores(s, math, 0);
    finish(math);
    mask_tile(block, math, item, tile, 0, thread);
    score_scales(scale_log2, block, thread);
    followed_max<C>(tile_maxima, math.scores, scale_log2);
    lazy_max(maxima, math.rows, tile_maxima);
    store_rows(s.running_max[0], maxima, thread);
    bar_arrive(MaxReady, kMathThreads);
    const RowScale even_scale = math.rows.move_max(maxima);
    exponentiate<typename C::Latent, C::kSparse>(math.p_fragment, math.rows, math.scores, scale_log2);
    store_sw128(s.p(0), math.p_fragment, thread);
    bar_arrive(P0Ready, kMathThreads);

    rescale(math.out, even_scale);
    sanitize_v<false>(block, item, tile, 0, thread);
    start_own_product<false>(s, math, 0);
    finish(math);
    release(s.kv_empty[0].left, thread);
    math.ring.advance(0);

    if (tile + 1 == item.tile_end) return;
    bar_sync(P1Ready, kMathThreads);
    load_rows(maxima, s.running_max[1], thread);
    rescale(math.out, math.rows.move_max(maxima));
    sanitize_v<false>(block, item, tile + 1, 1, thread);
    start_other_product<false>(s, math, 1);
    finish(math);
    release(s.kv_empty[1].left, thread);
    math.ring.advance(1);
}

// The maximum after the even tile becomes the right warpgroup's.
template <class C>
MLA_DEVICE RowScale take_even_max(Storage<C>& s, Math& math, i32 thread) {
    float maxima[kFragmentRows];
    bar_sync(MaxReady, kMathThreads);
    load_rows(maxima, s.running_max[0], thread);
    return math.rows.move_max(maxima);
}

// O_R += P0 V0_R.
template <class C>
MLA_DEVICE void add_even_to_right(Block<C>& block, Math& math, const WorkItem& item, i32 tile, const RowScale& scale,
                                  i32 thread) {
    bar_sync(P0Ready, kMathThreads);
    rescale(math.out, scale);
    sanitize_v<true>(block, item, tile, 0, thread);
    start_other_product<true>(block.s, math, 0);
    finish(math);
    release(block.s.kv_empty[0].right, thread);
    math.ring.advance(0);
}

// The right warpgroup's share of the same tiles if both exist ...
template <class C>
MLA_DEVICE void right_pair(Block<C>& block, Math& math, const WorkItem& item, i32 tile, i32 thread) {
    Storage<C>& s = block.s;
    float scale_log2[kFragmentRows], tile_maxima[kFragmentRows], maxima[kFragmentRows];
    RowScale even_scale;

    start_scores(s, math, 1);
    finish(math);
    mask_tile(block, math, item, tile + 1, 1, thread);
    score_scales(scale_log2, block, thread);
    followed_max<C>(tile_maxima, math.scores, scale_log2);
    even_scale = take_even_max(s, math, thread);
    lazy_max(maxima, math.rows, tile_maxima);
    store_rows(s.running_max[1], maxima, thread);
    const RowScale odd_scale = math.rows.move_max(maxima);
    exponentiate<typename C::Latent, C::kSparse>(math.p_fragment, math.rows, math.scores, scale_log2);
    store_sw128(s.p(1), math.p_fragment, thread);
    bar_arrive(P1Ready, kMathThreads);

    add_even_to_right(block, math, item, tile, even_scale, thread);
    rescale(math.out, odd_scale);
    sanitize_v<true>(block, item, tile + 1, 1, thread);
    start_own_product<true>(s, math, 1);
    finish(math);
    release(s.kv_empty[1].right, thread);
    math.ring.advance(1);
}

// ... and if only the even one does.
template <class C>
MLA_DEVICE void right_last(Block<C>& block, Math& math, const WorkItem& item, i32 tile, i32 thread) {
    const RowScale scale = take_even_max(block.s, math, thread);
    add_even_to_right(block, math, item, tile, scale, thread);
}

// ---- Roles -----------------------------------------------------------------------------------------------------
template <class C>
MLA_DEVICE void run_left_role(Block<C>& block, i32 thread) {
    run_math_role<false>(block, thread, [&](Math& math, const WorkItem& item) {
#pragma unroll 1
        for (i32 tile = item.tile_begin; tile < item.tile_end; tile += 2) {
            left_pair(block, math, item, tile, thread);
        }
    });
}

template <class C>
MLA_DEVICE void run_right_role(Block<C>& block, i32 thread) {
    run_math_role<true>(block, thread, [&](Math& math, const WorkItem& item) {
        i32 tile = item.tile_begin;
#pragma unroll 1
        for (; tile + 1 < item.tile_end; tile += 2) right_pair(block, math, item, tile, thread);
        if (tile < item.tile_end) right_last(block, math, item, tile, thread);
    });
}
}  // namespace mla::attention::sm90
