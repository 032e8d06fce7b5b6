// How the blocks of a cluster, which share the tokens of one request, merge their results through distributed shared
// memory, and how clusters that share a request merge theirs.
//
//   block j: O_j, maxima m_j, sums l_j of its rows
//   M = max_j m_j,  l = sum_j l_j exp2(m_j - M),  out = sum_j O_j exp2(m_j - M) / l,  lse = ln 2 (M + log2 l)
//
// Block d of a cluster of C finishes columns [d, d + 1) * 512 / C of all rows. O_j lies in shared memory in the order
// of the threads that hold it: accumulators of WGMMA with 64 columns of O as their rows and query rows as their
// columns.
//
// A request that is too long for one cluster has several. Each writes its slices to the workspace and takes a ticket
// per slice; the block with the last ticket merges the slices of all clusters, in their order, so that results do not
// depend on which block is last. No block waits for one that may not have started.
//
// Source: clusters that merge through distributed shared memory are ClusterFusion's idea (2025), the last arriver's
// merge that of stream-K and split-K products. What differs: columns are divided over the blocks of the cluster, so
// that every step of the merge runs on all of them, and no block waits for another cluster.
#pragma once
#include "attention/decode_output.cuh"
#include "attention/online_softmax.cuh"
#include "decode/cluster_work.cuh"
#include "ptx/cluster.cuh"
#include "ptx/system.cuh"
#include "tile/fragment.cuh"

namespace mla::decode {
// ---- Shape -----------------------------------------------------------------------------------------------------
constexpr i32 kPanelColumns = 64;  // of O, which are the rows of an accumulator
constexpr i32 kPanels = kHeadDimV / kPanelColumns;

// `kGroups` warpgroups merge, each some of the rows. With kTwoSums a row has a sum of its own for its log-sum-exp.
template <i32 kBlockRows_, i32 kClusterBlocks_, i32 kGroups = 1, bool kTwoSums_ = false>
struct MergeShape {
    static constexpr i32 kBlockRows = kBlockRows_, kClusterBlocks = kClusterBlocks_;
    static constexpr bool kTwoSums = kTwoSums_;
    static constexpr i32 kThreads = kGroups * kWarpgroupThreads;
    static constexpr i32 kSlicePanels = kPanels / kClusterBlocks;     // that a block finishes
    static constexpr i32 kVectors = kBlockRows / 8;                   // of four floats, in a fragment of a panel
    static constexpr i32 kOwnVectors = kVectors / kGroups;            // of them a thread merges
    static constexpr i32 kOwnRows = 8 * kOwnVectors;                  // of a warpgroup
    static constexpr i32 kSliceVectors = kSlicePanels * kOwnVectors;  // of a thread
    static_assert(kSlicePanels * kClusterBlocks == kPanels, "slices of whole panels");
    static_assert(kOwnVectors * kGroups == kVectors, "each warpgroup has as many rows");
    static_assert(kOwnRows <= kWarpThreads, "a lane for each row");

    // The first row, and the first vector, of a thread's warpgroup.
    MLA_DEVICE static i32 first_vector(i32 thread) { return thread / kWarpgroupThreads * kOwnVectors; }
    MLA_DEVICE static i32 first_row(i32 thread) { return 8 * first_vector(thread); }
};

// ---- Storage ---------------------------------------------------------------------------------------------------
template <class C>
using RowValues = float[C::kBlockRows];

// What takes the place of the tiles of keys once all of them have been multiplied. Other blocks read `out` to
// `lse_sum`.
template <class C>
struct Merge {
    float4 out[kPanels][C::kVectors][kWarpgroupThreads];  // O^T, not normalised, as the threads held it
    RowValues<C> max, sum;
    RowValues<C> lse_sum;                                             // with two sums
    RowValues<C> maxima[C::kClusterBlocks], sums[C::kClusterBlocks];  // of all blocks
    RowValues<C> lse_sums[C::kTwoSums ? C::kClusterBlocks : 1];
    RowValues<C> weights[C::kClusterBlocks];
    RowValues<C> lse2;
    RowValues<C> cluster_weights[kMaxClusters];  // first their log-sum-exps, where clusters share a request
    i32 is_last;
};

// What the merge knows of a block.
template <class C>
struct MergeBlock {
    const DecodeParams& p;
    Merge<C>& merge;
    i32 kv_head, row0, rows;  // see RowBlock
    i32 cluster, rank;        // number in the launch; of the block in its cluster
    ClusterShare share;

    MLA_DEVICE static void sync() { bar_sync(C::kBarrier, C::kThreads); }
};

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

// By whole warps: what block `rank` of a cluster has to do; false if the cluster has no share. `hidden` as in RowBlock.
template <i32 kClusterBlocks>
MLA_DEVICE bool find_work(const DecodeParams& p, i32 cluster, i32 rank, i32 hidden, ClusterShare& share,
                          WorkItem& item) {
    if (!find_share<kClusterBlocks>(p, cluster, share)) return false;
    const RequestLength length = request_length(p, share.request);
    const TileRange all{0, ceil_div(length.tokens, kTileTokens)};
    const TileRange mine = all.piece(share.index, share.count).piece(rank, kClusterBlocks);
    item.request = share.request;
    item.tokens = length.tokens;
    item.behind_last = length.behind_last;
    item.first_tokens = 0;
    item.seen_by_all = length.tokens - hidden_here(p, hidden, length.behind_last);
    item.tile_begin = mine.begin;
    item.tile_end = mine.end;
    item.partial_index = kNotSplit;
    return true;
}

// ---- Merge of the blocks of a cluster --------------------------------------------------------------------------
// A thread's share of a slice: elements of Merge::out.
template <class C>
struct Slice {
    float4 vectors[C::kSlicePanels][C::kOwnVectors];

    MLA_DEVICE void clear() {
#pragma unroll
        for (auto& panel : vectors) {
#pragma unroll
            for (float4& x : panel) x = make_float4(0.f, 0.f, 0.f, 0.f);
        }
    }

    // Adds another slice, each row times its weight.
    MLA_DEVICE void add(const Slice& x, const RowValues<C>& weights, i32 thread) {
        const float* const own = weights + C::first_row(thread) + fragment_column(thread);
#pragma unroll
        for (i32 v = 0; v < C::kOwnVectors; ++v) {
            const float even = own[8 * v], odd = own[8 * v + 1];
#pragma unroll
            for (i32 panel = 0; panel < C::kSlicePanels; ++panel) {
                const float4& from = x.vectors[panel][v];
                float4& to = vectors[panel][v];
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
MLA_DEVICE void read_slice(Slice<C>& slice, const MergeBlock<C>& block, u32 source, i32 thread) {
#pragma unroll
    for (i32 panel = 0; panel < C::kSlicePanels; ++panel) {
#pragma unroll
        for (i32 v = 0; v < C::kOwnVectors; ++v) {
            const SmemAddr here = smem_addr(&block.merge.out[block.rank * C::kSlicePanels + panel]
                                                            [C::first_vector(thread) + v][thread % kWarpgroupThreads]);
            slice.vectors[panel][v] = ld_shared_cluster_v4(map_to_rank(here, source));
        }
    }
}

template <class C>
MLA_DEVICE void read_statistics(Merge<C>& merge, i32 thread) {
#pragma unroll 1
    for (i32 i = thread; i < C::kClusterBlocks * C::kBlockRows; i += C::kThreads) {
        const i32 source = i / C::kBlockRows, row = i % C::kBlockRows;
        merge.maxima[source][row] = ld_shared_cluster_f32(map_to_rank(smem_addr(&merge.max[row]), source));
        merge.sums[source][row] = ld_shared_cluster_f32(map_to_rank(smem_addr(&merge.sum[row]), source));
        if constexpr (C::kTwoSums) {
            merge.lse_sums[source][row] = ld_shared_cluster_f32(map_to_rank(smem_addr(&merge.lse_sum[row]), source));
        }
    }
}

// By one thread per row: the weight of each block's O, and the row's log-sum-exp. Not the last step where clusters
// share the request; it is normalised all the same, as a partial result is.
template <class C>
MLA_DEVICE void weigh_blocks(Merge<C>& merge, i32 row) {
    if (row >= C::kBlockRows) return;
    float max = kLowestMax;
#pragma unroll
    for (i32 j = 0; j < C::kClusterBlocks; ++j) max = fmaxf(max, merge.maxima[j][row]);
    float weights[C::kClusterBlocks], sum = 0.f, lse_sum = 0.f;
#pragma unroll
    for (i32 j = 0; j < C::kClusterBlocks; ++j) {
        weights[j] = exp2f(merge.maxima[j][row] - max);
        sum = fmaf(weights[j], merge.sums[j][row], sum);
        if constexpr (C::kTwoSums) lse_sum = fmaf(weights[j], merge.lse_sums[j][row], lse_sum);
    }
    const float factor = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
    for (i32 j = 0; j < C::kClusterBlocks; ++j) merge.weights[j][row] = weights[j] * factor;
    merge.lse2[row] = row_lse2(max - C::kWeightLog2, C::kTwoSums ? lse_sum : sum);
}

// ---- Merge of the clusters of a request ------------------------------------------------------------------------
// Where the workspace has what belongs to a cluster, this row block, and a rank.
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
        vectors = reinterpret_cast<float4*>(p.partial_out) + index * (C::kSliceVectors * C::kThreads);
        lse2 = p.partial_lse + index * C::kBlockRows;
    }

    MLA_DEVICE float4& vector(i32 panel, i32 v, i32 thread) const {
        return vectors[(panel * C::kOwnVectors + v) * C::kThreads + thread];
    }
};

template <class C>
MLA_DEVICE void store_partial(const PartialSlice<C>& to, const Merge<C>& merge, const Slice<C>& slice, i32 thread) {
#pragma unroll
    for (i32 panel = 0; panel < C::kSlicePanels; ++panel) {
#pragma unroll
        for (i32 v = 0; v < C::kOwnVectors; ++v) to.vector(panel, v, thread) = slice.vectors[panel][v];
    }
    if (thread < C::kBlockRows) to.lse2[thread] = merge.lse2[thread];
}

// Whether all other clusters of the request have stored their slices of this rank. The last one resets the counter for
// the next launch.
template <class C>
MLA_DEVICE bool take_ticket(const MergeBlock<C>& block, i32 thread) {
    block.sync();  // the slice has been stored
    if (thread == 0) {
        u32* const taken = block.p.tickets + slice_index<C>(block.share.first, block.rank);
        block.merge.is_last = atom_add_acq_rel(taken, 1) == block.share.count - 1;
        if (block.merge.is_last) *taken = 0;
    }
    block.sync();
    return block.merge.is_last;
}

// By one thread per row, from the log-sum-exps of the clusters: their weights, and the log-sum-exp of all.
template <class C>
MLA_DEVICE void weigh_clusters(Merge<C>& merge, i32 count, i32 row) {
    if (row >= C::kBlockRows) return;
    float max = negative_infinity(), sum = 0.f;
#pragma unroll 1
    for (i32 g = 0; g < count; ++g) max = fmaxf(max, merge.cluster_weights[g][row]);
#pragma unroll 1
    for (i32 g = 0; g < count; ++g) {
        float& weight = merge.cluster_weights[g][row];
        weight = weight == negative_infinity() ? 0.f : exp2f(weight - max);  // nothing weighs nothing; a NaN stays one
        sum += weight;
    }
    const float factor = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll 1
    for (i32 g = 0; g < count; ++g) merge.cluster_weights[g][row] *= factor;
    merge.lse2[row] = sum == 0.f ? negative_infinity() : max + log2f(sum);
}

// The sum of the slices of all clusters of the request, in their order, so many at a time as registers hold.
template <class C>
MLA_DEVICE void merge_clusters(const MergeBlock<C>& block, Slice<C>& total, i32 thread) {
    constexpr i32 kAtOnce = C::kSliceVectors <= 4 ? 8 : 32 / C::kSliceVectors;
    const ClusterShare& share = block.share;
    Merge<C>& merge = block.merge;
    for (i32 i = thread; i < share.count * C::kBlockRows; i += C::kThreads) {
        const i32 g = i / C::kBlockRows, row = i % C::kBlockRows;
        merge.cluster_weights[g][row] = PartialSlice<C>(block.p, share.first + g, block.rank).lse2[row];
    }
    block.sync();
    weigh_clusters(merge, share.count, thread);
    block.sync();
    total.clear();
#pragma unroll 1
    for (i32 first = 0; first < share.count; first += kAtOnce) {
        Slice<C> slices[kAtOnce];
#pragma unroll
        for (i32 i = 0; i < kAtOnce; ++i) {
            const PartialSlice<C> from(block.p, share.first + min(first + i, share.count - 1), block.rank);
#pragma unroll
            for (i32 panel = 0; panel < C::kSlicePanels; ++panel) {
#pragma unroll
                for (i32 v = 0; v < C::kOwnVectors; ++v) {
                    slices[i].vectors[panel][v] = from.vector(panel, v, thread);
                }
            }
        }
#pragma unroll
        for (i32 i = 0; i < kAtOnce; ++i) {
            if (first + i < share.count) total.add(slices[i], merge.cluster_weights[first + i], thread);
        }
    }
}

// ---- Results ---------------------------------------------------------------------------------------------------
// The final results: columns of the slice, by `C::store_slice`, and, by block 0 of a cluster, the log-sum-exps. Lane i
// computes where the i-th row of its warpgroup begins.
template <class C>
MLA_DEVICE void store_final(const MergeBlock<C>& block, const Slice<C>& slice, i32 thread) {
    const DecodeParams& p = block.p;
    const i32 request = block.share.request;
    const i32 my_row = min(block.row0 + C::first_row(thread) + thread % kWarpThreads, block.rows - 1);
    const i64 my_offset = out_offset(p, request, block.kv_head, my_row);
    C::store_slice(block, slice, my_offset, block.rank * C::kSlicePanels * kPanelColumns, thread);
    const i32 row = block.row0 + thread;
    if (block.rank != 0 || thread >= C::kBlockRows || row >= block.rows) return;
    p.lse[lse_offset(p, request, block.kv_head, row)] = final_lse(p, block.merge.lse2[thread]);
}

// By the warpgroups that merge, after a cluster barrier: slice `rank` of the results. Arrives at the next cluster
// barrier once all has been read from the other blocks.
template <class C>
MLA_DEVICE void finish_slice(const MergeBlock<C>& block, i32 thread) {
    Merge<C>& merge = block.merge;
    Slice<C> slices[C::kClusterBlocks], total;
#pragma unroll
    for (i32 j = 0; j < C::kClusterBlocks; ++j) read_slice(slices[j], block, j, thread);
    read_statistics(merge, thread);
    block.sync();
    weigh_blocks(merge, thread);
    block.sync();
    total.clear();
#pragma unroll
    for (i32 j = 0; j < C::kClusterBlocks; ++j) total.add(slices[j], merge.weights[j], thread);
    cluster_arrive();  // all has been read from the other blocks
    if (block.share.count > 1) {
        store_partial(PartialSlice<C>(block.p, block.cluster, block.rank), merge, total, thread);
        if (!take_ticket(block, thread)) return;
        merge_clusters(block, total, thread);
    }
    store_final(block, total, thread);
}
}  // namespace mla::decode
