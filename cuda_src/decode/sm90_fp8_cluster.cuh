// Dense decode in FP8 on Hopper for small batches, in one launch: the blocks of a cluster share the tokens of a request
// and merge their results through distributed shared memory (decode/cluster_merge.cuh).
//
// Grid: x = clusters, which divide the batch (decode/cluster_work.cuh), and their blocks; y = row blocks of all KV
// heads. Tiles are those of decode/sm90_fp8.cu. Block d of a cluster of C finishes columns [d, d + 1) * 512 / C:
//
//   math    | tiles | O, m, l to own shared memory | cluster barrier | slice d of O_0 .. O_(C-1) | sum | store
//   load    | tiles |------------------------------| cluster barrier |
//
// The second half of another cluster barrier keeps every block's shared memory until all have read it.
#pragma once
#include "decode/cluster_merge.cuh"
#include "decode/sm90_fp8.cuh"

namespace mla::decode {
// ---- Results ---------------------------------------------------------------------------------------------------
// Writes a slice: two neighbouring columns of a row by each thread.
template <class Element, class C>
MLA_DEVICE void store_fp8_slice(Element, const MergeBlock<C>& block, const Slice<C>& slice, i64 my_offset, i32 column0,
                                i32 thread) {
    const i32 lane = thread % kWarpThreads, warp = thread % kWarpgroupThreads / kWarpThreads;
    const i32 first_column = column0 + warp * kWarpColumns + lane / 4 * 2;
#pragma unroll
    for (i32 v = 0; v < C::kOwnVectors; ++v) {
#pragma unroll
        for (i32 odd = 0; odd < 2; ++odd) {
            const i32 row = 8 * v + fragment_column(thread) + odd;  // of the warpgroup's
            const i64 offset = __shfl_sync(kFullWarp, my_offset, row) + first_column;
            if (block.row0 + C::first_row(thread) + row >= block.rows) continue;
#pragma unroll
            for (i32 panel = 0; panel < C::kSlicePanels; ++panel) {
                const float4& four = slice.vectors[panel][v];
                const float x = odd ? four.y : four.x, y = odd ? four.w : four.z;
                const i64 at = offset + panel * kPanelColumns;
                if (block.p.out_is_fp32) {
                    *reinterpret_cast<float2*>(static_cast<float*>(block.p.out) + at) = make_float2(x, y);
                } else {
                    *reinterpret_cast<u32*>(static_cast<u16*>(block.p.out) + at) = cvt_x2(Element{}, x, y);
                }
            }
        }
    }
}

// ---- Variant ---------------------------------------------------------------------------------------------------
template <class Query_, i32 kRows, i32 kClusterBlocks>
struct Fp8ClusterConfig {
    using Query = Query_;

    struct Merging : MergeShape<kRows, kClusterBlocks, 2, true> {
        static constexpr i32 kBarrier = Fp8BothSides;
        static constexpr float kWeightLog2 = kFp8WeightLog2;

        MLA_DEVICE static void store_slice(const MergeBlock<Merging>& block, const Slice<Merging>& slice, i64 my_offset,
                                           i32 column0, i32 thread) {
            store_fp8_slice(typename Fp8QueryType<Query>::Element{}, block, slice, my_offset, column0, thread);
        }
    };

    using Memory = Fp8Storage<kRows, false, ClusterShare>;  // math warps have no registers for a share
};

template <class C>
MLA_DEVICE Merge<typename C::Merging>& fp8_merge_storage(typename C::Memory& s) {
    using Merged = Merge<typename C::Merging>;
    static_assert(sizeof(Merged) <= sizeof(s.kv), "the merge takes the place of the tiles");
    return *reinterpret_cast<Merged*>(s.kv);
}

template <class C>
struct Fp8ClusterBlock : Fp8Block<typename C::Memory> {
    const WorkItem& item;

    MLA_DEVICE Fp8ClusterBlock(const Fp8Block<typename C::Memory>& block, const WorkItem& item)
        : Fp8Block<typename C::Memory>(block), item(item) {}
    MLA_DEVICE SingleItem items() const { return SingleItem{item, false}; }
};

// ---- Math role -------------------------------------------------------------------------------------------------
// The block's results, to its own shared memory: the sums of both sides have one reference.
template <class Merging, class Math>
MLA_DEVICE void keep_fp8_result(Math& math, Merge<Merging>& merge) {
    leave_fp8_sums(math);  // also: the last products have been computed
    const i32 thread = math.thread();
    auto& own = math.s.side[math.side].stats;
    if (thread < Math::kRows) {
        const Fp8RowSums sums = fp8_row_sums(math.s, thread);
        own.factor[thread] = ex2_approx(math.own_reference() - sums.reference) * math.block.p.value_scale;
        if (math.side == 0) {
            merge.max[thread] = sums.reference;
            merge.sum[thread] = sums.rounded;
            merge.lse_sum[thread] = sums.sum;
        }
    }
    math.sync_side();
#pragma unroll
    for (i32 v = 0; v < Merging::kVectors; ++v) {
        const float2 by = *reinterpret_cast<const float2*>(own.factor + math.head_of(4 * v));
#pragma unroll
        for (i32 b = 0; b < Math::kBlocks; ++b) {
            const float* const x = math.out[b] + 4 * v;
            merge.out[math.side * Math::kBlocks + b][v][thread] =
                make_float4(x[0] * by.x, x[1] * by.y, x[2] * by.x, x[3] * by.y);
        }
    }
}

template <class C, class Block>
MLA_DEVICE void run_fp8_share(const Block& block, i32 warp) {
    Fp8Math<Block> math(block, warp);
    begin_fp8_item<typename C::Query>(math, block.item);
    add_fp8_tiles(math, block.item, 0);
    keep_fp8_result<typename C::Merging>(math, fp8_merge_storage<C>(block.s));
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
MLA_DEVICE WorkItem in_uniform(const WorkItem& item) {
    return {mla::in_uniform(item.request),     mla::in_uniform(item.tokens),
            mla::in_uniform(item.behind_last), 0,
            mla::in_uniform(item.seen_by_all), mla::in_uniform(item.tile_begin),
            mla::in_uniform(item.tile_end),    kNotSplit};
}

template <class C>
MLA_DEVICE void run_fp8_cluster_block(const DecodeParams& p, const TensorMap& latent_map, const TensorMap& rope_map,
                                      typename C::Memory& s) {
    using Merging = typename C::Merging;
    const Fp8Block<typename C::Memory> row_block(p, blockIdx.y, s);
    clear_fp8_query(s);
    if (threadIdx.x == 0) {
        prefetch_tensormap(latent_map);
        prefetch_tensormap(rope_map);
        init_fp8_storage(s, row_block.rows);
    }
    __syncthreads();
    prefetch_inputs<KeyTile<kMaxHeadDimQk>, typename Fp8QueryType<typename C::Query>::Stored>(p);
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp(), rank = cluster_rank(), cluster = blockIdx.x / Merging::kClusterBlocks;
    ClusterShare share;
    WorkItem found;
    if (!find_work<Merging::kClusterBlocks>(p, cluster, rank, row_block.hidden, share, found)) {
        return;  // the same in all blocks of the cluster
    }
    if (threadIdx.x == 0) s.more = share;
    const WorkItem item = in_uniform(found);
    const Fp8ClusterBlock<C> block(row_block, item);
    if (warp < kLoadWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_fp8_share<C>(block, warp);
        cluster_sync();  // every block's results are in its shared memory
        finish_slice(MergeBlock<Merging>{p, fp8_merge_storage<C>(s), block.kv_head, block.row0, s.rows,
                                         (i32)blockIdx.x / Merging::kClusterBlocks, (i32)cluster_rank(), s.more},
                     threadIdx.x);
    } else {
        setmaxnreg_dec<kRegsLoad>();
        if (warp == kLoadWarp) {
            const Fp8TileLoader<Fp8ClusterBlock<C>> load_tile{block, latent_map, rope_map, {}, 0};
            run_lean_load_role(block, own_lane(), load_tile);
        }
        __syncwarp();
        cluster_sync();
        cluster_arrive();
    }
    __syncwarp();
    griddepcontrol_launch_dependents();
    cluster_wait();  // no other block still reads this one's shared memory
}
}  // namespace mla::decode
