// The roles of attention/sm90/seesaw_records.cuh with optional inputs (attention/query_groups.cuh): a varying number of
// queries per request, a sliding window, queries in two arrays, results that RoPE turns back.
//
// A split holds groups of one query each instead of requests, and query rows are in two arrays. Tokens before the
// window are not read. Scouts have 24 registers: they hold the state of a group in one register, one word per lane.
#pragma once
#include "attention/sm90/seesaw_records.cuh"

namespace mla::attention::sm90 {
// ---- Tokens ----------------------------------------------------------------------------------------------------
// No division if page sizes are powers of two: a scout finds a tile's rows in less time than the tile takes.
// PERF(H200, 2026-11-27, v32, 64 heads, q_rope: 165.7 to 163.6 us)
struct ShiftedTokens : SlimGroupedTokens {
    template <class Item>
    MLA_DEVICE static Place place(const DecodeParams& p, const Item& item, i32 token) {
        if (token < item.first_token || token >= item.tokens) return nowhere();
        const i32 index = (i32)divided(token, p.page_size);
        return p.block_table[item.request * p.table_stride_b_elems + index * p.table_stride_page_elems];
    }

    template <class Record, class Item>
    MLA_DEVICE static TokenBytes bytes(const DecodeParams& p, const Item& item, i32 token, Place page) {
        const u32 in_page = (u32)token - divided(token, p.page_size) * (u32)p.page_size;
        return GroupedTokens::bytes<Record>(p, item, token, {page, (i32)in_page});
    }
};

// ---- Scouts ----------------------------------------------------------------------------------------------------
// Words that all lanes of a warp have alike, in one register: lane i has word i.
struct LaneWords {
    i32 words;

    MLA_DEVICE i32 get(i32 word) const { return __shfl_sync(kFullWarp, words, word); }
    MLA_DEVICE void set(i32 word, i32 value) {
        if (own_lane() == word) words = value;
    }
};

// A group needs more state than a scout's 24 registers hold, so the schedule is read again for each.
template <>
struct SlimTileWalk<GroupedWork> : LaneWords {
    enum Word : i32 { kHidden, kGroup, kRequest, kSeenTokens, kFirstToken, kAtTile, kTileEnd, kFreeWord };
    bool first;

    // The argument of `place` of Tokens; `tokens` excludes those hidden from the group.
    struct Item {
        i32 request, tokens, first_token;
    };

    MLA_DEVICE SlimTileWalk(const DecodeParams& p, i32 split, i32 hidden = 0) : LaneWords{0}, first(false) {
        set(kHidden, hidden);
        set(kGroup, p.schedule[split].request - 1);
    }

    MLA_DEVICE bool next(const DecodeParams& p) {
        set(kAtTile, get(kAtTile) + 1);
        first = false;
        while (in_uniform(get(kAtTile)) >= in_uniform(get(kTileEnd))) {
            if (!open(p, in_uniform(get(kGroup)) + 1)) return false;
        }
        return true;
    }

    MLA_DEVICE bool open(const DecodeParams& p, i32 group) {
        const SchedulePoint end = p.schedule[blockIdx.y + 1];
        if (group >= p.b || group > end.request || (group == end.request && end.tile == 0)) return false;
        set(kGroup, group);
        i32 tokens, hidden = in_uniform(get(kHidden)), first_tile = 0;
        if (forms_of(p).groups == nullptr) {
            const RequestLength length = request_length(p, group);
            set(kRequest, group);
            tokens = length.tokens;
            if (hidden != 0) hidden = hidden_here(p, hidden, length.behind_last);
        } else {
            const QueryGroup& of = forms_of(p).groups[group];
            set(kRequest, of.request);
            set(kFirstToken, of.first_token);
            first_tile = of.first_token / kTileTokens;
            tokens = of.tokens;
            if (p.causal) hidden = max(hidden + of.later_queries + of.queries - p.s_q, 0);
        }
        set(kSeenTokens, tokens - hidden);
        const SchedulePoint begin = p.schedule[blockIdx.y];
        set(kAtTile, first_tile + (group == begin.request ? begin.tile : 0));
        const i32 tiles = ceil_div(tokens, kTileTokens);
        set(kTileEnd, group == end.request ? min(tiles, first_tile + end.tile) : tiles);
        first = true;
        return true;
    }

    MLA_DEVICE i32 queries() const { return get(kGroup); }
    MLA_DEVICE bool ends() const { return get(kAtTile) + 1 == get(kTileEnd); }
    MLA_DEVICE i32 at() const { return get(kAtTile); }
    MLA_DEVICE Item item() const { return {get(kRequest), get(kSeenTokens), get(kFirstToken)}; }
    MLA_DEVICE void make_uniform() {}
};

// TileBefore in the lanes' words.
template <>
struct TileBefore<SlimTileWalk<GroupedWork>> {
    using Walk = SlimTileWalk<GroupedWork>;
    enum Word : i32 { kBits = Walk::kFreeWord, kQuery, kFirstQuery, kKvHead = 16, kFirstRow, kNumRows, kRound };

    MLA_DEVICE TileBefore(Walk& walk) {
        walk.set(kQuery, kNoQuery);
        walk.set(kFirstQuery, walk.queries());
    }

    MLA_DEVICE void recall(Ring<1>& ring, const Walk& walk) const { ring.phases = walk.get(kRound); }
    MLA_DEVICE void keep(const Ring<1>& ring, Walk& walk) const { walk.set(kRound, ring.phases); }
    // All lanes take part: each holds a word of the result.
    MLA_DEVICE void say(FoundTile& to, const Walk& walk, bool last) const {
        const FoundTile found{walk.get(kBits) | (last ? FoundTile::kLast : 0), walk.get(kQuery)};
        if (own_lane() == 0) to = found;
    }
    MLA_DEVICE void remember(Walk& walk, u32 present) {
        const bool with_query = walk.first ? walk.ends() : (walk.get(kBits) & FoundTile::kFirst) != 0;
        walk.set(kBits, (present & FoundTile::kRows) | (walk.first ? FoundTile::kFirst : 0));
        const i32 query = walk.queries();
        walk.set(kQuery, with_query && query != walk.get(kFirstQuery) ? query : kNoQuery);
    }
};

// The query rows of a warp are of one query.
template <class C>
struct ScoutedQuery<C, SlimTileWalk<GroupedWork>> {
    using Walk = SlimTileWalk<GroupedWork>;
    using Before = TileBefore<Walk>;

    MLA_DEVICE static void remember(Walk& walk, const RecordBlock<C>& block, i32 warp) {
        walk.set(Before::kKvHead, block.kv_head);
        walk.set(Before::kFirstRow, block.row0 + warp * kRowsOfWarp);
        walk.set(Before::kNumRows, query_rows_of_warp(block, warp));
    }
    MLA_DEVICE static void prefetch(const Walk& walk, const RecordBlock<C>& block, i32) {
        const i32 lane = own_lane();
        const i32 column = lane * kSw128Columns, query = walk.queries(), kv_head = walk.get(Before::kKvHead);
        const i32 row = walk.get(Before::kFirstRow), rows = walk.get(Before::kNumRows);
        if (rows <= 0 || lane >= C::kSwTilesQk) return;
        const u16* from = part_of_row(C::Tokens::query_row(block.p, query, kv_head, row), column) + column;
        const i64 stride = column < kHeadDimV ? block.p.q_stride_h_elems : rope_of(block.p).q_rope_stride_h_elems;
#pragma unroll 1
        for (i32 i = 0; i < rows; ++i, from += stride) prefetch_global_l2(from);
    }
};

// ---- Dequant role ----------------------------------------------------------------------------------------------
// Queries in two arrays.
template <class C>
struct QueryStart<C, GroupedWork> {
    MLA_DEVICE static void run(const Dequantiser<C>& to, i32 query) {
        const RecordBlock<C>& block = to.block;
        constexpr i32 kLatentSteps = kSwTilesV * kSw128Chunks / kWarpThreads;
        to.template start_steps<0, kLatentSteps>(first_query_row(block, query, to.warp).latent,
                                                 block.p.q_stride_h_elems);
        if constexpr (kQuerySteps<C> > kLatentSteps) {
            opaque(query);  // the address again, rather than both at once
            to.template start_steps<kLatentSteps, kQuerySteps<C>>(
                part_of_row(first_query_row(block, query, to.warp), kHeadDimV), rope_of(block.p).q_rope_stride_h_elems);
        }
    }
};
}  // namespace mla::attention::sm90
