// The parameters of the kernels of dense attention, backward, and how they keep sums in the workspace.
//
//   P = exp2(scale_log2 Q K^T - lse2),   dP = dO V^T,   dS = P (dP - delta)
//   dV = P^T dO,   dK = scale dS^T Q,   dQ = scale dS K
//
// Per-query data in the workspace is ordered by the rows of the query tiles (dense/tiles.cuh). Sequences begin at
// multiples of kRowGroup rows, so that tiles are aligned; a group's rows beyond its sequence have lse2 = +inf and delta
// = 0. A tile may be read whole at any sequence's end, but the rows after it belong to the next sequence: rows past
// `queries` must be masked, whatever was read.
#pragma once
#include "common/facts.cuh"
#include "dense/tiles.cuh"

namespace mla::dense {
struct PrefillBackwardParams {
    const u16* q;            // (s_q, h_q, d_qk), or less kRopeColumns
    const u16* q_rope;       // (s_q, h_q, kRopeColumns), or within q
    const u16* k;            // (s_kv, h_kv, d_qk), or less kRopeColumns
    const u16* k_rope;       // (s_kv, h_kv, kRopeColumns), or within k; a stride of 0: the same for all heads
    const u16* v;            // (s_kv, h_kv, d_v)
    const void* out;         // (s_q, h_q, d_v), 16 bits or fp32
    const u16* dout;         // (s_q, h_q, d_v)
    const float* lse;        // (s_q, h_q), natural
    const float* dlse;       // (s_q, h_q), or null
    float* lse2;             // (h_q, num_rows): lse log2(e); +inf without a key, or where lse is infinite: P is 0
    float* delta;            // (h_q, num_rows): sum of out * dout, less dlse; 0 where lse is infinite
    float* dq_sums;          // (h_q, num_rows, d_qk), zeroed, without the factor scale; or null. See dq_sum_offset()
    float* dk_rope_sums;     // with the factor scale; null: every KV head has a dk_rope of its own. Fast: (s_kv,
                             // kRopeColumns), zeroed, to be added to. Deterministic: (s_kv, h_kv, kRopeColumns)
    u16* dq;                 // as q
    u16* dq_rope;            // as q_rope
    u16* dk;                 // as k
    u16* dk_rope;            // as k_rope
    u16* dv;                 // as v
    Schedule* schedule;      // of query tiles
    Schedule* key_schedule;  // of key tiles
    QueryTile* tiles;        // tiles with most keys first
    KeyTile* key_tiles;      // tiles with most queries first
    i64 q_stride_s_elems, q_stride_h_elems;
    i64 q_rope_stride_s_elems, q_rope_stride_h_elems;
    i64 k_stride_s_elems, k_stride_h_elems;
    i64 k_rope_stride_s_elems, k_rope_stride_h_elems;
    i64 v_stride_s_elems, v_stride_h_elems;
    i64 out_stride_s_elems, out_stride_h_elems;
    i64 dout_stride_s_elems, dout_stride_h_elems;
    i64 lse_stride_s_elems, lse_stride_h_elems;
    i64 dlse_stride_s_elems, dlse_stride_h_elems;
    i64 dk_rope_sums_stride_s_elems, dk_rope_sums_stride_h_elems;  // the latter is 0 if heads add to one sum
    i64 dq_stride_s_elems, dq_stride_h_elems;
    i64 dq_rope_stride_s_elems, dq_rope_stride_h_elems;
    i64 dk_stride_s_elems, dk_stride_h_elems;
    i64 dk_rope_stride_s_elems, dk_rope_stride_h_elems;
    i64 dv_stride_s_elems, dv_stride_h_elems;
    i32 s_q, s_kv, h_q, h_kv;
    i32 num_rows;                      // at most, and enough to read kTileQueries of them from any query's
    i32 q_rope_column, k_rope_column;  // where the last columns begin, in q and dq, k and dk: 0, or d_qk - kRopeColumns
    i32 k_rope_heads;                  // 1, or h_kv
    i32 heads_at_once;                 // query heads whose keys and values are walked together by tiles of queries
    i32 kv_heads_at_once;              // KV heads whose queries and sums are walked together by tiles of keys
    i32 out_is_fp32;
    float scale, scale_log2;
};

#define MLA_PREFILL_BACKWARD_FACTS()                                                                \
    MLA_FACT_LIST(params_layout, MLA_OFFSET(::mla::dense::PrefillBackwardParams, q_stride_s_elems), \
                  MLA_OFFSET(::mla::dense::PrefillBackwardParams, s_q),                             \
                  MLA_OFFSET(::mla::dense::PrefillBackwardParams, scale),                           \
                  (int)sizeof(::mla::dense::PrefillBackwardParams))

// Offset of an element of a head's dq_sums. A group of 16 rows is contiguous, in the order of a warp's m64nNk16
// accumulators: lane by lane four elements (two rows, two columns) of every eight columns. So a tile's sums are one
// range for bulk reductions, and a fragment goes to shared memory in 16-byte stores.
MLA_DEVICE constexpr i64 dq_sum_offset(i64 row, i32 column, i32 columns) {
    const i32 lane = (i32)(row % 8) * 4 + column % 8 / 2, element = (i32)(row % kRowGroup / 8) * 2 + column % 2;
    return row / kRowGroup * kRowGroup * columns + (column / 8 * kWarpThreads + lane) * 4 + element;
}
}  // namespace mla::dense
