// Sparse MLA prefill on Blackwell for 65 to 128 heads: a pair of SMs multiplies together (`cta_group::2`).
//
//   S = Q K^T * scale           (128 x d_qk) (d_qk x 128) per tile of 128 listed rows, d_qk = 576 or 512
//   P = exp2(S log2(e) - m)     m: running maximum of each head
//   l = sum of P,  O = P V      (128 x 128) (128 x 512); V is K's first 512 columns
//   out = O / (l + exp2(sink - m)),   lse = ln 2 (m + log2 l),   max_logits = max of S
//
// Grid: x = 2 blocks of 64 heads, y = splits. Clusters of 2 x 1, a pair per TPC, which iterates over the queries of its
// split (attention/split_work.cuh).
//
//   keys     |  K j+1 |  K j+2          |  K j+3          | as columns are scored
//   products |  S j+1 |  P j V j  S j+2 |  P j+1 V j+1 ...
//   softmax  |  P j   |  P j+1          |  P j+2
//   values   |        |  V j+1          |  V j+2          | as columns are multiplied
//
// The roles are in attention/sm100/joint.cuh, those that gather in sparse_forward/sm100_joint.cuh.
//
// Source: 128 heads on a pair of SMs, with keys split for the scores and value columns for the result, are FlashMLA's
// plan (2025). What differs: Q stays in shared memory, and K and V come and go in groups of two SW128 tiles.
#include "sparse_forward/sm100_joint.cuh"

namespace mla::sparse_forward::sm100 {
// ---- Variant ---------------------------------------------------------------------------------------------------
using C = JointConfig<MLA_DTYPE, MLA_HEAD_DIM_QK>;
using Shared = JointStorage<C>;

static_assert(sizeof(Shared) <= kMaxDynamicSmem, "shared memory");
MLA_DECODE_FACTS();
MLA_FACT(threads, kJointThreads);
MLA_FACT(smem_bytes, sizeof(Shared));
MLA_FACT(block_heads, kJointHeads);
MLA_FACT(cluster, kPairBlocks);
MLA_FACT(tmem_columns, JointColumns::kAllocated);
MLA_FACT(tmem_columns_used, JointColumns::kUsed);
MLA_FACT(mbarriers, (MLA_OFFSET(Shared, tmem) - MLA_OFFSET(Shared, q_full)) / sizeof(MBarrier));
// M, N and the number of K = 16 products per joint tile of keys: S, O.
MLA_FACT_LIST(products, kPairBlocks* kJointHeads, kJointKeys, C::kSwTilesQk* kSw128MmaSteps, kPairBlocks* kJointHeads,
              kHalves* kTileDims, kValueProducts* kJointKeys / kMmaK);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kJointThreads, 1)
    mla_sparse_forward_sm100_joint(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap kv_map,
                                   const __grid_constant__ TensorMap q_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_joint_block<C>(p, JointMaps{kv_map, q_map}, *reinterpret_cast<Shared*>(smem));
}
}  // namespace mla::sparse_forward::sm100
