// Sparse MLA decode from FP8 records on Blackwell: warps that dequantise feed tcgen05 with swapped operands.
//
//   S^T = K Q^T * scale           (64 x d_qk) (d_qk x heads) per tile of 64 listed tokens
//   P^T = exp2(S^T log2(e) - m)   m: running maximum of each head
//   l = sum of P,  O^T = V^T P^T  (512 x 64) (64 x heads), in tensor memory; V is K's first 512 columns
//   out = O / (l + exp2(sink - m)),   lse = ln 2 (m + log2 l)
//
// Grid: x = blocks of 16, 32 or 64 heads, y = splits. To the schedule each query is a request whose tokens are the
// entries of its lists. One block per SM iterates over the work items of its split (attention/split_work.cuh).
//
//   dequant   | K 0 | K 1 |        | K 2, as the values of tile 0 are multiplied | K 3 ...
//   mma       |     | S 0  |  S 1  |  V 0 P 0  |  V 1 P 1  |  S 2  |  S 3  |  V 2 P 2  | ...
//   softmax   |            |  P 0  |  P 1      |                   |  P 2  |  P 3      | ...
//
// Roles and barriers: sparse_decode/sm100.cuh.
//
// Source: swapped operands for few query rows are FlashMLA-ETAP's idea (2025), dequantising warps beside tcgen05
// FlashMLA's FP8 decode for Blackwell (2025). What differs: products are exact in f16 where scales are no powers of
// two, and heads are not padded to 64.
#include "sparse_decode/sm100.cuh"

namespace mla::sparse_decode::sm100 {
// ---- Variant ---------------------------------------------------------------------------------------------------
using C = Config<MLA_DTYPE, MLA_RECORD, MLA_BLOCK_ROWS>;
static_assert(sizeof(Storage<C>) <= kMaxDynamicSmem, "shared memory");

MLA_SPARSE_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage<C>));
MLA_FACT(block_rows, C::kBlockRows);
MLA_FACT(tmem_columns, Columns<C::kHeads>::kAllocated);
MLA_FACT(tmem_columns_used, Columns<C::kHeads>::kUsed);
MLA_RECORD_FACT(C::TokenRecord);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_decode_sm100(const __grid_constant__ SparseDecodeParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_block(p, *reinterpret_cast<Storage<C>*>(smem));
}
}  // namespace mla::sparse_decode::sm100
