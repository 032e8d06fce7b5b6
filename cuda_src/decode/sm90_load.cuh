// The loading roles of a dense decode block on Hopper: query rows by cp.async, KV tiles by TMA.
#pragma once
#include "attention/sm90/tile.cuh"
#include "attention/split_work.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"

namespace mla::decode {
using namespace attention;
using namespace attention::sm90;

// role    warps    does
// load    1        KV tiles, page by page
// query   3        the query rows of each work item
constexpr i32 kLoadArrivals = 1;
constexpr i32 kQueryThreads = 3 * kWarpThreads;

// ---- Query role ------------------------------------------------------------------------------------------------
// Destination of query rows: each stage has SW128 tiles for the block's rows, a full barrier and an empty barrier.
template <i32 kStages>
struct QueryStages {
    u8* q;
    MBarrier *full, *empty;

    // Stages take turns, one work item each.
    MLA_DEVICE static i32 next(i32 stage) { return stage + 1 == kStages ? 0 : stage + 1; }
};

// Row `row` of the block; past the KV head's rows, its last one (which is then not used).
template <class Block>
MLA_DEVICE const u16* query_row(const Block& block, i32 request, i32 row) {
    const DecodeParams& p = block.p;
    const i32 group = p.h_q / p.h_kv, r = min(block.row0 + row, block.rows - 1);
    return p.q + request * p.q_stride_b_elems + (r / group) * p.q_stride_s_elems +
           (i64)(block.kv_head * group + r % group) * p.q_stride_h_elems;
}

// Each warp loads every third row. Its lanes compute the rows' addresses in parallel and shuffle them, since an address
// takes two divisions.
constexpr i32 kQueryWarps = kQueryThreads / kWarpThreads;

template <class Tile, class Block>
MLA_DEVICE void load_query_rows(const Block& block, SmemAddr q, const u16* my_row, i32 first_row, i32 lane) {
    constexpr i32 kRows = Block::kRows;
    static_assert(ceil_div(kRows, kQueryWarps) <= kWarpThreads, "a lane knows one row of its warp");
    for (i32 i = 0, row = first_row; row < kRows; ++i, row += kQueryWarps) {
        const u16* from = reinterpret_cast<const u16*>(__shfl_sync(kFullWarp, reinterpret_cast<u64>(my_row), i));
        const bool present = block.row0 + row < block.rows;
        for (i32 chunk = lane; chunk < Tile::kSwTilesQk * kSw128Chunks; chunk += kWarpThreads) {
            const u32 sw_tile = (u32)(chunk / kSw128Chunks) * (kRows * kSw128RowBytes);
            cp_async_16(q + (sw_tile + sw128_offset(row, chunk % kSw128Chunks)), from + chunk * 8, present);
        }
    }
}

// The query rows of a work item, by the kind of work. Queries in two arrays: decode/split_rows.cuh.
template <class Work>
struct ItemRows {
    const u16* my_row;
    template <class Tile>
    static constexpr i32 kLatentLines = Tile::kSwTilesQk;  // of a row
    template <class Tile>
    static constexpr bool kRopeLine = false;  // one line more, apart

    template <class Block>
    MLA_DEVICE ItemRows(const Block& block, const WorkItem& item, i32 row)
        : my_row(query_row(block, item.request, row)) {}
    template <class Tile, class Block>
    MLA_DEVICE void load(const Block& block, const WorkItem&, SmemAddr q, i32 first_row, i32 lane) const {
        load_query_rows<Tile>(block, q, my_row, first_row, lane);
    }
    template <class Tile>
    MLA_DEVICE void prefetch() const {
        for (i32 i = 0; i < kLatentLines<Tile>; ++i) prefetch_global_l2(my_row + i * kSw128Columns);
    }
};

// `block.items()` iterates over the block's work items; `store_more(item)` stores additional data with the rows.
template <class Tile, class Block, i32 kStages, class StoreMore>
MLA_DEVICE void run_query_role(const Block& block, const QueryStages<kStages>& stages, i32 thread,
                               StoreMore store_more) {
    using Rows = ItemRows<typename Block::Work>;
    constexpr i32 kRows = Block::kRows;
    const DecodeParams& p = block.p;
    const i32 lane = thread % kWarpThreads, first_row = thread / kWarpThreads;
    bool others_at_work = false;
    i32 stage = 0;
    Ring<kStages> ring;
    typename Block::Work::HeldItem item;
    for (auto walk = block.items(); walk.next(p, item);) {
        if (item.tile_begin >= item.tile_end) continue;
        const Rows rows(block, item, first_row + lane * kQueryWarps);
        // Others may be at work on a previous work item: the rows come into L2 meanwhile.
        if (others_at_work) rows.template prefetch<Tile>();
        if constexpr (Block::kStartsEarly) griddepcontrol_wait();
        mbarrier_wait(stages.empty[stage], ring.empty_parity(stage));
        const u32 offset = stage * Tile::kSwTilesQk * kRows * kSw128RowBytes;
        rows.template load<Tile>(block, item, smem_addr(stages.q) + offset, first_row, lane);
        store_more(item);
        cp_async_wait_all();
        fence_proxy_async();
        mbarrier_arrive(stages.full[stage]);
        ring.advance(stage);
        stage = stages.next(stage);
        others_at_work = true;
    }
}

template <class Tile, class Block, i32 kStages>
MLA_DEVICE void run_query_role(const Block& block, const QueryStages<kStages>& stages, i32 thread) {
    run_query_role<Tile>(block, stages, thread, [](const WorkItem&) {});
}

// ---- Load role -------------------------------------------------------------------------------------------------
// A tile of 64 tokens is fetched in boxes of gcd(page_size, 64) tokens, or fewer, each within one page. The warp looks
// up 64 boxes at a time, two per lane, and the lane that looked up a box fetches it. The pages of the next 64 boxes are
// read from the block table while the current ones are fetched, which hides the latency.
//
// Lookups stop at the request's end, and no page outside the pool is read: such boxes are outside the tensor, and TMA
// writes zeros for them.
constexpr i32 kBatchBoxes = 2 * kWarpThreads;
constexpr i32 kAbsentPage = -1;

struct BoxBatch {
    i32 page[2];    // of boxes lane and lane + 32, as in the block table
    i32 offset[2];  // of the box's first token within the page
};

// `first_token` of the batch; boxes are `rows` tokens each.
template <class Work = ScheduledWork>
MLA_DEVICE BoxBatch look_up(const DecodeParams& p, const WorkItem& item, i32 first_token, i32 rows, i32 lane) {
    BoxBatch batch;
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
        const i32 token = first_token + (lane + i * kWarpThreads) * rows;
        batch.page[i] = kAbsentPage;
        batch.offset[i] = 0;
        if (token < item.tokens && Work::windows_reach(item, token + rows)) {
            const i32 table_index = token / p.page_size;
            batch.page[i] =
                p.block_table[item.request * p.table_stride_b_elems + table_index * p.table_stride_page_elems];
            batch.offset[i] = token - table_index * p.page_size;
        }
    }
    return batch;
}

// Pages outside the pool get a number that is outside the tensor for certain.
MLA_DEVICE void drop_absent_pages(const DecodeParams& p, BoxBatch& batch) {
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
        if ((u32)batch.page[i] >= (u32)p.num_pages) batch.page[i] = kAbsentPage;
    }
}

// L2 policy of the keys. Evicted first, the lines of a long work item displace little but each other, which is slow
// where kernels before have left the L2 full of written lines. Short items, and keys that several row blocks read, were
// faster with evict_first.
constexpr i32 kLongItemTiles = 32;

template <class Block>
MLA_DEVICE u64 key_policy(const Block& block, const WorkItem& item) {
    const bool read_once = block.rows <= Block::kRows;
    return read_once && item.tile_end - item.tile_begin >= kLongItemTiles ? kEvictNormal : kEvictFirst;
}

// The boxes of one tile, from a lane of the load warp.
struct TileBoxes {
    const BoxBatch& batch;
    i32 first, count;  // within the window
    i32 rows, lane;
    u64 l2_policy;

    MLA_DEVICE i32 box(i32 i) const { return lane + i * kWarpThreads - first; }
    MLA_DEVICE bool contains(i32 box) const { return (u32)box < (u32)count; }

    // Bit t says whether token t of the tile can be read. Tokens past the end do not matter: their scores are masked.
    MLA_DEVICE u64 present_tokens() const {
        u64 absent = __ballot_sync(kFullWarp, batch.page[1] == kAbsentPage);
        absent = absent << 32 | __ballot_sync(kFullWarp, batch.page[0] == kAbsentPage);
        absent >>= first;
        if (count < kBatchBoxes) absent &= (1ull << count) - 1;
        if (absent == 0) return ~0ull;
        u64 present = 0;
        for (i32 token = 0; token < kTileTokens; ++token) {
            present |= (u64)(((absent >> (token / rows)) & 1) == 0) << token;
        }
        return present;
    }

    // Fetches SW128 tiles [begin, end) of the tile, in the order of arrival.
    template <class Tile>
    MLA_DEVICE void load(SmemAddr tile, const TensorMap& kv_map, MBarrier& full, i32 kv_head, i32 begin,
                         i32 end) const {
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            if (!contains(box(i))) continue;
            for (i32 k = begin; k < end; ++k) {
                const i32 sw_tile = Tile::sw_tile_in_order(k);
                cp_async_bulk_tensor_4d(tile + (sw_tile * kSw128Bytes + box(i) * rows * kSw128RowBytes), kv_map, full,
                                        sw_tile * kSw128Columns, batch.offset[i], kv_head, batch.page[i], l2_policy);
            }
        }
    }
};

// gcd(page_size, most): the largest power of two up to `most` that divides page_size.
MLA_DEVICE i32 tokens_of_box(const DecodeParams& p, i32 most) {
    while (p.page_size % most != 0) most /= 2;
    return most;
}

// `load_tile(boxes, item, tile)` fetches one tile.
template <class Block, class LoadTile>
MLA_DEVICE void run_load_role(const Block& block, i32 lane, LoadTile load_tile, i32 most_tokens = kTileTokens) {
    const DecodeParams& p = block.p;
    const i32 rows = tokens_of_box(p, most_tokens);
    const i32 boxes_per_tile = kTileTokens / rows;
    const i32 batch_tiles = kBatchBoxes / boxes_per_tile;
    using Work = typename Block::Work;
    typename Block::Work::HeldItem item;
    for (auto walk = block.items(); walk.next(p, item);) {
        const u64 l2_policy = key_policy(block, item);
        BoxBatch next = look_up<Work>(p, item, item.tile_begin * kTileTokens, rows, lane);
        for (i32 first = item.tile_begin; first < item.tile_end; first += batch_tiles) {
            BoxBatch batch = next;
            drop_absent_pages(p, batch);
            if (first + batch_tiles < item.tile_end) {
                next = look_up<Work>(p, item, (first + batch_tiles) * kTileTokens, rows, lane);
            }
            const i32 last = min(first + batch_tiles, item.tile_end);
            for (i32 tile = first; tile < last; ++tile) {
                const i32 first_box = (tile - first) * boxes_per_tile;
                load_tile(TileBoxes{batch, first_box, boxes_per_tile, rows, lane, l2_policy}, item, tile);
            }
        }
    }
}
}  // namespace mla::decode
