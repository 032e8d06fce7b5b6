// Dense MLA decode on Blackwell: up to 64 query rows per block, both sums in tensor memory.
//
//   S^T = K Q^T * scale           (64 x 576) (576 x rows) per tile of 64 tokens
//   P^T = exp2(S^T log2(e) - m)   m: running maximum of each row
//   l = sum of P,  O^T = V^T P^T  (512 x 64) (64 x rows); V is K's first 512 columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// Grid: x = row blocks of all KV heads (up to 64 rows each, of s_q * h_q / h_kv), y = splits. One block per SM iterates
// over the work items of its split (attention/split_work.cuh).
//
// Rows are the narrow side of both matmuls, so that few rows need no padding to the tensor cores' 128. One warp keeps
// two tiles of keys in flight, one thread issues the score matmuls, another the value matmuls:
//
//   load     |    K 2    |          K 3          | ...
//   scores   | S 1       |       S 2             | ...
//   softmax  | P 0       | P 1                   | P 2
//   values   |     O (0) |        O (1)          |      ...
//
// The roles are in decode/sm100.cuh.
//
// Source: swapped operands for few query rows are FlashMLA-ETAP's idea (2025), lazily updated maxima FlashAttention
// 4's. Here two threads issue, and K's groups of columns are released one product at a time.
#include "decode/sm100.cuh"

// Keys have RoPE columns unless a variant says otherwise.
#ifndef MLA_HEAD_DIM_QK
#define MLA_HEAD_DIM_QK 576
#endif

// A mask says which drafts a query sees, if a variant says so.
#ifndef MLA_TREE_MASK
#define MLA_TREE_MASK 0
#endif

namespace mla::decode::sm100 {
// ---- Variant ---------------------------------------------------------------------------------------------------
using C = Config<MLA_DTYPE, MLA_BLOCK_ROWS, MLA_HEAD_DIM_QK, MLA_TREE_MASK>;
using Shared = Storage<C>;

static_assert(sizeof(Shared) <= kMaxDynamicSmem, "shared memory");
static_assert(regions_are_disjoint<C>(), "tensor memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Shared));
MLA_FACT(block_rows, C::kBlockRows);
MLA_FACT(tmem_columns, TmemMap<C>::kAllocated);
MLA_FACT(tmem_columns_used, TmemMap<C>::kUsed);
// M, N and the number of K = 16 products per tile of keys: S, O.
MLA_FACT_LIST(products, kTileTokens, C::kBlockRows, C::kSwTilesQk* kSw128MmaSteps, kTileDims, C::kBlockRows,
              kDimTiles* kTileTokens / kMmaK);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode_sm100(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap kv_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_block<C>(p, kv_map, *reinterpret_cast<Shared*>(smem));
}
}  // namespace mla::decode::sm100
