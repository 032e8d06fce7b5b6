// Dense decode for small batches, in one launch: the blocks of a cluster share the tokens of one request and merge
// their results through distributed shared memory.
//
//   block j of a cluster: its tiles as in decode/sm90_small.cuh -> O_j, maxima m_j, sums l_j of its rows
//   M = max_j m_j,  l = sum_j l_j exp2(m_j - M),  out = sum_j O_j exp2(m_j - M) / l,  lse = ln 2 (M + log2 l)
//
// Grid: x = clusters, which divide the batch (decode/cluster_work.cuh), and their blocks; y = row blocks of all KV
// heads. Block d of a cluster of C finishes columns [d, d + 1) * 512 / C of all rows:
//
//   math    | tiles | O, m, l to own shared memory | cluster barrier | slice d of O_0 .. O_(C-1) | sum | store
//   load    | tiles |------------------------------| cluster barrier |
//   query   | Q     |------------------------------| cluster barrier |
//
// The second half of another cluster barrier keeps every block's shared memory until all have read it.
//
// A request that is too long for one cluster has several. Each writes its slices to the workspace and takes a ticket
// per slice; the block with the last ticket merges the slices of all clusters, in their order, so that results do not
// depend on which block is last. No block waits for one that may not have started.
//
// Source: clusters that merge through distributed shared memory are ClusterFusion's idea (2025); the last arriver's
// merge comes from stream-K and split-K products. Here columns are divided over the blocks of the cluster, so that
// every step of the merge runs on all of them, and no block waits for another cluster.
#pragma once
#include "decode/cluster_work.cuh"
#include "decode/sm90_small.cuh"
#include "ptx/cluster.cuh"
#include "ptx/system.cuh"

namespace mla::decode::sm90 {
// ---- Variant ---------------------------------------------------------------------------------------------------
template <class Base, i32 kClusterBlocks_>
struct ClusterConfig : Base {
    static constexpr i32 kClusterBlocks = kClusterBlocks_;
    static constexpr i32 kSliceSwTiles = kSwTilesV / kClusterBlocks;  // SW128 tiles of columns that a block finishes
    static constexpr i32 kVectors = Base::kBlockRows / 8;             // of four floats, in a thread's fragment
    static constexpr i32 kSliceVectors = kSliceSwTiles * kVectors;    // of a thread
    static_assert(kSliceSwTiles * kClusterBlocks == kSwTilesV, "slices of whole SW128 tiles");
};

// ---- Storage ---------------------------------------------------------------------------------------------------
template <class C>
using RowValues = float[C::kBlockRows];

// Overwrites the tiles of keys once all of them have been multiplied. Other blocks read the first three members.
template <class C>
struct Merge {
    float4 out[kSwTilesV][C::kVectors][kWarpgroupThreads];  // O^T, not normalised, as the threads held it
    RowValues<C> max, sum;
    RowValues<C> maxima[C::kClusterBlocks], sums[C::kClusterBlocks];  // of all blocks
    RowValues<C> weights[C::kClusterBlocks];
    RowValues<C> lse2;
    RowValues<C> cluster_weights[kMaxClusters];  // first their log-sum-exps, where clusters share a request
    i32 is_last;
};

template <class C>
MLA_DEVICE Merge<C>& merge_storage(Storage<C>& s) {
    static_assert(sizeof(Merge<C>) <= sizeof(s.kv), "the merge takes the place of the tiles");
    return *reinterpret_cast<Merge<C>*>(s.kv);
}

// ---- Work ------------------------------------------------------------------------------------------------------
// The block's one work item, in place of a WorkIterator.
struct SingleItem {
    const WorkItem& item;
    bool done;

    MLA_DEVICE bool next(const DecodeParams&, WorkItem& to) {
        if (done) return false;
        to = item;
        done = true;
        return true;
    }
};

template <class C>
struct ClusterBlock : Block<C> {
    i32 cluster;  // number in the launch
    ClusterShare share;
    WorkItem item;

    MLA_DEVICE ClusterBlock(const DecodeParams& p, Storage<C>& s)
        : Block<C>(p, blockIdx.y, s), cluster(blockIdx.x / C::kClusterBlocks) {}
    MLA_DEVICE SingleItem items() const { return SingleItem{item, false}; }
};

// Called by whole warps: finds the block's work; false if its cluster has no share.
template <class C>
MLA_DEVICE bool find_work(ClusterBlock<C>& block, i32 rank) {
    if (!find_share<C::kClusterBlocks>(block.p, block.cluster, block.share)) return false;
    const ClusterShare& share = block.share;
    const RequestLength length = request_length(block.p, share.request);
    const TileRange all{0, ceil_div(length.tokens, kTileTokens)};
    const TileRange mine = all.piece(share.index, share.count).piece(rank, C::kClusterBlocks);
    WorkItem& item = block.item;
    item.request = share.request;
    item.tokens = length.tokens;
    item.behind_last = length.behind_last;
    item.tokens_in_first = 0;
    item.seen_by_all = length.tokens - hidden_here(block.p, block.hidden, length.behind_last);
    item.tile_begin = mine.begin;
    item.tile_end = mine.end;
    item.partial_index = kNotSplit;
    return true;
}

// ---- Math role -------------------------------------------------------------------------------------------------
// Index in Merge::out, in floats, of a row and column of the result.
template <class C>
MLA_DEVICE i32 merge_element(i32 head, i32 column) {
    const i32 in_tile = column % kSw128Columns;
    const i32 thread = in_tile / 16 * kWarpThreads + in_tile % 8 * 4 + head % 8 / 2;
    const i32 vector = column / kSw128Columns * C::kVectors + head / 8;
    return (vector * kWarpgroupThreads + thread) * 4 + in_tile % 16 / 8 * 2 + head % 2;
}

// The block's results, to its own shared memory.
template <class C>
MLA_DEVICE void keep_result(ClusterBlock<C>& block, Math<C>& math, i32 thread) {
    Storage<C>& s = block.s;
    store_warp_sums<C::kBlockRows>(s.warp_values[thread / kWarpThreads], math.heads.sum, thread);
    bar_sync(MathOnly, kWarpgroupThreads);  // every warp's last product has also been computed
    Merge<C>& merge = merge_storage(s);
#pragma unroll
    for (i32 sw_tile = 0; sw_tile < kSwTilesV; ++sw_tile) {
#pragma unroll
        for (i32 v = 0; v < C::kVectors; ++v) {
            const float* const x = math.out[sw_tile] + 4 * v;
            merge.out[sw_tile][v][thread] = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
    if (thread < 4) {  // these threads hold every head
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

// ---- Merge of the blocks of a cluster ----------------------------------------------------------------------------
// A thread's share of a slice: the same elements as in Merge::out.
template <class C>
struct Slice {
    float4 vectors[C::kSliceSwTiles][C::kVectors];

    MLA_DEVICE void clear() {
#pragma unroll
        for (auto& sw_tile : vectors) {
#pragma unroll
            for (float4& x : sw_tile) x = make_float4(0.f, 0.f, 0.f, 0.f);
        }
    }

    // Adds another slice, each row times its weight.
    MLA_DEVICE void add(const Slice& x, const RowValues<C>& weights, i32 thread) {
#pragma unroll
        for (i32 v = 0; v < C::kVectors; ++v) {
            const float even = weights[8 * v + fragment_column(thread)];
            const float odd = weights[8 * v + fragment_column(thread) + 1];
#pragma unroll
            for (i32 sw_tile = 0; sw_tile < C::kSliceSwTiles; ++sw_tile) {
                const float4& from = x.vectors[sw_tile][v];
                float4& to = vectors[sw_tile][v];
                to.x = fmaf(even, from.x, to.x);
                to.y = fmaf(odd, from.y, to.y);
                to.z = fmaf(even, from.z, to.z);
                to.w = fmaf(odd, from.w, to.w);
            }
        }
    }
};

// The slice of block `source` that this block finishes.
template <class C>
MLA_DEVICE void read_slice(Slice<C>& slice, Merge<C>& merge, u32 source, i32 rank, i32 thread) {
#pragma unroll
    for (i32 sw_tile = 0; sw_tile < C::kSliceSwTiles; ++sw_tile) {
#pragma unroll
        for (i32 v = 0; v < C::kVectors; ++v) {
            const SmemAddr here = smem_addr(&merge.out[rank * C::kSliceSwTiles + sw_tile][v][thread]);
            slice.vectors[sw_tile][v] = ld_shared_cluster_v4(map_to_rank(here, source));
        }
    }
}

template <class C>
MLA_DEVICE void read_statistics(Merge<C>& merge, i32 thread) {
#pragma unroll 1
    for (i32 i = thread; i < C::kClusterBlocks * C::kBlockRows; i += kWarpgroupThreads) {
        const i32 source = i / C::kBlockRows, head = i % C::kBlockRows;
        merge.maxima[source][head] = ld_shared_cluster_f32(map_to_rank(smem_addr(&merge.max[head]), source));
        merge.sums[source][head] = ld_shared_cluster_f32(map_to_rank(smem_addr(&merge.sum[head]), source));
    }
}

// Called by one thread per head: the weight of each block's O, and the head's log-sum-exp. Where clusters share the
// request another step follows; the result is normalised all the same, like a partial result.
template <class C>
MLA_DEVICE void weigh_blocks(const ClusterBlock<C>& block, Merge<C>& merge, i32 head) {
    if (head >= C::kBlockRows) return;
    float max = kLowestMax;
#pragma unroll
    for (i32 j = 0; j < C::kClusterBlocks; ++j) max = fmaxf(max, merge.maxima[j][head]);
    float weights[C::kClusterBlocks], sum = 0.f;
#pragma unroll
    for (i32 j = 0; j < C::kClusterBlocks; ++j) {
        weights[j] = exp2f(merge.maxima[j][head] - max);
        sum = fmaf(weights[j], merge.sums[j][head], sum);
    }
    const float factor = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
    for (i32 j = 0; j < C::kClusterBlocks; ++j) merge.weights[j][head] = weights[j] * factor;
    merge.lse2[head] = row_lse2(max, sum);
}

// ---- Results -----------------------------------------------------------------------------------------------------
// Transposed, a quad holds eight columns of one head: 16 bytes.
template <class C>
MLA_DEVICE void store_slice_16bit(const ClusterBlock<C>& block, const Slice<C>& slice, i64 my_offset, i32 column0,
                                  i32 thread) {
    using Element = typename C::Element;
    const i32 lane = thread % kWarpThreads;
    u16* const base = static_cast<u16*>(block.p.out) + column0 + thread / kWarpThreads * 16 + lane % 4 * 2;
#pragma unroll
    for (i32 v = 0; v < C::kVectors; ++v) {
        const i32 head = 8 * v + lane / 4;
        u16* const to = base + __shfl_sync(kFullWarp, my_offset, head);
#pragma unroll
        for (i32 sw_tile = 0; sw_tile < C::kSliceSwTiles; ++sw_tile) {
            const float4& x = slice.vectors[sw_tile][v];
            const u32 low = movmatrix_trans(cvt_x2(Element{}, x.x, x.y));
            const u32 high = movmatrix_trans(cvt_x2(Element{}, x.z, x.w));
            if (block.row0 + head >= block.rows) continue;
            *reinterpret_cast<u32*>(to + sw_tile * kSw128Columns) = low;
            *reinterpret_cast<u32*>(to + sw_tile * kSw128Columns + 8) = high;
        }
    }
}

template <class C>
MLA_DEVICE void store_slice_fp32(const ClusterBlock<C>& block, const Slice<C>& slice, i64 my_offset, i32 column0,
                                 i32 thread) {
    float* const base = static_cast<float*>(block.p.out) + column0 + fragment_row(thread);
#pragma unroll
    for (i32 v = 0; v < C::kVectors; ++v) {
#pragma unroll
        for (i32 odd = 0; odd < 2; ++odd) {
            const i32 head = 8 * v + fragment_column(thread) + odd;
            float* const to = base + __shfl_sync(kFullWarp, my_offset, head);
            if (block.row0 + head >= block.rows) continue;
#pragma unroll
            for (i32 sw_tile = 0; sw_tile < C::kSliceSwTiles; ++sw_tile) {
                const float4& x = slice.vectors[sw_tile][v];
                to[sw_tile * kSw128Columns] = odd ? x.y : x.x;
                to[sw_tile * kSw128Columns + 8] = odd ? x.w : x.z;
            }
        }
    }
}

// The final results: columns of the slice and, by block 0 of a cluster, the log-sum-exps. Lane i computes where the
// i-th head begins.
template <class C>
MLA_DEVICE void store_final(const ClusterBlock<C>& block, const Merge<C>& merge, const Slice<C>& slice, i32 rank,
                            i32 thread) {
    static_assert(C::kBlockRows <= kWarpThreads, "a lane for each head");
    const DecodeParams& p = block.p;
    const i32 request = block.share.request;
    const i32 my_row = min(block.row0 + thread % kWarpThreads, block.rows - 1);
    const i64 my_offset = out_offset(p, request, block.kv_head, my_row);
    const i32 column0 = rank * C::kSliceSwTiles * kSw128Columns;
    if (p.out_is_fp32) {
        store_slice_fp32(block, slice, my_offset, column0, thread);
    } else {
        store_slice_16bit(block, slice, my_offset, column0, thread);
    }
    const i32 row = block.row0 + thread;
    if (rank != 0 || thread >= C::kBlockRows || row >= block.rows) return;
    p.lse[lse_offset(p, request, block.kv_head, row)] = final_lse(p, merge.lse2[thread]);
}

// ---- Merge of the clusters of a request ----------------------------------------------------------------------------
// Index in the workspace of the slice for a cluster, this row block and a rank.
template <class C>
MLA_DEVICE i64 slice_index(i32 cluster, i32 rank) {
    return ((i64)cluster * gridDim.y + blockIdx.y) * C::kClusterBlocks + rank;
}

// The slice of one block of a cluster in the workspace, in the order of the threads, and its log-sum-exps. Every block
// has its own copy of these, since a ticket speaks of the blocks of one rank only.
template <class C>
struct PartialSlice {
    float4* vectors;
    float* lse2;

    MLA_DEVICE PartialSlice(const DecodeParams& p, i32 cluster, i32 rank) {
        const i64 index = slice_index<C>(cluster, rank);
        vectors = reinterpret_cast<float4*>(p.partial_out) + index * (C::kSliceVectors * kWarpgroupThreads);
        lse2 = p.partial_lse + index * C::kBlockRows;
    }

    MLA_DEVICE float4& vector(i32 sw_tile, i32 v, i32 thread) const {
        return vectors[(sw_tile * C::kVectors + v) * kWarpgroupThreads + thread];
    }
};

template <class C>
MLA_DEVICE void store_partial(const PartialSlice<C>& to, const Merge<C>& merge, const Slice<C>& slice, i32 thread) {
#pragma unroll
    for (i32 sw_tile = 0; sw_tile < C::kSliceSwTiles; ++sw_tile) {
#pragma unroll
        for (i32 v = 0; v < C::kVectors; ++v) to.vector(sw_tile, v, thread) = slice.vectors[sw_tile][v];
    }
    if (thread < C::kBlockRows) to.lse2[thread] = merge.lse2[thread];
}

// Returns true if all other clusters of the request have stored their slices of this rank. The last cluster resets the
// counter for the next launch.
template <class C>
MLA_DEVICE bool take_ticket(const ClusterBlock<C>& block, Merge<C>& merge, i32 rank, i32 thread) {
    bar_sync(MathOnly, kWarpgroupThreads);  // the slice has been stored
    if (thread == 0) {
        u32* const taken = block.p.tickets + slice_index<C>(block.share.first, rank);
        merge.is_last = atom_add_acq_rel(taken, 1) == block.share.count - 1;
        if (merge.is_last) *taken = 0;
    }
    bar_sync(MathOnly, kWarpgroupThreads);
    return merge.is_last;
}

// Called by one thread per head: the weights of the clusters from their log-sum-exps, and the total log-sum-exp.
template <class C>
MLA_DEVICE void weigh_clusters(Merge<C>& merge, i32 count, i32 head) {
    if (head >= C::kBlockRows) return;
    float max = negative_infinity(), sum = 0.f;
#pragma unroll 1
    for (i32 g = 0; g < count; ++g) max = fmaxf(max, merge.cluster_weights[g][head]);
#pragma unroll 1
    for (i32 g = 0; g < count; ++g) {
        float& weight = merge.cluster_weights[g][head];
        weight = weight == negative_infinity() ? 0.f : exp2f(weight - max);  // empty: weight 0; NaN stays NaN
        sum += weight;
    }
    const float factor = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll 1
    for (i32 g = 0; g < count; ++g) merge.cluster_weights[g][head] *= factor;
    merge.lse2[head] = sum == 0.f ? negative_infinity() : max + log2f(sum);
}

// Sums the slices of all clusters of the request in their order, kAtOnce at a time to fit the registers.
template <class C>
MLA_DEVICE void merge_clusters(const ClusterBlock<C>& block, Merge<C>& merge, Slice<C>& total, i32 rank, i32 thread) {
    constexpr i32 kAtOnce = C::kSliceVectors <= 4 ? 8 : 32 / C::kSliceVectors;
    const ClusterShare& share = block.share;
    for (i32 i = thread; i < share.count * C::kBlockRows; i += kWarpgroupThreads) {
        const i32 g = i / C::kBlockRows, head = i % C::kBlockRows;
        merge.cluster_weights[g][head] = PartialSlice<C>(block.p, share.first + g, rank).lse2[head];
    }
    bar_sync(MathOnly, kWarpgroupThreads);
    weigh_clusters(merge, share.count, thread);
    bar_sync(MathOnly, kWarpgroupThreads);
    total.clear();
#pragma unroll 1
    for (i32 first = 0; first < share.count; first += kAtOnce) {
        Slice<C> slices[kAtOnce];
#pragma unroll
        for (i32 i = 0; i < kAtOnce; ++i) {
            const PartialSlice<C> from(block.p, share.first + min(first + i, share.count - 1), rank);
#pragma unroll
            for (i32 sw_tile = 0; sw_tile < C::kSliceSwTiles; ++sw_tile) {
#pragma unroll
                for (i32 v = 0; v < C::kVectors; ++v) {
                    slices[i].vectors[sw_tile][v] = from.vector(sw_tile, v, thread);
                }
            }
        }
#pragma unroll
        for (i32 i = 0; i < kAtOnce; ++i) {
            if (first + i < share.count) total.add(slices[i], merge.cluster_weights[first + i], thread);
        }
    }
}

// ---- Epilogue ----------------------------------------------------------------------------------------------------
// Called by the math warpgroup after a cluster barrier. Writes slice `rank` of the results.
template <class C>
MLA_DEVICE void finish_slice(const ClusterBlock<C>& block, i32 rank, i32 thread) {
    Merge<C>& merge = merge_storage(block.s);
    Slice<C> slices[C::kClusterBlocks], total;
#pragma unroll
    for (i32 j = 0; j < C::kClusterBlocks; ++j) read_slice(slices[j], merge, j, rank, thread);
    read_statistics(merge, thread);
    bar_sync(MathOnly, kWarpgroupThreads);
    weigh_blocks(block, merge, thread);
    bar_sync(MathOnly, kWarpgroupThreads);
    total.clear();
#pragma unroll
    for (i32 j = 0; j < C::kClusterBlocks; ++j) total.add(slices[j], merge.weights[j], thread);
    cluster_arrive();  // all has been read from the other blocks
    if (block.share.count > 1) {
        store_partial(PartialSlice<C>(block.p, block.cluster, rank), merge, total, thread);
        if (!take_ticket(block, merge, rank, thread)) return;
        merge_clusters(block, merge, total, rank, thread);
    }
    store_final(block, merge, total, rank, thread);
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
    prefetch_inputs<typename C::Work, ItemRows<typename C::Work>::template kLatentLines<C>>(p);
    wait_for_inputs<C>(p);

    const i32 warp = uniform_warp(), rank = cluster_rank();
    if (!find_work(block, rank)) return griddepcontrol_wait();  // the same in all blocks of the cluster
    if (warp < kLoadWarp) {
        run_math_role(block, threadIdx.x);
    } else if (warp == kLoadWarp) {
        run_load_role(block, threadIdx.x % kWarpThreads, GroupLoader<C>{block, kv_map, 0});
    } else {
        const QueryStages<kStagesQ> stages{s.q[0][0], s.q_full, s.q_empty};
        run_query_role<C>(block, stages, threadIdx.x - kQueryWarp * kWarpThreads);
    }
    __syncwarp();
    griddepcontrol_wait();  // results may be written
    cluster_sync();         // every block's results are in its shared memory
    if (warp < kLoadWarp) {
        finish_slice(block, rank, threadIdx.x);
    } else {
        cluster_arrive();
    }
    __syncwarp();
    griddepcontrol_launch_dependents();
    cluster_wait();  // no other block still reads this one's shared memory
}
}  // namespace mla::decode::sm90
