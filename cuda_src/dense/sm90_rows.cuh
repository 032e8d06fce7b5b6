// Shared by the Hopper kernels that walk tiles of queries: work items, tiles of rows in panels of 64 columns, their
// copies, clearing of elements that nobody may see, and the turns of two warpgroups.
#pragma once
#include "dense/tiles.cuh"
#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"
#include "tile/elements.cuh"
#include "tile/sw128.cuh"

namespace mla::dense {
static_assert(kRopeColumns == kSw128Columns, "the last columns are a panel");

// For either kind of parameters: copies the query tile of a work item to its slot; returns its head, or -1 if there is
// no such item.
template <class Params>
MLA_DEVICE i32 find_item(const Params& p, i32 index, i32 num_tiles, QueryTile& tile, QueryTile& slot) {
    if (index >= num_tiles * p.h_q) return -1;
    const WorkItem item = work_item(p.h_q, p.heads_at_once, index, num_tiles);
    tile = p.tiles[item.tile];
    slot = tile;
    return item.head;
}

// Two warpgroups issue their products in turn, the first one first; kTurn0 and the next are named barriers.
template <i32 kTurn0>
MLA_DEVICE void take_turn(i32 warpgroup) {
    bar_sync(warpgroup == 0 ? kTurn0 : kTurn0 + 1, 2 * kWarpgroupThreads);
}
template <i32 kTurn0>
MLA_DEVICE void pass_turn(i32 warpgroup) {
    bar_arrive(warpgroup == 0 ? kTurn0 + 1 : kTurn0, 2 * kWarpgroupThreads);
}

// Rows of an array. Their last panel may be in a separate array, and begins at last_column there.
struct RowSource {
    const TensorMap &map, &last_map;
    i32 last_column;
};

// A box of rows of a head, with the last panel of another head where heads share it; `at` bytes into each panel.
template <i32 kPanels, u32 kPanelBytes>
MLA_DEVICE void load_rows(u8 (&to)[kPanels][kPanelBytes], MBarrier& full, const RowSource& from, i32 first_row,
                          i32 head, i32 last_head, u64 l2_policy, u32 at = 0) {
#pragma unroll
    for (i32 panel = 0; panel < kPanels; ++panel) {
        const bool last = panel + 1 == kPanels;
        cp_async_bulk_tensor_3d(smem_addr(to[panel]) + at, last ? from.last_map : from.map, full,
                                last ? from.last_column : panel * kSw128Columns, first_row, last ? last_head : head,
                                l2_policy);
    }
}

// The tiles of keys of a work item.
template <i32 kTileKeys>
struct KeyTiles {
    i32 count;
    i32 whole;  // the first of these, which need no cleaning: all queries see all of their keys

    MLA_DEVICE explicit KeyTiles(const QueryTile& tile, bool all_need_care = false)
        : count(ceil_div(tile.seen_by_any(), kTileKeys)),
          whole(all_need_care ? 0 : min(count, tile.seen_by_all() / kTileKeys)) {}
};

// How many keys the queries from row `first` on see, at most `rows` of them.
MLA_DEVICE i32 seen_by_rows(const QueryTile& tile, i32 first, i32 rows) {
    const i32 end = min(tile.queries, first + rows);
    return first < end ? max(0, tile.seen(end - 1)) : 0;
}

// Returns true if a thread's share of the rows from `first` on contains NaN or infinity.
template <class Element, i32 kThreads, i32 kLoads, i32 kPanels, u32 kPanelBytes>
MLA_DEVICE bool has_nonfinite(const u8 (&rows)[kPanels][kPanelBytes], i32 first, i32 thread) {
    constexpr i32 kRows = kPanelBytes / kSw128RowBytes;
    NonfiniteFinder<Element> finder;
#pragma unroll
    for (i32 panel = 0; panel < kPanels; ++panel) {
        const uint4* chunks = reinterpret_cast<const uint4*>(rows[panel]);
#pragma unroll kLoads
        for (i32 i = first * kSw128Chunks + thread; i < kRows * kSw128Chunks; i += kThreads) finder.look(chunks[i]);
    }
    return finder.found();
}

// Zeroes the non-finite elements of the rows from `first` on; calls `found(row)` for each such row. A fast first check,
// with kLoads of a thread in flight, usually finds none.
template <class Element, i32 kThreads, i32 kLoads = 4, i32 kPanels, u32 kPanelBytes, class Found>
MLA_DEVICE void clean_rows(u8 (&rows)[kPanels][kPanelBytes], i32 first, i32 thread, Found found) {
    constexpr i32 kRows = kPanelBytes / kSw128RowBytes;
    if (!has_nonfinite<Element, kThreads, kLoads>(rows, first, thread)) return;
#pragma unroll 1
    for (i32 i = first * kSw128Chunks + thread; i < kRows * kSw128Chunks; i += kThreads) {
#pragma unroll 1
        for (i32 panel = 0; panel < kPanels; ++panel) {
            uint4& chunk = reinterpret_cast<uint4*>(rows[panel])[i];
            uint4 clean = chunk;
            if (!zero_nonfinite<Element>(clean)) continue;
            chunk = clean;
            found(i / kSw128Chunks);
        }
    }
}
}  // namespace mla::dense
