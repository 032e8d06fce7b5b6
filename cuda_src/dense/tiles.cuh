// Divides the work of dense attention: tiles of queries, or of keys, and the order of work.
#pragma once
#include "common/types.cuh"

namespace mla::dense {
constexpr i32 kTileQueries = 128, kKeyTileKeys = 128;
constexpr i32 kRopeColumns = 64;  // the last columns of queries and keys, which may be separate arrays
constexpr i32 kRowGroup = 16;     // alignment of sequences in the workspace's per-query data

// Up to 128 neighbouring queries of a sequence, and its keys. Query r of the tile sees the first diagonal + r + 1 of
// them, at most all.
struct alignas(16) QueryTile {
    i32 first_query, queries;
    i32 first_key, keys;
    i32 diagonal;   // at least `keys`, where queries see all keys
    i32 first_row;  // workspace row of its first query
    i32 unused[2];

    MLA_DEVICE i32 seen(i32 row) const { return min(keys, diagonal + row + 1); }
    MLA_DEVICE i32 seen_by_any() const { return max(0, seen(queries - 1)); }
    MLA_DEVICE i32 seen_by_all() const { return max(0, seen(0)); }
};

// Up to 128 neighbouring keys of a sequence, and its queries. Key r of the tile is seen by all but the first
// diagonal + r of them.
struct alignas(16) KeyTile {
    i32 first_key, keys;
    i32 first_query, queries;
    i32 diagonal;   // at most -keys, where queries see all keys
    i32 first_row;  // workspace row of the sequence's first query
    i32 unused[2];

    MLA_DEVICE i32 first_seer(i32 row) const { return min(queries, max(0, diagonal + row)); }
    MLA_DEVICE i32 first_to_see_any() const { return first_seer(0); }
    MLA_DEVICE i32 first_to_see_all() const { return first_seer(keys - 1); }
    MLA_DEVICE i32 seers() const { return queries - first_to_see_any(); }
};

// One after another; without keys, the queries before the first sequence and after the last; and the same for keys.
struct Sequence {
    i32 first_query, queries;
    i32 first_key, keys;
    i32 first_tile, first_key_tile;
    i32 first_row;
};

// The schedule's result, in the workspace.
struct Schedule {
    i32 num_tiles;
    i32 next_item;  // next item to hand out; the first ones follow the block's index
};

// A tile of one head.
struct WorkItem {
    i32 tile, head;
};

// Items per block in the last group of heads: the shortest items then come last, and blocks end together.
constexpr i32 kLastItems = 8;

// The order of work: the heads in groups of heads_at_once, the last of them larger; within one, tile after tile, and
// each tile's heads.
MLA_DEVICE WorkItem work_item(i32 heads, i32 heads_at_once, i32 index, i32 num_tiles,
                              i32 last_items = kLastItems * (i32)gridDim.x) {
    const i32 last = min(heads, max(heads_at_once, ceil_div(last_items, num_tiles)));
    const i32 group = min(index / (heads_at_once * num_tiles), (heads - last) / heads_at_once);
    const i32 first_head = group * heads_at_once, within = index - first_head * num_tiles;
    const i32 of_group = first_head + heads_at_once > heads - last ? heads - first_head : heads_at_once;
    return WorkItem{within / of_group, first_head + within % of_group};
}
}  // namespace mla::dense
