// Sparse MLA decode from FP8 records on Hopper, 64 heads per block: the seesaw over keys that a warpgroup dequantises.
//
//   S = Q K^T * scale            (64 heads x d_qk) (d_qk x 64) per tile of 64 listed tokens
//   P = exp2(S log2(e) - m)      m: running row maximum
//   l = sum of P,  O = P V       V is K's first 512 columns
//   out = O / (l + exp2(sink - m)),   lse = ln 2 (m + log2 l)
//
// Grid: x = blocks of 64 heads, y = splits. To the schedule each query is a request with the entries of its lists as
// tokens. One block per SM iterates over the work items of its split (attention/split_work.cuh). No cluster: blocks of
// one query dequantise for themselves.
//
// The roles are in attention/sm90/seesaw_records.cuh.
//
// Source: FlashMLA's FP8 sparse decode (2025) also dequantises in a third warpgroup. Here both math warpgroups score,
// in f16 where scales are no powers of two, and blocks do not exchange dequantised keys.
#include "attention/sm90/seesaw_records.cuh"

namespace mla::sparse_decode {
using namespace attention;
using namespace attention::sm90;

// ---- Variant ---------------------------------------------------------------------------------------------------
#ifdef MLA_COMPACT  // the second cache has the compact record
using Record = v41_mixed;
#else
using Record = MLA_RECORD;
#endif
using Records = SeesawRecords<MLA_DTYPE, Record, SelectedTokens>;

MLA_SPARSE_DECODE_FACTS();
MLA_SEESAW_RECORDS_FACTS(Records);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kSeesawThreads, 1)
    mla_sparse_decode_sm90(const __grid_constant__ SparseDecodeParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_seesaw_records<Records>(p, smem);
}
}  // namespace mla::sparse_decode
