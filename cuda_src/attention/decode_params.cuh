// Parameters and sizes of MLA decode, shared by its kernels (one layout, so that one host record serves all).
//
// Sparse attention is the special case of one-token pages: each query is a request of one token, its list of rows is
// its line of the block table, and the length of the list its seqlen. Only sparse attention has max_logits. A member
// with an initialiser is one that some operations lack; its initial value has no effect.
#pragma once
#include "attention/shapes.cuh"
#include "common/facts.cuh"
#include "common/lse.cuh"

namespace mla::attention {
constexpr i32 kMaxSplits = 256;  // splits of a schedule, and pieces of a request

// A position in the work of a batch: before tile `tile` of request `request`.
struct SchedulePoint {
    i32 request;
    i32 tile;
};

// Strides are in elements. A query row of KV head g is r = s * group + i, where group = h_q / h_kv and the head is
// g * group + i: the rows that share keys.
struct DecodeParams {
    const u16* q;                    // (b, s_q, h_q, d_qk)
    const u16* kv;                   // (num_pages, page_size, h_kv, d_qk)
    const i32* block_table;          // (b, max_pages)
    const i32* seqlens;              // (b,)
    const SchedulePoint* schedule;   // (num_splits + 1,)
    void* out;                       // (b, s_q, h_q, 512), 16-bit or fp32
    float* lse;                      // (b, h_q, s_q)
    const float* attn_sink;          // (h_q,), or null: per-head logits that enter the denominator of `out`, not `lse`
    float* max_logits = nullptr;     // (b, h_q, s_q), or null: the largest scaled score
    float* partial_out;              // (2 num_splits, h_q * s_q, 512), normalised; see attention/split_work.cuh
    float* partial_lse;              // (2 num_splits, h_q * s_q), base 2
    float* partial_max = nullptr;    // (2 num_splits, h_q * s_q), base 2
    u32* tickets = nullptr;          // zeros; for kernels whose last block merges, see decode/cluster_work.cuh
    const u64* tree_mask = nullptr;  // (b, s_q), or null: see attention/tree_mask.cuh
    i64 q_stride_b_elems, q_stride_s_elems, q_stride_h_elems;
    i64 kv_stride_page_elems, kv_stride_token_elems, kv_stride_h_elems;
    i64 table_stride_b_elems, table_stride_page_elems, seqlens_stride_elems;
    i64 out_stride_b_elems, out_stride_s_elems, out_stride_h_elems;
    i64 lse_stride_b_elems, lse_stride_h_elems, lse_stride_s_elems;
    i64 max_stride_b_elems = 0, max_stride_h_elems = 0, max_stride_s_elems = 0;
    i64 sink_stride_elems;
    i64 tree_stride_b_elems = 0, tree_stride_s_elems = 0;
    i32 b, s_q = 1, h_q, h_kv = 1;
    i32 num_pages, page_size, max_pages, num_splits;
    i32 causal = 0, out_is_fp32;
    i32 continued_index;    // partial index of split 0 where split 1 continues its last request
    i32 request_units = 0;  // without a schedule: units of work per request
    i32 unit_tiles = 0;     // tiles per unit, fewer in the last. With a schedule: 1 where W_UV follows the combine
    i32 cp_world = 1, cp_rank = 0;  // token j of the cache is token j * cp_world + cp_rank of the sequence
    i32 new_tokens = -1;  // tokens at the end of each sequence that the launch before writes, of the inputs only these
                          // and q; -1: maybe any input
    float scale_log2;     // softmax scale * log2(e)
    LseConvention lse_convention;
    float value_scale;  // factor of the values, of caches with one scale for all; `scale_log2` has it, too
};

// The part of a request's sequence that lies in this cache.
struct RequestLength {
    i32 tokens;
    i32 behind_last;  // tokens of the sequence after the last of these, all on other ranks: fewer than cp_world
};

// The block table holds at most `max_tokens`, whatever the seqlen claims. The longest sequence with that many has
// max_tokens * cp_world + cp_rank tokens, since its last ones may all be on other ranks.
MLA_DEVICE RequestLength request_length(i64 seqlen, i64 max_tokens, i32 cp_world, i32 cp_rank) {
    const i32 length = (i32)max(0ll, min(seqlen, max_tokens * cp_world + cp_rank));
    if (cp_world == 1) return RequestLength{length, 0};
    if (length <= cp_rank) return RequestLength{0, 0};
    const i32 last = (length - cp_rank - 1) / cp_world;
    return RequestLength{last + 1, length - 1 - (last * cp_world + cp_rank)};
}

MLA_DEVICE RequestLength request_length(const DecodeParams& p, i32 request) {
    const i64 max_tokens = (i64)p.max_pages * p.page_size;
    return request_length(p.seqlens[request * p.seqlens_stride_elems], max_tokens, p.cp_world, p.cp_rank);
}

// Rows of one KV head.
MLA_DEVICE i32 query_rows(const DecodeParams& p) { return p.s_q * (p.h_q / p.h_kv); }

// Tokens at the sequence's end that row `row` does not see.
MLA_DEVICE i32 hidden_from(const DecodeParams& p, i32 row) { return p.causal ? p.s_q - 1 - row / (p.h_q / p.h_kv) : 0; }

// How many of the last `hidden` tokens of the sequence are in this cache.
MLA_DEVICE i32 hidden_here(const DecodeParams& p, i32 hidden, i32 behind_last) {
    return p.cp_world == 1 ? hidden : (hidden + p.cp_world - 1 - behind_last) / p.cp_world;
}

// A token's key in the cache; null where its page is not in the pool. Only for tokens of the request.
MLA_DEVICE const u16* cached_row(const DecodeParams& p, i32 request, i32 kv_head, i32 token) {
    const i32 table_index = token / p.page_size;
    const i32 page = p.block_table[request * p.table_stride_b_elems + table_index * p.table_stride_page_elems];
    if ((u32)page >= (u32)p.num_pages) return nullptr;
    return p.kv + page * p.kv_stride_page_elems + (token - table_index * p.page_size) * p.kv_stride_token_elems +
           kv_head * p.kv_stride_h_elems;
}

}  // namespace mla::attention

// Facts that the host reads from the cubin. Members of one size are contiguous, so four offsets pin down the layout of
// the struct.
#define MLA_DECODE_FACTS()                                                                                           \
    MLA_FACT_LIST(params_layout, MLA_OFFSET(mla::attention::DecodeParams, q_stride_b_elems),                         \
                  MLA_OFFSET(mla::attention::DecodeParams, b), MLA_OFFSET(mla::attention::DecodeParams, scale_log2), \
                  (int)sizeof(mla::attention::DecodeParams));                                                        \
    MLA_FACT(tile_tokens, mla::attention::kTileTokens)
