// Dense MLA decode straight from FP8 records on the CUDA cores of any GPU: the plain baseline.
//
//   s = q k^T * scale,   p = exp2(s log2(e) - m),   o = sum p v / sum p,   lse = ln 2 (m + log2 sum p)
//
// Grid: x = blocks of 8 query rows, y = splits (attention/split_work.cuh). See attention/generic_records.cuh. It
// supports all optional inputs of attention/query_groups.cuh, and is not built for speed.
#include "attention/generic_records.cuh"

namespace mla::decode {
using namespace attention;

// ---- Variant ---------------------------------------------------------------------------------------------------
using Records = GenericRecords<MLA_DTYPE, MLA_RECORD, GroupedTokens>;

MLA_DECODE_FORM_FACTS();
MLA_GENERIC_RECORDS_FACTS(Records);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kGenericThreads, 2)
    mla_decode_generic_records(const __grid_constant__ DecodeFormParams p) {
    __shared__ GenericStorage<Records> s;
    run_generic_records(p, s);
}
}  // namespace mla::decode
