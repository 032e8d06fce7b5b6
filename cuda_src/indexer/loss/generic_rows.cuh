// Rows that the losses' kernels for any GPU read, over the lanes of a warp: queries and keys, whole or in two arrays,
// and the indexer's queries and keys, in bf16 or e4m3.
#pragma once
#include "indexer/loss/lane_row.cuh"
#include "indexer/loss/params.cuh"

namespace mla::indexer::loss {
template <class Row>
MLA_DEVICE void load_pair(Row& row, const LossParams& p, const u16* first, const u16* last, i32 lane) {
    last -= p.first_dim;
    row.load_each(
        p.head_dim, lane, [&](i32 at) { return (at < p.first_dim ? first : last)[at]; },
        [](u32 bits) { return bfloat16::to_float(bits); });
}

template <class Row>
MLA_DEVICE void load_query(Row& row, const LossParams& p, i32 token, i32 head, i32 lane) {
    load_pair(row, p, p.q + token * p.q_stride_token_elems + head * p.q_stride_head_elems,
              p.q_rope + token * p.q_rope_stride_token_elems + head * p.q_rope_stride_head_elems + p.q_rope_column,
              lane);
}

// The key of `row` that `head` has.
template <class Row>
MLA_DEVICE void load_key(Row& key, const LossParams& p, i64 row, i32 head, i32 lane) {
    const i32 kv_head = head / p.kv_head_heads;
    load_pair(key, p, p.k + row * p.k_stride_token_elems + kv_head * p.k_stride_head_elems,
              p.k_rope + row * p.k_rope_stride_token_elems + kv_head * p.k_rope_stride_head_elems + p.k_rope_column,
              lane);
}

template <class Row>
MLA_DEVICE void load_index_row(Row& row, const LossParams& p, const void* array, i64 first, i32 lane) {
    if (p.codes) {
        const u8* codes = static_cast<const u8*>(array) + first;
        row.load_each(
            p.index_dim, lane, [&](i32 at) { return codes[at]; },
            [](u32 bits) { return float8_e4m3fn::to_float(bits); });
    } else {
        row.load(static_cast<const u16*>(array) + first, p.index_dim, lane);
    }
}

template <class Row>
MLA_DEVICE void load_index_query(Row& row, const LossParams& p, i32 token, i32 head, i32 lane) {
    load_index_row(row, p, p.index_q, index_query_at(p, token, head), lane);
}

// Without its scale.
template <class Row>
MLA_DEVICE void load_index_key(Row& key, const LossParams& p, i64 row, i32 lane) {
    load_index_row(key, p, p.index_k, row * p.index_k_stride_elems, lane);
}
}  // namespace mla::indexer::loss
