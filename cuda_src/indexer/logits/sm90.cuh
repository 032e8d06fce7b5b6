// What the indexer logits kernels for Hopper share: blocks of tokens in a ring of query stages, tiles of keys in
// another, warpgroups that take the tiles in turn.
#pragma once
#include "common/limits.cuh"
#include "indexer/logits/params.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "tile/ring.cuh"
#include "tile/sw128.cuh"

namespace mla::indexer::logits::sm90 {
// ---- Roles -----------------------------------------------------------------------------------------------------
// role       warps of the block             does
// math w     4w..                           every kMathWarpgroups-th tile of keys
// load       the first of the last four     queries and weights of each block of tokens, tiles of keys
// fill       the others                     -inf where no tile is computed
//
// Paged, tiles and queries are loaded by a warp each.
template <i32 kMathWarpgroups>
struct Roles {
    static constexpr i32 kThreads = (kMathWarpgroups + 1) * kWarpgroupThreads;
    static constexpr i32 kMathWarps = kMathWarpgroups * kWarpgroupWarps, kLoadWarp = kMathWarps;
};

constexpr i32 kMaxTokens = 8;  // of a block

// Blocks of tokens for which there need be no schedule: a warp looks at them all.
constexpr i32 kLaneBlocks = 4;
constexpr i32 kMaxShortLine = kLaneBlocks * kWarpThreads;

// ---- A block of tokens -----------------------------------------------------------------------------------------
// Beside its queries: the tiles of this thread block, and what each token may see.
struct BlockInfo {
    i32 block, tokens;
    TileRange tiles;  // none: there are no more blocks
    KeyRange ranges[kMaxTokens];
};

// The line of all tiles where there are few blocks of tokens, in the lanes of a warp: cut without a schedule.
template <i32 kTileKeys>
struct ShortLine {
    using Cost = BlockCost<kTileKeys>;

    const KeyRanges& ranges;
    i32 lane, first;  // `first`: of this lane's blocks
    TileRange tiles[kLaneBlocks];
    i32 before, total;  // what lies in front of this lane's blocks, and all of it

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

    // The same as schedule.cu finds.
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

// This thread block's share of that line, or of a schedule.
template <i32 kTileKeys>
MLA_DEVICE LineShare find_share(const LogitsParams& p, const KeyRanges& ranges, i32 lane) {
    if (p.cuts != nullptr) return LineShare{p.cuts[blockIdx.x], p.cuts[blockIdx.x + 1]};
    const ShortLine<kTileKeys> line(ranges, lane);
    return LineShare{line.cut(blockIdx.x, gridDim.x), line.cut(blockIdx.x + 1, gridDim.x)};
}

// The blocks of a share, by a whole warp. Lane i knows the range of token i.
template <i32 kTileKeys>
struct BlockWalk {
    const KeyRanges& ranges;
    TileCut from, to;
    i32 lane;
    // The block that `next` has found:
    i32 block;
    TileRange tiles;
    KeyRange range;
    KeyBounds ahead;  // of the next block: asked for while this one is worked on

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

// ---- Stages ----------------------------------------------------------------------------------------------------
// A position in a ring of stages of which a role takes every kStep-th.
template <i32 kStages, i32 kStep = 1>
struct StageWalk {
    i32 stage;
    u32 wraps = 0;  // how often it has begun anew: the phase of the stage's barriers

    MLA_DEVICE explicit StageWalk(i32 first) : stage(first) {}
    MLA_DEVICE u32 parity() const { return wraps & 1; }
    MLA_DEVICE void advance(i32 stages = kStages) {
        stage += kStep;
        if (stage < stages) return;
        stage -= stages;
        ++wraps;
    }
};

// The full barriers of a ring whose stages are not always the same consumer's. Tiles may arrive out of order, so that a
// consumer may come to a stage while the tile before its own is still under way there: the tile before that one has the
// parity that it waits for. With two barriers, which take turns, that tile cannot be: it had been consumed before
// anything that this consumer has seen was fetched.
template <i32 kStages>
struct TileBarriers {
    MBarrier barrier[2][kStages];

    template <i32 kStep>
    MLA_DEVICE MBarrier& of(const StageWalk<kStages, kStep>& walk) {
        return barrier[walk.wraps & 1][walk.stage];
    }
    template <i32 kStep>
    MLA_DEVICE void wait(const StageWalk<kStages, kStep>& walk) {
        mbarrier_wait(of(walk), walk.wraps >> 1 & 1);
    }
};

// By a warp: put(head, token, weight) takes the weight of each head and token, a lane those of one token. Those that
// are not there weigh nothing. All loads of a round are under way at once: short blocks wait for nothing else.
template <class Put>
MLA_DEVICE void load_weights(const LogitsParams& p, const BlockInfo& info, i32 heads, i32 tokens, i32 lane, Put put) {
    constexpr i32 kHeadsAtOnce = kWarpThreads / kMaxTokens, kLoads = 8;
    const i32 token = lane % kMaxTokens;
    const float* row = p.weights + info.block * p.weights_stride_block_elems + token * p.weights_stride_token_elems;
    for (i32 first = lane / kMaxTokens; first < heads; first += kLoads * kHeadsAtOnce) {
        float weights[kLoads];
#pragma unroll
        for (i32 i = 0; i < kLoads; ++i) {
            const i32 head = first + i * kHeadsAtOnce;
            const bool is_there = token < info.tokens && head < p.heads;
            weights[i] = is_there ? row[head * p.weights_stride_head_elems] : 0.f;
        }
#pragma unroll
        for (i32 i = 0; i < kLoads; ++i) {
            const i32 head = first + i * kHeadsAtOnce;
            if (token < tokens && head < heads) put(head, token, weights[i]);
        }
    }
}

// By a warp, for the math warps; the end of all is a block without tiles.
template <class Walk>
MLA_DEVICE void write_info(BlockInfo& info, const Walk& walk, bool found) {
    if (walk.lane < kMaxTokens) info.ranges[walk.lane] = walk.range;
    if (walk.lane == 0) {
        info.block = walk.block;
        info.tokens = found ? walk.ranges.tokens_of(walk.block) : 0;
        info.tiles = found ? walk.tiles : TileRange{0, 0};
    }
    __syncwarp();
}

// ---- Fill role -------------------------------------------------------------------------------------------------
// -inf in front of and behind the tiles of each token's block. Tokens go round the warps of the grid.
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
}  // namespace mla::indexer::logits::sm90
