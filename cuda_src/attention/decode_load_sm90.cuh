// The loading roles of a decode block on Hopper: query rows by cp.async, KV tiles by TMA.
#pragma once
#include "attention/decode_block_sm90.cuh"

// ---- Query role ------------------------------------------------------------------------------------------------
MLA_DEVICE void run_query_role(Block& block, i32 thread) {
    const DenseDecodeParams& p = block.p;
    const i32 group = p.h_q / p.h_kv, lane = thread % kWarpThreads;
    const SmemAddr q = smem_addr(block.s.q);
    Ring<1> ring;
    Fragment fragment;
    for (FragmentWalk walk(p, block.part); walk.next(p, fragment);) {
        if (fragment.tile_begin >= fragment.tile_end) continue;
        mbarrier_wait(block.s.q_empty, ring.empty_parity(0));
        for (i32 row = thread / kWarpThreads; row < kBlockM; row += kQueryThreads / kWarpThreads) {
            const i32 r = min(block.row0 + row, block.rows - 1);
            const bool present = block.row0 + row < block.rows;
            const u16* from = p.q + fragment.request * p.q_stride_b_elems + (r / group) * p.q_stride_s_elems +
                              (i64)(block.kv_head * group + r % group) * p.q_stride_h_elems;
            for (i32 chunk = lane; chunk < kPanelsQk * kPanelChunks; chunk += kWarpThreads) {
                const u32 panel = (u32)(chunk / kPanelChunks) * kPanelBytes;
                cp_async_16(q + (panel + panel_offset(row, chunk % kPanelChunks)), from + chunk * 8, present);
            }
        }
        cp_async_wait_all();
        fence_proxy_async();
        mbarrier_arrive(block.s.q_full);
        ring.advance(0);
    }
}

// ---- Load role -------------------------------------------------------------------------------------------------
// A tile of 64 tokens is fetched in boxes of `rows` = gcd(page_size, 64) tokens, each within one page; a lane looks up
// and fetches boxes lane and lane + 32. Past the sequence's end nothing is looked up, and a page outside the pool is
// not read: the box then lies outside the tensor, where TMA writes zeros.
struct TileBoxes {
    i32 page[2];    // -1: absent
    i32 offset[2];  // first token within the page
};

constexpr i32 kAbsentPage = -1;

MLA_DEVICE TileBoxes look_up_boxes(const DenseDecodeParams& p, const Fragment& fragment, i32 tile, i32 rows, i32 lane) {
    TileBoxes boxes;
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
        const i32 box = lane + i * kWarpThreads;
        const i32 token = tile * kTileTokens + box * rows;
        boxes.page[i] = kAbsentPage;
        boxes.offset[i] = 0;
        if (box * rows < kTileTokens && token < fragment.tokens) {
            const i32 slot = token / p.page_size;
            const i32 page = p.block_table[fragment.request * p.table_stride_b_elems + slot * p.table_stride_page_elems];
            boxes.page[i] = (u32)page < (u32)p.num_pages ? page : kAbsentPage;
            boxes.offset[i] = token - slot * p.page_size;
        }
    }
    return boxes;
}

// Bit t says whether token t of the tile can be read. Tokens past the end do not matter: their scores are masked.
MLA_DEVICE u64 present_tokens(const TileBoxes& boxes, i32 rows, i32 boxes_used, i32 lane) {
    const u32 absent_low = __ballot_sync(kFullWarp, lane < boxes_used && boxes.page[0] == kAbsentPage);
    const u32 absent_high = __ballot_sync(kFullWarp, lane + 32 < boxes_used && boxes.page[1] == kAbsentPage);
    const u64 absent = (u64)absent_high << 32 | absent_low;
    if (absent == 0) return ~0ull;
    u64 present = 0;
    for (i32 token = 0; token < kTileTokens; ++token) present |= (u64)(((absent >> (token / rows)) & 1) == 0) << token;
    return present;
}

MLA_DEVICE void load_panels(Block& block, const TileBoxes& boxes, i32 stage, i32 rows, i32 lane, i32 first, i32 count,
                            MBarrier& full) {
    const SmemAddr tile = smem_addr(block.s.kv[stage]);
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
        const i32 box = lane + i * kWarpThreads;
        if (box * rows >= kTileTokens) break;
        for (i32 panel = first; panel < first + count; ++panel) {
            cp_async_bulk_tensor_4d(tile + (panel * kPanelBytes + box * rows * kPanelRowBytes), block.kv_map, full,
                                    panel * kPanelColumns, boxes.offset[i], block.kv_head, boxes.page[i], kEvictFirst);
        }
    }
}

MLA_DEVICE void run_load_role(Block& block, i32 lane) {
    const DenseDecodeParams& p = block.p;
    i32 rows = kTileTokens;  // gcd(page_size, 64): the largest power of two up to 64 that divides page_size
    while (p.page_size % rows != 0) rows /= 2;
    Ring<kStagesKV> ring;
    Fragment fragment;
    for (FragmentWalk walk(p, block.part); walk.next(p, fragment);) {
        if (fragment.tile_begin >= fragment.tile_end) continue;
        TileBoxes next = look_up_boxes(p, fragment, fragment.tile_begin, rows, lane);
        for (i32 tile = fragment.tile_begin; tile < fragment.tile_end; ++tile) {
            const i32 stage = stage_of(fragment, tile);
            const TileBoxes boxes = next;
            const u64 present = present_tokens(boxes, rows, kTileTokens / rows, lane);
            // The next tile's pages are looked up before this one's stage is free: the latency is hidden.
            if (tile + 1 < fragment.tile_end) next = look_up_boxes(p, fragment, tile + 1, rows, lane);

            mbarrier_wait(block.s.kv_empty[stage].left, ring.empty_parity(stage));
            if (lane == 0) {
                block.s.present[stage] = present;
                mbarrier_arrive_expect_tx(block.s.kv_full[stage].left, kLeftBytes);
            }
            __syncwarp();
            load_panels(block, boxes, stage, rows, lane, kRopePanel, 1, block.s.kv_full[stage].left);
            load_panels(block, boxes, stage, rows, lane, 0, kPanelsHalf, block.s.kv_full[stage].left);

            mbarrier_wait(block.s.kv_empty[stage].right, ring.empty_parity(stage));
            if (lane == 0) mbarrier_arrive_expect_tx(block.s.kv_full[stage].right, kRightBytes);
            __syncwarp();
            load_panels(block, boxes, stage, rows, lane, kPanelsHalf, kPanelsHalf, block.s.kv_full[stage].right);
            ring.advance(stage);
        }
    }
}
