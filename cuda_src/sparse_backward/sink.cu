// The gradient of the attention sinks: d_sink = -(sum of sparse_backward_delta's spans), always in the same order.
//
// Grid: x = blocks of 32 heads, one per lane. Warp w adds the spans w, w + 32, ...; then one warp adds the warps' sums.
#include "common/facts.cuh"
#include "ptx/control.cuh"

namespace mla::sparse_backward {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 1024;
constexpr i32 kWarps = kThreads / kWarpThreads;

// ---- Params ----------------------------------------------------------------------------------------------------
struct SinkParams {
    const float* sink_sums;  // (spans, h_q)
    float* d_sink;           // (h_q,)
    i32 spans, h_q;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(SinkParams, spans), (int)sizeof(SinkParams));
MLA_FACT(threads, kThreads);
MLA_FACT(heads_per_block, kWarpThreads);

extern "C" __global__ void __launch_bounds__(kThreads) mla_sparse_backward_sink(const __grid_constant__ SinkParams p) {
    __shared__ float sums[kWarps][kWarpThreads];
    griddepcontrol_wait();
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const i32 head = blockIdx.x * kWarpThreads + lane;
    float sum = 0.f;
    if (head < p.h_q) {
#pragma unroll 4
        for (i32 span = warp; span < p.spans; span += kWarps) sum += p.sink_sums[(i64)span * p.h_q + head];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || head >= p.h_q) return;
    float total = 0.f;
#pragma unroll
    for (i32 i = 0; i < kWarps; ++i) total += sums[i][lane];
    p.d_sink[head] = -total;
}
}  // namespace mla::sparse_backward
