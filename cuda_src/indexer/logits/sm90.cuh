// Shared code of the indexer logits kernels for Hopper: a ring of query stages for blocks of tokens, a ring of key
// stages for tiles, and warpgroups that take the tiles in turn.
#pragma once
#include "common/limits.cuh"
#include "indexer/logits/line.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "tile/ring.cuh"
#include "tile/sw128.cuh"

namespace mla::indexer::logits::sm90 {
// ---- Roles -----------------------------------------------------------------------------------------------------
// role       warps of the block             does
// math w     4w..                           every kMathWarpgroups-th tile of keys
// load       the first of the last four     queries and weights of each block of tokens, tiles of keys
// fill       the rest of the last four      -inf where no tile is computed
//
// In the paged kernel, one warp loads tiles and another loads queries.
template <i32 kMathWarpgroups>
struct Roles {
    static constexpr i32 kThreads = (kMathWarpgroups + 1) * kWarpgroupThreads;
    static constexpr i32 kMathWarps = kMathWarpgroups * kWarpgroupWarps, kLoadWarp = kMathWarps;
};

// ---- A block of tokens -----------------------------------------------------------------------------------------
// Stored with the queries: the tiles of this thread block, and the range of keys that each token sees.
struct BlockInfo {
    i32 block, tokens;
    TileRange tiles;  // empty: no more blocks
    KeyRange ranges[kMaxTokens];
};

// ---- Stages ----------------------------------------------------------------------------------------------------
// A position in a ring of stages, for a role that uses every kStep-th stage.
template <i32 kStages, i32 kStep = 1>
struct StageWalk {
    i32 stage;
    u32 wraps = 0;  // times around the ring, which give the phase of the stage's barriers

    MLA_DEVICE explicit StageWalk(i32 first) : stage(first) {}
    MLA_DEVICE u32 parity() const { return wraps & 1; }
    MLA_DEVICE void advance(i32 stages = kStages) {
        stage += kStep;
        if (stage < stages) return;
        stage -= stages;
        ++wraps;
    }
};

// The full barriers of a ring in which a stage may pass from one consumer to another. Tiles may arrive out of order, so
// a consumer can reach a stage while the previous tile of that stage is still loading. With one barrier per stage, the
// consumer would then see the parity of the tile before that one, take it for its own, and read too early. Two barriers
// per stage, used in turn, prevent this: the tile two laps back was consumed before this consumer's last tile was
// fetched.
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

// Calls put(head, token, weight) for each head and token; a lane of the warp handles one token. Absent heads and tokens
// have weight 0. All loads of a round are in flight together, because a short block waits for these loads alone.
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

// Tells the math warps about the next block; a block without tiles ends the kernel. Called by a whole warp.
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
}  // namespace mla::indexer::logits::sm90
