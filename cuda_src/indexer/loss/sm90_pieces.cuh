// Queries and keys of the attention for TMA, in the losses on Hopper: 128 tokens or keys by pieces of 64 columns. The
// last 64 columns may be in separate arrays.
#pragma once
#include "indexer/loss/params.cuh"
#include "ptx/copy.cuh"
#include "tile/sw128.cuh"

namespace mla::indexer::loss {
// For each operand the array with the first columns, or with all, and the array with the last ones.
struct MainMaps {
    const TensorMap &q, &q_rope, &k, &k_rope;
};

struct MainPieces {
    i32 first, all;
    bool shared_last;  // the keys of all heads have the same last piece

    MLA_DEVICE explicit MainPieces(const LossParams& p)
        : first(ceil_div(p.first_dim, kSw128Columns)),
          all(first + (p.head_dim > p.first_dim)),
          shared_last(all > first && p.k_rope_stride_head_elems == 0) {}

    MLA_DEVICE bool is_last(i32 piece) const { return first < all && piece == first; }
};

// Called by one thread. Pieces beyond the last are zeros.
MLA_DEVICE void load_query_piece(const LossParams& p, const MainMaps& maps, const MainPieces& pieces, SmemAddr to,
                                 MBarrier& full, i32 piece, i32 token, i32 head, u64 l2_policy) {
    const bool last = pieces.is_last(piece);
    cp_async_bulk_tensor_3d(to, last ? maps.q_rope : maps.q, full, last ? p.q_rope_column : piece * kSw128Columns,
                            token, head, l2_policy);
}

MLA_DEVICE void load_key_piece(const LossParams& p, const MainMaps& maps, const MainPieces& pieces, SmemAddr to,
                               MBarrier& full, i32 piece, i32 key, i32 kv_head, u64 l2_policy) {
    const bool last = pieces.is_last(piece);
    cp_async_bulk_tensor_3d(to, last ? maps.k_rope : maps.k, full, last ? p.k_rope_column : piece * kSw128Columns, key,
                            last && pieces.shared_last ? 0 : kv_head, l2_policy);
}
}  // namespace mla::indexer::loss
