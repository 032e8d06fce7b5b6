// Dense MLA decode on Hopper for few query rows: memory-bound, so a tile of keys is held as briefly as possible.
//
//   S^T = K Q^T * scale           (64 x d_qk) (d_qk x rows) per tile of 64 tokens
//   P^T = exp2(S^T log2(e) - m)   m: running maximum of each row
//   l = sum of P,  O^T = V^T P^T  (d_v x 64) (64 x rows); V is K's first d_v columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// Grid: x = row blocks of all KV heads (up to 32 rows each, of s_q * h_q / h_kv), y = splits. One block per SM iterates
// over the work items of its split (attention/split_work.cuh). With values of 256 columns, half as many accumulators
// leave room for 64 rows, and a tile arrives as a whole.
//
// One warpgroup does all the math, one warp keeps two tiles of keys in flight, and the query rows of the next work item
// are loaded while the current one is processed. A tile arrives in three groups of SW128 tiles, each scored as soon as
// it is there, and is released as a whole:
//
//   math    | S^T group 0, 1, 2 | max, P | O^T += V^T P^T | S'^T group 0, 1, 2 | ...
//   load    |        K' groups 0, 1, 2 ->                 | K'' groups 0, 1, 2 ->
//   query   |              Q of the next work item
//
// The roles are in decode/sm90_small.cuh and decode/sm90_small_block.cuh.
//
// Source: swapped operands for few query rows are FlashMLA-ETAP's idea (2025). What differs: a single math warpgroup,
// and V^T is read from the tile of keys without a transpose.
#include "common/limits.cuh"
#include "decode/sm90_small_block.cuh"

// Keys have RoPE columns unless a variant says otherwise.
#ifndef MLA_HEAD_DIM_QK
#define MLA_HEAD_DIM_QK 576
#endif

// A mask says which drafts a query sees, if a variant says so.
#ifndef MLA_TREE_MASK
#define MLA_TREE_MASK 0
#endif

namespace mla::decode::sm90 {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Small = Config<MLA_DTYPE, MLA_BLOCK_ROWS, MLA_HEAD_DIM_QK, MLA_TREE_MASK>;

static_assert(sizeof(Storage<Small>) <= kMaxDynamicSmem, "shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage<Small>));
MLA_FACT(block_rows, Small::kBlockRows);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode_sm90_small(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap kv_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_small_block<Small>(p, kv_map, *reinterpret_cast<Storage<Small>*>(smem));
}
}  // namespace mla::decode::sm90
