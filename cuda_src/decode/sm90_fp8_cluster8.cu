// Dense decode in FP8 on Hopper for small batches, in one launch: clusters of 8 blocks share the tokens of a request
// and merge their results. The grid and the time line are in decode/sm90_fp8_cluster.cuh, the mathematics and the
// source in decode/sm90_fp8.cu.
#include "decode/sm90_fp8_cluster.cuh"

namespace mla::decode {
// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr i32 kClusterBlocks = 8;
using Clustered = Fp8ClusterConfig<MLA_DTYPE, MLA_BLOCK_ROWS, kClusterBlocks>;

static_assert(sizeof(Clustered::Memory) <= kMaxDynamicSmem, "shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kBlockThreads);
MLA_FACT(smem_bytes, sizeof(Clustered::Memory));
MLA_FACT(block_m, MLA_BLOCK_ROWS);
MLA_FACT(cluster, kClusterBlocks);
MLA_FACT(max_clusters, kMaxClusters);
MLA_FACT(min_tiles_per_block, kMinTilesPerBlock);
MLA_RECORD_FACT(fp8);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
    mla_decode_sm90_fp8_cluster8(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap latent_map,
                                 const __grid_constant__ TensorMap rope_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_fp8_cluster_block<Clustered>(p, latent_map, rope_map, *reinterpret_cast<Clustered::Memory*>(smem));
}
}  // namespace mla::decode
