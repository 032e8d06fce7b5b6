// Per-query, per-head inputs of the sparse backward's main kernel.
//
//   delta = sum out * dout,   lse2 = log2(exp(lse) + exp(sink)),   d_sink = -sum over queries of w delta
//   w = 1 / (1 + exp(lse - sink)), the sink's share of the weights
//
// Grid: x = spans of 8 queries of one head, one warp each, neighbouring warps take neighbouring heads. A warp sums w
// delta over its span in the order of the queries; sparse_backward_sink adds the spans.
//
// A row is empty if its query has no key or if its lse is infinite: then out and dout are not read, delta is 0 and lse2
// is +Inf, so that exp2(s - lse2) is 0.
#include "common/facts.cuh"
#include "ptx/control.cuh"
#include "sparse_backward/delta.cuh"
#include "tile/huge_lse.cuh"

namespace mla::sparse_backward {
using Element = MLA_DTYPE;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kSpanQueries = 8;

// ---- Params ----------------------------------------------------------------------------------------------------
struct DeltaParams {
    const void* out;         // (s_q, h_q, 512), 16-bit or fp32
    const u16* dout;         // (s_q, h_q, 512)
    const float* lse;        // (s_q, h_q)
    const float* attn_sink;  // (h_q,), or null
    const i32* counts;       // (s_q,)
    float* delta;            // (s_q, h_q), contiguous
    float* lse2;             // (s_q, h_q), contiguous
    float* sink_sums;        // (spans, h_q), contiguous; null without a sink
    i64 out_stride_s_elems, out_stride_h_elems;
    i64 dout_stride_s_elems, dout_stride_h_elems;
    i64 lse_stride_s_elems, lse_stride_h_elems;
    i64 attn_sink_stride_elems;
    i32 s_q, h_q;
    i32 out_is_fp32;
    float lse_to_log2;  // from the caller's base to base 2
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(DeltaParams, out_stride_s_elems), MLA_OFFSET(DeltaParams, s_q),
              MLA_OFFSET(DeltaParams, lse_to_log2), (int)sizeof(DeltaParams));
MLA_FACT(threads, kThreads);
MLA_FACT(units_per_block, kWarps);
MLA_FACT(span_queries, kSpanQueries);

template <class Out>
MLA_DEVICE float any_dot(const Out* out, const u16* dout, i32 lane) {
    float sum = 0.f;
#pragma unroll 1
    for (i32 column = lane * kChunkElems; column < kHeadDimV; column += kWarpThreads * kChunkElems) {
        float x[kChunkElems], y[kChunkElems];
        load_chunk<Element>(x, out + column);
        load_chunk<Element>(y, dout + column);
#pragma unroll
        for (i32 i = 0; i < kChunkElems; ++i) sum = fmaf(x[i], y[i], sum);
    }
    return sum;
}

MLA_DEVICE float row_delta(const DeltaParams& p, i64 query, i64 head, i32 lane) {
    const i64 at = query * p.out_stride_s_elems + head * p.out_stride_h_elems;
    const u16* out = static_cast<const u16*>(p.out) + at;
    const u16* dout = p.dout + query * p.dout_stride_s_elems + head * p.dout_stride_h_elems;
    if (p.out_is_fp32) return warp_sum(any_dot(static_cast<const float*>(p.out) + at, dout, lane));
    const bool aligned = (reinterpret_cast<u64>(out) | reinterpret_cast<u64>(dout)) % 16 == 0;
    if (!aligned) return warp_sum(any_dot(out, dout, lane));
    DeltaLoads loads;
    loads.start(out, dout, lane);
    return warp_sum(loads.dot<Element>());
}

// log2(2^a + 2^b) of a finite a and any b. NaN propagates.
MLA_DEVICE float add_exponentials(float a, float b) { return (a > b ? a : b) + log2f(1.f + exp2f(-fabsf(a - b))); }

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_sparse_backward_delta(const __grid_constant__ DeltaParams p) {
    griddepcontrol_wait();
    const i32 lane = threadIdx.x % kWarpThreads;
    const i64 unit = (i64)blockIdx.x * kWarps + threadIdx.x / kWarpThreads;
    const i64 head = unit % p.h_q, span = unit / p.h_q;
    const i64 end = min((span + 1) * kSpanQueries, (i64)p.s_q);
    const float sink2 = p.attn_sink == nullptr || span * kSpanQueries >= p.s_q
                            ? negative_infinity()
                            : p.attn_sink[head * p.attn_sink_stride_elems] * kLog2E;
    float sink_sum = 0.f;
    for (i64 query = span * kSpanQueries; query < end; ++query) {
        const float lse = p.lse[query * p.lse_stride_s_elems + head * p.lse_stride_h_elems];
        const float own = lse2_of_weights(lse * p.lse_to_log2);
        float delta = 0.f, lse2 = -negative_infinity();
        if (p.counts[query] > 0 && own != -negative_infinity()) {
            delta = row_delta(p, query, head, lane);
            lse2 = add_exponentials(own, sink2);
            sink_sum += delta / (1.f + exp2f(own - sink2));
        }
        if (lane == 0) {
            p.delta[query * p.h_q + head] = delta;
            p.lse2[query * p.h_q + head] = lse2;
        }
    }
    if (p.sink_sums != nullptr && lane == 0 && span * kSpanQueries < p.s_q) p.sink_sums[span * p.h_q + head] = sink_sum;
}
}  // namespace mla::sparse_backward
