// Divides the tiles of all blocks of tokens among the thread blocks of a grid: the tiles form one line, and warps walk
// along their share of it.
#pragma once
#include "indexer/logits/params.cuh"

namespace mla::indexer::logits {
constexpr i32 kMaxTokens = 8;  // in a block of tokens

// Up to kMaxShortLine blocks of tokens need no schedule: one warp looks at them all.
constexpr i32 kLaneBlocks = 4;
constexpr i32 kMaxShortLine = kLaneBlocks * kWarpThreads;

// The line of tiles of at most kMaxShortLine blocks of tokens, held in the lanes of a warp and cut without a schedule.
template <i32 kTileKeys>
struct ShortLine {
    using Cost = BlockCost<kTileKeys>;

    const KeyRanges& ranges;
    i32 lane, first;  // `first`: the first of this lane's blocks
    TileRange tiles[kLaneBlocks];
    i32 before, total;  // cost of the tiles before this lane's blocks, and of all tiles

    MLA_DEVICE ShortLine(const KeyRanges& ranges, i32 lane) : ranges(ranges), lane(lane) {
        const i32 blocks = ranges.num_blocks, lane_blocks = ceil_div(blocks, kWarpThreads);
        first = lane * lane_blocks;
        const i32 own_blocks = max(0, min(lane_blocks, blocks - first));
#pragma unroll
        for (i32 i = 0; i < kLaneBlocks; ++i) {
            tiles[i] = i < own_blocks ? block_tiles<kTileKeys>(ranges, first + i) : TileRange{0, 0};
        }
        sum_up(blocks);
    }

    MLA_DEVICE void sum_up(i32 blocks) {
        i32 own = 0;
#pragma unroll
        for (i32 i = 0; i < kLaneBlocks; ++i) own += Cost::of(tiles[i]);
        i32 through = own;
        if (blocks > 1) {
#pragma unroll
            for (i32 step = 1; step < kWarpThreads; step *= 2) {
                const i32 left = __shfl_up_sync(kFullWarp, through, step);
                if (lane >= step) through += left;
            }
        }
        before = through - own;
        total = __shfl_sync(kFullWarp, through, blocks > 1 ? kWarpThreads - 1 : 0);
    }

    // Makes the same cut as schedule.cu.
    MLA_DEVICE TileCut cut(i32 split, i32 num_splits) const {
        const i32 place = share_begin(split, num_splits, total);
        if (place >= total) return TileCut{ranges.num_blocks, 0};
        i32 left = place - before;
        TileCut found{-1, 0};
#pragma unroll
        for (i32 i = 0; i < kLaneBlocks; ++i) {
            const i32 cost = Cost::of(tiles[i]);
            if (0 <= left && left < cost) found = TileCut{first + i, Cost::tile_at(tiles[i], left)};
            left -= cost;
        }
        const i32 owner = __ffs(__ballot_sync(kFullWarp, found.block >= 0)) - 1;
        return TileCut{__shfl_sync(kFullWarp, found.block, owner), __shfl_sync(kFullWarp, found.tile, owner)};
    }
};

// This thread block's share of the line, taken from the schedule if there is one.
template <i32 kTileKeys>
MLA_DEVICE LineShare find_share(const LogitsParams& p, const KeyRanges& ranges, i32 lane) {
    if (p.cuts != nullptr) return LineShare{p.cuts[blockIdx.x], p.cuts[blockIdx.x + 1]};
    const ShortLine<kTileKeys> line(ranges, lane);
    return LineShare{line.cut(blockIdx.x, gridDim.x), line.cut(blockIdx.x + 1, gridDim.x)};
}

// Walks a whole warp through the blocks of a share. Lane i holds the range of token i.
template <i32 kTileKeys>
struct BlockWalk {
    const KeyRanges& ranges;
    TileCut from, to;
    i32 lane;
    // The current block, set by `next`:
    i32 block;
    TileRange tiles;
    KeyRange range;
    KeyBounds ahead;  // bounds of the next block, loaded while the warp works on this one

    MLA_DEVICE BlockWalk(const KeyRanges& ranges, const LineShare& share, i32 lane)
        : ranges(ranges), from(share.from), to(share.to), lane(lane), block(share.from.block - 1) {
        look_ahead();
    }

    MLA_DEVICE void look_ahead() {
        ahead = KeyBounds{0, 0};
        if (block + 1 < ranges.num_blocks && lane < ranges.tokens_of(block + 1)) ahead = ranges.load(block + 1, lane);
    }

    MLA_DEVICE bool next() {
        const i32 last = min(to.block, ranges.num_blocks - 1);
        while (++block <= last) {
            range = KeyRange{0, 0};
            if (lane < ranges.tokens_of(block)) range = ranges.clamp(ahead, lane);
            look_ahead();
            tiles = warp_tiles<kTileKeys>(range);
            if (block == from.block) tiles.begin = max(tiles.begin, from.tile);
            if (block == to.block) tiles.end = min(tiles.end, to.tile);
            if (tiles.begin < tiles.end) return true;
        }
        return false;
    }
};

// ---- Fill role -------------------------------------------------------------------------------------------------
// Writes -inf before and after the tiles of each token's block. Tokens are dealt out to the warps of the grid.
template <i32 kTileKeys, i32 kWarps>
MLA_DEVICE void run_fill_role(const LogitsParams& p, i32 warp, i32 lane) {
    if (!p.clean) return;
    const KeyRanges ranges = key_ranges(p);
    i32 filled = -1;
    TileRange tiles{0, 0};
    for (i32 row = blockIdx.x * kWarps + warp; row < p.num_tokens; row += gridDim.x * kWarps) {
        const i32 block = row / p.block_tokens, token = row % p.block_tokens;
        if (block != filled) {
            KeyRange range{0, 0};
            if (lane < ranges.tokens_of(block)) range = ranges.of(block, lane);
            tiles = warp_tiles<kTileKeys>(range);
            filled = block;
        }
        const LogitsRow logits(p, block, token);
        logits.fill(0, min(p.num_keys, tiles.begin * kTileKeys), lane);
        logits.fill(min(p.num_keys, tiles.end * kTileKeys), p.num_keys, lane);
    }
}
}  // namespace mla::indexer::logits
