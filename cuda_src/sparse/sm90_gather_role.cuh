// The gather role of a sparse forward block on Hopper: one warpgroup that brings the listed rows of kv, tile by tile,
// and the query rows of each fragment.
#pragma once
#include "attention/decode_tile_sm90.cuh"
#include "attention/sparse_gather.cuh"
#include "ptx/control.cuh"

// Fetches one tile into the stage, each half as soon as its place is free.
template <class Storage>
MLA_DEVICE void gather_tile(const DenseDecodeParams& p, Storage& s, const RowNumbers& numbers, i32 stage,
                            u32 empty_parity, i32 thread) {
    const SmemAddr tile = smem_addr(s.kv[stage]);
    const RowSources rows = rows_by_number(p.kv, p.kv_stride_page_elems, p.num_pages, numbers, thread);
    mbarrier_wait(s.kv_empty[stage].left, empty_parity);
#pragma unroll
    for (i32 i = 0; i < kPanelsLeft; ++i) gather_panel(tile, rows, panel_in_order(i), kKvPolicy, thread);
    arrive_when_gathered(s.kv_full[stage].left, thread);
    mbarrier_wait(s.kv_empty[stage].right, empty_parity);
#pragma unroll
    for (i32 i = kPanelsLeft; i < kPanelsQk; ++i) gather_panel(tile, rows, panel_in_order(i), kKvPolicy, thread);
    arrive_when_gathered(s.kv_full[stage].right, thread);
}

// `query` gathers a query's rows, or prefetches them into L2.
//
// The place of Q is free only once the last query is done, later than both stages: the first tiles of the next one come
// before its Q. (At the block's start everything is free.)
template <class Storage, class QueryGather>
MLA_DEVICE void run_gather_role(const DenseDecodeParams& p, Storage& s, i32 part, const QueryGather& query,
                                i32 thread) {
    bool others_at_work = false;
    Ring<kStagesKV> kv_ring;
    Ring<1> q_ring;
    Fragment fragment;
    for (FragmentWalk walk(p, part); walk.next(p, fragment);) {
        if (fragment.tile_begin >= fragment.tile_end) continue;
        const i32* list = p.block_table + fragment.request * p.table_stride_b_elems;
        RowNumbers next = read_row_numbers(list + fragment.tile_begin * kTileTokens, thread);
        if (others_at_work) query.prefetch(fragment.request, thread);
        const i32 turn_of_q = fragment.tile_begin + (others_at_work ? kStagesKV : 0);
        for (i32 tile = fragment.tile_begin;; ++tile) {
            opaque(thread);  // what follows from it is not worth registers through the loop
            if (tile == min(turn_of_q, fragment.tile_end)) {
                mbarrier_wait(s.q_empty, q_ring.empty_parity(0));
                query.gather(fragment.request, thread);
                arrive_when_gathered(s.q_full, thread);
                q_ring.advance(0);
            }
            if (tile == fragment.tile_end) break;
            const RowNumbers numbers = next;
            if (tile + 1 < fragment.tile_end) next = read_row_numbers(list + (tile + 1) * kTileTokens, thread);
            const i32 stage = stage_of(fragment, tile);
            gather_tile(p, s, numbers, stage, kv_ring.empty_parity(stage), thread);
            kv_ring.advance(stage);
        }
        others_at_work = true;
    }
}
