// The parameters of the kernels of dense attention, forward.
#pragma once
#include "common/facts.cuh"
#include "dense/tiles.cuh"

namespace mla::dense {
struct PrefillParams {
    const u16* q;              // (s_q, h_q, d_qk), or less kRopeColumns
    const u16* q_rope;         // (s_q, h_q, kRopeColumns), or within q
    const u16* k;              // (s_kv, h_kv, d_qk), or less kRopeColumns
    const u16* k_rope;         // (s_kv, h_kv, kRopeColumns), or within k; a stride of 0: the same for all heads
    const u16* v;              // (s_kv, h_kv, d_v)
    const void* state_out;     // (s_q, h_q, d_v), 16 bits or fp32, or null
    const float* state_lse;    // (s_q, h_q), or null
    void* out;                 // (s_q, h_q, d_v), 16 bits or fp32; may be state_out
    float* lse;                // (s_q, h_q); may be state_lse
    Schedule* schedule;        // or null: one sequence, see one_sequence.cuh
    QueryTile* tiles;          // tiles with most keys first
    const u8* mask;            // (s_q, mask_bytes), or null: see mask.cuh
    const i32* cu_seqlens_q;   // (2,), or null; read where there is no schedule, see one_sequence.cuh
    const i32* cu_seqlens_kv;  // (2,), or null
    i64 mask_stride_bytes;
    i64 q_stride_s_elems, q_stride_h_elems;
    i64 q_rope_stride_s_elems, q_rope_stride_h_elems;
    i64 k_stride_s_elems, k_stride_h_elems;
    i64 k_rope_stride_s_elems, k_rope_stride_h_elems;
    i64 v_stride_s_elems, v_stride_h_elems;
    i64 state_out_stride_s_elems, state_out_stride_h_elems;
    i64 state_lse_stride_s_elems, state_lse_stride_h_elems;
    i64 out_stride_s_elems, out_stride_h_elems;
    i64 lse_stride_s_elems, lse_stride_h_elems;
    i64 cu_seqlens_q_stride_elems, cu_seqlens_kv_stride_elems;
    i32 s_q, s_kv, h_q, h_kv;
    i32 q_rope_column, k_rope_column;  // where the last columns begin in their array: 0, or d_qk - kRopeColumns
    i32 k_rope_heads;                  // 1, or h_kv
    i32 heads_at_once;                 // heads whose keys and values are walked together, so that they stay in L2
    i32 state_is_fp32, out_is_fp32;
    i32 mask_bytes;  // of a row; keys beyond are hidden
    i32 causal;      // read where there is no schedule
    float scale_log2;
};

#define MLA_PREFILL_FACTS()                                                                                          \
    MLA_FACT_LIST(params_layout, MLA_OFFSET(::mla::dense::PrefillParams, mask_stride_bytes),                         \
                  MLA_OFFSET(::mla::dense::PrefillParams, s_q), MLA_OFFSET(::mla::dense::PrefillParams, scale_log2), \
                  (int)sizeof(::mla::dense::PrefillParams))

MLA_DEVICE WorkItem work_item(const PrefillParams& p, i32 index, i32 num_tiles) {
    return work_item(p.h_q, p.heads_at_once, index, num_tiles);
}
}  // namespace mla::dense
