// Attention to FP8 records for few query rows: scouts, which find the rows, and the dequantising role that reads the
// scouts' results. See attention/sm90/small_records.cuh.
#pragma once
#include "attention/sm90/small_records_conversion.cuh"
#include "ptx/copy.cuh"

namespace mla::attention::sm90 {
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
        listed.tokens_in_first = walk.tokens_in_first;
        listed.place = Tokens::place(block.p, walk, listed.token);
        listed.query = walk.first ? walk.queries() : kNoQuery;
        if (walk.first) prefetch_query(walk.queries());
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
        const TokenBytes token = find_token<TokenRecord, typename C::Tokens>(p, current, current.token, current.place);
        scout.report(s.tiles[at.stage], current, token);
        release(s.full[at.stage], thread);
        at.advance();
        if (!current.exists) break;
        current = next;
    }
}

// ---- Dequant role ----------------------------------------------------------------------------------------------
// A scout's result for one lane and tile.
struct ScoutedRow {
    const u8 *data, *scales;  // of its row
    u32 present;              // of the warp's rows, as bits
    i32 query;                // as in ScoutedTile
};

// The scales of a row that has been copied to shared memory.
template <class Record, class Latent>
struct ScoutedScales : WholeRowScales<Record, Latent> {
    MLA_DEVICE ScoutedScales(const typename LaneScales<Record>::OfRow& row, const u8*, i32)
        : WholeRowScales<Record, Latent>{row} {}
};
template <class Latent>
struct ScoutedScales<v41_mixed, Latent> : RowScales<v41_mixed, Latent> {
    MLA_DEVICE ScoutedScales(const MixedRow& row, const u8* data, i32 lane)
        : RowScales<v41_mixed, Latent>(LaneScales<v41_mixed>::of_row(row, is_compact_row(data), lane)) {}
};

template <class C>
struct ScoutedDequantiser : DequantWarp<C> {
    using Base = DequantWarp<C>;
    using TokenRecord = typename C::TokenRecord;
    using OfRow = typename LaneScales<TokenRecord>::OfRow;
    using Scales = ScoutedScales<TokenRecord, typename C::Latent>;
    using Base::Base, Base::block, Base::lane, Base::row, Base::warp;
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
        if constexpr (kGroup == 0 && kMixed<TokenRecord>) {
            const bool compact = is_compact_row(from.data);
            const i32 part = lane % kPieceLanes;
            u8* const to = reinterpret_cast<u8*>(&block.s.rows.row_scales[row]);
            const u8* const scales = from.scales - compact;
            if (compact) {
                cp_async<8>(smem_addr(to + 8 * part), scales + 8 * part, present);
            } else {
                cp_async<4>(smem_addr(to + 4 * part), scales + 4 * part, present);
            }
        } else if (kGroup == 0) {
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
    MLA_DEVICE void store_group(const Scales& scales, const ScoutedRow& next) const {
        if (kGroup > 0) {
            Base::wait_for_place(kGroup);
            cp_async_wait_group<C::kGroups - 1>();
        }
        constexpr i32 kBegin = C::first_piece(kGroup), kEnd = C::first_piece(kGroup + 1);
        uint4 held[kEnd - kBegin];  // all are read before any is stored: the compiler keeps that order
#pragma unroll
        for (i32 piece = kBegin; piece < kEnd; ++piece) {
            held[piece - kBegin] = *reinterpret_cast<const uint4*>(Base::raw(piece));
        }
#pragma unroll
        for (i32 piece = kBegin; piece < kEnd; ++piece) Base::store_piece(piece, held[piece - kBegin], scales);
        Base::pass_on(kGroup);
        fetch<kGroup>(next);
    }

    MLA_DEVICE void store_tile(const ScoutedRow& current, const ScoutedRow& next) {
        cp_async_wait_group<C::kGroups - 1>();
        __syncwarp();  // the four lanes of a row have copied its scales
        const Scales scales(block.s.rows.row_scales[row], current.data, lane);
        Base::wait_for_place(0);
        Base::store_presence(current.present);
        store_group<0>(scales, next);
        store_group<1>(scales, next);
        store_group<2>(scales, next);
        static_assert(C::kGroups == 3, "all of them");
        Base::next_stage();
    }
};

template <class C>
MLA_DEVICE void run_scouted_dequant_role(SmallBlock<C>& block, i32 warp, i32 lane) {
    ScoutedDequantiser<C> dequantiser(block, warp, lane);
    constexpr i32 kQueryRows = dequantiser.kQueryRows;
    // The first query is loaded before any row is: it would arrive after all of them.
    const DecodeParams& p = block.p;
    const i32 likely = min(C::Tokens::Work::begin(p, block.split).request, p.b - 1);
    QueryRow<typename C::Tile> query[kQueryRows];
#pragma unroll
    for (i32 i = 0; i < kQueryRows; ++i) query[i].load(dequantiser.query_row(likely, i), lane);
    ScoutedRow current = dequantiser.read();
    if (current.query == kNoTile) return;
    dequantiser.template fetch<0>(current);
    dequantiser.template fetch<1>(current);
    dequantiser.template fetch<2>(current);
    if (current.query == likely) {
#pragma unroll
        for (i32 i = 0; i < kQueryRows; ++i) dequantiser.store_query_row(query[i], i);
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
}  // namespace mla::attention::sm90
