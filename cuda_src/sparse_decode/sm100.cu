// Sparse MLA decode from FP8 records on Blackwell: warps that dequantise feed tcgen05 with swapped operands.
//
//   S^T = K Q^T * scale           (64 x d_qk) (d_qk x heads) per tile of 64 listed tokens
//   P^T = exp2(S^T log2(e) - m)   m: running maximum of each head
//   l = sum of P,  O^T = V^T P^T  (512 x 64) (64 x heads), in tensor memory; V is K's first 512 columns
//   out = O / (l + exp2(sink - m)),   lse = ln 2 (m + log2 l)
//
// Grid: x = blocks of 16, 32 or 64 heads, y = splits. To the schedule each query is a request with the entries of its
// lists as tokens. One block per SM iterates over the work items of its split (attention/split_work.cuh).
//
//   dequant   | K 0 | K 1 |        | K 2, as the values of tile 0 are multiplied | K 3 ...
//   mma       |     | S 0  |  S 1  |  V 0 P 0  |  V 1 P 1  |  S 2  |  S 3  |  V 2 P 2  | ...
//   softmax   |            |  P 0  |  P 1      |                   |  P 2  |  P 3      | ...
//
// Roles and barriers: attention/sm100/records.cuh.
//
// Source: swapped operands for few query rows are FlashMLA-ETAP's idea (2025), dequantising warps for tcgen05
// FlashMLA's FP8 decode for Blackwell (2025). Here products are exact in f16 where scales are no powers of two, and
// heads are not padded to 64.
#include "attention/sm100/records.cuh"

namespace mla::sparse_decode::sm100 {
using namespace attention;
using namespace attention::sm100;

// ---- Variant ---------------------------------------------------------------------------------------------------
using C = RecordConfig<MLA_DTYPE, MLA_RECORD, SelectedTokens, MLA_BLOCK_ROWS>;

MLA_SPARSE_DECODE_FACTS();
MLA_RECORDS_SM100_FACTS(C);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kRecordThreads, 1)
    mla_sparse_decode_sm100(const __grid_constant__ SparseDecodeParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    auto& s = *reinterpret_cast<RecordStorage<C>*>(smem);
    run_records(p, s, [&](const auto&, auto& scores, i32 stage, const WorkItem&, i32, i32 thread) {
        mask_absent(scores, s.present[stage], thread);
    });
}
}  // namespace mla::sparse_decode::sm100
