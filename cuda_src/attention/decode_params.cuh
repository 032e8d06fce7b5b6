// Parameters and sizes of MLA decode, shared by its kernels (one layout, so that one host record serves all).
//
// Sparse attention is the same with pages of one token: each query is a request of one token, its list of rows is its
// line of the block table, and the length of the list its seqlen. Only there attn_sink and max_logits may be asked for.
#pragma once
#include "common/facts.cuh"
#include "common/types.cuh"

#ifndef MLA_HEAD_DIM_QK
#define MLA_HEAD_DIM_QK 576
#endif
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK;  // width of the latent cache: d_nope 512, and mostly d_rope 64
constexpr i32 kHeadDimV = 512;               // the values are the first 512 columns of the keys
constexpr i32 kTileTokens = 64;              // tokens of one step, in the schedule and in every kernel
static_assert(kHeadDimQk == kHeadDimV || kHeadDimQk == kHeadDimV + 64, "with or without RoPE columns");

// A place in the work of a batch: before tile `tile` of request `request`.
struct SchedulePoint {
    i32 request;
    i32 tile;
};

// Strides are in elements. A query row of KV head g is r = s * group + i, where group = h_q / h_kv and the head is
// g * group + i: the rows that share keys.
struct DenseDecodeParams {
    const u16* q;                   // (b, s_q, h_q, d_qk)
    const u16* kv;                  // (num_pages, page_size, h_kv, d_qk)
    const i32* block_table;         // (b, max_pages)
    const i32* seqlens;             // (b,)
    const SchedulePoint* schedule;  // (num_parts + 1,)
    void* out;                      // (b, s_q, h_q, 512), 16-bit or fp32
    float* lse;                     // (b, h_q, s_q)
    const float* attn_sink;         // (h_q,), or null: a logit without a value; `out` knows of it, `lse` does not
    float* max_logits;              // (b, h_q, s_q), or null: the largest scaled score
    float* partial_out;             // (2 num_parts, h_q * s_q, 512), normalised; see attention/split_work.cuh
    float* partial_lse;             // (2 num_parts, h_q * s_q), base 2
    float* partial_max;             // (2 num_parts, h_q * s_q), base 2
    i64 q_stride_b_elems, q_stride_s_elems, q_stride_h_elems;
    i64 kv_stride_page_elems, kv_stride_token_elems, kv_stride_h_elems;
    i64 table_stride_b_elems, table_stride_page_elems, seqlens_stride_elems;
    i64 out_stride_b_elems, out_stride_s_elems, out_stride_h_elems;
    i64 lse_stride_b_elems, lse_stride_h_elems, lse_stride_s_elems;
    i64 max_stride_b_elems, max_stride_h_elems, max_stride_s_elems;
    i64 sink_stride_elems;
    i32 b, s_q, h_q, h_kv;
    i32 num_pages, page_size, max_pages, num_parts;
    i32 causal, out_is_fp32;
    float scale_log2;  // softmax scale * log2(e)
    float lse_factor;  // from base-2 logarithm to the caller's base
    float empty_lse;   // lse of a row without a key
    i32 padding;
};

// Tokens of a request, whatever its seqlen claims: never past what its block table can hold.
MLA_DEVICE i32 request_tokens(const DenseDecodeParams& p, i32 request) {
    const i64 most = (i64)p.max_pages * p.page_size;
    const i64 given = p.seqlens[request * p.seqlens_stride_elems];
    return (i32)max(0ll, min(given, most));
}

// Rows of one KV head.
MLA_DEVICE i32 query_rows(const DenseDecodeParams& p) { return p.s_q * (p.h_q / p.h_kv); }

// First key that row `row` does not see.
MLA_DEVICE i32 visible_tokens(const DenseDecodeParams& p, i32 row, i32 tokens) {
    return p.causal ? tokens - (p.s_q - 1 - row / (p.h_q / p.h_kv)) : tokens;
}

// A token's key in the cache; null where its page is not in the pool. Only for tokens below request_tokens().
MLA_DEVICE const u16* cached_row(const DenseDecodeParams& p, i32 request, i32 kv_head, i32 token) {
    const i32 slot = token / p.page_size;
    const i32 page = p.block_table[request * p.table_stride_b_elems + slot * p.table_stride_page_elems];
    if ((u32)page >= (u32)p.num_pages) return nullptr;
    return p.kv + page * p.kv_stride_page_elems + (token - slot * p.page_size) * p.kv_stride_token_elems +
           kv_head * p.kv_stride_h_elems;
}

// The struct's layout for the host's own record. Members of one size stand together, so these four say it all.
#define MLA_DECODE_FACTS()                                                                                          \
    MLA_FACT_LIST(params_layout, MLA_OFFSET(DenseDecodeParams, q_stride_b_elems), MLA_OFFSET(DenseDecodeParams, b), \
                  MLA_OFFSET(DenseDecodeParams, scale_log2), (int)sizeof(DenseDecodeParams));                       \
    MLA_FACT(tile_tokens, kTileTokens)
