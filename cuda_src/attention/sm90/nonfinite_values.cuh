// NaN and Inf in values that only some rows of a thread block see.
//
// 0 * NaN is not 0: before V is multiplied, it is made finite where not every row of the block sees the token. Tokens
// past the sequence's end become 0. Of a token that only later queries see, finite elements stay; the others become 0,
// and fixup_nonfinite adds them to the rows that do see it. Windows: attention/sm90/window_values.cuh.
#pragma once
#include "attention/decode_output.cuh"
#include "attention/sm90/tile.cuh"
#include "attention/split_work.cuh"
#include "ptx/barrier.cuh"
#include "tile/elements.cuh"
#include "tile/sw128.cuh"

namespace mla::attention::sm90 {
// Sanitizes tokens [first, 64) of a tile; those from `end` on are past the sequence's end. By one warpgroup, between
// two of its barriers; before the second one every thread needs a fence_proxy_async. If there was NaN or Inf,
// `nonfinite_request` (in shared memory) becomes `request`.
template <class Element, i32 kSwTiles, class Layout = HalfLayout<false>>
MLA_DEVICE void sanitize_rows(u8* sw_tiles, i32 first, i32 end, i32& nonfinite_request, i32 request, i32 thread) {
    for (i32 i = thread; i < (kTileTokens - first) * kSw128Chunks; i += kWarpgroupThreads) {
        const i32 row = first + i / kSw128Chunks;
#pragma unroll
        for (i32 sw_tile = 0; sw_tile < kSwTiles; ++sw_tile) {
            uint4& chunk = *reinterpret_cast<uint4*>(sw_tiles + Layout::sw_tile_offset(sw_tile) +
                                                     Layout::chunk_offset(row, i % kSw128Chunks));
            uint4 sanitized = make_uint4(0, 0, 0, 0);
            if (row < end && zero_nonfinite<Element>(sanitized = chunk)) nonfinite_request = request;
            chunk = sanitized;
        }
    }
}

// The tokens of a tile that not every row of a block sees, from `first` on; of one half of the tile's values.
struct HiddenTokens {
    i32 first;

    MLA_DEVICE HiddenTokens(const WorkItem& item, i32 tile) : first(item.seen_by_all - tile * kTileTokens) {}
    MLA_DEVICE bool any() const { return first < kTileTokens; }

    template <class Tile>
    MLA_DEVICE void clean(u8* values, const WorkItem& item, i32 tile, i32& nonfinite_request, i32 thread) const {
        sanitize_rows<typename Tile::Element, kSwTilesHalf, typename Tile::Layout>(
            values, max(first, 0), item.tokens - tile * kTileTokens, nonfinite_request, item.request, thread);
    }
};

// Cold path, by one warpgroup: calls `add(row, column, value)` for the non-finite elements that sanitize_rows zeroed in
// columns [first_column, + kColumns), for each row of the block that sees them; a column always by the same thread. The
// weights do not matter, since any multiple of an infinity is infinite.
template <class Element, i32 kColumns, i32 kRows, class Work, class Add>
MLA_DEVICE void for_each_nonfinite(const RowBlock<kRows, Work>& block, const WorkItem& item, i32 first_column,
                                   i32 thread, Add add) {
    const DecodeParams& p = block.p;
    const i32 first = max(Work::first_hidden(item), item.tile_begin * kTileTokens);
    const i32 last = min(item.tokens, item.tile_end * kTileTokens);
#pragma unroll 1
    for (i32 token = max(first, 0); token < last; ++token) {
        token = Work::next_hidden(item, token);  // tokens that every row sees were not cleaned
        if (token >= last) break;
        const u16* values = cached_row(p, item.request, block.kv_head, token);
        if (values == nullptr) continue;
#pragma unroll 1
        for (i32 i = 0; i < kColumns / kWarpgroupThreads; ++i) {
            const i32 column = first_column + thread + i * kWarpgroupThreads;
            const float value = Element::to_float(values[column]);
            if (fabsf(value) <= kMaxFloat) continue;
#pragma unroll 1
            for (i32 row = block.row0; row < min(block.row0 + kRows, block.rows_of(item)); ++row) {
                if (Work::sees(p, item, row, token)) add(row, column, value);
            }
        }
    }
}

// Adds them to the results already stored.
template <class Element, i32 kColumns, i32 kRows, class Work>
MLA_DEVICE void fixup_nonfinite(const RowBlock<kRows, Work>& block, const WorkItem& item, i32 first_column,
                                i32 thread) {
    for_each_nonfinite<Element, kColumns>(block, item, first_column, thread, [&](i32 row, i32 column, float value) {
        add_to_output<Element, Work>(block.p, item, block.kv_head, row, column, value);
    });
}
}  // namespace mla::attention::sm90
