// Sparse MLA prefill on Blackwell: each query attends to the rows of kv in its list, by tcgen05 with swapped operands.
//
//   S^T = K Q^T * scale           (64 rows x d_qk) (d_qk x heads) per tile of 64 listed rows
//   P^T = exp2(S^T log2(e) - m)   m: running maximum of each head
//   l = sum of P,  O^T = V^T P^T  (512 x 64) (64 x heads), in tensor memory; V is K's first 512 columns
//   out = O / (l + exp2(sink - m)),   lse = ln 2 (m + log2 l),   max_logits = max of S
//
// Grid: x = blocks of 16, 32 or 64 heads, y = splits. To the schedule a query is a request, and its list a line of the
// block table, with one-token pages (attention/decode_params.cuh). One block per SM iterates over the queries of its
// split (attention/split_work.cuh). No cluster.
//
//   gather    | K 0 | K 1 |        | K 2, as the values of tile 0 are multiplied | K 3 ...
//   mma       |     | S 0  |  S 1  |  V 0 P 0  |  V 1 P 1  |  S 2  |  S 3  |  V 2 P 2  | ...
//   softmax   |            |  P 0  |  P 1      |                   |  P 2  |  P 3      | ...
//
// Roles and barriers: sparse_forward/sm100.cuh.
//
// Source: swapped operands for few query rows are FlashMLA-ETAP's idea (2025), a forward for Blackwell with both
// products transposed vLLM's (2026), results that are rescaled only where a maximum grows by much FlashAttention-4's.
// Here tiles of 64 keys in two whole stages are scored two by two, and P overwrites the RoPE columns.
#include "sparse_forward/sm100.cuh"

namespace mla::sparse_forward::sm100 {
// ---- Variant ---------------------------------------------------------------------------------------------------
using C = Config<MLA_DTYPE, MLA_HEAD_DIM_QK, MLA_BLOCK_HEADS>;
MLA_FORWARD_SM100_FACTS(C);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_forward_sm100(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap kv_map,
                             const __grid_constant__ TensorMap q_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_block<C>(p, Maps{kv_map, q_map}, *reinterpret_cast<Storage<C>*>(smem));
}
}  // namespace mla::sparse_forward::sm100
