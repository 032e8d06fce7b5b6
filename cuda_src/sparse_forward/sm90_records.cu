// Sparse MLA on Hopper straight from FP8 records: warps that dequantise feed a warpgroup that multiplies.
//
//   S^T = K Q^T * scale           (64 x d_qk) (d_qk x heads) per tile of 64 listed rows
//   P^T = exp2(S^T log2(e) - m)   m: running maximum of each head
//   l = sum of P,  O^T = V^T P^T  (512 x 64) (64 x heads); V is K's first 512 columns
//   out = O / (l + exp2(sink - m)),   lse = ln 2 (m + log2 l),   max_logits = max of S
//
// Grid: x = blocks of heads, y = splits. One block per SM iterates over the work items of its split
// (attention/split_work.cuh). The kernel is sparse decode's for few heads, with tokens from attention_row_lists' lists.
// The roles are in attention/sm90/small_records.cuh.
//
// Source: as sparse_decode/sm90_small.cu.
#include "attention/sm90/small_records.cuh"

namespace mla::sparse_forward {
using namespace attention;
using namespace attention::sm90;

// ---- Variant ---------------------------------------------------------------------------------------------------
using Small = SmallRecords<MLA_DTYPE, MLA_RECORD, ListedRows, MLA_BLOCK_ROWS>;

MLA_DECODE_FACTS();
MLA_SMALL_RECORDS_FACTS(Small);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(Small::kThreads, 1)
    mla_sparse_forward_sm90_records(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_small_records<Small>(p, smem);
}
}  // namespace mla::sparse_forward
