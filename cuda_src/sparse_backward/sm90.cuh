// Shared by the two Hopper kernels of the sparse MLA backward: sizes, the iteration over the work, a thread's share of
// the gather, P and dS of a tile. Work items, and hence shared memory, barriers and roles, are the kernels' own.
#pragma once
#include "common/limits.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "sparse_backward/l2_lockstep.cuh"
#include "sparse_backward/params.cuh"
#include "tile/fragment.cuh"
#include "tile/product.cuh"
#include "tile/ring.cuh"
#include "tile/sw128.cuh"

namespace mla::sparse_backward::sm90 {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kBlockHeads = 64;
constexpr i32 kTileKeys = kTileTokens;
constexpr i32 kThreads = 3 * kWarpgroupThreads;        // scores, values, reduce
constexpr i32 kGatherThreads = 2 * kWarpgroupThreads;  // scores, values
constexpr i32 kRegsEntry = regs_at_entry(kThreads);
// The first warp of each role after the first.
constexpr i32 kValuesWarp = kWarpgroupWarps, kReduceWarp = 2 * kWarpgroupWarps;
constexpr i32 kScoresPerThread = kBlockHeads * kTileKeys / kWarpgroupThreads;

enum NamedBarrier : i32 { ItemMultiplied = 1 };  // within reduce: all its warps have waited for their products

// ---- Work ------------------------------------------------------------------------------------------------------
// A position in the work of a block (or pair): a tile of its item number `pass`. Items without a key have no tile. Odd
// passes go through their lists backwards: lists are sorted by row, so all blocks sweep over kv and dkv together, in
// alternating directions, and each sweep starts with what the previous one left in the L2.
struct Cursor {
    i32 pass, tile, count;  // count: keys of the item's query

    MLA_DEVICE bool first() const { return tile == 0; }
    MLA_DEVICE bool last() const { return (tile + 1) * kTileKeys >= count; }
    // The block's progress over all its sweeps if the tile begins at step `step` of kv.
    MLA_DEVICE i64 steps(i32 step) const {
        return (i64)pass * kSweepSteps + (pass & 1 ? kSweepSteps - 1 - step : step);
    }
    // First key of the tile, in the list.
    MLA_DEVICE i32 first_key() const { return (pass & 1 ? ceil_div(count, kTileKeys) - 1 - tile : tile) * kTileKeys; }
};

// The first tile from pass `pass` on; calls `skipped` with each item that has none. A kernel's Block provides
// `valid(at)` (the item exists), `count(at)` (its number of keys) and `list(at)` (its list).
template <class Block, class Skipped>
MLA_DEVICE Cursor seek(const Block& block, i32 pass, Skipped skipped) {
    Cursor at{pass, 0, 0};
    for (; block.valid(at); ++at.pass) {
        at.count = block.count(at);
        if (at.count > 0) break;
        skipped(at);
    }
    return at;
}

template <class Block, class Skipped>
MLA_DEVICE Cursor next(const Block& block, const Cursor& at, Skipped skipped) {
    if (at.last()) return seek(block, at.pass + 1, skipped);
    return Cursor{at.pass, at.tile + 1, at.count};
}

struct Nothing {
    MLA_DEVICE void operator()(const Cursor&) const {}
};

// ---- Gather ----------------------------------------------------------------------------------------------------
// Eight threads fetch 128 bytes of a row; a thread has two rows of each tile, and the same chunk of every SW128 tile.
constexpr i32 kRowsPerThread = kTileKeys * kSw128Chunks / kGatherThreads;

// The tile's row that is the thread's number i.
MLA_DEVICE i32 tile_row(i32 thread, i32 i) { return thread / kSw128Chunks + i * (kGatherThreads / kSw128Chunks); }

// Which rows of kv they are.
template <class Block>
MLA_DEVICE void look_up(i32 (&rows)[kRowsPerThread], const Block& block, const Cursor& at, i32 thread) {
    const i32* list = block.list(at) + at.first_key();
#pragma unroll
    for (i32 i = 0; i < kRowsPerThread; ++i) rows[i] = list[tile_row(thread, i)];
}

// Waits for this thread's copies, makes them visible to WGMMA, and arrives.
MLA_DEVICE void arrive_with_copies(MBarrier& full) {
    cp_async_wait_all();
    fence_proxy_async();
    mbarrier_arrive(full);
}

// ---- P and dS --------------------------------------------------------------------------------------------------
// Issues d = A B^T over `kCount` SW128 tiles of both.
template <class Element, i32 kCount>
MLA_DEVICE void multiply_sw_tiles(float (&d)[kScoresPerThread], SmemAddr a_sw_tiles, SmemAddr b_sw_tiles) {
    const SmemDesc a = uniform(k_major_desc(a_sw_tiles));
    const SmemDesc b = uniform(k_major_desc(b_sw_tiles));
    pin(d);
    wgmma_fence();
    multiply_abt<kCount * kSw128MmaSteps>(Element{}, d, a, b);
}

// P of a tile, in 16 bits, from S. Columns from `keys` on are 0: their keys are 0, but exp2(-lse2) may be infinite.
template <class Element>
MLA_DEVICE void make_weights(u32 (&p)[kSw128MmaSteps][4], float (&s)[kScoresPerThread], i32 keys, float scale_log2,
                             const float (&lse2)[kFragmentRows], i32 thread) {
    if (keys < kTileKeys) {
#pragma unroll
        for (i32 i = 0; i < kScoresPerThread; ++i) {
            if (fragment_column(thread, i) >= keys) s[i] = negative_infinity();
        }
    }
#pragma unroll
    for (i32 i = 0; i < kScoresPerThread; i += 2) {
        const i32 r = fragment_half(i);
        const float p0 = ex2_approx(fmaf(s[i], scale_log2, -lse2[r]));
        const float p1 = ex2_approx(fmaf(s[i + 1], scale_log2, -lse2[r]));
        p[i / 8][(i % 8) / 2] = cvt_x2(Element{}, p0, p1);
    }
}

// Two elements of dS, in 16 bits, from P and dP. `delta` is premultiplied by the scale.
template <class Element>
MLA_DEVICE u32 score_gradients(u32 p, const float* dp, float scale, float delta) {
    const float ds0 = Element::to_float((u16)p) * fmaf(dp[0], scale, -delta);
    const float ds1 = Element::to_float((u16)(p >> 16)) * fmaf(dp[1], scale, -delta);
    return cvt_x2(Element{}, ds0, ds1);
}

// ---- dQ --------------------------------------------------------------------------------------------------------
MLA_DEVICE u16* dq_row(const BackwardParams& p, i32 query, i32 head) {
    return p.dq + query * p.dq_stride_s_elems + (i64)head * p.dq_stride_h_elems;
}
}  // namespace mla::sparse_backward::sm90
