// The L2 norm of the value part of each selected row of kv, |kv[j, :512]|, for exact_sums_bounds.
//
// Grid: x = rows of kv, one warp each. A non-finite norm becomes 0: the additions to such a row are non-finite anyway.
// Rows that no query selects are neither read nor written.
#include "attention/shapes.cuh"
#include "common/facts.cuh"
#include "ptx/control.cuh"
#include "tile/elements.cuh"
#include "tile/warp.cuh"

namespace mla::exact_sums {
using namespace attention;
using Element = MLA_DTYPE;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kWarps = kThreads / kWarpThreads;

// ---- Params ----------------------------------------------------------------------------------------------------
struct NormsParams {
    const u16* kv;        // (s_kv, d_qk)
    const u32* selected;  // (s_kv,)
    float* norms;         // (s_kv,)
    i64 kv_stride_s_elems;
    i32 s_kv;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(NormsParams, kv_stride_s_elems), MLA_OFFSET(NormsParams, s_kv),
              (int)sizeof(NormsParams));
MLA_FACT(threads, kThreads);
MLA_FACT(rows_per_block, kWarps);

extern "C" __global__ void __launch_bounds__(kThreads) mla_exact_sums_norms(const __grid_constant__ NormsParams p) {
    griddepcontrol_wait();
    const i32 lane = threadIdx.x % kWarpThreads;
    const i64 row = (i64)blockIdx.x * kWarps + threadIdx.x / kWarpThreads;
    if (row >= p.s_kv || p.selected[row] == 0) return;
    float sum = 0.f;
#pragma unroll
    for (i32 i = 0; i < kHeadDimV / kChunkElems / kWarpThreads; ++i) {
        float x[kChunkElems];
        load_chunk<Element>(x, p.kv + row * p.kv_stride_s_elems + (i * kWarpThreads + lane) * kChunkElems);
#pragma unroll
        for (i32 j = 0; j < kChunkElems; ++j) sum = fmaf(x[j], x[j], sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) p.norms[row] = sum <= kMaxFloat ? sqrtf(sum) : 0.f;
}
}  // namespace mla::exact_sums
