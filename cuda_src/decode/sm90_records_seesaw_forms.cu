// Dense MLA decode straight from FP8 records on Hopper, 64 query rows per block, for the forms of
// attention/query_groups.cuh: queries whose number varies from request to request, a window, queries in two arrays,
// results that are turned back.
//
// The mathematics, the grid and the source are in decode/sm90_records_seesaw.cu. What differs: a split holds groups of
// one query each instead of requests, and query rows are two pieces. What a window leaves out is not read.
#include "attention/sm90/seesaw_records.cuh"

namespace mla::decode {
using namespace attention;
using namespace attention::sm90;

// ---- Variant ---------------------------------------------------------------------------------------------------
using Records = SeesawRecords<MLA_DTYPE, MLA_RECORD, SlimGroupedTokens>;

MLA_DECODE_FORM_FACTS();
MLA_SEESAW_RECORDS_FACTS(Records);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kSeesawThreads, 1)
    mla_decode_sm90_records_seesaw_forms(const __grid_constant__ DecodeFormParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_seesaw_records<Records>(p, smem);
}
}  // namespace mla::decode
