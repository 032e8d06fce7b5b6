// Shared by the Hopper kernels of the sparse stage's loss: a block has one token, and the keys of its list arrive as
// tiles of 128, which one warpgroup gathers with cp.async, 64 columns at a time.
#pragma once
#include "indexer/loss/params.cuh"
#include "tile/gather.cuh"
#include "tile/ring.cuh"
#include "tile/sw128.cuh"

namespace mla::indexer::loss {
constexpr i32 kListTileKeys = 2 * kSw128Rows;
constexpr u32 kListPieceBytes = kListTileKeys * kSw128RowBytes;

// The list of a block's token.
struct KeyList {
    const i32* rows;
    i32 token, count;

    MLA_DEVICE i32 tiles() const { return ceil_div(count, kListTileKeys); }
};

MLA_DEVICE KeyList key_list(const LossParams& p, i32 token) {
    return KeyList{p.rows + token * p.rows_stride_elems, token, p.ranges[token].end};
}

// Addresses of a thread's part of a tile's rows. Lists are padded to 64 keys only, with no row.
struct TileSources {
    RowSources halves[2];
};

MLA_DEVICE TileSources tile_sources(const KeyList& list, const u16* matrix, i64 stride_elems, i32 count, i32 tile,
                                    i32 thread) {
    TileSources sources;
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
        const i32 first = tile * kListTileKeys + half * kSw128Rows;
        RowNumbers numbers{{-1, -1, -1, -1}};
        if (first < list.count) numbers = read_row_numbers(list.rows + first, thread);
        sources.halves[half] = rows_by_number(matrix, stride_elems, count, numbers, thread);
    }
    return sources;
}

// Starts the copy of 64 columns; beyond `width`, a multiple of 8, they become zeros.
MLA_DEVICE void gather_piece(SmemAddr to, const TileSources& sources, i32 piece, i32 width, i32 thread) {
    const i32 chunk = thread % kSw128Chunks;
    const bool inside = piece * kSw128Columns + chunk * 8 < width;
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
        const RowSources& rows = sources.halves[half];
#pragma unroll
        for (i32 i = 0; i < kRowsPerThread; ++i) {
            const u32 at = half * kSw128Bytes + sw128_offset(first_row_of(thread) + i, chunk);
            cp_async_16<kFetchBytes>(to + at, rows.from[i] + piece * kSw128Columns, inside && rows.present[i],
                                     kEvictLast);
        }
    }
}

// The rest is for kernels that keep the queries, all heads of a token, while the keys pass as pieces. `Storage` has `q`
// and `q_full`, the pieces of the queries, and `k`, `k_full` and `k_empty`, the ring.
constexpr i32 kListHeads = 128;

// Called by one thread.
template <i32 kCount, class Storage>
MLA_DEVICE void load_list_queries(Storage& s, const TensorMap& map, i32 token) {
    mbarrier_arrive_expect_tx(s.q_full, kCount * sizeof(s.q[0]));
#pragma unroll 1
    for (i32 piece = 0; piece < kCount; ++piece) {
        cp_async_bulk_tensor_3d(smem_addr(s.q[piece]), map, s.q_full, piece * kSw128Columns, token, 0, kEvictFirst);
    }
}

// The `count` rows of `matrix` are keys.
template <i32 kCount, class Storage, class Pieces>
MLA_DEVICE void gather_list_keys(Storage& s, Pieces& pieces, const KeyList& list, const u16* matrix, i64 stride_elems,
                                 i32 count, i32 width, i32 thread) {
#pragma unroll 1
    for (i32 tile = 0; tile < list.tiles(); ++tile) {
        const TileSources sources = tile_sources(list, matrix, stride_elems, count, tile, thread);
#pragma unroll 1
        for (i32 piece = 0; piece < kCount; ++piece, pieces.advance()) {
            pieces.wait_empty(s.k_empty);
            gather_piece(smem_addr(s.k[pieces.stage]), sources, piece, width, thread);
            arrive_when_gathered(s.k_full[pieces.stage], thread);
        }
    }
}
}  // namespace mla::indexer::loss
