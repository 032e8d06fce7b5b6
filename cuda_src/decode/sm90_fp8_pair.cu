// Dense decode in FP8 on Hopper for more than 64 query rows: pairs of blocks read each tile once.
//
// The mathematics, the grid and the source are those of decode/sm90_fp8.cu. Two neighbouring blocks of rows are a
// cluster and walk through the same tiles; each fetches half of the columns of a tile, for both:
//
//   load of block 0 | columns 0..255 and RoPE columns -> stage s of both blocks, when both have released it
//   load of block 1 | columns 256..511                -> the same
//
// A stage's empty barrier counts the math warps of both blocks, which arrive at both.
//
// Source: multicast of operands that the blocks of a cluster share is CUTLASS's for matrix products.
#include "decode/sm90_fp8.cuh"
#include "ptx/cluster.cuh"

namespace mla::decode {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Query = MLA_DTYPE;
using BlockStorage = Fp8Storage<MLA_BLOCK_ROWS, false>;

constexpr i32 kReaders = 2;
static_assert(sizeof(BlockStorage) <= kMaxDynamicSmem, "shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kBlockThreads);
MLA_FACT(smem_bytes, sizeof(BlockStorage));
MLA_FACT(block_m, MLA_BLOCK_ROWS);
MLA_FACT(cluster, kReaders);
MLA_RECORD_FACT(fp8);

struct PairBlock : Fp8Block<BlockStorage> {
    using Fp8Block<BlockStorage>::Fp8Block;

    MLA_DEVICE void release_tile(i32 stage) const {
        const u32 lane = own_lane();
        __syncwarp();
        if (lane < kReaders) mbarrier_arrive(map_to_rank(smem_addr(&s.kv_empty[stage]), lane));
    }
};

// ---- Load role -------------------------------------------------------------------------------------------------
struct PairLoader : Fp8TileLoader<PairBlock> {
    MLA_DEVICE void operator()(const TileBoxes& boxes, const WorkItem& item, i32 tile) { load_tile(*this, boxes); }

    // Half of the columns, to both blocks.
    MLA_DEVICE void load_box(const TileBoxes& boxes, SmemAddr to, MBarrier& full, i32 i) const {
        constexpr u16 kBoth = (1 << kReaders) - 1;
        const u32 first = boxes.box(i) * boxes.rows, rope_row_bytes = (block.ring.tile_bytes - kFp8LatentBytes) / 64;
        const i32 page = boxes.window.page[i], token = boxes.window.offset[i], rank = cluster_rank();
        for (i32 panel = rank * kFp8PanelsOfSide; panel < (rank + 1) * kFp8PanelsOfSide; ++panel) {
            cp_async_bulk_tensor_4d_multicast(to + (panel * kSw128Bytes + first * kSw128RowBytes), latent_map, full,
                                              panel * kSw128ByteColumns, token, block.kv_head, page, kBoth,
                                              boxes.l2_policy);
        }
        if (rank != 0) return;
        cp_async_bulk_tensor_4d_multicast(to + (kFp8LatentBytes + first * rope_row_bytes), rope_map, full, kHeadDimV,
                                          token, block.kv_head, page, kBoth, boxes.l2_policy);
    }
};

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
    mla_decode_sm90_fp8_pair(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap latent_map,
                             const __grid_constant__ TensorMap rope_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    auto& s = *reinterpret_cast<BlockStorage*>(smem);
    const PairBlock block(p, blockIdx.x, s);
    clear_fp8_query(s);
    if (threadIdx.x == 0) {
        prefetch_tensormap(latent_map);
        prefetch_tensormap(rope_map);
        init_fp8_storage(s, block.rows, kReaders);
    }
    cluster_sync();         // the barriers of both blocks are there
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    if (warp < kLoadWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_fp8_side<Query>(block, warp);
    } else {
        setmaxnreg_dec<kRegsLoad>();
        if (warp == kLoadWarp) {
            run_lean_load_role(block, own_lane(), PairLoader{{block, latent_map, rope_map, {}, 0}});
        }
    }
    __syncwarp();
    cluster_arrive();
    griddepcontrol_launch_dependents();
    cluster_wait();  // neither block still writes to the other one's shared memory
}
}  // namespace mla::decode
