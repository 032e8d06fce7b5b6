// The loading roles of a dense decode block on Hopper: query rows by cp.async, KV tiles by TMA.
#pragma once
#include "attention/decode_block_sm90.cuh"
#include "ptx/copy.cuh"

// role    warps    does
// load    8        KV tiles, page by page, into the two stages
// query   9..11    the query rows of each fragment
constexpr i32 kLoadArrivals = 1;
constexpr i32 kQueryThreads = 3 * kWarpThreads;

// ---- Query role ------------------------------------------------------------------------------------------------
// Row `row` of the block; past the KV head's rows, its last one (which is then not used).
MLA_DEVICE const u16* query_row(const Block& block, i32 request, i32 row) {
    const DenseDecodeParams& p = block.p;
    const i32 group = p.h_q / p.h_kv, r = min(block.row0 + row, block.rows - 1);
    return p.q + request * p.q_stride_b_elems + (r / group) * p.q_stride_s_elems +
           (i64)(block.kv_head * group + r % group) * p.q_stride_h_elems;
}

// Each warp loads every third row. Its lanes work out the rows' addresses side by side and hand them round, since an
// address takes two divisions.
constexpr i32 kQueryWarps = kQueryThreads / kWarpThreads;
static_assert(ceil_div(kBlockM, kQueryWarps) <= kWarpThreads, "a lane knows one row of its warp");

MLA_DEVICE void load_query_rows(const Block& block, const u16* my_row, i32 first_row, i32 lane) {
    const SmemAddr q = smem_addr(block.s.q);
    for (i32 i = 0, row = first_row; row < kBlockM; ++i, row += kQueryWarps) {
        const u16* from = reinterpret_cast<const u16*>(__shfl_sync(kFullWarp, reinterpret_cast<u64>(my_row), i));
        const bool present = block.row0 + row < block.rows;
        for (i32 chunk = lane; chunk < kPanelsQk * kPanelChunks; chunk += kWarpThreads) {
            const u32 panel = (u32)(chunk / kPanelChunks) * kPanelBytes;
            cp_async_16(q + (panel + panel_offset(row, chunk % kPanelChunks)), from + chunk * 8, present);
        }
    }
}

MLA_DEVICE void run_query_role(Block& block, i32 thread) {
    const DenseDecodeParams& p = block.p;
    const i32 lane = thread % kWarpThreads, first_row = thread / kWarpThreads;
    bool others_at_work = false;
    Ring<1> ring;
    Fragment fragment;
    for (FragmentWalk walk(p, block.part); walk.next(p, fragment);) {
        if (fragment.tile_begin >= fragment.tile_end) continue;
        const u16* my_row = query_row(block, fragment.request, first_row + lane * kQueryWarps);
        if (others_at_work) {  // on the fragment before: meanwhile the rows come into L2
            for (i32 panel = 0; panel < kPanelsQk; ++panel) prefetch_global_l2(my_row + panel * kPanelColumns);
        }
        mbarrier_wait(block.s.q_empty, ring.empty_parity(0));
        load_query_rows(block, my_row, first_row, lane);
        cp_async_wait_all();
        fence_proxy_async();
        mbarrier_arrive(block.s.q_full);
        ring.advance(0);
        others_at_work = true;
    }
}

// ---- Load role -------------------------------------------------------------------------------------------------
// A tile of 64 tokens is fetched in boxes of gcd(page_size, 64) tokens, each within one page. The warp looks up 64
// boxes at a time, two a lane, and the lane that knows a box fetches it. The pages of the next 64 boxes are read from
// the block table while the present ones are fetched, so that their latency is hidden.
//
// Past the request's end nothing is looked up, and a page outside the pool is not read: such a box lies outside the
// tensor, where TMA writes zeros.
constexpr i32 kWindowBoxes = 2 * kWarpThreads;
constexpr i32 kAbsentPage = -1;

struct BoxWindow {
    i32 page[2];    // of boxes lane and lane + 32; as the block table has them
    i32 offset[2];  // of the box's first token within the page
};

// `first_token` of the window; boxes are `rows` tokens each.
MLA_DEVICE BoxWindow look_up(const DenseDecodeParams& p, const Fragment& fragment, i32 first_token, i32 rows,
                             i32 lane) {
    BoxWindow window;
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
        const i32 token = first_token + (lane + i * kWarpThreads) * rows;
        window.page[i] = kAbsentPage;
        window.offset[i] = 0;
        if (token < fragment.tokens) {
            const i32 slot = token / p.page_size;
            window.page[i] =
                p.block_table[fragment.request * p.table_stride_b_elems + slot * p.table_stride_page_elems];
            window.offset[i] = token - slot * p.page_size;
        }
    }
    return window;
}

// Whatever is not in the pool gets the one page number that is certainly outside the tensor.
MLA_DEVICE void drop_absent_pages(const DenseDecodeParams& p, BoxWindow& window) {
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
        if ((u32)window.page[i] >= (u32)p.num_pages) window.page[i] = kAbsentPage;
    }
}

// The boxes of one tile within the window.
struct TileBoxes {
    i32 first, count;

    MLA_DEVICE i32 place(i32 i, i32 lane) const { return lane + i * kWarpThreads - first; }
    MLA_DEVICE bool contains(i32 place) const { return (u32)place < (u32)count; }
};

// Bit t says whether token t of the tile can be read. Tokens past the end do not matter: their scores are masked.
MLA_DEVICE u64 present_tokens(const BoxWindow& window, const TileBoxes& boxes, i32 rows, i32 lane) {
    u64 absent = __ballot_sync(kFullWarp, window.page[1] == kAbsentPage);
    absent = absent << 32 | __ballot_sync(kFullWarp, window.page[0] == kAbsentPage);
    absent >>= boxes.first;
    if (boxes.count < kWindowBoxes) absent &= (1ull << boxes.count) - 1;
    if (absent == 0) return ~0ull;
    u64 present = 0;
    for (i32 token = 0; token < kTileTokens; ++token) present |= (u64)(((absent >> (token / rows)) & 1) == 0) << token;
    return present;
}

// Fetches panels [first, last) of the tile's boxes, in the order of arrival.
MLA_DEVICE void load_panels(Block& block, const TensorMap& kv_map, const BoxWindow& window, const TileBoxes& boxes,
                            i32 stage, i32 rows, i32 lane, i32 first, i32 last, MBarrier& full) {
    const SmemAddr tile = smem_addr(block.s.kv[stage]);
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
        const i32 place = boxes.place(i, lane);
        if (!boxes.contains(place)) continue;
        for (i32 k = first; k < last; ++k) {
            const i32 panel = panel_in_order(k);
            cp_async_bulk_tensor_4d(tile + (panel * kPanelBytes + place * rows * kPanelRowBytes), kv_map, full,
                                    panel * kPanelColumns, window.offset[i], block.kv_head, window.page[i],
                                    kEvictFirst);
        }
    }
}

MLA_DEVICE void load_tile(Block& block, const TensorMap& kv_map, const BoxWindow& window, const TileBoxes& boxes,
                          i32 stage, i32 rows, i32 lane, u32 empty_parity) {
    Storage& s = block.s;
    const u64 present = present_tokens(window, boxes, rows, lane);
    mbarrier_wait(s.kv_empty[stage].left, empty_parity);
    if (lane == 0) {
        s.present[stage] = present;
        mbarrier_arrive_expect_tx(s.kv_full[stage].left, kLeftBytes);
    }
    __syncwarp();
    load_panels(block, kv_map, window, boxes, stage, rows, lane, 0, kPanelsLeft, s.kv_full[stage].left);

    mbarrier_wait(s.kv_empty[stage].right, empty_parity);
    if (lane == 0) mbarrier_arrive_expect_tx(s.kv_full[stage].right, kRightBytes);
    __syncwarp();
    load_panels(block, kv_map, window, boxes, stage, rows, lane, kPanelsLeft, kPanelsQk, s.kv_full[stage].right);
}

MLA_DEVICE void run_load_role(Block& block, const TensorMap& kv_map, i32 lane) {
    const DenseDecodeParams& p = block.p;
    i32 rows = kTileTokens;  // gcd(page_size, 64): the largest power of two up to 64 that divides page_size
    while (p.page_size % rows != 0) rows /= 2;
    const i32 boxes_per_tile = kTileTokens / rows;
    const i32 window_tiles = kWindowBoxes / boxes_per_tile;
    Ring<kStagesKV> ring;
    Fragment fragment;
    for (FragmentWalk walk(p, block.part); walk.next(p, fragment);) {
        BoxWindow next = look_up(p, fragment, fragment.tile_begin * kTileTokens, rows, lane);
        for (i32 first = fragment.tile_begin; first < fragment.tile_end; first += window_tiles) {
            BoxWindow window = next;
            drop_absent_pages(p, window);
            if (first + window_tiles < fragment.tile_end) {
                next = look_up(p, fragment, (first + window_tiles) * kTileTokens, rows, lane);
            }
            const i32 last = min(first + window_tiles, fragment.tile_end);
            for (i32 tile = first; tile < last; ++tile) {
                const i32 stage = stage_of(fragment, tile);
                const TileBoxes boxes{(tile - first) * boxes_per_tile, boxes_per_tile};
                load_tile(block, kv_map, window, boxes, stage, rows, lane, ring.empty_parity(stage));
                ring.advance(stage);
            }
        }
    }
}
