// The parameters of the kernels of the indexer's losses.
//
// Tokens are processed in chunks. A chunk has a row of numbers per token, or, with targets per head, per token and
// head: the main attention's weight of each key (`target`), and the indexer's score of it (`scores`), which becomes the
// gradient by that score. The caller's targets cover all tokens. In the sparse stage, the keys of a token are the
// places of its list.
#pragma once
#include "common/facts.cuh"
#include "common/types.cuh"
#include "indexer/key_ranges.cuh"
#include "ptx/fp8.cuh"
#include "tile/huge_lse.cuh"

namespace mla::indexer::loss {
// Strides are in elements. Of the parts of the workspace, rows are `row_stride_elems` apart.
struct LossParams {
    const u16* q;              // (s_q, h, d), bf16, or less the last columns
    const u16* q_rope;         // (s_q, h, last columns), bf16, or within q
    const u16* k;              // (s_kv, h_kv, d), bf16, or less the last columns; a stride of 0: the same for all heads
    const u16* k_rope;         // (s_kv, h_kv, last columns), bf16, or within k; strides as of k
    const u16* v;              // (s_kv, h_kv, d_v), bf16, or null; strides as of k
    const void* index_q;       // (s_q, h_i, d_i), bf16 or e4m3
    const void* index_k;       // (s_kv, d_i), of the same dtype
    const void* weights;       // (s_q, h_i), fp32 or bf16
    const float* k_scale;      // (s_kv,): of codes, or null: 1
    const float* q_scale;      // (s_q, h_i): those that `weights` contain, or null: 1
    const float* lse;          // (s_q, h), for the target; not per head
    const float* row_weights;  // (s_q,), or null: 1
    const i32* cu_seqlens_q;   // (b + 1,), or null: one sequence
    const i32* cu_seqlens_kv;  // (b + 1,), or null
    KeyRange* ranges;          // (s_q,): the keys of each token
    float* target;             // (chunk, rows, keys): sums of exp(scale * q.k - lse), or target_scale * q.k
    float* scores = nullptr;   // (chunk, rows, keys): the indexer's scores, then the gradient by them
    u16* gradient = nullptr;   // (chunk, keys), bf16: k_scale G, zero up to the end of a tile of keys; or null
    u16* finite_keys = nullptr;         // (s_kv, d_i), bf16: index_k, non-finite elements zeroed; or null
    u16* decoded_queries = nullptr;     // (chunk, h_i, d_i), bf16: index_q, where these are codes; or null
    u16* finite_values = nullptr;       // (s_kv, d_v), bf16: v, non-finite elements zeroed, rows of 16 bytes; or null
    i32* nonfinite_tiles = nullptr;     // (tiles of keys,): whether v has such elements there; or null
    float* key_sums = nullptr;          // (key_splits, s_kv, d_i): d_index_k of the chunks so far
    float* kl;                          // (s_q, rows)
    float* mass;                        // (s_q, rows)
    float* index_lse;                   // (s_q, rows)
    void* d_index_q;                    // (s_q, h_i, d_i), bf16 or fp32
    void* d_index_k;                    // (s_kv, d_i), bf16 or fp32
    float* d_weights;                   // (s_q, h_i)
    u16* out;                           // (s_q, h, d_v), bf16, or null
    float* attention_lse;               // (s_q, h), or null
    const i32* rows = nullptr;          // (s_q, list): of the sparse stage, the keys that each token selects; or null
    const i32* counts = nullptr;        // (s_q,): the lengths of these lists; or null
    const float* extractors = nullptr;  // (s_kv + 1,): of binned sums (tile/binned_sum.cuh), then their bound; or null
    u32* largest = nullptr;             // one, zeroed: the bits of the float that the bound is made of
    float* head_sums;                   // (s_q, num_keys): where `loss_head_sums` puts the targets; or null
    i64 q_stride_token_elems, q_stride_head_elems;
    i64 q_rope_stride_token_elems, q_rope_stride_head_elems;
    i64 k_stride_token_elems, k_stride_head_elems;
    i64 k_rope_stride_token_elems, k_rope_stride_head_elems;
    i64 v_stride_token_elems, v_stride_head_elems;
    i64 index_q_stride_token_elems, index_q_stride_head_elems;
    i64 index_k_stride_elems;
    i64 weights_stride_token_elems, weights_stride_head_elems;
    i64 k_scale_stride_elems, q_scale_stride_token_elems, q_scale_stride_head_elems;
    i64 lse_stride_token_elems, lse_stride_head_elems;
    i64 row_weights_stride_elems;
    i64 cu_seqlens_q_stride_elems, cu_seqlens_kv_stride_elems;
    i64 kl_stride_token_elems, kl_stride_head_elems;
    i64 mass_stride_token_elems, mass_stride_head_elems;
    i64 index_lse_stride_token_elems, index_lse_stride_head_elems;
    i64 d_index_q_stride_token_elems, d_index_q_stride_head_elems;
    i64 d_index_k_stride_elems;
    i64 d_weights_stride_token_elems, d_weights_stride_head_elems;
    i64 out_stride_token_elems, out_stride_head_elems;
    i64 attention_lse_stride_token_elems, attention_lse_stride_head_elems;
    i64 head_sums_stride_elems;
    i64 target_stride_elems, row_stride_elems, rows_stride_elems;
    i32 s_q, s_kv, b;
    i32 num_keys;            // of a row: s_kv, or the places of a list
    i32 heads, index_heads;  // 0: not computed
    i32 kv_head_heads;       // heads per KV head
    i32 head_dim, value_dim, index_dim;
    i32 first_dim;                     // columns of q and k before the last ones: head_dim if these are no arrays
    i32 q_rope_column, k_rope_column;  // where the last columns begin in their array: 0, or first_dim
    i32 causal, per_head;
    i32 first_token, num_tokens;  // of the chunk
    i32 first_target;             // the token of the first row of `target`
    i32 first_fetched;            // first token that TMA fetches as index queries for the gradients
    i32 first_chunk, last_chunk;
    i32 weights_bf16, codes, d_index_q_fp32, d_index_k_fp32;  // codes: index_q and index_k are e4m3
    i32 key_splits, min_split_tokens;  // of the tokens that see a tile of keys: each split has separate sums
    float scale, target_scale;
    float score_unit;  // factor of the indexer's weights, 1 of codes
};

MLA_DEVICE i32 rows_per_token(const LossParams& p) { return p.per_head ? p.heads : 1; }
MLA_DEVICE float row_weight(const LossParams& p, i32 token) {
    return p.row_weights == nullptr ? 1.f : p.row_weights[token * p.row_weights_stride_elems];
}
// Start of a row of the chunk.
MLA_DEVICE i64 row_offset(const LossParams& p, i32 token, i32 row) {
    return ((i64)(token - p.first_token) * rows_per_token(p) + row) * p.row_stride_elems;
}
// Start of a row of `target`, which may cover all tokens.
MLA_DEVICE i64 target_offset(const LossParams& p, i32 token, i32 row) {
    return ((i64)(token - p.first_target) * rows_per_token(p) + row) * p.target_stride_elems;
}
// Start of the row with an index head's scores.
MLA_DEVICE i64 head_offset(const LossParams& p, i32 token, i32 head) {
    return row_offset(p, token, p.per_head ? head : 0);
}
// The row of a key of a token: with lists, `at` is a place in the token's.
MLA_DEVICE i64 key_row(const LossParams& p, i32 token, i32 at) {
    return p.rows == nullptr ? at : p.rows[token * p.rows_stride_elems + at];
}
MLA_DEVICE constexpr i32 index_element_bytes(float8_e4m3fn) { return 1; }
MLA_DEVICE constexpr i32 index_element_bytes(bfloat16) { return 2; }

// Offsets of index queries and keys, and their elements.
MLA_DEVICE i64 index_query_at(const LossParams& p, i32 token, i32 head) {
    return token * p.index_q_stride_token_elems + head * p.index_q_stride_head_elems;
}
MLA_DEVICE float index_element(const LossParams& p, const void* array, i64 at) {
    return p.codes ? float8_e4m3fn::to_float(static_cast<const u8*>(array)[at])
                   : bfloat16::to_float(static_cast<const u16*>(array)[at]);
}
MLA_DEVICE float key_scale(const LossParams& p, i64 row) {
    return p.k_scale == nullptr ? 1.f : p.k_scale[row * p.k_scale_stride_elems];
}
// The bits of an index head's weight as they are stored, and their value: so that what waits for the load can come
// later.
MLA_DEVICE u32 weight_bits(const LossParams& p, i32 token, i32 head) {
    const i64 at = token * p.weights_stride_token_elems + head * p.weights_stride_head_elems;
    return p.weights_bf16 ? static_cast<const u16*>(p.weights)[at] : static_cast<const u32*>(p.weights)[at];
}
MLA_DEVICE float weight_of_bits(const LossParams& p, u32 bits) {
    return p.score_unit * __uint_as_float(p.weights_bf16 ? bits << 16 : bits);
}
MLA_DEVICE float index_weight(const LossParams& p, i32 token, i32 head) {
    return weight_of_bits(p, weight_bits(p, token, head));
}

// Factor of the gradient by an index query: the weight without the scale of the query's codes.
MLA_DEVICE float query_factor(const LossParams& p, i32 token, i32 head) {
    const float weight = index_weight(p, token, head);
    if (p.q_scale == nullptr) return weight;
    return weight / p.q_scale[token * p.q_scale_stride_token_elems + head * p.q_scale_stride_head_elems];
}

// -lse in base 2, or -inf if float32 no longer tells the head's weights: its part in the target is then exp(-inf) = 0.
MLA_DEVICE float minus_lse2(float lse) { return has_weights(lse) ? -lse * kLog2E : negative_infinity(); }

// Per head, a row has a divergence only if weights follow from both of its log-sum-exps.
MLA_DEVICE bool is_live(float mass, float index_lse) { return has_weights(mass) && has_weights(index_lse); }

// A row's constants for the gradients per head, in base 2.
struct HeadRow {
    bool live;  // has a divergence
    float weight_log2, minus_mass, minus_index_lse;
};

MLA_DEVICE HeadRow head_row(const LossParams& p, i32 token, i32 head) {
    if (token >= p.s_q) return HeadRow{false, 0.f, 0.f, 0.f};
    const float mass = p.mass[token * p.mass_stride_token_elems + head * p.mass_stride_head_elems];
    const float index_lse = p.index_lse[token * p.index_lse_stride_token_elems + head * p.index_lse_stride_head_elems];
    return HeadRow{is_live(mass, index_lse), index_weight(p, token, head) * kLog2E, -mass * kLog2E,
                   -index_lse * kLog2E};
}

// In the copy of the values: rows start at multiples of 16 bytes.
MLA_DEVICE i64 finite_value_stride(const LossParams& p) { return ceil_div(p.value_dim, 8) * 8; }

// A gradient in its own dtype.
MLA_DEVICE void store_gradient(void* to, bool fp32, i64 at, float x) {
    if (fp32) {
        static_cast<float*>(to)[at] = x;
    } else {
        static_cast<u16*>(to)[at] = bfloat16::from_float(x);
    }
}

#define MLA_LOSS_FACTS()                                                                                    \
    MLA_FACT_LIST(params_layout, MLA_OFFSET(LossParams, q_stride_token_elems), MLA_OFFSET(LossParams, s_q), \
                  MLA_OFFSET(LossParams, scale), (int)sizeof(LossParams))
}  // namespace mla::indexer::loss
