// Query rows in two arrays (attention/split_queries.cuh), for the query role of decode/sm90_load.cuh. A work item may
// have fewer rows than a block.
#pragma once
#include "attention/query_groups.cuh"
#include "decode/sm90_load.cuh"
#include "tile/elements.cuh"

namespace mla::decode {
// load_query_rows for queries in two arrays, and for keys of any width. Missing rows of an item are absent.
template <class Tile, class Block>
MLA_DEVICE void load_split_query_rows(const Block& block, const WorkItem& item, SmemAddr q, const SplitRow& my_row,
                                      i32 first_row, i32 lane) {
    constexpr i32 kRows = Block::kRows, kLatentChunks = kSwTilesV * kSw128Chunks;
    constexpr i32 kChunks = Tile::kHeadDimQk / 8;  // of a row; zeros make its SW128 tiles whole
    constexpr bool kPadded = kChunks < Tile::kSwTilesQk * kSw128Chunks;
    for (i32 i = 0, row = first_row; row < kRows; ++i, row += kQueryWarps) {
        const u64 latent = __shfl_sync(kFullWarp, reinterpret_cast<u64>(my_row.latent), i);
        const u64 rope = __shfl_sync(kFullWarp, reinterpret_cast<u64>(my_row.rope), i);
        const bool present = block.row0 + row < block.rows_of(item);
        for (i32 chunk = lane; chunk < Tile::kSwTilesQk * kSw128Chunks; chunk += kWarpThreads) {
            const u32 sw_tile = (u32)(chunk / kSw128Chunks) * (kRows * kSw128RowBytes);
            const u16* const from = chunk < kLatentChunks
                                        ? reinterpret_cast<const u16*>(latent) + chunk * 8
                                        : reinterpret_cast<const u16*>(rope) + (chunk - kLatentChunks) * 8;
            cp_async_16(q + (sw_tile + sw128_offset(row, chunk % kSw128Chunks)), from,
                        present && (!kPadded || chunk < kChunks));
        }
    }
}

MLA_DEVICE i32 first_query_of(const SplitQueryWork&, const WorkItem&) { return 0; }
MLA_DEVICE i32 first_query_of(const GroupedWork&, const WorkItem& item) { return GroupedWork::of(item).first_query; }

template <class Work>
struct SplitItemRows {
    SplitRow my_row;
    template <class Tile>
    static constexpr bool kRopeLine = Tile::kSwTilesQk > kSwTilesV;
    template <class Tile>
    static constexpr i32 kLatentLines = kRopeLine<Tile> ? kSwTilesV : Tile::kSwTilesQk;

    template <class Block>
    MLA_DEVICE SplitItemRows(const Block& block, const WorkItem& item, i32 row)
        : my_row(split_query_row(block.p, item.request, first_query_of(Work{}, item), block.kv_head,
                                 min(block.row0 + row, block.rows_of(item) - 1))) {}
    template <class Tile, class Block>
    MLA_DEVICE void load(const Block& block, const WorkItem& item, SmemAddr q, i32 first_row, i32 lane) const {
        load_split_query_rows<Tile>(block, item, q, my_row, first_row, lane);
    }
    template <class Tile>
    MLA_DEVICE void prefetch() const {
        for (i32 i = 0; i < kLatentLines<Tile>; ++i) prefetch_global_l2(my_row.latent + i * kSw128Columns);
        if constexpr (kRopeLine<Tile>) prefetch_global_l2(my_row.rope);
    }
};

template <>
struct ItemRows<SplitQueryWork> : SplitItemRows<SplitQueryWork> {
    using SplitItemRows::SplitItemRows;
};
template <>
struct ItemRows<GroupedWork> : SplitItemRows<GroupedWork> {
    using SplitItemRows::SplitItemRows;
};

// The score of a row of queries with a key, see PlainRows.
template <class Tile>
MLA_DEVICE float split_score(const DecodeParams& p, const SplitRow& query, const u16* key) {
    float dot = plain_dot<typename Tile::Element>(query.latent, key, kHeadDimV);
    if constexpr (Tile::kHeadDimQk > kHeadDimV) {
        dot += plain_dot<typename Tile::Element>(query.rope, key + kHeadDimV, Tile::kHeadDimQk - kHeadDimV);
    }
    return __fmul_rn(dot, p.scale_log2);
}
}  // namespace mla::decode
