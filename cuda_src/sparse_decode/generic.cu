// Sparse MLA decode from FP8 records on the CUDA cores of any GPU: the plain baseline.
//
//   s = q k^T * scale,   p = exp2(s log2(e) - m),   o = sum p v / (sum p + exp2(sink - m)),   lse = ln 2 (m + log2 sum
//   p)
//
// To the schedule each query is a request whose tokens are its list (sparse_decode/lists.cu).
//
// Grid: x = blocks of 8 heads, y = splits (attention/split_work.cuh). See attention/generic_records.cuh.
#include "attention/generic_records.cuh"

namespace mla::sparse_decode {
using namespace attention;

// ---- Variant ---------------------------------------------------------------------------------------------------
using TokenRecord = MLA_RECORD;
using Records = GenericRecords<MLA_DTYPE, TokenRecord, SelectedTokens>;

static_assert(sizeof(GenericStorage<Records>) <= 48 * 1024, "static shared memory");

MLA_SPARSE_DECODE_FACTS();
MLA_FACT(threads, kGenericThreads);
MLA_FACT(block_m, kGenericRows);
MLA_RECORD_FACT(TokenRecord);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kGenericThreads, 2)
    mla_sparse_decode_generic(const __grid_constant__ SparseDecodeParams p) {
    __shared__ GenericStorage<Records> s;
    run_generic_records(p, s);
}
}  // namespace mla::sparse_decode
