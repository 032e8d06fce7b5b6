// Which keys each query token sees, and which tiles of keys a block of tokens therefore needs.
//
// The tokens of a block are consecutive: eight in prefill, the next tokens of one sequence in paged decode. Values come
// from the device and may be anything: a range is clamped to [0, num_keys], and is empty where it does not begin before
// its end.
#pragma once
#include "common/types.cuh"

namespace mla::indexer {
struct KeyRange {
    i32 begin, end;

    MLA_DEVICE bool contains(i32 key) const { return begin <= key && key < end; }
};

// The caller's bounds as stored in memory.
struct KeyBounds {
    i32 begin, end;
};

struct KeyRanges {
    const i32* begins;  // or null: 0
    const i32* ends;    // or null: num_keys
    i64 begins_stride_elems;
    i64 ends_stride_block_elems, ends_stride_token_elems;
    i32 num_tokens, num_blocks, block_tokens;
    i32 num_keys;
    i32 end_of_last;  // `ends` hold the end of a block's last token: each token before it sees one key less

    MLA_DEVICE i32 tokens_of(i32 block) const { return min(block_tokens, num_tokens - block * block_tokens); }

    // The bounds of a token of a block.
    MLA_DEVICE KeyBounds load(i32 block, i32 token) const {
        KeyBounds bounds{0, num_keys};
        if (begins != nullptr) bounds.begin = begins[((i64)block * block_tokens + token) * begins_stride_elems];
        if (ends != nullptr) bounds.end = ends[block * ends_stride_block_elems + token * ends_stride_token_elems];
        return bounds;
    }
    MLA_DEVICE KeyRange of(i32 block, i32 token) const { return clamp(load(block, token), token); }

    MLA_DEVICE KeyRange clamp(const KeyBounds& bounds, i32 token) const {
        i32 end = max(bounds.end, 0);
        if (end_of_last) end -= block_tokens - 1 - token;
        const i32 first = min(max(bounds.begin, 0), num_keys), last = min(max(end, 0), num_keys);
        return first < last ? KeyRange{first, last} : KeyRange{0, 0};
    }
};

// Tiles [begin, end) that hold the ranges of some tokens: none where all ranges are empty.
struct TileRange {
    i32 begin, end;

    MLA_DEVICE i32 size() const { return end - begin; }
};

template <i32 kTileKeys>
MLA_DEVICE TileRange tiles_of(i32 first_key, i32 last_key) {
    return first_key < last_key ? TileRange{first_key / kTileKeys, ceil_div(last_key, kTileKeys)} : TileRange{0, 0};
}

// Called by one thread.
template <i32 kTileKeys>
MLA_DEVICE TileRange block_tiles(const KeyRanges& ranges, i32 block) {
    const i32 tokens = ranges.tokens_of(block);
    i32 first = ranges.num_keys, last = 0;
#pragma unroll 4
    for (i32 token = 0; token < tokens; ++token) {
        const KeyRange range = ranges.of(block, token);
        if (range.begin == range.end) continue;
        first = min(first, range.begin);
        last = max(last, range.end);
    }
    return tiles_of<kTileKeys>(first, last);
}

// Called by all lanes of a warp, each with the range of one token, or an empty one.
template <i32 kTileKeys>
MLA_DEVICE TileRange warp_tiles(KeyRange range) {
    const i32 first = range.begin < range.end ? range.begin : 0x7fffffff;
    return tiles_of<kTileKeys>(__reduce_min_sync(kFullWarp, first), __reduce_max_sync(kFullWarp, range.end));
}

// ---- The line of all tiles, cut evenly -------------------------------------------------------------------------
// The tiles of all blocks form one line; thread block i of the grid takes tiles cuts[i] up to cuts[i + 1].
struct TileCut {
    i32 block, tile;
};

struct LineShare {
    TileCut from, to;
};

// Equal shares; the first `total % num_splits` are larger by one.
MLA_DEVICE i32 share_begin(u32 split, u32 num_splits, u32 total) {
    return (i32)(split * (total / num_splits) + min(split, total % num_splits));
}

// Cost of a block in tiles. Fetching its queries counts as one tile of 128 keys, and as nothing for smaller tiles.
template <i32 kTileKeys>
struct BlockCost {
    static constexpr i32 kQueries = kTileKeys >= 128 ? 1 : 0;

    MLA_DEVICE static i32 of(TileRange tiles) { return tiles.size() == 0 ? 0 : tiles.size() + kQueries; }
    // The tile that lies `cost` after the block's beginning.
    MLA_DEVICE static i32 tile_at(TileRange tiles, i32 cost) { return tiles.begin + max(0, cost - kQueries); }
};
}  // namespace mla::indexer
