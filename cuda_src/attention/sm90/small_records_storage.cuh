// Attention to FP8 records for few query rows: a kernel's configuration, and the shared memory of its roles. See
// attention/sm90/small_records.cuh.
#pragma once
#include "attention/record_tokens.cuh"
#include "attention/sm90/record_keys.cuh"
#include "attention/sm90/swapped.cuh"
#include "attention/split_work.cuh"
#include "attention/tree_mask.cuh"
#include "ptx/barrier.cuh"
#include "tile/warp.cuh"

namespace mla::attention::sm90 {
// ---- Variant ---------------------------------------------------------------------------------------------------
// Configuration of a kernel. Tokens_ is one of attention/record_tokens.cuh. With kTree_ a mask selects the drafts that
// a query sees.
template <class Element_, class TokenRecord_, class Tokens_, i32 kBlockRows_, bool kTree_ = false>
struct SmallRecords : RecordTile<TokenRecord_> {
    using Element = Element_;
    using TokenRecord = TokenRecord_;
    using Tokens = Tokens_;
    using Tile = RecordTile<TokenRecord_>;
    using Latent = typename KeyFormats<TokenRecord, Element>::Latent;  // also of P
    using Rope = typename KeyFormats<TokenRecord, Element>::Rope;
    static constexpr i32 kBlockRows = kBlockRows_;
    static constexpr bool kTree = kTree_;
    static constexpr bool kTensorMemory = false;  // sums in tensor memory; the kernel then has the rest of the storage
    static constexpr i32 kGroupSwTiles = 3;
    static constexpr i32 kGroups = ceil_div(Tile::kSwTilesQk, kGroupSwTiles);
    static constexpr u32 kQSwTileBytes = kHeadSwTileBytes<kBlockRows>;
    // Rows come through shared memory, or through registers. Loads into registers that are used in the next round of a
    // loop share one scoreboard: the first use waits for all of them.
    static constexpr bool kStaged = Tokens::kStaged;
    // Scouts find out where the rows are, so that dequantising warps do not. With 32 query rows there is no room.
    static constexpr bool kScouted = kStaged && kBlockRows <= 16;
    // Two math warpgroups take tiles in turn, so that one multiplies while the other weighs. With 32 query rows there
    // are not enough registers.
    static constexpr i32 kMathGroups = kBlockRows <= 16 ? 2 : 1;
    static constexpr i32 kWarpgroups = kMathGroups + 2 + (kScouted ? 1 : 0), kThreads = kWarpgroups * kWarpgroupThreads;
    static constexpr i32 kRegsMath = kMathGroups > 1 ? 136 : 240;
    static constexpr i32 kRegsDequant = kScouted ? 80 : kMathGroups > 1 ? 120 : 128;
    static constexpr i32 kRegsScout = 48;
    static constexpr i32 kRegsAtEntry = 512 / kWarpgroups / 8 * 8;  // of a thread
    static_assert(kMathGroups * kRegsMath + 2 * kRegsDequant + (kScouted ? kRegsScout : 0) <=
                      kWarpgroups * kRegsAtEntry,
                  "registers of the block");
    // Staged rows leave room for one stage of 32 query rows.
    static constexpr i32 kStagesQ = kStaged ? 1 : 2;
    // Tiles, and query rows with them, are written by ordinary stores and read by WGMMA. The fence between the two
    // makes a dequantising warp wait for its loads, so the mathematics have it where that is faster. PERF(H200,
    // 2026-11-22, pages: -4 to -6 % with 8 and 16 rows, 28 % at batch 1, with 32 rows it costs 9 %; lists: -3 to -5 %
    // with 16 rows, with 32 it costs 4 %)
    static constexpr bool kFencedByReaders = kBlockRows <= 16 || kStaged;
    // See e4m3_pair. PERF(H200, 2026-11-22: -2 % from pages with 16 rows, but +2 % where a record has one scale)
    static constexpr bool kUnshifted = kBlockRows <= 16 && !kHasValueScale<TokenRecord>;

    MLA_DEVICE static constexpr i32 group_of(i32 sw_tile) { return sw_tile / kGroupSwTiles; }
    // The pieces of a group: [first_piece(group), first_piece(group + 1)).
    MLA_DEVICE static constexpr i32 first_piece(i32 group) {
        return group < kGroups ? group * kGroupSwTiles : Tile::kRowPieces;
    }
};

// ---- Budget ----------------------------------------------------------------------------------------------------
// role      warps, registers: 8 and 16 rows, scouted   not scouted   32 rows      does
// math      0..7, 136                                  0..7, 136     0..3, 240    S^T, softmax, O^T
// dequant   8..15, 80                                  8..15, 120    4..11, 128   eight rows of a tile per warp; Q
// scouts    16..17, 48                                                            addresses of a tile's rows
constexpr i32 kDequantWarps = 8;
constexpr i32 kRowsOfWarp = kWarpThreads / kPieceLanes;
constexpr i32 kScoutWarps = kTileTokens / kWarpThreads;  // of a warpgroup; the others are idle
static_assert(kDequantWarps * kRowsOfWarp == kTileTokens && kTileTokens == kSw128Rows, "each row has its four lanes");

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier           arrives (count)       waits      first phase
// kv_full[s][g]     dequant warps (8)     math       blocked
// kv_empty[s][g]    math warps (4)        dequant    free       of the warpgroup that has the tile
// q_empty[s]        math warps (4 or 8)   dequant    free
// rows.full[i]      scout warps (2)       dequant    blocked    where there are scouts
// rows.empty[i]     dequant warps (8)     scouts     free
//
// A query comes with group 0 of its first tile: it is written before, and the fence and the barrier of the group cover
// it, too (see kFencedByReaders). P needs no barrier of its own: it is overwritten after the next tile's maxima have
// been exchanged, before which every warp has finished with the product that read it.

// Each lane's 16 bytes of each piece of its row: they are the lane's own.
template <i32 kPieces>
struct RawRows {
    alignas(16) u8 bytes[kDequantWarps][kPieces][kWarpThreads * 16];
};
template <>
struct RawRows<0> {};

// A scout's results for a tile.
constexpr i32 kScoutStages = 4;
constexpr i32 kNoQuery = -1, kNoTile = -2;

template <class C>
struct ScoutedTile {
    const u8* rows[kTileTokens];  // absent rows: any address, which is not read
    const u8* scales[kScalesApart<typename C::TokenRecord> ? kTileTokens : 1];
    u64 present;
    i32 query;  // if the tile is the first of a work item, else kNoQuery; or kNoTile
};

template <class C, bool = C::kScouted>
struct ScoutStorage : RawRows<C::kRowPieces> {
    ScoutedTile<C> tiles[kScoutStages];
    alignas(16) typename LaneScales<typename C::TokenRecord>::OfRow row_scales[kTileTokens];
    MBarrier full[kScoutStages], empty[kScoutStages];
};
template <class C>
struct ScoutStorage<C, false> : RawRows<C::kStaged ? C::kRowPieces : 0> {};

template <class C, bool = C::kTensorMemory>
struct SmallStorage {
    alignas(kSwizzleAtomBytes) u8 kv[kStagesKV][C::kTileBytes];
    u8 q[C::kStagesQ][C::kSwTilesQk][C::kQSwTileBytes];
    u8 p[C::kMathGroups][C::kQSwTileBytes];                             // [head][token]
    float q_factors[C::kStagesQ][C::kBlockRows];                        // of the scores of each head
    float warp_values[C::kMathGroups][kWarpgroupWarps][C::kBlockRows];  // maxima, then sums, of each warp's tokens
    HeadStats<C::kBlockRows> stats;
    ScoutStorage<C> rows;
    u64 present[kStagesKV];  // bit t: token t of the tile is there
    MBarrier kv_full[kStagesKV][C::kGroups], kv_empty[kStagesKV][C::kGroups];
    MBarrier q_empty[C::kStagesQ];
};

// State shared by the dequantising warps on Blackwell, whose sums are in tensor memory.
template <class C>
struct SmallStorage<C, true> {
    // The ninth SW128 tile of a stage has the RoPE columns of the wider record until they are scored, then P.
    alignas(kSwizzleAtomBytes) u8 kv[kStagesKV][(kSwTilesV + 1) * kSw128Bytes];
    u8 q[C::kStagesQ][C::kSwTilesQk][C::kQSwTileBytes];
    float q_factors[C::kStagesQ][C::kBlockRows];
    u64 present[kStagesKV];
    MBarrier kv_full[kStagesKV][C::kGroups], kv_empty[kStagesKV][C::kGroups], q_empty[C::kStagesQ];
};

// MathOnly: within a math warpgroup, one of each. MathBoth: between the two.
enum SmallBarrier : i32 { MathOnly = 1, MathBoth = 3 };

template <class C>
struct SmallBlock : RowBlock<C::kBlockRows, typename MaskedWork<C::kTree, typename C::Tokens::Work>::Type> {
    using Rows = RowBlock<C::kBlockRows, typename MaskedWork<C::kTree, typename C::Tokens::Work>::Type>;
    SmallStorage<C>& s;

    MLA_DEVICE SmallBlock(const DecodeParams& p, SmallStorage<C>& s) : Rows(p), s(s) {}
};

// Called by one thread, before the block's first barrier.
template <class C>
MLA_DEVICE void init_storage(SmallStorage<C>& s) {
    for (i32 stage = 0; stage < kStagesKV; ++stage) {
        for (MBarrier& full : s.kv_full[stage]) mbarrier_init(full, kDequantWarps);
        for (MBarrier& empty : s.kv_empty[stage]) mbarrier_init(empty, kWarpgroupWarps);
    }
    for (MBarrier& empty : s.q_empty) mbarrier_init(empty, C::kMathGroups * kWarpgroupWarps);
    if constexpr (C::kScouted) init_ring(s.rows.full, s.rows.empty, kScoutWarps, kDequantWarps);
}

// ---- Tiles of a split ------------------------------------------------------------------------------------------
// A tile with requested token addresses.
template <class C>
struct ListedTile {
    bool exists;
    i32 query;  // as in ScoutedTile
    typename C::Tokens::Place place;
    i32 token, tokens_in_first;  // see `bytes` of attention/record_tokens.cuh
};
}  // namespace mla::attention::sm90
