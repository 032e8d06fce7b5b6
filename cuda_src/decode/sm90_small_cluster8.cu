// Dense decode on Hopper for small batches, in one launch: clusters of 8 blocks share the tokens of a request and merge
// their results. The mathematics, the grid, the time line and the source are in decode/sm90_small_cluster.cuh.
#include "common/limits.cuh"
#include "decode/sm90_small_cluster.cuh"

namespace mla::decode::sm90 {
// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr i32 kClusterBlocks = 8;
using Clustered = ClusterConfig<Config<MLA_DTYPE, MLA_BLOCK_ROWS, MLA_HEAD_DIM_QK>, kClusterBlocks>;

static_assert(sizeof(Storage<Clustered>) <= kMaxDynamicSmem, "shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage<Clustered>));
MLA_FACT(block_rows, Clustered::kBlockRows);
MLA_FACT(cluster, kClusterBlocks);
MLA_FACT(max_clusters, kMaxClusters);
MLA_FACT(min_tiles_per_block, kMinTilesPerBlock);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode_sm90_small_cluster8(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap kv_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_cluster_block(p, kv_map, *reinterpret_cast<Storage<Clustered>*>(smem));
}
}  // namespace mla::decode::sm90
