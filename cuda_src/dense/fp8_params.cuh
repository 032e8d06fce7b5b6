// The parameters of the kernels of dense attention over e4m3 codes, and the scales of a sequence and head.
#pragma once
#include "dense/params.cuh"

namespace mla::dense {
struct PrefillFp8Addresses {
    const float* q_scales;  // (b, h_kv), or null: 1
    const float* k_scales;
    const float* v_scales;
    const Sequence* sequences;  // b + 2 of them, as the schedule leaves them
};

// Rows of queries, keys and values are bytes; there is no earlier state, and no mask.
struct PrefillFp8Params : PrefillFp8Addresses, PrefillParams {
    i64 q_scales_stride_b_elems, q_scales_stride_h_elems;
    i64 k_scales_stride_b_elems, k_scales_stride_h_elems;
    i64 v_scales_stride_b_elems, v_scales_stride_h_elems;
    i32 b;
    i32 out_is_fp16;  // or bfloat16, where it is not fp32
};

#define MLA_PREFILL_FP8_OFFSET(field) MLA_OFFSET(::mla::dense::PrefillFp8Params, field)
#define MLA_PREFILL_FP8_FACTS()                                                                          \
    MLA_FACT_LIST(params_layout, MLA_PREFILL_FP8_OFFSET(mask_stride_bytes), MLA_PREFILL_FP8_OFFSET(s_q), \
                  MLA_PREFILL_FP8_OFFSET(scale_log2), MLA_PREFILL_FP8_OFFSET(q_scales_stride_b_elems),   \
                  MLA_PREFILL_FP8_OFFSET(b), (int)sizeof(::mla::dense::PrefillFp8Params))

// Factors of scores, in base 2, and of values, per sequence and KV head.
struct ItemScales {
    float score_log2, value;
};

// The sequence of a query, among the caller's; any of them for a query of none.
MLA_DEVICE i32 sequence_of(const PrefillFp8Params& p, i32 query) {
    i32 low = 0, high = p.b + 2;
    while (high - low > 1) {
        const i32 middle = (low + high) / 2;
        (p.sequences[middle].first_query <= query ? low : high) = middle;
    }
    return max(0, min(low - 1, p.b - 1));
}

MLA_DEVICE float scale_at(const float* scales, i64 stride_b, i64 stride_h, i32 sequence, i32 kv_head) {
    return scales == nullptr ? 1.f : scales[sequence * stride_b + kv_head * stride_h];
}

// A factor of 0, as of codes that are all 0, becomes the smallest normal number: times the -inf of a hidden score it
// would be NaN.
MLA_DEVICE ItemScales item_scales(const PrefillFp8Params& p, i32 query, i32 kv_head) {
    constexpr float kLeastFactor = 1.17549435e-38f;
    const i32 n = sequence_of(p, query);
    const float of_q = scale_at(p.q_scales, p.q_scales_stride_b_elems, p.q_scales_stride_h_elems, n, kv_head);
    const float of_k = scale_at(p.k_scales, p.k_scales_stride_b_elems, p.k_scales_stride_h_elems, n, kv_head);
    const float of_v = scale_at(p.v_scales, p.v_scales_stride_b_elems, p.v_scales_stride_h_elems, n, kv_head);
    const float factor = p.scale_log2 * of_q * of_k;
    return {factor == 0.f ? kLeastFactor : factor, of_v};
}

MLA_DEVICE const u8* code_bytes(const u16* elements) { return reinterpret_cast<const u8*>(elements); }

// A query or key: the first columns, and the last kRopeColumns.
struct CodeRow {
    const u8 *first, *last;
};

MLA_DEVICE CodeRow query_codes(const PrefillFp8Params& p, i64 query, i32 head) {
    return {code_bytes(p.q) + query * p.q_stride_s_elems + head * p.q_stride_h_elems,
            code_bytes(p.q_rope) + query * p.q_rope_stride_s_elems + head * p.q_rope_stride_h_elems + p.q_rope_column};
}

MLA_DEVICE CodeRow key_codes(const PrefillFp8Params& p, i64 key, i32 kv_head) {
    return {code_bytes(p.k) + key * p.k_stride_s_elems + kv_head * p.k_stride_h_elems,
            code_bytes(p.k_rope) + key * p.k_rope_stride_s_elems + kv_head * p.k_rope_stride_h_elems + p.k_rope_column};
}
}  // namespace mla::dense
