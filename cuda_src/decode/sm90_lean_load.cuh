// The load role of decode/sm90_load.cuh with fewer registers: 24 are enough, where math warps need all others.
//
// Values that are equal in all lanes are in uniform registers, and only the pages of the next boxes are read in
// advance: offsets within pages are computed by divisions when the boxes are due. That is slower, but hidden where a
// tile takes long.
#pragma once
#include "decode/sm90_load.cuh"
#include "tile/uniform.cuh"

namespace mla::decode {
// A lane's two boxes of the batch that starts at `first_token`: each box's first token.
struct LeanBatch {
    i32 first_token, rows, lane;

    MLA_DEVICE i32 token(i32 i) const { return first_token + (lane + i * kWarpThreads) * rows; }

    MLA_DEVICE void look_up_pages(i32 (&page)[2], const DecodeParams& p, const WorkItem& item) const {
#pragma unroll 1
        for (i32 i = 0; i < 2; ++i) {  // one division at a time
            i32 found = kAbsentPage;
            if (token(i) < item.tokens) {
                const i32 table_index = (i32)((u32)token(i) / (u32)p.page_size);
                found = p.block_table[item.request * p.table_stride_b_elems + table_index * p.table_stride_page_elems];
            }
            (i == 0 ? page[0] : page[1]) = found;
        }
    }

    MLA_DEVICE BoxBatch of_pages(const i32 (&page)[2], const DecodeParams& p) const {
        BoxBatch batch;
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            batch.page[i] = page[i];
            batch.offset[i] = (i32)((u32)token(i) % (u32)p.page_size);
        }
        drop_absent_pages(p, batch);
        return batch;
    }
};

// `load_tile(boxes, item, tile)` fetches one tile.
template <class Block, class LoadTile>
MLA_DEVICE void run_lean_load_role(const Block& block, i32 lane, LoadTile load_tile) {
    const DecodeParams& p = block.p;
    const i32 rows = in_uniform(min(kTileTokens, p.page_size & -p.page_size));  // gcd(page_size, 64)
    const i32 boxes_per_tile = in_uniform(kTileTokens / rows);
    const i32 batch_tiles = in_uniform(kBatchBoxes / boxes_per_tile);
    WorkItem item;
    for (auto walk = block.items(); walk.next(p, item);) {
        i32 next[2];
        LeanBatch{item.tile_begin * kTileTokens, rows, lane}.look_up_pages(next, p, item);
        for (i32 first = item.tile_begin; first < item.tile_end; first += batch_tiles) {
            const BoxBatch batch = LeanBatch{first * kTileTokens, rows, lane}.of_pages(next, p);
            if (first + batch_tiles < item.tile_end) {
                LeanBatch{(first + batch_tiles) * kTileTokens, rows, lane}.look_up_pages(next, p, item);
            }
            const i32 last = min(first + batch_tiles, item.tile_end);
            for (i32 tile = first; tile < last; ++tile) {
                const bool keep =
                    in_uniform(key_policy(block, item) == kEvictNormal);  // anew: a policy is two registers
                const u64 l2_policy = keep ? kEvictNormal : kEvictFirst;
                const i32 first_box = (tile - first) * boxes_per_tile;
                load_tile(TileBoxes{batch, first_box, boxes_per_tile, rows, lane, l2_policy}, item, tile);
            }
        }
    }
}
}  // namespace mla::decode
