// Parameters of the main kernels of the sparse backward (one layout, so that one host record serves all), and the order
// in which they keep a row of dKV. Strides are in elements.
#pragma once
#include "attention/row_list.cuh"
#include "common/facts.cuh"

namespace mla::sparse_backward {
using namespace attention;

// The main kernel of the backward. Arrays without strides are contiguous.
struct BackwardParams {
    const u16* q;             // (s_q, h_q, d_qk)
    const u16* kv;            // (s_kv, d_qk)
    const u16* dout;          // (s_q, h_q, 512)
    const i32* rows;          // (s_q, rows_stride)
    const i32* counts;        // (s_q,)
    const float* lse2;        // (s_q, h_q): times lse2_factor of base 2, the sink included; infinite without a key
    float* delta;             // (s_q, h_q): sum of out * dout; with `out` the main kernel writes it
    const float* extractors;  // (s_kv + 1,): of binned sums (tile/binned_sum.cuh), then their bound
    u16* dq;                  // (s_q, h_q, d_qk)
    float* dkv;               // (s_kv, d_qk), zeroed; if deterministic kNumBins of them
    u64* progress;            // zeroed: for the blocks' lockstep; null: without it
    const u16* out;           // (s_q, h_q, 512), for delta; null if delta is ready. Kernels that need it never get it
    i64 q_stride_s_elems, q_stride_h_elems, kv_stride_s_elems;
    i64 dout_stride_s_elems, dout_stride_h_elems;
    i64 dq_stride_s_elems, dq_stride_h_elems;
    i64 out_stride_s_elems, out_stride_h_elems;
    i64 lse2_stride_s_elems, lse2_stride_h_elems;
    i64 rows_stride_elems;
    i32 s_q, s_kv, h_q;
    float lse2_factor;        // to base 2
    float scale, scale_log2;  // of the scores; scale * log2(e)
};

// The position of a dim in its row of the workspace, for the Hopper kernels and the weight-stationary one. The four
// threads of a quad hold two dims each of every eight; this order makes a thread's dims of two such groups contiguous,
// so that the quad's additions cover 64 bytes.
MLA_DEVICE constexpr i32 dkv_position(i32 dim) { return dim / 16 * 16 + dim % 8 / 2 * 4 + dim % 16 / 8 * 2 + dim % 2; }

// dkv_position for the Blackwell kernel with transposed sums (sparse_backward/sm100.cu): a thread holds dims 8 apart,
// four of each 32, or two of 16 among the RoPE dims, and eight lanes cover 128 or 64 bytes of a row.
MLA_DEVICE constexpr i32 dkv_position_sm100(i32 dim) {
    return dim < 512 ? dim / 32 * 32 + dim % 8 * 4 + dim % 32 / 8 : dim / 16 * 16 + dim % 8 * 2 + dim % 16 / 8;
}
}  // namespace mla::sparse_backward

#define MLA_BACKWARD_FACTS()                                                                         \
    MLA_FACT_LIST(params_layout, MLA_OFFSET(mla::sparse_backward::BackwardParams, q_stride_s_elems), \
                  MLA_OFFSET(mla::sparse_backward::BackwardParams, s_q),                             \
                  MLA_OFFSET(mla::sparse_backward::BackwardParams, lse2_factor),                     \
                  (int)sizeof(mla::sparse_backward::BackwardParams))
