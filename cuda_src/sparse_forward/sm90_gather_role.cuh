// The gather role of a sparse forward block on Hopper: one warpgroup that brings the listed rows of kv, tile by tile,
// and the query rows of each work item.
#pragma once
#include "attention/sm90/tile.cuh"
#include "ptx/control.cuh"
#include "tile/gather.cuh"

namespace mla::sparse_forward {
using namespace attention;
using namespace attention::sm90;

// Fetches one tile into the stage, each half as soon as it is free.
template <class Tile, class Storage>
MLA_DEVICE void gather_tile(const DecodeParams& p, Storage& s, const RowNumbers& numbers, i32 stage, u32 empty_parity,
                            i32 thread) {
    const SmemAddr tile = smem_addr(s.kv[stage]);
    const RowSources rows = rows_by_number(p.kv, p.kv_stride_page_elems, p.num_pages, numbers, thread);
    mbarrier_wait(s.kv_empty[stage].left, empty_parity);
#pragma unroll
    for (i32 i = 0; i < Tile::kSwTilesLeft; ++i)
        gather_sw_tile(tile, rows, Tile::sw_tile_in_order(i), kKvPolicy, thread);
    arrive_when_gathered(s.kv_full[stage].left, thread);
    mbarrier_wait(s.kv_empty[stage].right, empty_parity);
#pragma unroll
    for (i32 i = Tile::kSwTilesLeft; i < Tile::kSwTilesQk; ++i)
        gather_sw_tile(tile, rows, Tile::sw_tile_in_order(i), kKvPolicy, thread);
    arrive_when_gathered(s.kv_full[stage].right, thread);
}

// `query` gathers a query's rows, or prefetches them into L2.
//
// Q's buffer becomes free only when the previous query is done, later than both stages: the first tiles of the next
// query come before its Q. (At the block's start everything is free.)
template <class Tile, class Storage, class QueryGather>
MLA_DEVICE void run_gather_role(const DecodeParams& p, Storage& s, i32 split, const QueryGather& query, i32 thread) {
    bool others_at_work = false;
    Ring<kStagesKV> kv_ring;
    Ring<1> q_ring;
    WorkItem item;
    for (WorkIterator walk(p, split); walk.next(p, item);) {
        if (item.tile_begin >= item.tile_end) continue;
        const i32* list = p.block_table + item.request * p.table_stride_b_elems;
        RowNumbers next = read_row_numbers(list + item.tile_begin * kTileTokens, thread);
        if (others_at_work) query.prefetch(item.request, thread);
        const i32 turn_of_q = item.tile_begin + (others_at_work ? kStagesKV : 0);
        for (i32 tile = item.tile_begin;; ++tile) {
            opaque(thread);  // derived values are not worth registers across the loop
            if (tile == min(turn_of_q, item.tile_end)) {
                mbarrier_wait(s.q_empty, q_ring.empty_parity(0));
                query.gather(item.request, thread);
                arrive_when_gathered(s.q_full, thread);
                q_ring.advance(0);
            }
            if (tile == item.tile_end) break;
            const RowNumbers numbers = next;
            if (tile + 1 < item.tile_end) next = read_row_numbers(list + (tile + 1) * kTileTokens, thread);
            const i32 stage = stage_of(item, tile);
            gather_tile<Tile>(p, s, numbers, stage, kv_ring.empty_parity(stage), thread);
            kv_ring.advance(stage);
        }
        others_at_work = true;
    }
}
}  // namespace mla::sparse_forward
