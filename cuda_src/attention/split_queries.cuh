// Queries of dense decode in two arrays: the first 512 columns of each row, and its RoPE columns, as projections leave
// them. One array with all columns will do, too.
#pragma once
#include "attention/split_work.cuh"

namespace mla::attention {
// ---- Params ----------------------------------------------------------------------------------------------------
struct RopeAddress {
    const u16* q_rope;  // the last 64 columns of the queries, or null: q has them
};

struct DecodeRopeParams : RopeAddress, DecodeParams {
    i64 q_rope_stride_b_elems, q_rope_stride_s_elems, q_rope_stride_h_elems;  // strides of q if q has the columns
};

MLA_DEVICE const DecodeRopeParams& rope_of(const DecodeParams& p) { return static_cast<const DecodeRopeParams&>(p); }

// ---- Rows ------------------------------------------------------------------------------------------------------
// A row of queries in two parts.
struct SplitRow {
    const u16 *latent, *rope;
};

MLA_DEVICE SplitRow split_query_row(const DecodeParams& p, i32 request, i32 first_query, i32 kv_head, i32 row) {
    const DecodeRopeParams& parts = rope_of(p);
    const i32 group = p.h_q / p.h_kv, head = kv_head * group + row % group, query = first_query + row / group;
    const u16* const latent =
        p.q + request * p.q_stride_b_elems + (i64)query * p.q_stride_s_elems + (i64)head * p.q_stride_h_elems;
    if (parts.q_rope == nullptr) return {latent, latent + kHeadDimV};
    return {latent, parts.q_rope + request * parts.q_rope_stride_b_elems + (i64)query * parts.q_rope_stride_s_elems +
                        (i64)head * parts.q_rope_stride_h_elems};
}

// ---- Work ------------------------------------------------------------------------------------------------------
// The work of a plain call with such queries.
struct SplitQueryWork : ScheduledWork {};
}  // namespace mla::attention

// Facts that the host reads from the cubin, see MLA_DECODE_FACTS.
#define MLA_DECODE_ROPE_FACTS()                                                                                      \
    MLA_FACT_LIST(params_layout, MLA_ROPE_OFFSET(q_stride_b_elems), MLA_ROPE_OFFSET(b), MLA_ROPE_OFFSET(scale_log2), \
                  MLA_ROPE_OFFSET(q_rope_stride_b_elems), (int)sizeof(mla::attention::DecodeRopeParams));            \
    MLA_FACT(tile_tokens, mla::attention::kTileTokens)
#define MLA_ROPE_OFFSET(field) MLA_OFFSET(mla::attention::DecodeRopeParams, field)
