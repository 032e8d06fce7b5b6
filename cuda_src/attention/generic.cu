// Dense MLA decode on the CUDA cores of any GPU: the fallback where no faster kernel fits, and the plain baseline.
//
//   s = q k^T * scale,   p = exp2(s log2(e) - m),   o = sum p v / sum p,   lse = ln 2 (m + log2 sum p)
//
// Also for sparse attention: one-token pages, and o = sum p v / (sum p + exp2(sink - m)).
//
// Grid: x = blocks of 8 query rows of all KV heads, y = splits (attention/split_work.cuh).
// A block fetches 32 tokens at a time into shared memory:
//
//   all warps   | fetch 32 keys |  scores: warp = row, lane = token | out: thread = 2 columns, 8 rows | fetch ...
//
// Everything is fp32 after the load; P is not rounded. Any token stride is supported.
#include "attention/generic_pages.cuh"

// Dense decode names no width.
#ifndef MLA_HEAD_DIM_QK
#define MLA_HEAD_DIM_QK 576
#endif

namespace mla::attention {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Pages = GenericPages<MLA_DTYPE, MLA_HEAD_DIM_QK>;

static_assert(sizeof(GenericPagesStorage<Pages>) <= 48 * 1024, "static shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(block_m, kBlockM);

// ---- Kernel ----------------------------------------------------------------------------------------------------
// Two blocks per SM: without the bound the compiler aims at four and spills on some targets.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    mla_attention_generic(const __grid_constant__ DecodeParams p) {
    __shared__ GenericPagesStorage<Pages> s;
    run_generic_pages(p, s);
}
}  // namespace mla::attention
