// Parameters and sizes of sparse MLA, shared by its kernels.
//
// sparse_rows resolves the caller's indices once: for each query the rows of kv that it attends to, without the invalid
// ones. All other kernels see these lists only. Strides are in elements.
#pragma once
#include "common/facts.cuh"
#include "common/types.cuh"

constexpr i32 kRowsPerTile = 64;  // lists are padded to whole tiles, with kNoRow
constexpr i32 kNoRow = -1;

// Indices of a query to rows of kv.
struct SparseRowsParams {
    const i32* indices;        // (s_q, topk)
    const i32* topk_length;    // (s_q,), or null: every slot counts
    const i32* cu_seqlens_q;   // (b + 1,), or null: one sequence
    const i32* cu_seqlens_kv;  // (b + 1,), or null
    i32* rows;                 // (s_q, rows_stride): valid rows, then kNoRow to the end of the tile
    i32* counts;               // (s_q,): how many are valid
    u32* selected;             // (s_kv,), zeroed: how many slots select the row; or null
    i64 indices_stride_s_elems, indices_stride_k_elems, topk_length_stride_elems;
    i64 cu_seqlens_q_stride_elems, cu_seqlens_kv_stride_elems;
    i64 rows_stride_elems;  // a multiple of kRowsPerTile, at least topk
    i32 s_q, s_kv, topk, b;
    i32 causal, ordered;
};

// The main kernel of the backward. Arrays without strides are contiguous.
struct SparseBackwardParams {
    const u16* q;           // (s_q, h_q, d_qk)
    const u16* kv;          // (s_kv, d_qk)
    const u16* dout;        // (s_q, h_q, 512)
    const i32* rows;        // (s_q, rows_stride)
    const i32* counts;      // (s_q,)
    const float* lse2;      // (s_q, h_q): base 2, the sink included; +inf for a row without a key
    const float* delta;     // (s_q, h_q): sum of out * dout
    const float* rounders;  // (s_kv + 1,): of deterministic additions, attention/exact_addition.cuh; then their bound
    u16* dq;                // (s_q, h_q, d_qk)
    float* dkv;             // (s_kv, d_qk), zeroed; if deterministic kLevels of them
    u64* progress;          // zeroed: what keeps the blocks in step; null: they need not be
    i64 q_stride_s_elems, q_stride_h_elems, kv_stride_s_elems;
    i64 dout_stride_s_elems, dout_stride_h_elems;
    i64 dq_stride_s_elems, dq_stride_h_elems;
    i64 rows_stride_elems;
    i32 s_q, s_kv, h_q, padding;
    float scale, scale_log2;  // of the scores; scale * log2(e)
};

// Where the sum for a dimension stands in its row of the workspace, of the Hopper kernels and the weight-stationary
// one. Of a row, the four threads of a quad hold two dims each in every eight; the order below puts a thread's dims of
// two such groups side by side, so that the quad's additions cover 64 bytes.
MLA_DEVICE constexpr i32 dkv_position(i32 dim) { return dim / 16 * 16 + dim % 8 / 2 * 4 + dim % 16 / 8 * 2 + dim % 2; }

// The same for the Blackwell kernel with transposed sums (sm100/sparse_backward.cu): a thread holds dims 8 apart, four
// of them of 32, or two of 16 among the RoPE dims, and eight lanes cover 128 or 64 bytes of a row.
MLA_DEVICE constexpr i32 dkv_position_sm100(i32 dim) {
    return dim < 512 ? dim / 32 * 32 + dim % 8 * 4 + dim % 32 / 8 : dim / 16 * 16 + dim % 8 * 2 + dim % 16 / 8;
}
