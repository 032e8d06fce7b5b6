// What the kernels of dense attention have in common: their parameters, and the list of tiles of queries.
#pragma once
#include "common/facts.cuh"
#include "common/types.cuh"

namespace mla::dense {
constexpr i32 kTileQueries = 128;
constexpr i32 kRopeColumns = 64;  // the last columns of queries and keys, which may be arrays of their own

// Up to 128 neighbouring queries of a sequence, and its keys. Query r of the tile sees the first diagonal + r + 1 of
// them, at most all.
struct alignas(16) QueryTile {
    i32 first_query, queries;
    i32 first_key, keys;
    i32 diagonal;  // at least `keys`, where queries see all keys
    i32 unused[3];

    MLA_DEVICE i32 seen(i32 row) const { return min(keys, diagonal + row + 1); }
    MLA_DEVICE i32 seen_by_any() const { return max(0, seen(queries - 1)); }
    MLA_DEVICE i32 seen_by_all() const { return max(0, seen(0)); }
};

// One after another; without keys, the queries before the first sequence and after the last.
struct Sequence {
    i32 first_query, queries;
    i32 first_key, keys;
    i32 first_tile;
};

// What the schedule finds, in the workspace.
struct Schedule {
    i32 num_tiles;
    i32 next_item;  // of those that blocks take in turn; the first ones are given by the block's index
};

struct PrefillParams {
    const u16* q;              // (s_q, h_q, d_qk), or less kRopeColumns
    const u16* q_rope;         // (s_q, h_q, kRopeColumns), or within q
    const u16* k;              // (s_kv, h_kv, d_qk), or less kRopeColumns
    const u16* k_rope;         // (s_kv, h_kv, kRopeColumns), or within k; a stride of 0: the same for all heads
    const u16* v;              // (s_kv, h_kv, d_v)
    const i32* cu_seqlens_q;   // (b + 1,), or null: one sequence
    const i32* cu_seqlens_kv;  // (b + 1,), or null
    const void* state_out;     // (s_q, h_q, d_v), 16 bits or fp32, or null
    const float* state_lse;    // (s_q, h_q), or null
    void* out;                 // (s_q, h_q, d_v), 16 bits or fp32; may be state_out
    float* lse;                // (s_q, h_q); may be state_lse
    Schedule* schedule;
    Sequence* sequences;  // b + 2
    QueryTile* tiles;     // those with most keys first
    i64 q_stride_s_elems, q_stride_h_elems;
    i64 q_rope_stride_s_elems, q_rope_stride_h_elems;
    i64 k_stride_s_elems, k_stride_h_elems;
    i64 k_rope_stride_s_elems, k_rope_stride_h_elems;
    i64 v_stride_s_elems, v_stride_h_elems;
    i64 cu_seqlens_q_stride_elems, cu_seqlens_kv_stride_elems;
    i64 state_out_stride_s_elems, state_out_stride_h_elems;
    i64 state_lse_stride_s_elems, state_lse_stride_h_elems;
    i64 out_stride_s_elems, out_stride_h_elems;
    i64 lse_stride_s_elems, lse_stride_h_elems;
    i32 s_q, s_kv, h_q, h_kv, b;
    i32 q_rope_column, k_rope_column;  // where the last columns begin in their array: 0, or d_qk - kRopeColumns
    i32 k_rope_heads;                  // 1, or h_kv
    i32 heads_at_once;                 // whose keys and values are walked together, so that they stay in L2
    i32 causal, state_is_fp32, out_is_fp32;
    float scale_log2;
};

#define MLA_PREFILL_FACTS()                                                                                          \
    MLA_FACT_LIST(params_layout, MLA_OFFSET(::mla::dense::PrefillParams, q_stride_s_elems),                          \
                  MLA_OFFSET(::mla::dense::PrefillParams, s_q), MLA_OFFSET(::mla::dense::PrefillParams, scale_log2), \
                  (int)sizeof(::mla::dense::PrefillParams))

// A tile of queries of one head.
struct WorkItem {
    i32 tile, head;
};

// The order of work: the heads in groups of heads_at_once; within one, tile after tile, and each tile's heads.
MLA_DEVICE WorkItem work_item(const PrefillParams& p, i32 index, i32 num_tiles) {
    const i32 group = index / (p.heads_at_once * num_tiles), within = index - group * p.heads_at_once * num_tiles;
    const i32 first_head = group * p.heads_at_once, heads = min(p.heads_at_once, p.h_q - first_head);
    return WorkItem{within / heads, first_head + within % heads};
}
}  // namespace mla::dense
