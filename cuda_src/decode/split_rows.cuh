// Query rows of attention/query_groups.cuh, for the query role of decode/sm90_load.cuh: their RoPE columns may be a
// separate array, and a work item may have fewer rows than a block.
#pragma once
#include "attention/query_groups.cuh"
#include "decode/sm90_load.cuh"

namespace mla::decode {
// load_query_rows for queries in two arrays. Missing rows of an item are absent.
template <class Tile, class Block>
MLA_DEVICE void load_split_query_rows(const Block& block, const GroupItem& item, SmemAddr q, const SplitRow& my_row,
                                      i32 first_row, i32 lane) {
    constexpr i32 kRows = Block::kRows, kLatentChunks = kSwTilesV * kSw128Chunks;
    for (i32 i = 0, row = first_row; row < kRows; ++i, row += kQueryWarps) {
        const u64 latent = __shfl_sync(kFullWarp, reinterpret_cast<u64>(my_row.latent), i);
        const u64 rope = __shfl_sync(kFullWarp, reinterpret_cast<u64>(my_row.rope), i);
        const bool present = block.row0 + row < block.rows_of(item);
        for (i32 chunk = lane; chunk < Tile::kSwTilesQk * kSw128Chunks; chunk += kWarpThreads) {
            const u32 sw_tile = (u32)(chunk / kSw128Chunks) * (kRows * kSw128RowBytes);
            const u16* const from = chunk < kLatentChunks
                                        ? reinterpret_cast<const u16*>(latent) + chunk * 8
                                        : reinterpret_cast<const u16*>(rope) + (chunk - kLatentChunks) * 8;
            cp_async_16(q + (sw_tile + sw128_offset(row, chunk % kSw128Chunks)), from, present);
        }
    }
}

template <>
struct ItemRows<GroupedWork> {
    SplitRow my_row;
    template <class Tile>
    static constexpr i32 kLatentLines = kSwTilesV;

    template <class Block>
    MLA_DEVICE ItemRows(const Block& block, const GroupItem& item, i32 row)
        : my_row(split_query_row(block.p, item, block.kv_head, min(block.row0 + row, block.rows_of(item) - 1))) {}
    template <class Tile, class Block>
    MLA_DEVICE void load(const Block& block, const GroupItem& item, SmemAddr q, i32 first_row, i32 lane) const {
        load_split_query_rows<Tile>(block, item, q, my_row, first_row, lane);
    }
    MLA_DEVICE const u16* latent() const { return my_row.latent; }
};
}  // namespace mla::decode
