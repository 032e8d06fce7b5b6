// NaN and Inf in values that windows leave out: of tokens before all windows, and of tokens that only earlier queries
// see.
#pragma once
#include "attention/query_groups.cuh"
#include "attention/sm90/nonfinite_values.cuh"

namespace mla::attention::sm90 {
// Cleans the values of a tile at a window's edge. Tokens in [seen_from, seen_by_all), which every row sees, stay as
// they are. Other tokens in [first_token, tokens) keep their finite elements. All remaining tokens become 0.
template <class Element, i32 kSwTiles, class Layout = HalfLayout<false>>
MLA_DEVICE void sanitize_window(u8* sw_tiles, const GroupItem& item, i32 tile, i32& nonfinite_request, i32 thread) {
    for (i32 i = thread; i < kTileTokens * kSw128Chunks; i += kWarpgroupThreads) {
        const i32 row = i / kSw128Chunks, token = tile * kTileTokens + row;
        if (item.seen_from <= token && token < item.seen_by_all) continue;
        const bool kept = item.first_token <= token && token < item.tokens;
#pragma unroll
        for (i32 sw_tile = 0; sw_tile < kSwTiles; ++sw_tile) {
            uint4& chunk = *reinterpret_cast<uint4*>(sw_tiles + Layout::sw_tile_offset(sw_tile) +
                                                     Layout::chunk_offset(row, i % kSw128Chunks));
            uint4 sanitized = make_uint4(0, 0, 0, 0);
            if (kept && zero_nonfinite<Element>(sanitized = chunk)) nonfinite_request = item.request;
            chunk = sanitized;
        }
    }
}

// HiddenTokens for calls with a window.
struct HiddenOfWindows {
    bool are_there;

    MLA_DEVICE HiddenOfWindows(const WorkItem& item, i32 tile) : are_there(!GroupedWork::all_rows_see(item, tile)) {}
    MLA_DEVICE bool any() const { return are_there; }

    template <class Tile>
    MLA_DEVICE void clean(u8* values, const WorkItem& item, i32 tile, i32& nonfinite_request, i32 thread) const {
        sanitize_window<typename Tile::Element, kSwTilesHalf, typename Tile::Layout>(values, GroupedWork::of(item),
                                                                                     tile, nonfinite_request, thread);
    }
};
}  // namespace mla::attention::sm90
