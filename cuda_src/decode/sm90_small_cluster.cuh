// Dense decode for small batches, in one launch: the blocks of a cluster share the tokens of one request and merge
// their results through distributed shared memory (decode/cluster_merge.cuh).
//
// Grid: x = clusters, which divide the batch (decode/cluster_work.cuh), and their blocks; y = row blocks of all KV
// heads. Tiles are those of decode/sm90_small.cuh. Block d of a cluster of C finishes columns [d, d + 1) * 512 / C:
//
//   math    | tiles | O, m, l to own shared memory | cluster barrier | slice d of O_0 .. O_(C-1) | sum | store
//   load    | tiles |------------------------------| cluster barrier |
//   query   | Q     |------------------------------| cluster barrier |
//
// The second half of another cluster barrier keeps every block's shared memory until all have read it.
#pragma once
#include "decode/cluster_merge.cuh"
#include "decode/sm90_small.cuh"

namespace mla::decode::sm90 {
// ---- Results -----------------------------------------------------------------------------------------------------
// Transposed, a quad holds eight columns of one head: 16 bytes.
template <class Element, class C>
MLA_DEVICE void store_slice_16bit(Element, const MergeBlock<C>& block, const Slice<C>& slice, i64 my_offset,
                                  i32 column0, i32 thread) {
    const i32 lane = thread % kWarpThreads;
    u16* const base = static_cast<u16*>(block.p.out) + column0 + thread / kWarpThreads * 16 + lane % 4 * 2;
#pragma unroll
    for (i32 v = 0; v < C::kOwnVectors; ++v) {
        const i32 head = 8 * v + lane / 4;
        u16* const to = base + __shfl_sync(kFullWarp, my_offset, head);
#pragma unroll
        for (i32 panel = 0; panel < C::kSlicePanels; ++panel) {
            const float4& x = slice.vectors[panel][v];
            const u32 low = movmatrix_trans(cvt_x2(Element{}, x.x, x.y));
            const u32 high = movmatrix_trans(cvt_x2(Element{}, x.z, x.w));
            if (block.row0 + head >= block.rows) continue;
            *reinterpret_cast<u32*>(to + panel * kPanelColumns) = low;
            *reinterpret_cast<u32*>(to + panel * kPanelColumns + 8) = high;
        }
    }
}

template <class C>
MLA_DEVICE void store_slice_fp32(const MergeBlock<C>& block, const Slice<C>& slice, i64 my_offset, i32 column0,
                                 i32 thread) {
    float* const base = static_cast<float*>(block.p.out) + column0 + fragment_row(thread);
#pragma unroll
    for (i32 v = 0; v < C::kOwnVectors; ++v) {
#pragma unroll
        for (i32 odd = 0; odd < 2; ++odd) {
            const i32 head = 8 * v + fragment_column(thread) + odd;
            float* const to = base + __shfl_sync(kFullWarp, my_offset, head);
            if (block.row0 + head >= block.rows) continue;
#pragma unroll
            for (i32 panel = 0; panel < C::kSlicePanels; ++panel) {
                const float4& x = slice.vectors[panel][v];
                to[panel * kPanelColumns] = odd ? x.y : x.x;
                to[panel * kPanelColumns + 8] = odd ? x.w : x.z;
            }
        }
    }
}

// ---- Variant ---------------------------------------------------------------------------------------------------
template <class Base, i32 kClusterBlocks>
struct ClusterConfig : Base {
    struct Merging : MergeShape<Base::kBlockRows, kClusterBlocks> {
        static constexpr i32 kBarrier = MathOnly;
        static constexpr float kWeightLog2 = 0.f;

        MLA_DEVICE static void store_slice(const MergeBlock<Merging>& block, const Slice<Merging>& slice, i64 my_offset,
                                           i32 column0, i32 thread) {
            if (block.p.out_is_fp32) {
                store_slice_fp32(block, slice, my_offset, column0, thread);
            } else {
                store_slice_16bit(typename Base::Element{}, block, slice, my_offset, column0, thread);
            }
        }
    };
};

template <class C>
MLA_DEVICE Merge<typename C::Merging>& merge_storage(Storage<C>& s) {
    using Merged = Merge<typename C::Merging>;
    static_assert(sizeof(Merged) <= sizeof(s.kv), "the merge takes the place of the tiles");
    return *reinterpret_cast<Merged*>(s.kv);
}

// ---- Work ------------------------------------------------------------------------------------------------------
template <class C>
struct ClusterBlock : Block<C> {
    i32 cluster;  // number in the launch
    ClusterShare share;
    WorkItem item;

    MLA_DEVICE ClusterBlock(const DecodeParams& p, Storage<C>& s)
        : Block<C>(p, blockIdx.y, s), cluster(blockIdx.x / C::Merging::kClusterBlocks) {}
    MLA_DEVICE SingleItem items() const { return SingleItem{item, false}; }
};

// ---- Math role -------------------------------------------------------------------------------------------------
// Where the element of a row and column of the result is in Merge::out, as floats.
template <class C>
MLA_DEVICE i32 merge_element(i32 head, i32 column) {
    const i32 in_tile = column % kSw128Columns;
    const i32 thread = in_tile / 16 * kWarpThreads + in_tile % 8 * 4 + head % 8 / 2;
    const i32 vector = column / kSw128Columns * C::Merging::kVectors + head / 8;
    return (vector * kWarpgroupThreads + thread) * 4 + in_tile % 16 / 8 * 2 + head % 2;
}

// The block's results, to its own shared memory.
template <class C>
MLA_DEVICE void keep_result(ClusterBlock<C>& block, Math<C>& math, i32 thread) {
    Storage<C>& s = block.s;
    store_warp_sums<C::kBlockRows>(s.warp_values[thread / kWarpThreads], math.heads.sum, thread);
    bar_sync(MathOnly, kWarpgroupThreads);  // also: every warp's last product has been computed
    auto& merge = merge_storage(s);
#pragma unroll
    for (i32 sw_tile = 0; sw_tile < kSwTilesV; ++sw_tile) {
#pragma unroll
        for (i32 v = 0; v < C::Merging::kVectors; ++v) {
            const float* const x = math.out[sw_tile] + 4 * v;
            merge.out[sw_tile][v][thread] = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
    if (thread < 4) {  // which hold every head
#pragma unroll
        for (i32 k = 0; k < kHeadsOfThread<C::kBlockRows>; ++k) {
            merge.max[kth_head(k, thread)] = math.heads.max.value[k];
        }
    }
    if (thread < C::kBlockRows) {
        float sum = 0.f;
#pragma unroll
        for (const auto& warp : s.warp_values) sum += warp[thread];
        merge.sum[thread] = sum;
    }
    if (s.nonfinite_request != block.item.request) return;
    bar_sync(MathOnly, kWarpgroupThreads);
    float* const out = &merge.out[0][0][0].x;
    for_each_nonfinite<typename C::Element, kHeadDimV>(
        block, block.item, 0, thread,
        [&](i32 row, i32 column, float value) { out[merge_element<C>(row - block.row0, column)] += value; });
}

template <class C>
MLA_DEVICE void run_math_role(ClusterBlock<C>& block, i32 thread) {
    Math<C> math;
    math.stage = math.q_stage = 0;
    math.reset();
    process_item(block, math, block.item, thread);
    keep_result(block, math, thread);
}

// ---- Kernel ------------------------------------------------------------------------------------------------------
template <class C>
MLA_DEVICE void run_cluster_block(const DecodeParams& p, const TensorMap& kv_map, Storage<C>& s) {
    ClusterBlock<C> block(p, s);
    if (threadIdx.x == 0) {
        prefetch_tensormap(kv_map);
        init_storage(s);
    }
    __syncthreads();
    prefetch_inputs<C>(p);
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp(), rank = cluster_rank();
    if (!find_work<C::Merging::kClusterBlocks>(p, block.cluster, rank, block.hidden, block.share, block.item)) {
        return;  // the same in all blocks of the cluster
    }
    if (warp < kLoadWarp) {
        run_math_role(block, threadIdx.x);
    } else if (warp == kLoadWarp) {
        run_load_role(block, threadIdx.x % kWarpThreads, GroupLoader<C>{block, kv_map, 0});
    } else {
        const QueryStages<kStagesQ> stages{s.q[0][0], s.q_full, s.q_empty};
        run_query_role<C>(block, stages, threadIdx.x - kQueryWarp * kWarpThreads);
    }
    __syncwarp();
    cluster_sync();  // every block's results are in its shared memory
    if (warp < kLoadWarp) {
        finish_slice(MergeBlock<typename C::Merging>{p, merge_storage(s), block.kv_head, block.row0, block.rows,
                                                     block.cluster, rank, block.share},
                     threadIdx.x);
    } else {
        cluster_arrive();
    }
    __syncwarp();
    griddepcontrol_launch_dependents();
    cluster_wait();  // no other block still reads this one's shared memory
}
}  // namespace mla::decode::sm90
