// Sparse MLA decode from FP8 records on the CUDA cores of any GPU: the plain baseline.
//
//   s = q k^T * scale,   p = exp2(s log2(e) - m),   o = sum p v / (sum p + exp2(sink - m)),   lse = ln 2 (m + log2 sum
//   p)
//
// To the schedule each query is a request with the entries of its lists as tokens.
//
// Grid: x = blocks of 8 heads, y = splits (attention/split_work.cuh). See attention/generic_records.cuh.
#include "attention/generic_records.cuh"

namespace mla::sparse_decode {
using namespace attention;

// ---- Variant ---------------------------------------------------------------------------------------------------
using Records = GenericRecords<MLA_DTYPE, MLA_RECORD, SelectedTokens>;

MLA_SPARSE_DECODE_FACTS();
MLA_GENERIC_RECORDS_FACTS(Records);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kGenericThreads, 2)
    mla_sparse_decode_generic(const __grid_constant__ SparseDecodeParams p) {
    __shared__ GenericStorage<Records> s;
    run_generic_records(p, s);
}
}  // namespace mla::sparse_decode
