// The length of the value part of each row of kv that is selected, for sparse_bounds: |kv[j, :512]|.
//
// Grid: x = rows of kv, a warp each. 0 where that is not a number: what such a row gets is none either. Rows that
// nobody selects are not read, and get nothing.
#include "attention/dtype_variant.cuh"
#include "common/facts.cuh"
#include "ptx/control.cuh"
#include "tile/elements.cuh"
#include "tile/warp.cuh"

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kHeadDimV = 512;

// ---- Params ----------------------------------------------------------------------------------------------------
struct SparseNormsParams {
    const u16* kv;        // (s_kv, d_qk)
    const u32* selected;  // (s_kv,)
    float* norms;         // (s_kv,)
    i64 kv_stride_s_elems;
    i32 s_kv;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(SparseNormsParams, kv_stride_s_elems), MLA_OFFSET(SparseNormsParams, s_kv),
              (int)sizeof(SparseNormsParams));
MLA_FACT(threads, kThreads);
MLA_FACT(rows_per_block, kWarps);

extern "C" __global__ void __launch_bounds__(kThreads) mla_sparse_norms(const __grid_constant__ SparseNormsParams p) {
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
    if (lane == 0) p.norms[row] = sum <= kLargestFloat ? sqrtf(sum) : 0.f;
}
