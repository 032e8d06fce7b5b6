// Query tiles of a call with one sequence, which needs no schedule: tiles with most keys first, then tiles of queries
// outside the sequence, before its start and after its end.
#pragma once
#include "dense/tiles.cuh"

namespace mla::dense {
struct OneSequence {
    i32 first_query, queries;
    i32 first_key, keys;
    i32 tiles, tiles_before, all_tiles;

    // The caller's numbers are hostile, as for the schedule.
    template <class Params>
    MLA_DEVICE void find(const Params& p) {
        first_query = stated(p.cu_seqlens_q, 0, 0, p.s_q);
        first_key = stated(p.cu_seqlens_kv, 0, 0, p.s_kv);
        queries = max(0, stated(p.cu_seqlens_q, p.cu_seqlens_q_stride_elems, p.s_q, p.s_q) - first_query);
        keys = max(0, stated(p.cu_seqlens_kv, p.cu_seqlens_kv_stride_elems, p.s_kv, p.s_kv) - first_key);
        tiles = ceil_div(queries, kTileQueries);
        tiles_before = ceil_div(first_query, kTileQueries);
        all_tiles = tiles + tiles_before + ceil_div(p.s_q - first_query - queries, kTileQueries);
    }

    template <class Params>
    MLA_DEVICE QueryTile tile(const Params& p, i32 index) const {
        if (index < tiles) {
            const i32 first = (tiles - 1 - index) * kTileQueries, diagonal = p.causal ? keys - queries + first : keys;
            return QueryTile{first_query + first, min(kTileQueries, queries - first), first_key, keys, diagonal, 0, {}};
        }
        const i32 outside = index - tiles, after = outside - tiles_before;
        const i32 first = after < 0 ? outside * kTileQueries : first_query + queries + after * kTileQueries;
        const i32 end = after < 0 ? first_query : p.s_q;
        return QueryTile{first, min(kTileQueries, end - first), 0, 0, 0, 0, {}};
    }

   private:
    MLA_DEVICE static i32 stated(const i32* starts, i64 at, i32 otherwise, i32 total) {
        return starts == nullptr ? otherwise : max(0, min(starts[at], total));
    }
};

// The order of a block's items where there is no counter: in turn from either end, as the first have most keys.
MLA_DEVICE i32 item_of_turn(i32 turn) {
    const i32 blocks = gridDim.x, block = blockIdx.x;
    return turn * blocks + (turn % 2 == 0 ? block : blocks - 1 - block);
}
}  // namespace mla::dense
