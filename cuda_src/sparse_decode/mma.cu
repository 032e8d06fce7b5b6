// Sparse MLA decode from FP8 records with mma.sync, for every GPU since Ampere: blocks of up to 32 heads.
//
//   S = Q K^T * scale             (heads x d_qk) (d_qk x 32) per step of 32 listed tokens
//   P = exp2(S log2(e) - m)       m: running maximum of each head
//   l = sum of P,  O = P V        (heads x 32) (32 x 512); V is K's first 512 columns
//   out = O / (l + exp2(sink - m)),   lse = ln 2 (m + log2 l)
//
// Grid: x = blocks of heads, y = splits. To the schedule each query is a request with the entries of its lists as
// tokens. One block per SM iterates over the work items of its split (attention/split_work.cuh).
// attention/mma/records.cuh processes a step.
#include "attention/mma/codes.cuh"

namespace mla::sparse_decode {
using namespace attention;

// ---- Variant ---------------------------------------------------------------------------------------------------
using Records = mma::MmaRecords<MLA_DTYPE, MLA_RECORD, SelectedTokens, MLA_BLOCK_ROWS, MLA_SMEM_KB * 1024>;

MLA_SPARSE_DECODE_FACTS();
MLA_MMA_RECORDS_FACTS(Records);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(mma::kThreads, 1)
    mla_sparse_decode_mma(const __grid_constant__ SparseDecodeParams p) {
    extern __shared__ __align__(mma::kSegmentBytes) u8 smem[];
    mma::run_records<Records>(p, smem);
}
}  // namespace mla::sparse_decode
