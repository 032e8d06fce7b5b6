// Dense MLA decode on the CUDA cores of any GPU, for the forms of attention/query_groups.cuh: queries whose number
// varies from request to request, a window, queries in two arrays.
//
// The mathematics and the grid are in attention/generic.cu. What differs: a split holds groups of queries.
#include "attention/generic_pages.cuh"

namespace mla::attention {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Pages = GenericPages<MLA_DTYPE, MLA_HEAD_DIM_QK, GroupedWork>;

static_assert(sizeof(GenericPagesStorage<Pages>) <= 48 * 1024, "static shared memory");

MLA_DECODE_FORM_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(block_m, kBlockM);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    mla_attention_generic_forms(const __grid_constant__ DecodeFormParams p) {
    __shared__ GenericPagesStorage<Pages> s;
    run_generic_pages(p, s);
}
}  // namespace mla::attention
