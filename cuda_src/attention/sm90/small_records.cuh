// Attention to FP8 records on Hopper for few query rows: warps that dequantise feed warpgroups that multiply.
//
// What a tile goes through, for the kernels that differ in where a request's tokens lie: in lists of slots
// (sparse_decode/sm90_small.cu), in listed rows (sparse/forward_sm90_records.cu) or in pages (decode/sm90_records.cu).
// Operands are swapped, see attention/sm90/swapped.cuh; query rows that share keys are called heads.
//
// Eight warps load rows, into registers or through shared memory, convert them to 16 bits
// (attention/sm90/record_keys.cuh) and write SW128 tiles of two stages. What has been converted is asked for again of
// the next tile at once, across work items, too: a whole tile is in flight all the time. A stage has three groups of
// SW128 tiles, passed on one by one:
//
//   math     |   S^T group 0, 1, 2   | max, P | O^T += V^T P^T, group 0, 1, 2 | S'^T ...
//   dequant  |        K' groups 0, 1, 2 ->          wait for a group, K'' ->
//   loads    |  K''  ...                              K''' ...
//
// Of two math warpgroups each has the tiles of a stage, and the first one adds up both at the end of a work item.
#pragma once
#include "attention/record_tokens.cuh"
#include "attention/row_block.cuh"
#include "attention/sm90/nonfinite_values.cuh"
#include "attention/sm90/record_query.cuh"
#include "attention/sm90/swapped.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "tile/warp.cuh"

namespace mla::attention::sm90 {
// ---- Variant ---------------------------------------------------------------------------------------------------
// What a kernel chooses. Tokens_ is one of attention/record_tokens.cuh. With kTree_ a mask says which drafts a query
// sees.
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
    // Where rows are staged, there is room for 32 query rows once.
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
constexpr i32 kScoutWarps = kTileTokens / kWarpThreads;  // of a warpgroup; the others have nothing to do
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

// What the scouts have found out about a tile.
constexpr i32 kScoutStages = 4;
constexpr i32 kNoQuery = -1, kNoTile = -2;

template <class C>
struct ScoutedTile {
    const u8* rows[kTileTokens];  // where none is: some address, which is not read
    const u8* scales[kScalesApart<typename C::TokenRecord> ? kTileTokens : 1];
    u64 present;
    i32 query;  // where the tile is the first of a work item, else kNoQuery; or kNoTile
};

template <class C, bool = C::kScouted>
struct ScoutStorage : RawRows<C::kRowPieces> {
    ScoutedTile<C> tiles[kScoutStages];
    alignas(16) typename LaneScales<typename C::TokenRecord>::OfRow row_scales[kTileTokens];
    MBarrier full[kScoutStages], empty[kScoutStages];
};
template <class C>
struct ScoutStorage<C, false> : RawRows<C::kStaged ? C::kRowPieces : 0> {};

template <class C>
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

// MathOnly: within a math warpgroup, one of each. MathBoth: between the two.
enum SmallBarrier : i32 { MathOnly = 1, MathBoth = 3 };

template <class C>
struct SmallBlock : RowBlock<C::kBlockRows, C::kTree> {
    SmallStorage<C>& s;

    MLA_DEVICE SmallBlock(const DecodeParams& p, SmallStorage<C>& s) : RowBlock<C::kBlockRows, C::kTree>(p), s(s) {}
};

// By one thread, before the block's first barrier.
template <class C>
MLA_DEVICE void init_storage(SmallStorage<C>& s) {
    for (i32 stage = 0; stage < kStagesKV; ++stage) {
        for (MBarrier& full : s.kv_full[stage]) mbarrier_init(full, kDequantWarps);
        for (MBarrier& empty : s.kv_empty[stage]) mbarrier_init(empty, kWarpgroupWarps);
    }
    for (MBarrier& empty : s.q_empty) mbarrier_init(empty, C::kMathGroups * kWarpgroupWarps);
    if constexpr (C::kScouted) init_ring(s.rows.full, s.rows.empty, kScoutWarps, kDequantWarps);
}

// ---- Dequant role ----------------------------------------------------------------------------------------------
// A tile of whose tokens the places have been asked for.
template <class C>
struct ListedTile {
    bool exists;
    i32 query;  // where the tile is the first of a work item, else kNoQuery
    typename C::Tokens::Place place;
    i32 token, first_tokens;  // see `bytes` of attention/record_tokens.cuh
};

// A tile on its way: a lane's bytes of its row, where these do not come through shared memory.
template <class C>
struct FetchedTile {
    uint4 piece[C::kStaged ? 1 : C::kRowPieces];
    LaneScales<typename C::TokenRecord> scales;
    bool present;
};

template <class C>
struct Dequantiser {
    using TokenRecord = typename C::TokenRecord;
    SmallBlock<C>& block;
    static constexpr i32 kQueryRows = C::kBlockRows / kDequantWarps;  // of the warp
    i32 warp, lane, row;                                              // row of each tile
    i32 stage, q_stage;
    Ring<kStagesKV> ring;
    Ring<C::kStagesQ> q_ring;

    // The warp's i-th query row of the block; null past the last head.
    MLA_DEVICE const u16* query_row(i32 query, i32 i) const {
        const i32 row = block.row0 + warp + i * kDequantWarps;
        return row < block.rows ? C::Tokens::query_row(block.p, query, block.kv_head, row) : nullptr;
    }

    // Reads on, and brings the rows of a query that comes up into L2.
    MLA_DEVICE ListedTile<C> list_next(TileWalk<typename C::Tokens::Work>& walk) const {
        ListedTile<C> listed{walk.next(block.p), kNoQuery, C::Tokens::nowhere(), 0, 0};
        if (!listed.exists) return listed;
        listed.token = walk.tile * kTileTokens + row;
        listed.first_tokens = walk.first_tokens;
        listed.place = C::Tokens::place(block.p, walk, listed.token);
        if (!walk.first) return listed;
        listed.query = walk.request;
#pragma unroll
        for (i32 i = 0; i < kQueryRows; ++i) {
            // Without a branch: after one that lanes may take apart, the compiler would keep nothing in uniform
            // registers.
            const i32 row = min(block.row0 + warp + i * kDequantWarps, block.rows - 1);
            const u16* from = C::Tokens::query_row(block.p, listed.query, block.kv_head, row);
            prefetch_global_l2(from + min(lane, C::kSwTilesQk - 1) * kSw128Columns);
        }
        return listed;
    }

    // The lane's token of a tile. It waits for the place, and so most likely for all loads: call it late.
    MLA_DEVICE TokenBytes find(const ListedTile<C>& listed) const {
        return C::Tokens::template bytes<TokenRecord>(block.p, listed, listed.token, listed.place);
    }

    MLA_DEVICE void store_query(i32 query) {
        SmallStorage<C>& s = block.s;
        mbarrier_wait(s.q_empty[q_stage], q_ring.empty_parity(q_stage));
#pragma unroll 2
        for (i32 i = 0; i < kQueryRows; ++i) {
            QueryRow<typename C::Tile> from;
            from.load(query_row(query, i), lane);
            store_query_row(from, i);
        }
        next_query();
    }

    // The warp's i-th row of a query.
    MLA_DEVICE void store_query_row(const QueryRow<typename C::Tile>& from, i32 i) const {
        SmallStorage<C>& s = block.s;
        const i32 at = warp + i * kDequantWarps;
        const float factor = sm90::store_query_row<typename C::Tile, typename C::Element, typename C::Latent>(
            s.q[q_stage][0], C::kQSwTileBytes, from, at, lane);
        if (lane == 0) s.q_factors[q_stage][at] = factor;
    }

    MLA_DEVICE void next_query() {
        q_ring.advance(q_stage);
        q_stage = (q_stage + 1) % C::kStagesQ;
    }

    // Asks for pieces [begin, end) of a row.
    template <i32 kBegin, i32 kEnd>
    MLA_DEVICE void fetch(FetchedTile<C>& tile, const TokenBytes& token) const {
#pragma unroll
        for (i32 piece = kBegin; piece < kEnd; ++piece) {
            if constexpr (C::kStaged) {
                const bool present = token.data != nullptr;
                const u8* nothing = reinterpret_cast<const u8*>(block.p.kv);
                const u8* from = present ? piece_address<TokenRecord>(token.data, piece, lane) : nothing;
                cp_async_16(smem_addr(raw(piece)), from, present);
            } else {
                tile.piece[piece] = load_piece<TokenRecord>(token, piece, lane);
            }
        }
        if (C::kStaged) cp_async_commit_group();
    }

    MLA_DEVICE uint4 fetched(const FetchedTile<C>& tile, i32 piece) const {
        if constexpr (C::kStaged) return *reinterpret_cast<const uint4*>(raw(piece));
        return tile.piece[C::kStaged ? 0 : piece];
    }

    MLA_DEVICE u8* raw(i32 piece) const { return block.s.rows.bytes[warp][piece] + lane * 16; }

    template <i32 kGroup, class Scales>
    MLA_DEVICE void convert_group(FetchedTile<C>& tile, const Scales& scales) const {
        constexpr i32 kBegin = C::first_piece(kGroup), kEnd = C::first_piece(kGroup + 1);
        uint4 held[kEnd - kBegin];
        if (C::kScouted) {  // all are read before any is stored: the compiler keeps that order
#pragma unroll
            for (i32 piece = kBegin; piece < kEnd; ++piece) held[piece - kBegin] = fetched(tile, piece);
        }
#pragma unroll
        for (i32 piece = kBegin; piece < kEnd; ++piece) {
            u8* to = block.s.kv[stage] + C::sw_tile_of(piece) * kSw128Bytes;
            const uint4 bytes = C::kScouted ? held[piece - kBegin] : fetched(tile, piece);
            if (piece < C::kLatentSwTiles) {
                store_latent<typename C::Latent, C::kUnshifted>(to, bytes, scales.of_piece(piece, lane), row, lane);
            } else {
                store_rope_piece<TokenRecord, typename C::Rope>(to, bytes, piece - C::kLatentSwTiles, row, lane);
            }
        }
        if (!C::kFencedByReaders) fence_proxy_async();
        release(block.s.kv_full[stage][kGroup], lane);
    }

    template <i32 kGroup>
    MLA_DEVICE void store_group(FetchedTile<C>& tile, const RowScales<TokenRecord, typename C::Latent>& scales,
                                const TokenBytes& next) const {
        mbarrier_wait(block.s.kv_empty[stage][kGroup], ring.empty_parity(stage));
        if (kGroup == 0) store_presence(tile.present);
        if (C::kStaged) cp_async_wait_group<C::kGroups - 1>();
        convert_group<kGroup>(tile, scales);
        fetch<C::first_piece(kGroup), C::first_piece(kGroup + 1)>(tile, next);
    }

    // Stores a tile, and refills its registers from the next one. The loads come after the release, which keeps the
    // compiler from moving them up: they would need other registers, and be waited for at the tile's end.
    MLA_DEVICE void store_tile(FetchedTile<C>& tile, const TokenBytes& next) {
        const RowScales<TokenRecord, typename C::Latent> scales(tile.scales);
        tile.scales = LaneScales<TokenRecord>::load(next, lane);
        store_group<0>(tile, scales, next);
        store_group<1>(tile, scales, next);
        store_group<2>(tile, scales, next);
        static_assert(C::kGroups == 3, "all of them");
        tile.present = next.data != nullptr;
        ring.advance(stage);
        stage ^= 1;
    }

    // Which of the warp's rows are there, by one byte of the tile's bits.
    MLA_DEVICE void store_presence(bool present) const {
        const bool of_row = __shfl_sync(kFullWarp, present, lane % kRowsOfWarp * kPieceLanes);
        const u32 rows = __ballot_sync(kFullWarp, of_row);
        if (lane == 0) reinterpret_cast<u8*>(&block.s.present[stage])[warp] = (u8)rows;
    }
};

// While a tile is stored, the next one is loaded, and the places of the tokens of the one after it.
template <class C>
MLA_DEVICE void run_dequant_role(SmallBlock<C>& block, i32 warp, i32 lane) {
    using TokenRecord = typename C::TokenRecord;
    using Tokens = typename C::Tokens;
    const DecodeParams& p = block.p;
    Dequantiser<C> dequantiser{block, warp, lane, warp * kRowsOfWarp + lane / kPieceLanes, 0, 0};
    TileWalk<typename C::Tokens::Work> walk(p, block.split);
    ListedTile<C> current = dequantiser.list_next(walk);
    if (!current.exists) return;
    ListedTile<C> next = dequantiser.list_next(walk);
    const TokenBytes first = dequantiser.find(current);
    FetchedTile<C> tile;
    tile.present = first.data != nullptr;
    tile.scales = LaneScales<TokenRecord>::load(first, lane);
    dequantiser.template fetch<0, C::first_piece(1)>(tile, first);
    dequantiser.template fetch<C::first_piece(1), C::first_piece(2)>(tile, first);
    dequantiser.template fetch<C::first_piece(2), C::first_piece(3)>(tile, first);
#pragma unroll 1
    while (true) {
        const ListedTile<C> after = dequantiser.list_next(walk);
        if (current.query != kNoQuery) dequantiser.store_query(current.query);
        dequantiser.store_tile(tile, dequantiser.find(next));
        if (!next.exists) break;
        current = next;
        next = after;
    }
}

// ---- Scouts ----------------------------------------------------------------------------------------------------
// A lane finds one row of each tile.
template <class C>
struct Scout {
    using TokenRecord = typename C::TokenRecord;
    using Tokens = typename C::Tokens;
    SmallBlock<C>& block;
    i32 thread;

    // Reads on, and brings the rows of a query that comes up into L2.
    MLA_DEVICE ListedTile<C> list_next(TileWalk<typename Tokens::Work>& walk) const {
        ListedTile<C> listed{walk.next(block.p), kNoTile, Tokens::nowhere(), 0, 0};
        if (!listed.exists) return listed;
        listed.token = walk.tile * kTileTokens + thread;
        listed.first_tokens = walk.first_tokens;
        listed.place = Tokens::place(block.p, walk, listed.token);
        listed.query = walk.first ? walk.request : kNoQuery;
        if (walk.first) prefetch_query(walk.request);
        return listed;
    }

    MLA_DEVICE void prefetch_query(i32 query) const {
#pragma unroll 1
        for (i32 i = thread; i < C::kBlockRows * C::kSwTilesQk; i += kTileTokens) {
            const i32 row = min(block.row0 + i / C::kSwTilesQk, block.rows - 1);
            const u16* from = Tokens::query_row(block.p, query, block.kv_head, row);
            prefetch_global_l2(from + i % C::kSwTilesQk * kSw128Columns);
        }
    }

    MLA_DEVICE void report(ScoutedTile<C>& to, const ListedTile<C>& listed, const TokenBytes& token) const {
        const bool present = token.data != nullptr;
        const u8* nothing = reinterpret_cast<const u8*>(block.p.kv);
        to.rows[thread] = present ? token.data : nothing;
        if (kScalesApart<TokenRecord>) to.scales[thread] = present ? token.scales : nothing;
        const u32 rows = __ballot_sync(kFullWarp, present);
        if (thread % kWarpThreads == 0) reinterpret_cast<u32*>(&to.present)[thread / kWarpThreads] = rows;
        if (thread == 0) to.query = listed.query;
    }
};

template <class C>
MLA_DEVICE void run_scout_role(SmallBlock<C>& block, i32 thread) {
    using TokenRecord = typename C::TokenRecord;
    const DecodeParams& p = block.p;
    const Scout<C> scout{block, thread};
    TileWalk<typename C::Tokens::Work> walk(p, block.split);
    RingPosition<kScoutStages> at;
    auto& s = block.s.rows;
    ListedTile<C> current = scout.list_next(walk);
#pragma unroll 1
    while (true) {
        const ListedTile<C> next = scout.list_next(walk);
        at.wait_empty(s.empty);
        const TokenBytes token = C::Tokens::template bytes<TokenRecord>(p, current, current.token, current.place);
        scout.report(s.tiles[at.stage], current, token);
        release(s.full[at.stage], thread);
        at.advance();
        if (!current.exists) break;
        current = next;
    }
}

// ---- Dequant role after scouts ---------------------------------------------------------------------------------
// A lane's row of a tile.
struct ScoutedRow {
    const u8 *data, *scales;
    u32 present;  // of the warp's rows, as bits
    i32 query;
};

template <class C>
struct ScoutedDequantiser : Dequantiser<C> {
    using Base = Dequantiser<C>;
    using TokenRecord = typename C::TokenRecord;
    using OfRow = typename LaneScales<TokenRecord>::OfRow;
    using Base::block, Base::lane, Base::row, Base::warp, Base::stage, Base::ring;
    RingPosition<kScoutStages> at;

    MLA_DEVICE ScoutedRow read() {
        auto& s = block.s.rows;
        at.wait_full(s.full);
        const ScoutedTile<C>& tile = s.tiles[at.stage];
        ScoutedRow found;
        found.data = tile.rows[row];
        found.scales = kScalesApart<TokenRecord> ? tile.scales[kScalesApart<TokenRecord> ? row : 0]
                                                 : TokenRecord::scales(nullptr, const_cast<u8*>(found.data), 0, 0);
        found.present = reinterpret_cast<const u8*>(&tile.present)[warp];
        found.query = tile.query;
        release(s.empty[at.stage], lane);
        at.advance();
        return found;
    }

    // Asks for a group of a row; its scales come with the first one.
    template <i32 kGroup>
    MLA_DEVICE void fetch(const ScoutedRow& from) const {
        const bool present = from.present >> lane / kPieceLanes & 1;
        if (kGroup == 0) {
            constexpr i32 kBytes = 4, kLanes = sizeof(OfRow) / kBytes;
            const i32 part = lane % kPieceLanes;
            u8* to = reinterpret_cast<u8*>(&block.s.rows.row_scales[row]) + part * kBytes;
            if (part < kLanes) cp_async<kBytes>(smem_addr(to), from.scales + part * kBytes, present);
        }
#pragma unroll
        for (i32 piece = C::first_piece(kGroup); piece < C::first_piece(kGroup + 1); ++piece) {
            cp_async_16(smem_addr(Base::raw(piece)), piece_address<TokenRecord>(from.data, piece, lane), present);
        }
        cp_async_commit_group();
    }

    template <i32 kGroup>
    MLA_DEVICE void store_group(const WholeRowScales<TokenRecord, typename C::Latent>& scales,
                                const ScoutedRow& next) const {
        if (kGroup > 0) {
            mbarrier_wait(block.s.kv_empty[stage][kGroup], ring.empty_parity(stage));
            cp_async_wait_group<C::kGroups - 1>();
        }
        FetchedTile<C> staged;
        Base::template convert_group<kGroup>(staged, scales);
        fetch<kGroup>(next);
    }

    MLA_DEVICE void store_tile(const ScoutedRow& current, const ScoutedRow& next) {
        cp_async_wait_group<C::kGroups - 1>();
        __syncwarp();  // the four lanes of a row have copied its scales
        const WholeRowScales<TokenRecord, typename C::Latent> scales{block.s.rows.row_scales[row]};
        mbarrier_wait(block.s.kv_empty[stage][0], ring.empty_parity(stage));
        if (lane == 0) reinterpret_cast<u8*>(&block.s.present[stage])[warp] = (u8)current.present;
        store_group<0>(scales, next);
        store_group<1>(scales, next);
        store_group<2>(scales, next);
        static_assert(C::kGroups == 3, "all of them");
        ring.advance(stage);
        stage ^= 1;
    }
};

template <class C>
MLA_DEVICE void run_scouted_dequant_role(SmallBlock<C>& block, i32 warp, i32 lane) {
    ScoutedDequantiser<C> dequantiser{{block, warp, lane, warp * kRowsOfWarp + lane / kPieceLanes, 0, 0}};
    // The first query is loaded before any row is: it would arrive after all of them.
    using Queries = ScoutedDequantiser<C>;
    const DecodeParams& p = block.p;
    const i32 likely = min(C::Tokens::Work::begin(p, block.split).request, p.b - 1);
    QueryRow<typename C::Tile> query[Queries::kQueryRows];
#pragma unroll
    for (i32 i = 0; i < Queries::kQueryRows; ++i) query[i].load(dequantiser.query_row(likely, i), lane);
    ScoutedRow current = dequantiser.read();
    if (current.query == kNoTile) return;
    dequantiser.template fetch<0>(current);
    dequantiser.template fetch<1>(current);
    dequantiser.template fetch<2>(current);
    if (current.query == likely) {
#pragma unroll
        for (i32 i = 0; i < Queries::kQueryRows; ++i) dequantiser.store_query_row(query[i], i);
        dequantiser.next_query();
        current.query = kNoQuery;
    }
#pragma unroll 1
    while (true) {
        if (current.query != kNoQuery) dequantiser.store_query(current.query);
        const ScoutedRow next = dequantiser.read();
        dequantiser.store_tile(current, next);
        if (next.query == kNoTile) break;
        current = next;
    }
}

// ---- Math role -------------------------------------------------------------------------------------------------
template <class C>
struct SmallMath : SwappedMath<C::kBlockRows, kSwTilesV> {
    i32 group, stage, q_stage;
    Ring<kStagesKV> ring;
};

// S^T of the tile in the current stage, each group as soon as it is there.
template <class C>
MLA_DEVICE void score(SmallStorage<C>& s, SmallMath<C>& math, i32 thread) {
    const SmemDesc k = uniform(k_major_desc(smem_addr(s.kv[math.stage])));
    const SmemDesc q = uniform(k_major_desc(smem_addr(s.q[math.q_stage])));
    const u32 parity = math.ring.full_parity(math.stage);
    pin(math.scores);
#pragma unroll
    for (i32 i = 0; i < C::kSwTilesQk; ++i) {
        if (i % C::kGroupSwTiles == 0) {
            mbarrier_wait(s.kv_full[math.stage][C::group_of(i)], parity);
            if (C::kFencedByReaders) fence_proxy_async();
            wgmma_fence();
        }
        const SmemDesc a = advance(k, i * kSw128Bytes), b = advance(q, i * C::kQSwTileBytes);
        if (i == C::kRopeSwTile) {
            add_scores(typename C::Rope{}, math.scores, a, b, true);
        } else {
            add_scores(typename C::Latent{}, math.scores, a, b, i > 0);
        }
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(math.scores);
    if constexpr (!kSameFormat<typename C::Element, typename C::Latent>) {
        HeadValues<C::kBlockRows> factors;
#pragma unroll
        for (i32 k = 0; k < kHeadsOfThread<C::kBlockRows>; ++k) {
            factors.value[k] = s.q_factors[math.q_stage][kth_head(k, thread)];
        }
        factors.multiply(math.scores);
    }
}

// O^T += V^T P^T; each group of the stage is released as soon as it has been multiplied.
template <class C>
MLA_DEVICE void add_values(SmallStorage<C>& s, SmallMath<C>& math, bool keeps, i32 thread) {
    const SmemDesc v = uniform(mn_major_desc(smem_addr(s.kv[math.stage])));
    const SmemDesc p = uniform(k_major_desc(smem_addr(s.p[math.group])));
#pragma unroll
    for (auto& columns : math.out) pin(columns);
    wgmma_fence();
#pragma unroll
    for (i32 sw_tile = 0; sw_tile < kSwTilesV; ++sw_tile) {
#pragma unroll
        for (i32 step = 0; step < kSw128MmaSteps; ++step) {
            multiply_by_heads<true>(typename C::Latent{}, math.out[sw_tile],
                                    advance(v, sw_tile * kSw128Bytes + step * kMnMajorStepBytes),
                                    advance(p, step * kKMajorStepBytes), true);
        }
        if (sw_tile + 1 == kSwTilesV || C::group_of(sw_tile + 1) != C::group_of(sw_tile)) wgmma_commit_group();
    }
    static_assert(C::kGroups == 3, "as many groups are committed");
    wgmma_wait_group<2>();
    if (!keeps) release(s.kv_empty[math.stage][0], thread);
    wgmma_wait_group<1>();
    if (!keeps) release(s.kv_empty[math.stage][1], thread);
    wgmma_wait_group<0>();
    if (!keeps) release(s.kv_empty[math.stage][2], thread);
#pragma unroll
    for (auto& columns : math.out) pin(columns);
}

// Most tiles hide nothing.
template <class C>
MLA_DEVICE void mask_tile(const SmallBlock<C>& block, SmallMath<C>& math, const WorkItem& item, i32 tile, i32 thread) {
    const u64 present = block.s.present[math.stage];  // not of what lies past the end, either
    if constexpr (!C::Tokens::kMasked) {
        mask_absent(math.scores, present, thread);
    } else {
        if ((tile + 1) * kTileTokens <= item.seen_by_all && present == ~0ull) return;
        i32 row0 = block.row0;
        opaque(row0);  // otherwise the divisions below are hoisted, and their results occupy registers in the loop
        if constexpr (C::kTree) {
#pragma unroll
            for (i32 k = 0; k < kHeadsOfThread<C::kBlockRows>; ++k) {
                const SeenTokens seen = seen_of_tree(block.p, item, row0 + kth_head(k, thread));
                mask_head(math.scores, k, seen.of_tile(tile * kTileTokens) & present, thread);
            }
            return;
        }
        KeyMask<C::kBlockRows> mask;
        mask.present = present;
#pragma unroll
        for (i32 k = 0; k < kHeadsOfThread<C::kBlockRows>; ++k) {
            mask.visible[k] = visible_tokens(block.p, item, row0 + kth_head(k, thread)) - tile * kTileTokens;
        }
        mask_keys(math.scores, mask, thread);
    }
}

// Makes V finite where not every row of the block sees the token; all scores of the tile must be done. The proxy fence
// after P covers these writes, too. A row that does see NaN in a latent has a score of NaN, and so is NaN as a whole:
// nothing has to be given back.
template <class C>
MLA_DEVICE void sanitize_v(const SmallBlock<C>& block, const SmallMath<C>& math, const WorkItem& item, i32 tile,
                           i32 thread) {
    if constexpr (C::Tokens::kMasked) {
        const i32 first = tile * kTileTokens;
        if (item.seen_by_all >= min(first + kTileTokens, item.tokens)) return;  // what is not there is zeros
        i32 found;
        sanitize_rows<typename C::Latent, kSwTilesV>(block.s.kv[math.stage], max(item.seen_by_all - first, 0),
                                                     item.tokens - first, found, item.request, thread);
    }
}

template <class C>
MLA_DEVICE void process_tile(SmallBlock<C>& block, SmallMath<C>& math, const WorkItem& item, i32 tile, i32 thread) {
    SmallStorage<C>& s = block.s;
    const float scale_log2 = block.p.scale_log2;
    score(s, math, thread);
    const bool last = tile + C::kMathGroups >= item.tile_end;
    if (last) release(s.q_empty[math.q_stage], thread);
    mask_tile(block, math, item, tile, thread);
    update_maxima(math, s.warp_values[math.group], scale_log2, MathOnly + math.group, thread);
    sanitize_v(block, math, item, tile, thread);
    store_p(typename C::Latent{}, math, smem_addr(s.p[math.group]), scale_log2, thread);
    bar_sync(MathOnly + math.group, kWarpgroupThreads);
    add_values(s, math, math.group > 0 && last, thread);
    math.ring.advance(math.stage);
    if (C::kMathGroups == 1) math.stage ^= 1;
}

// Where the second math warpgroup leaves its part of a work item: in the memory of stage 1, whose last tile it has
// therefore not released. A thread's maxima, sums and largest scores, then its columns; the thread of the first
// warpgroup with the same number has the same heads and columns.
template <class C>
struct MathPart {
    static constexpr i32 kHeads = kHeadsOfThread<C::kBlockRows>;
    float* at;

    MLA_DEVICE MathPart(SmallStorage<C>& s, i32 thread) : at(reinterpret_cast<float*>(s.kv[1]) + thread) {}
    MLA_DEVICE float& max(i32 head) const { return at[head * kWarpgroupThreads]; }
    MLA_DEVICE float& sum(i32 head) const { return at[(kHeads + head) * kWarpgroupThreads]; }
    MLA_DEVICE float& row_max(i32 head) const { return at[(2 * kHeads + head) * kWarpgroupThreads]; }
    MLA_DEVICE float& out(i32 sw_tile, i32 i) const {
        return at[(3 * kHeads + sw_tile * (C::kBlockRows / 2) + i) * kWarpgroupThreads];
    }
};
template <class C>
constexpr bool kPartFits =
    4 * kWarpgroupThreads * (3 * kHeadsOfThread<C::kBlockRows> + kSwTilesV * C::kBlockRows / 2) <= C::kTileBytes;

template <class C>
MLA_DEVICE void leave_part(SmallStorage<C>& s, const SmallMath<C>& math, i32 thread) {
    static_assert(kPartFits<C>, "a stage has room for a part");
    const MathPart<C> part(s, thread);
    bar_sync(MathOnly + math.group, kWarpgroupThreads);  // all have multiplied the tile
#pragma unroll
    for (i32 k = 0; k < part.kHeads; ++k) {
        part.max(k) = math.heads.max.value[k];
        part.sum(k) = math.heads.sum.value[k];
        if (C::Tokens::kWithRowMax) part.row_max(k) = math.heads.row_max.value[k];
    }
#pragma unroll
    for (i32 t = 0; t < kSwTilesV; ++t) {
#pragma unroll
        for (i32 i = 0; i < C::kBlockRows / 2; ++i) part.out(t, i) = math.out[t][i];
    }
}

// Which warpgroup has which tiles depends on where the item begins, so the sum must not depend on it: no operation is
// fused.
template <class C>
MLA_DEVICE void add_part(SmallStorage<C>& s, SmallMath<C>& math, i32 thread) {
    const MathPart<C> part(s, thread);
    HeadValues<C::kBlockRows> mine, theirs;
#pragma unroll
    for (i32 k = 0; k < part.kHeads; ++k) {
        const float max = fmaxf(math.heads.max.value[k], part.max(k));
        mine.value[k] = ex2_approx(math.heads.max.value[k] - max);
        theirs.value[k] = ex2_approx(part.max(k) - max);
        math.heads.max.value[k] = max;
        math.heads.sum.value[k] =
            __fadd_rn(__fmul_rn(math.heads.sum.value[k], mine.value[k]), __fmul_rn(part.sum(k), theirs.value[k]));
        if (C::Tokens::kWithRowMax) {
            math.heads.row_max.value[k] = fmaxf(math.heads.row_max.value[k], part.row_max(k));
        }
    }
#pragma unroll
    for (i32 t = 0; t < kSwTilesV; ++t) {
#pragma unroll
        for (i32 i = 0; i < C::kBlockRows / 2; ++i) {
            math.out[t][i] = __fadd_rn(__fmul_rn(math.out[t][i], mine.of(i)), __fmul_rn(part.out(t, i), theirs.of(i)));
        }
    }
}

// By both math warpgroups: the first one has the whole item afterwards. `has_part`: the second one had a tile.
template <class C>
MLA_DEVICE void merge_parts(SmallStorage<C>& s, SmallMath<C>& math, bool has_part, i32 thread) {
    if (math.group > 0 && has_part) leave_part(s, math, thread);
    bar_sync(MathBoth, 2 * kWarpgroupThreads);
    if (math.group == 0 && has_part) add_part(s, math, thread);
    bar_sync(MathBoth, 2 * kWarpgroupThreads);
    if (math.group == 0 || !has_part) return;
    for (MBarrier& empty : s.kv_empty[1]) release(empty, thread);
}

template <class C>
MLA_DEVICE void run_math_role(SmallBlock<C>& block, i32 group, i32 thread) {
    using Element = typename C::Element;
    const DecodeParams& p = block.p;
    SmallStorage<C>& s = block.s;
    const BlockHeads heads{block.kv_head, block.row0, block.rows};
    SmallMath<C> math;
    math.group = math.stage = group;
    math.q_stage = 0;
    i32 stage = 0;
    WorkItem item;
    using Work = WorkIteratorOf<typename C::Tokens::Work>;
    for (Work walk(p, block.split, C::Tokens::kMasked ? block.hidden : 0); walk.next(p, item);) {
        math.reset();
        const i32 tiles = item.tile_end - item.tile_begin;
        if (tiles > 0) {
            const i32 skipped = C::kMathGroups > 1 ? group ^ stage : 0;  // tiles of a stage belong to one warpgroup
#pragma unroll 1
            for (i32 tile = item.tile_begin + skipped; tile < item.tile_end; tile += C::kMathGroups) {
                process_tile(block, math, item, tile, thread);
            }
            if constexpr (C::kMathGroups > 1) {
                if (skipped >= tiles) release(s.q_empty[math.q_stage], thread);
                merge_parts(s, math, (tiles + stage) / 2 > 0, thread);
                stage = (stage + tiles) & 1;
            }
            math.q_stage = (math.q_stage + 1) % C::kStagesQ;
        }
        if (group > 0) continue;
        if constexpr (kHasValueScale<typename C::TokenRecord>) {
#pragma unroll
            for (auto& columns : math.out) {
#pragma unroll
                for (float& x : columns) x *= p.value_scale;
            }
        }
        store_result<C::Tokens::kWithRowMax>(Element{}, p, item, heads, math, s.warp_values[0], s.stats, 0, true,
                                             MathOnly, thread);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
// All of it, after the storage has been laid out.
template <class C>
MLA_DEVICE void run_small_records(const DecodeParams& p, SmallStorage<C>& s) {
    SmallBlock<C> block(p, s);
    if (threadIdx.x == 0) init_storage(s);
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    constexpr i32 kMathWarps = C::kMathGroups * kWarpgroupWarps;
    if (warp < kMathWarps) {
        setmaxnreg_inc<C::kRegsMath>();
        const i32 group = C::kMathGroups > 1 ? warp / kWarpgroupWarps : 0;  // one alone: named barriers are constants
        run_math_role(block, group, C::kMathGroups > 1 ? threadIdx.x % kWarpgroupThreads : threadIdx.x);
    } else if (!C::kScouted || warp < kMathWarps + kDequantWarps) {
        setmaxnreg_dec<C::kRegsDequant>();
        const i32 lane = threadIdx.x % kWarpThreads;
        if constexpr (C::kScouted) {
            run_scouted_dequant_role(block, warp - kMathWarps, lane);
        } else {
            run_dequant_role(block, warp - kMathWarps, lane);
        }
    } else if constexpr (C::kScouted) {
        setmaxnreg_dec<C::kRegsScout>();
        const i32 thread = threadIdx.x % kWarpgroupThreads;
        if (thread < kTileTokens) run_scout_role(block, thread);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::attention::sm90
