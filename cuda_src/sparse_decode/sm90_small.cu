// Sparse MLA decode from FP8 records on Hopper, for few heads: warps that dequantise feed warpgroups that multiply.
//
//   S^T = K Q^T * scale           (64 x d_qk) (d_qk x heads) per tile of 64 listed tokens
//   P^T = exp2(S^T log2(e) - m)   m: running maximum of each head
//   l = sum of P,  O^T = V^T P^T  (512 x 64) (64 x heads); V is K's first 512 columns
//   out = O / (l + exp2(sink - m)),   lse = ln 2 (m + log2 l)
//
// Grid: x = blocks of heads, y = splits. To the schedule each query is a request with the entries of its lists as
// tokens. One block per SM iterates over the work items of its split (attention/split_work.cuh).
//
// The roles are in attention/sm90/small_records.cuh.
//
// Source: swapped operands for few query rows are FlashMLA-ETAP's idea (2025). FlashMLA's FP8 kernel (2025) has
// dequantising warps next to WGMMA. Here products use f16 instead of bf16 where scales are no powers of two, loads roll
// on over the end of a tile, heads are not padded to 64, and lists have any length.
#include "attention/sm90/small_records.cuh"

namespace mla::sparse_decode {
using namespace attention;
using namespace attention::sm90;

// ---- Variant ---------------------------------------------------------------------------------------------------
#ifdef MLA_COMPACT  // the second cache has the compact record
using Record = v41_mixed;
#else
using Record = MLA_RECORD;
#endif
using Small = SmallRecords<MLA_DTYPE, Record, SelectedTokens, MLA_BLOCK_ROWS>;

MLA_SPARSE_DECODE_FACTS();
MLA_SMALL_RECORDS_FACTS(Small);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(Small::kThreads, 1)
    mla_sparse_decode_sm90_small(const __grid_constant__ SparseDecodeParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_small_records<Small>(p, smem);
}
}  // namespace mla::sparse_decode
