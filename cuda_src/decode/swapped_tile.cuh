// Masks of a tile in dense decode with swapped operands, S^T = K Q^T: a thread's scores are in the fragments of
// attention/head_softmax.cuh.
#pragma once
#include "attention/head_softmax.cuh"
#include "attention/sm90/tile.cuh"
#include "attention/sm90/window_values.cuh"
#include "attention/tree_mask.cuh"
#include "ptx/control.cuh"

namespace mla::decode {
using namespace attention;
using namespace attention::sm90;

// Most tiles hide nothing. `present`: bit t is set if the page of token t of the tile is in the pool.
template <class C, class Block>
MLA_DEVICE void mask_tile(const Block& block, float (&scores)[C::kBlockRows / 2], u64 present, const WorkItem& item,
                          i32 tile, i32 thread) {
    if (C::Work::all_rows_see(item, tile) && present == ~0ull) return;
    i32 row0 = block.row0;
    opaque(row0);  // otherwise the divisions below are hoisted, and their results occupy registers in the loop
    if constexpr (C::kBlockRows > 32) opaque(thread);  // the masks of its keys would not fit either
    if constexpr (C::kTree) {
#pragma unroll
        for (i32 k = 0; k < kHeadsOfThread<C::kBlockRows>; ++k) {
            const SeenTokens seen = seen_of_tree(block.p, item, row0 + kth_head(k, thread));
            mask_head(scores, k, seen.of_tile(tile * kTileTokens) & present, thread);
        }
        return;
    }
    KeyMask<C::kBlockRows> mask;
    mask.present = present;
#pragma unroll
    for (i32 k = 0; k < kHeadsOfThread<C::kBlockRows>; ++k) {
        const i32 visible = C::Work::visible(block.p, item, row0 + kth_head(k, thread));
        mask.visible[k] = min(visible, item.tokens) - tile * kTileTokens;
    }
    mask_keys(scores, mask, thread);
    if constexpr (C::Work::kForms) {
#pragma unroll
        for (i32 k = 0; k < kHeadsOfThread<C::kBlockRows>; ++k) {
            const i32 first = C::Work::window_begin(block.p, item, row0 + kth_head(k, thread));
            mask_keys_before(scores, k, first - tile * kTileTokens, thread);
        }
    }
}

// Makes the values in `keys`, a tile, finite where not every row of the block sees the token; all scores of the tile
// must be done. The proxy fence after P covers these writes, too.
template <class C, class Block>
MLA_DEVICE void sanitize_v(const Block& block, u8* keys, const WorkItem& item, i32 tile, i32 thread) {
    constexpr i32 kSwTiles = head_dim_v(C::kHeadDimQk) / kSw128Columns;
    if constexpr (C::Work::kForms) {
        if (C::Work::all_rows_see(item, tile)) return;
        sanitize_window<typename C::Element, kSwTiles>(keys, C::Work::of(item), tile, block.s.nonfinite_request,
                                                       thread);
    } else {
        const i32 seen_by_all = item.seen_by_all - tile * kTileTokens;
        if (seen_by_all >= kTileTokens) return;
        sanitize_rows<typename C::Element, kSwTiles>(keys, max(seen_by_all, 0), item.tokens - tile * kTileTokens,
                                                     block.s.nonfinite_request, item.request, thread);
    }
}
}  // namespace mla::decode
