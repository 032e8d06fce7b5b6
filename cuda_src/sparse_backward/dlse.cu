// The gradient through lse, as a change of delta, so that no other kernel of the sparse backward needs to handle it.
//
// lse is the log-sum-exp without the sink; its derivative is the softmax S without the sink: dS gains scale S dlse. The
// main kernel computes dS = scale P (dP - delta), where P includes the sink. S = P exp(total - lse) with total =
// log(exp(lse) + exp(sink)), so that dS is right, sink or not, with
//
//   delta - dlse exp(total - lse)
//
// in place of delta. sparse_backward_delta computes d_sink from delta itself: lse does not depend on the sink.
//
// P times the new delta is within |delta| + |dlse|, however large the factor: the bounds of a deterministic call.
//
// Grid: x = blocks of 256 pairs of a query and a head.
#include "common/facts.cuh"
#include "ptx/control.cuh"

namespace mla::sparse_backward {

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
// log2 of the largest distinguishable exp(total - lse). Slightly more and P is 0 in float32: no infinity may meet it.
constexpr float kMostShareLog2 = 100.f;

// ---- Params ----------------------------------------------------------------------------------------------------
struct DlseParams {
    const float* dlse;    // (s_q, h_q)
    const float* lse;     // (s_q, h_q)
    const float* lse2;    // (s_q, h_q), contiguous: total, of base 2; infinite without a key, or with an infinite sink
    float* delta;         // (s_q, h_q), contiguous: changed
    float* delta_bounds;  // (s_q, h_q), contiguous; null if nothing needs them
    i64 dlse_stride_s_elems, dlse_stride_h_elems;
    i64 lse_stride_s_elems, lse_stride_h_elems;
    i32 s_q, h_q;
    float lse_to_log2;  // from the caller's base to base 2
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(DlseParams, dlse_stride_s_elems), MLA_OFFSET(DlseParams, s_q),
              MLA_OFFSET(DlseParams, lse_to_log2), (int)sizeof(DlseParams));
MLA_FACT(threads, kThreads);
MLA_FACT(pairs_per_block, kThreads);

extern "C" __global__ void __launch_bounds__(kThreads) mla_sparse_backward_dlse(const __grid_constant__ DlseParams p) {
    griddepcontrol_wait();
    const i64 at = (i64)blockIdx.x * kThreads + threadIdx.x;
    if (at >= (i64)p.s_q * p.h_q) return;
    const i64 query = at / p.h_q, head = at % p.h_q;
    const float total = p.lse2[at], delta = p.delta[at];
    float natural = 0.f, share = 0.f;
    if (total != -negative_infinity()) {
        const float own = p.lse[query * p.lse_stride_s_elems + head * p.lse_stride_h_elems] * p.lse_to_log2;
        natural = p.dlse[query * p.dlse_stride_s_elems + head * p.dlse_stride_h_elems] * (kLog2E / p.lse_to_log2);
        share = exp2f(fminf(total - own, kMostShareLog2));
    }
    p.delta[at] = delta - natural * share;
    if (p.delta_bounds != nullptr) p.delta_bounds[at] = fabsf(delta) + fabsf(natural);
}
}  // namespace mla::sparse_backward
