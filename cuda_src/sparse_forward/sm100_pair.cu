// Sparse MLA prefill on Blackwell for more than 64 heads: a pair of blocks shares what each query selects.
//
// The products, roles and time line are those of sparse_forward/sm100.cu with 64 heads per block. Each block of the
// pair gathers half of the rows of a tile, and sends them to both: the L2 is read once per query instead of once per
// block.
//
// Grid: x = 2 blocks of 64 heads, y = splits. Clusters of 2 x 1.
//
// Source: sharing of keys by two blocks, one per half of the heads, is FlashMLA's (2025). What differs: the products
// are each block's own, and the rows arrive by multicast of `tile::gather4`.
#include "sparse_forward/sm100.cuh"

namespace mla::sparse_forward::sm100 {
// ---- Variant ---------------------------------------------------------------------------------------------------
using C = Config<MLA_DTYPE, MLA_HEAD_DIM_QK, /*kHeads=*/64, /*kBlocks=*/2>;
MLA_FORWARD_SM100_FACTS(C);
MLA_FACT(cluster, C::kBlocks);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_forward_sm100_pair(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap kv_map,
                                  const __grid_constant__ TensorMap q_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_block<C>(p, Maps{kv_map, q_map}, *reinterpret_cast<Storage<C>*>(smem));
}
}  // namespace mla::sparse_forward::sm100
