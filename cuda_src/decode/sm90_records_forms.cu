// Dense MLA decode straight from FP8 records on Hopper, for the forms of attention/query_groups.cuh: queries whose
// number varies from request to request, a window, queries in two arrays, results that are turned back.
//
// The mathematics, the grid and the source are in decode/sm90_records.cu. What differs: a split holds groups of queries
// instead of requests, masks begin where the windows of rows do, and query rows are two pieces each.
#include "attention/sm90/small_records.cuh"

namespace mla::decode {
using namespace attention;
using namespace attention::sm90;

// ---- Variant ---------------------------------------------------------------------------------------------------
using Small = SmallRecords<MLA_DTYPE, MLA_RECORD, GroupedTokens, MLA_BLOCK_ROWS>;

MLA_DECODE_FORM_FACTS();
MLA_SMALL_RECORDS_FACTS(Small);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(Small::kThreads, 1)
    mla_decode_sm90_records_forms(const __grid_constant__ DecodeFormParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_small_records<Small>(p, smem);
}
}  // namespace mla::decode
