// Scales of queries and of the cache that lie on the device, for attention in FP8.
#pragma once
#include "attention/decode_params.cuh"

namespace mla::attention {
struct Fp8ScaleAddresses {
    const float* q_scales = nullptr;   // (b, s_q, h_q), or null: scales of e4m3 queries, on top of `scale_log2`
    const float* kv_scales = nullptr;  // (1,), or null: scale of the cache, on top of `scale_log2` and `value_scale`
};

struct DecodeFp8Params : Fp8ScaleAddresses, DecodeParams {
    i64 q_scales_stride_b_elems = 0, q_scales_stride_s_elems = 0, q_scales_stride_h_elems = 0;
    i32 bf16_partials;  // partial results are bfloat16, and not float32: only of results in bfloat16
};

MLA_DEVICE float cache_scale(const DecodeFp8Params& p) { return p.kv_scales == nullptr ? 1.f : *p.kv_scales; }

// Scale of one row of e4m3 queries.
MLA_DEVICE float query_row_scale(const DecodeFp8Params& p, i32 request, i32 kv_head, i32 row) {
    if (p.q_scales == nullptr) return 1.f;
    const i32 group = p.h_q / p.h_kv;
    return p.q_scales[request * p.q_scales_stride_b_elems + row / group * p.q_scales_stride_s_elems +
                      (i64)(kv_head * group + row % group) * p.q_scales_stride_h_elems];
}
}  // namespace mla::attention

// Facts that the host reads from the cubin, see MLA_DECODE_FACTS.
#define MLA_DECODE_FP8_FACTS()                                                                                    \
    MLA_FACT_LIST(params_layout, MLA_FP8_OFFSET(q_stride_b_elems), MLA_FP8_OFFSET(b), MLA_FP8_OFFSET(scale_log2), \
                  MLA_FP8_OFFSET(q_scales_stride_b_elems), MLA_FP8_OFFSET(bf16_partials),                         \
                  (int)sizeof(mla::attention::DecodeFp8Params));                                                  \
    MLA_FACT(tile_tokens, mla::attention::kTileTokens)
#define MLA_FP8_OFFSET(field) MLA_OFFSET(mla::attention::DecodeFp8Params, field)
