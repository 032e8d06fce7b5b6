// Decode on Hopper for few query rows: the processing of a tile, for the kernels that differ in how they divide the
// tokens and in the destination of a work item's result. See decode/sm90_small.cu.
#pragma once
#include "attention/prefetch_inputs.cuh"
#include "attention/sm90/swapped.cuh"
#include "decode/sm90_load.cuh"
#include "decode/swapped_tile.cuh"
#include "ptx/control.cuh"
#include "tile/warp.cuh"

namespace mla::decode::sm90 {
// ---- Variant ---------------------------------------------------------------------------------------------------
// Sizes that depend on the width of a key. Two tiles of narrow keys leave shared memory free, so more tiles are kept in
// flight, depending on the number of the block's rows.
template <i32 kHeadDimQk, i32 kBlockRows, bool kNarrow = is_narrow_head_dim_qk(kHeadDimQk)>
struct SmallTile : KeyTile<kHeadDimQk> {
    static constexpr i32 kSwTilesV = attention::sm90::kSwTilesV, kStages = kStagesKV;
};
// The last of five SW128 tiles is filled up with zeros, by TMA.
template <i32 kHeadDimQk_, i32 kBlockRows>
struct SmallTile<kHeadDimQk_, kBlockRows, true> {
    static constexpr i32 kHeadDimQk = kHeadDimQk_;
    static constexpr i32 kSwTilesQk = ceil_div(kHeadDimQk, kSw128Columns);
    static constexpr i32 kSwTilesV = head_dim_v(kHeadDimQk) / kSw128Columns;
    static constexpr u32 kTileBytes = kSwTilesQk * kSw128Bytes;
    static constexpr i32 kStages = kBlockRows > 40 ? 3 : 4;
};

// SW128 tiles of a tile of keys arrive in the order of their columns, in groups: three of three, two of four, or one of
// five.
template <class Element_, i32 kBlockRows_, i32 kHeadDimQk, bool kTree_ = false, class Work_ = ScheduledWork>
struct Config : SmallTile<kHeadDimQk, kBlockRows_> {
    using Element = Element_;
    using Work = Work_;
    using Tile = SmallTile<kHeadDimQk, kBlockRows_>;
    static constexpr i32 kBlockRows = kBlockRows_;
    static constexpr bool kTree = kTree_;  // a mask says which drafts a query sees
    static constexpr i32 kGroupSwTiles = Tile::kSwTilesQk % 3 == 0 ? 3 : Tile::kSwTilesQk % 4 == 0 ? 4 : 5;
    static constexpr i32 kGroups = Tile::kSwTilesQk / kGroupSwTiles;
    static constexpr u32 kGroupBytes = kGroupSwTiles * kSw128Bytes;
    static constexpr u32 kQSwTileBytes = kHeadSwTileBytes<kBlockRows>;
    static_assert(Tile::kSwTilesQk % kGroupSwTiles == 0, "groups of one size");

    MLA_DEVICE static constexpr i32 sw_tile_in_order(i32 i) { return i; }
    MLA_DEVICE static i32 next_stage(i32 stage) {
        if constexpr (Tile::kStages == 2) return stage ^ 1;
        return stage + 1 == Tile::kStages ? 0 : stage + 1;
    }
};

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps    does
// math     0..3     S^T, softmax, O^T
// load     4        KV tiles:   decode/sm90_load.cuh
// query    5..7     query rows: the same
constexpr i32 kLoadWarp = kWarpgroupWarps, kQueryWarp = kLoadWarp + 1;
constexpr i32 kThreads = kWarpgroupThreads + kWarpThreads + kQueryThreads;
constexpr i32 kStagesQ = 2;
static_assert(kTileTokens == kSw128Rows, "a tile is 64 tokens");

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier           arrives (count)       carries        waits    first phase
// kv_full[s][g]     load (1)              kGroupBytes    math     blocked
// kv_empty[s]       math warps (4)        -              load     free
// q_full[s]         query threads (96)    -              math     blocked
// q_empty[s]        math warps (4)        -              query    free
//
// P needs no barrier of its own: it is overwritten after the next tile's maxima have been exchanged, before which every
// warp has finished with the product that read it.
template <class C>
struct Storage {
    alignas(kSwizzleAtomBytes) u8 kv[C::kStages][C::kTileBytes];
    u8 q[kStagesQ][C::kSwTilesQk][C::kQSwTileBytes];
    u8 p[C::kQSwTileBytes];                             // [row][token]
    float warp_values[kWarpgroupWarps][C::kBlockRows];  // maxima, then sums, of each warp's tokens
    HeadStats<C::kBlockRows> stats;
    u64 present[C::kStages];  // bit t: the page of token t of the tile is in the pool
    i32 nonfinite_request;    // the last request in which sanitize_rows found NaN or Inf
    MBarrier kv_full[C::kStages][C::kGroups], kv_empty[C::kStages];
    MBarrier q_full[kStagesQ], q_empty[kStagesQ];
};

// MathOnly: within the math warpgroup.
enum NamedBarrier : i32 { MathOnly = 1 };

// State shared by all roles.
template <class C>
struct Block : RowBlock<C::kBlockRows, typename MaskedWork<C::kTree, typename C::Work>::Type> {
    using Rows = RowBlock<C::kBlockRows, typename MaskedWork<C::kTree, typename C::Work>::Type>;
    static constexpr bool kStartsEarly = !C::Work::kForms;
    Storage<C>& s;

    MLA_DEVICE Block(const DecodeParams& p, Storage<C>& s) : Rows(p), s(s) {}
    MLA_DEVICE Block(const DecodeParams& p, i32 index, Storage<C>& s) : Rows(p, index), s(s) {}
};

// Called before the first read of anything that an earlier kernel may have written. If the launch before writes only
// queries and the last tokens, the schedule, the lengths, the block table and the tiles of other tokens are read while
// it runs.
template <class C>
MLA_DEVICE void wait_for_inputs(const DecodeParams& p) {
    if (!Block<C>::kStartsEarly || p.new_tokens < 0) griddepcontrol_wait();
}

// Called by one thread, before the block's first barrier.
template <class C>
MLA_DEVICE void init_storage(Storage<C>& s) {
    for (i32 stage = 0; stage < C::kStages; ++stage) {
        for (MBarrier& full : s.kv_full[stage]) mbarrier_init(full, kLoadArrivals);
        mbarrier_init(s.kv_empty[stage], kWarpgroupWarps);
    }
    for (i32 stage = 0; stage < kStagesQ; ++stage) {
        mbarrier_init(s.q_full[stage], kQueryThreads);
        mbarrier_init(s.q_empty[stage], kWarpgroupWarps);
    }
    fence_mbarrier_init();
    s.nonfinite_request = -1;
}

// ---- Load role -------------------------------------------------------------------------------------------------
template <class C>
struct GroupLoader {
    const Block<C>& block;
    const TensorMap& kv_map;
    i32 stage;
    Ring<C::kStages> ring;

    MLA_DEVICE void operator()(const TileBoxes& boxes, const WorkItem& item, i32 tile) {
        Storage<C>& s = block.s;
        if (Block<C>::kStartsEarly && (tile + 1) * kTileTokens > item.tokens - block.p.new_tokens)
            griddepcontrol_wait();
        const u64 present = boxes.present_tokens();
        mbarrier_wait(s.kv_empty[stage], ring.empty_parity(stage));
        if (boxes.lane == 0) {
            s.present[stage] = present;
            for (MBarrier& full : s.kv_full[stage]) mbarrier_arrive_expect_tx(full, C::kGroupBytes);
        }
        __syncwarp();
        for (i32 group = 0; group < C::kGroups; ++group) {
            const i32 first = group * C::kGroupSwTiles;
            boxes.load<C>(smem_addr(s.kv[stage]), kv_map, s.kv_full[stage][group], block.kv_head, first,
                          first + C::kGroupSwTiles);
        }
        ring.advance(stage);
        stage = C::next_stage(stage);
    }
};

// ---- Math role -------------------------------------------------------------------------------------------------
template <class C>
struct Math : SwappedMath<C::kBlockRows, C::kSwTilesV> {
    i32 stage, q_stage;
    Ring<C::kStages> ring;
    Ring<kStagesQ> q_ring;
};

// S^T of the tile in the current stage, each group as soon as it has arrived.
template <class C>
MLA_DEVICE void score(Storage<C>& s, Math<C>& math) {
    using Element = typename C::Element;
    const SmemDesc k = uniform(k_major_desc(smem_addr(s.kv[math.stage])));
    const SmemDesc q = uniform(k_major_desc(smem_addr(s.q[math.q_stage])));
    const u32 parity = math.ring.full_parity(math.stage);
    pin(math.scores);
#pragma unroll
    for (i32 i = 0; i < C::kSwTilesQk; ++i) {
        if (i % C::kGroupSwTiles == 0) {
            mbarrier_wait(s.kv_full[math.stage][i / C::kGroupSwTiles], parity);
            wgmma_fence();
        }
        multiply_abt<kSw128MmaSteps>(Element{}, math.scores, advance(k, i * kSw128Bytes),
                                     advance(q, i * C::kQSwTileBytes), i > 0);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(math.scores);
}

template <class C>
MLA_DEVICE void process_tile(Block<C>& block, Math<C>& math, const WorkItem& item, i32 tile, i32 thread) {
    using Element = typename C::Element;
    Storage<C>& s = block.s;
    const float scale_log2 = block.p.scale_log2;
    score(s, math);
    if (tile + 1 == item.tile_end) release(s.q_empty[math.q_stage], thread);
    mask_tile<C>(block, math.scores, s.present[math.stage], item, tile, thread);
    update_maxima(math, s.warp_values, scale_log2, MathOnly, thread);
    sanitize_v<C>(block, s.kv[math.stage], item, tile, thread);
    store_p(Element{}, math.heads, math.scores, smem_addr(s.p), scale_log2, thread);
    bar_sync(MathOnly, kWarpgroupThreads);
    add_values(Element{}, math.out, uniform(mn_major_desc(smem_addr(s.kv[math.stage]))),
               uniform(k_major_desc(smem_addr(s.p))));
    release(s.kv_empty[math.stage], thread);
    math.ring.advance(math.stage);
    math.stage = C::next_stage(math.stage);
}

// All tiles of a work item, if it has any; `math` is reset.
template <class C>
MLA_DEVICE void process_item(Block<C>& block, Math<C>& math, const WorkItem& item, i32 thread) {
    if (item.tile_begin >= item.tile_end) return;
    mbarrier_wait(block.s.q_full[math.q_stage], math.q_ring.full_parity(math.q_stage));
#pragma unroll 1
    for (i32 tile = item.tile_begin; tile < item.tile_end; ++tile) process_tile(block, math, item, tile, thread);
    math.q_ring.advance(math.q_stage);
    math.q_stage ^= 1;
}
}  // namespace mla::decode::sm90
