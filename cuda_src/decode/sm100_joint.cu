// Dense MLA decode on Blackwell for 65 to 128 query rows, or pairs of blocks of 64: two SMs multiply together
// (`cta_group::2`).
//
//   S = Q K^T * scale           (128 x d_qk) (d_qk x 128) per tile of 128 tokens, d_qk = 576 or 512
//   P = exp2(S log2(e) - m)     m: running maximum of each row
//   l = sum of P,  O = P V      (128 x 128) (128 x 512); V is K's first 512 columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// Grid: x = row blocks of all KV heads (64 rows each), y = splits. Clusters of 2 x 1, which iterate over the work items
// of their split (attention/split_work.cuh).
//
//   keys     |  K j+1 |  K j+2          |  K j+3          | as columns are scored
//   products |  S j+1 |  P j V j  S j+2 |  P j+1 V j+1 ...
//   softmax  |  P j   |  P j+1          |  P j+2
//   values   |        |  V j+1          |  V j+2          | as columns are multiplied
//
// Values that not every row of the pair sees are made finite between their arrival and their product, by the softmax. A
// barrier of the block instead of the leader's counts such a tile's values for it.
//
// Source: a pair of SMs with the keys split for the scores and the value columns split for the result is the plan of
// CUTLASS's and FlashInfer's decode (2025). Here K and V have separate buffers, which are filled and released by groups
// of columns, and hidden values, schedules and masks are handled as in our other kernels.
#include "decode/sm100_joint.cuh"

// Keys have RoPE columns unless a variant says otherwise.
#ifndef MLA_HEAD_DIM_QK
#define MLA_HEAD_DIM_QK 576
#endif

namespace mla::decode::sm100 {
// ---- Variant ---------------------------------------------------------------------------------------------------
using C = JointConfig<MLA_DTYPE, MLA_HEAD_DIM_QK>;
using Shared = DecodeStorage<C>;

static_assert(sizeof(Shared) <= kMaxDynamicSmem, "shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kJointThreads);
MLA_FACT(smem_bytes, sizeof(Shared));
MLA_FACT(block_rows, kJointHeads);
MLA_FACT(cluster, kPairBlocks);
MLA_FACT(tmem_columns, JointColumns::kAllocated);
MLA_FACT(tmem_columns_used, JointColumns::kUsed);
// M, N and the number of K = 16 products per joint tile of keys: S, O.
MLA_FACT_LIST(products, kPairBlocks* kJointHeads, kJointKeys, C::kSwTilesQk* kSw128MmaSteps, kPairBlocks* kJointHeads,
              kHalves* kTileDims, kValueProducts* kJointKeys / kMmaK);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kJointThreads, 1)
    mla_decode_sm100_joint(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap kv_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_joint_block<C>(p, kv_map, *reinterpret_cast<Shared*>(smem));
}
}  // namespace mla::decode::sm100
