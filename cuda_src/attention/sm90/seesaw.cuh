// The seesaw schedule of a decode block on Hopper: two warpgroups that take turns on the tensor cores.
//
// Tiles go in pairs: the left warpgroup scores the even tile, the right one the odd tile, and each multiplies both P's
// with its own half of the values, so that neither needs more than 64 x 256 accumulators. While one warpgroup is in
// its softmax, the other one has products to issue:
//
//   left    | softmax 0 | O_L += P0 V0_L |          | O_L += P1 V1_L | S0 = Q K0'            | softmax 0'
//   right   |   S1      |  softmax 1     | O_R += P0 V0_R | O_R += P1 V1_R | S1 = Q K1'      | ...
//   load    |           |       K0'_left ->  K1'_left, K0'_right ->  K1'_right ->
//
// Source: the two-warpgroup split of O and the shared maximum are FlashMLA's idea (its "seesaw" schedule, 2025).
// What differs: others load; one running maximum instead of exchanged scales; both warpgroups add tile 0 before tile 1,
// so P0 is written once and never re-scaled; the maximum moves only by more than 2^8, so O is almost never re-scaled.
#pragma once
#include "attention/decode_math_sm90.cuh"

// A fact made true by the first, waited for by the second (the mbarriers stand in attention/decode_block_sm90.cuh):
// MaxReady    left -> right   the maximum after tile 0 is in row_max[0]
// P0Ready     left -> right   P0 is in p(0)
// P1Ready     right -> left   the maximum after tile 1 is in row_max[1], and P1 in p(1)
enum NamedBarrier : i32 { MaxReady = FirstFreeBarrier, P0Ready, P1Ready };

// The left warpgroup's part of tiles `tile` and `tile + 1`.
MLA_DEVICE void left_pair(Block& block, Math& math, const Fragment& fragment, i32 tile, i32 thread) {
    Storage& s = block.s;
    const float scale_log2 = block.p.scale_log2;
    float tile_maxima[kFragmentRows], maxima[kFragmentRows];

    start_scores(s, math, 0);
    finish<0>(math);
    mask_tile(block, math, fragment, tile, 0, thread);
    tile_max(tile_maxima, math.scores, scale_log2);
    lazy_max(maxima, math.rows, tile_maxima);
    store_rows(s.row_max[0], maxima, thread);
    bar_arrive(MaxReady, kMathThreads);
    const RowScale even_scale = math.rows.move_max(maxima);
    exponentiate<Element>(math.p_fragment, math.rows, math.scores, scale_log2);
    store_panel(s.p(0), math.p_fragment, thread);
    bar_arrive(P0Ready, kMathThreads);

    rescale(math.out, even_scale);
    clean_values<false>(block, fragment, tile, 0, thread);
    start_own_product<false>(s, math, 0);
    finish<0>(math);
    release(s.kv_empty[0].left, thread);
    math.ring.advance(0);

    if (tile + 1 == fragment.tile_end) return;
    bar_sync(P1Ready, kMathThreads);
    load_rows(maxima, s.row_max[1], thread);
    rescale(math.out, math.rows.move_max(maxima));
    clean_values<false>(block, fragment, tile + 1, 1, thread);
    start_other_product<false>(s, math, 1);
    finish<0>(math);
    release(s.kv_empty[1].left, thread);
    math.ring.advance(1);
}

// The right warpgroup's part of the same tiles, where both are there ...
MLA_DEVICE void right_pair(Block& block, Math& math, const Fragment& fragment, i32 tile, i32 thread) {
    Storage& s = block.s;
    const float scale_log2 = block.p.scale_log2;
    float tile_maxima[kFragmentRows], maxima[kFragmentRows];

    start_scores(s, math, 1);
    finish<0>(math);
    mask_tile(block, math, fragment, tile + 1, 1, thread);
    tile_max(tile_maxima, math.scores, scale_log2);
    bar_sync(MaxReady, kMathThreads);
    load_rows(maxima, s.row_max[0], thread);
    const RowScale even_scale = math.rows.move_max(maxima);
    lazy_max(maxima, math.rows, tile_maxima);
    store_rows(s.row_max[1], maxima, thread);
    const RowScale odd_scale = math.rows.move_max(maxima);
    exponentiate<Element>(math.p_fragment, math.rows, math.scores, scale_log2);
    store_panel(s.p(1), math.p_fragment, thread);
    bar_arrive(P1Ready, kMathThreads);

    bar_sync(P0Ready, kMathThreads);
    rescale(math.out, even_scale);
    clean_values<true>(block, fragment, tile, 0, thread);
    start_other_product<true>(s, math, 0);
    finish<0>(math);
    release(s.kv_empty[0].right, thread);
    math.ring.advance(0);
    rescale(math.out, odd_scale);
    clean_values<true>(block, fragment, tile + 1, 1, thread);
    start_own_product<true>(s, math, 1);
    finish<0>(math);
    release(s.kv_empty[1].right, thread);
    math.ring.advance(1);
}

// ... and where only the even one is.
MLA_DEVICE void right_last(Block& block, Math& math, const Fragment& fragment, i32 tile, i32 thread) {
    Storage& s = block.s;
    float maxima[kFragmentRows];
    bar_sync(MaxReady, kMathThreads);
    load_rows(maxima, s.row_max[0], thread);
    rescale(math.out, math.rows.move_max(maxima));
    bar_sync(P0Ready, kMathThreads);
    clean_values<true>(block, fragment, tile, 0, thread);
    start_other_product<true>(s, math, 0);
    finish<0>(math);
    release(s.kv_empty[0].right, thread);
    math.ring.advance(0);
}

// ---- Roles -----------------------------------------------------------------------------------------------------
MLA_DEVICE void run_left_role(Block& block, i32 thread) {
    run_math_role<false, true>(block, thread, [&](Math& math, const Fragment& fragment) {
#pragma unroll 1
        for (i32 tile = fragment.tile_begin; tile < fragment.tile_end; tile += 2) {
            left_pair(block, math, fragment, tile, thread);
        }
    });
}

MLA_DEVICE void run_right_role(Block& block, i32 thread) {
    run_math_role<true, true>(block, thread, [&](Math& math, const Fragment& fragment) {
        i32 tile = fragment.tile_begin;
#pragma unroll 1
        for (; tile + 1 < fragment.tile_end; tile += 2) right_pair(block, math, fragment, tile, thread);
        if (tile < fragment.tile_end) right_last(block, math, fragment, tile, thread);
    });
}
