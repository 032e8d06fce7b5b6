// Attention to FP8 records for few query rows: the dequantising role where there are no scouts. Each warp finds its
// rows itself. See attention/sm90/small_records.cuh.
#pragma once
#include "attention/sm90/small_records_conversion.cuh"
#include "ptx/copy.cuh"

namespace mla::attention::sm90 {
// A tile on its way: a lane's bytes of its row, where these do not come through shared memory.
template <class C>
struct FetchedTile {
    uint4 piece[C::kStaged ? 1 : C::kRowPieces];
    LaneScales<typename C::TokenRecord> scales;
    bool present;
};

template <class C>
struct Dequantiser : DequantWarp<C> {
    using Base = DequantWarp<C>;
    using TokenRecord = typename C::TokenRecord;
    using Scales = RowScales<TokenRecord, typename C::Latent>;
    using Base::Base, Base::block, Base::lane, Base::row, Base::warp;

    // Reads on, and brings the rows of a query that comes up into L2.
    MLA_DEVICE ListedTile<C> list_next(TileWalk<typename C::Tokens::Work>& walk) const {
        ListedTile<C> listed{walk.next(block.p), kNoQuery, C::Tokens::nowhere(), 0, 0};
        if (!listed.exists) return listed;
        listed.token = walk.tile * kTileTokens + row;
        listed.tokens_in_first = walk.tokens_in_first;
        listed.place = C::Tokens::place(block.p, walk, listed.token);
        if (!walk.first) return listed;
        listed.query = walk.queries();
#pragma unroll
        for (i32 i = 0; i < Base::kQueryRows; ++i) {
            // Without a branch: after one that lanes may take apart, the compiler would keep nothing in uniform
            // registers.
            const i32 row = min(block.row0 + warp + i * kDequantWarps, block.rows - 1);
            const i32 column = min(lane, C::kSwTilesQk - 1) * kSw128Columns;
            const u16* from = part_of_row(C::Tokens::query_row(block.p, listed.query, block.kv_head, row), column);
            if constexpr (C::Tokens::Work::kForms) from = from == nullptr ? block.p.q : from + column;
            prefetch_global_l2(C::Tokens::Work::kForms ? from : from + column);
        }
        return listed;
    }

    // The lane's token of a tile. It waits for the place, and so most likely for all loads: call it late.
    MLA_DEVICE TokenBytes find(const ListedTile<C>& listed) const {
        return find_token<TokenRecord, typename C::Tokens>(block.p, listed, listed.token, listed.place);
    }

    // Asks for a group of a row.
    template <i32 kGroup>
    MLA_DEVICE void fetch(FetchedTile<C>& tile, const TokenBytes& token) const {
#pragma unroll
        for (i32 piece = C::first_piece(kGroup); piece < C::first_piece(kGroup + 1); ++piece) {
            if constexpr (C::kStaged) {
                const bool present = token.data != nullptr;
                const u8* nothing = reinterpret_cast<const u8*>(block.p.kv);
                const u8* from = present ? piece_address<TokenRecord>(token.data, piece, lane) : nothing;
                cp_async_16(smem_addr(Base::raw(piece)), from, present);
            } else {
                tile.piece[piece] = load_piece<TokenRecord>(token, piece, lane);
            }
        }
        if (C::kStaged) cp_async_commit_group();
    }

    MLA_DEVICE uint4 fetched(const FetchedTile<C>& tile, i32 piece) const {
        if constexpr (C::kStaged) return *reinterpret_cast<const uint4*>(Base::raw(piece));
        return tile.piece[C::kStaged ? 0 : piece];
    }

    template <i32 kGroup>
    MLA_DEVICE void store_group(FetchedTile<C>& tile, const Scales& scales, const TokenBytes& next) const {
        Base::wait_for_place(kGroup);
        if (kGroup == 0) store_presence(tile.present);
        if (C::kStaged) cp_async_wait_group<C::kGroups - 1>();
#pragma unroll
        for (i32 piece = C::first_piece(kGroup); piece < C::first_piece(kGroup + 1); ++piece) {
            Base::store_piece(piece, fetched(tile, piece), scales);
        }
        Base::pass_on(kGroup);
        fetch<kGroup>(tile, next);
    }

    // Stores a tile, and refills its registers from the next one. The loads come after the release, which keeps the
    // compiler from moving them up: they would need other registers, and be waited for at the tile's end.
    MLA_DEVICE void store_tile(FetchedTile<C>& tile, const TokenBytes& next) {
        const Scales scales(tile.scales);
        tile.scales = LaneScales<TokenRecord>::load(next, lane);
        store_group<0>(tile, scales, next);
        store_group<1>(tile, scales, next);
        store_group<2>(tile, scales, next);
        static_assert(C::kGroups == 3, "all of them");
        tile.present = next.data != nullptr;
        Base::next_stage();
    }

    MLA_DEVICE void store_presence(bool present) const {
        const bool of_row = __shfl_sync(kFullWarp, present, lane % kRowsOfWarp * kPieceLanes);
        Base::store_presence(__ballot_sync(kFullWarp, of_row));
    }
};

// While a tile is stored, the next one is loaded, and the places of the tokens of the one after it.
template <class C>
MLA_DEVICE void run_dequant_role(SmallBlock<C>& block, i32 warp, i32 lane) {
    Dequantiser<C> dequantiser(block, warp, lane);
    TileWalk<typename C::Tokens::Work> walk(block.p, block.split);
    ListedTile<C> current = dequantiser.list_next(walk);
    if (!current.exists) return;
    // From lists, a split's first query is asked for before all rows. PERF(H200, 2026-11-23, 32 heads: -2 to -6 %; from
    // pages it would be -1 to -4 % with 32 rows, but with 16 +5 to +7 % at batch 128)
    constexpr i32 kRowsAhead = C::kStaged ? Dequantiser<C>::kQueryRows : 0;
    QueryRow<typename C::Tile> query[kRowsAhead > 0 ? kRowsAhead : 1];
#pragma unroll
    for (i32 i = 0; i < kRowsAhead; ++i) query[i].load(dequantiser.query_row(current.query, i), lane);
    ListedTile<C> next = dequantiser.list_next(walk);
    const TokenBytes first = dequantiser.find(current);
    FetchedTile<C> tile;
    tile.present = first.data != nullptr;
    tile.scales = LaneScales<typename C::TokenRecord>::load(first, lane);
    dequantiser.template fetch<0>(tile, first);
    dequantiser.template fetch<1>(tile, first);
    dequantiser.template fetch<2>(tile, first);
    if constexpr (kRowsAhead > 0) {
#pragma unroll
        for (i32 i = 0; i < kRowsAhead; ++i) dequantiser.store_query_row(query[i], i);
        dequantiser.next_query();
        current.query = kNoQuery;
    }
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
}  // namespace mla::attention::sm90
