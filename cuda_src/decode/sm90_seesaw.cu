// Dense MLA decode on Hopper: two warpgroups that alternate on the tensor cores ("seesaw").
//
//   S = Q K^T * scale            (64 x 576) (576 x 64) per tile of 64 tokens
//   P = exp2(S log2(e) - m)      m: running row maximum, shared by both warpgroups
//   l = sum of P,  O = P V       V is K's first 512 columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// Grid: x = 64-row blocks of all KV heads (rows of one KV head = s_q * h_q / h_kv), y = splits. One block per
// SM iterates over the work items of its split (attention/split_work.cuh). No cluster.
//
// Tiles are processed in pairs: the left warpgroup scores the even tile, the right one the odd tile, and each
// multiplies both P's with its own half of the values (attention/sm90/seesaw.cuh).
//
//   left    | softmax 0 | O_L += P0 V0_L |          | O_L += P1 V1_L | S0 = Q K0'            | softmax 0'
//   right   |   S1      |  softmax 1     | O_R += P0 V0_R | O_R += P1 V1_R | S1 = Q K1'      | ...
//   load    |           |       K0'_left ->  K1'_left, K0'_right ->  K1'_right ->
//
// Source: FlashMLA's schedule (2025). The header says what differs in the products; here: a dedicated producer warp,
// and one mechanism for all page sizes.
#include "common/limits.cuh"
#include "decode/sm90_seesaw.cuh"

// Keys have RoPE columns unless a variant says otherwise.
#ifndef MLA_HEAD_DIM_QK
#define MLA_HEAD_DIM_QK 576
#endif

// A mask says which drafts a query sees, if a variant says so.
#ifndef MLA_TREE_MASK
#define MLA_TREE_MASK 0
#endif

namespace mla::decode {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Dense = Config<MLA_DTYPE, MLA_HEAD_DIM_QK, /*kSparse=*/false, MLA_TREE_MASK>;

static_assert(sizeof(Storage<Dense>) <= kMaxDynamicSmem, "shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage<Dense>));
MLA_FACT(block_m, kBlockM);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode_sm90_seesaw(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap kv_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_seesaw_block<Dense>(p, kv_map, *reinterpret_cast<Storage<Dense>*>(smem));
}
}  // namespace mla::decode
