// P^T of a tile and O^T of a work item where heads are the columns of fragments: P for the product with the values,
// statistics and results for the caller's arrays or the workspace.
#pragma once
#include "attention/decode_output.cuh"
#include "attention/head_softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/matrix.cuh"
#include "tile/sw128.cuh"

namespace mla::attention {
// A SW128 tile of Q or P: 64 columns of all heads.
template <i32 kHeads>
constexpr u32 kHeadSwTileBytes = kHeads * kSw128RowBytes;

// P^T from registers to [head][key] in shared memory, for a product to read after a barrier.
template <class Element, i32 kHeads>
MLA_DEVICE void store_p(Element, HeadState<kHeads>& heads, const float (&scores)[kHeads / 2], SmemAddr p,
                        float scale_log2, i32 thread) {
    // Matrix lane / 8: heads 8 * (lane / 16) on from the first, keys 8 * (lane / 8 % 2) on from the warp's first.
    const i32 lane = thread % kWarpThreads, head = lane / 16 * 8 + lane % 8;
    const i32 chunk = thread / kWarpThreads * 2 + lane / 8 % 2;
    constexpr i32 kWords = kHeads / 4;  // two for each eight heads: keys 0..7 and 8..15 of the warp's
    u32 words[kWords];
    heads.exponentiate(Element{}, words, scores, scale_log2);
#pragma unroll
    for (i32 i = 0; i + 4 <= kWords; i += 4) {
        stmatrix_x4_trans(p + sw128_offset(4 * i + head, chunk), {words[i], words[i + 1], words[i + 2], words[i + 3]});
    }
    if constexpr (kWords % 4 != 0) {
        stmatrix_x2_trans(p + sw128_offset(4 * (kWords - 2) + lane % 8, chunk), {words[kWords - 2], words[kWords - 1]});
    }
    fence_proxy_async();
}

// ---- Epilogue --------------------------------------------------------------------------------------------------
// It runs once per work item, so its instructions are rarely in the cache: one thread per head computes everything that
// needs divisions, and shares it.

// The heads of a thread block, rows [row0, row0 + kHeads) of a KV head and below `rows`; and its share of the work.
template <class Work_>
struct BlockHeadsOf {
    using Work = Work_;
    i32 kv_head, row0, rows;
};
using BlockHeads = BlockHeadsOf<ScheduledWork>;

// A warpgroup's statistics of each head at the end of a work item, in shared memory.
template <i32 kHeads>
struct HeadStats {
    float max[kHeads], row_max[kHeads];  // see HeadState
    float factor[kHeads];                // factor from the sum of weighted values to the result
};

// Called by one thread per head: its factor and, if this warpgroup `reports`, the statistics of the result.
template <bool kWithRowMax, i32 kHeads, class Work>
MLA_DEVICE void finish_head(const DecodeParams& p, const WorkItem& item, const BlockHeadsOf<Work>& block,
                            HeadStats<kHeads>& stats, const float (&warps)[kWarpgroupWarps][kHeads], bool reports,
                            i32 head) {
    if (head >= kHeads) return;
    const i32 row = block.row0 + head;
    stats.factor[head] = 0.f;
    if (row >= block.rows) return;
    float sum = 0.f;
#pragma unroll
    for (i32 warp = 0; warp < kWarpgroupWarps; ++warp) sum += warps[warp][head];
    stats.factor[head] = output_factor(p, item, block.kv_head, row, stats.max[head], sum);
    if (!reports) return;
    store_row_lse<Work>(p, item, block.kv_head, row, row_lse2(stats.max[head], sum));
    if (kWithRowMax) store_row_max(p, item, block.kv_head, row, with_nan_of(sum, stats.row_max[head]));
}

// Called by a warpgroup at the end of a work item: writes the heads' factors to `stats`, for all of its threads.
template <bool kWithRowMax, i32 kHeads, class Work>
MLA_DEVICE void finish_heads(const DecodeParams& p, const WorkItem& item, const BlockHeadsOf<Work>& block,
                             const HeadState<kHeads>& heads, float (&warps)[kWarpgroupWarps][kHeads],
                             HeadStats<kHeads>& stats, bool reports, i32 barrier, i32 thread) {
    store_warp_sums<kHeads>(warps[thread / kWarpThreads], heads.sum, thread);
    if (thread < 4) {  // these threads hold every head
#pragma unroll
        for (i32 k = 0; k < kHeadsOfThread<kHeads>; ++k) {
            stats.max[kth_head(k, thread)] = heads.max.value[k];
            if (kWithRowMax) stats.row_max[kth_head(k, thread)] = heads.row_max.value[k];
        }
    }
    bar_sync(barrier, kWarpgroupThreads);
    finish_head<kWithRowMax>(p, item, block, stats, warps, reports, thread);
    bar_sync(barrier, kWarpgroupThreads);
}

// A thread's share of one value per head in shared memory.
template <i32 kHeads>
MLA_DEVICE HeadValues<kHeads> own_factors(const float* heads, i32 thread) {
    HeadValues<kHeads> factors;
#pragma unroll
    for (i32 k = 0; k < kHeadsOfThread<kHeads>; ++k) factors.value[k] = heads[kth_head(k, thread)];
    return factors;
}

// Writes kPieces x 16 columns of each head by each warp: from `first_column` on, kWarpColumns further with each warp
// and kPieceColumns with each piece. Lane i computes where the i-th of every 32 heads begins.
template <i32 kWarpColumns, i32 kPieceColumns, class Element, i32 kHeads, i32 kPieces, class Work>
MLA_DEVICE void store_out(Element, const DecodeParams& p, const WorkItem& item, const BlockHeadsOf<Work>& block,
                          const float (&out)[kPieces][kHeads / 2], const HeadValues<kHeads>& factors, i32 first_column,
                          i32 thread) {
    const bool whole = item.partial_index == kNotSplit;
    const i32 lane = thread % kWarpThreads, heads = block.rows - block.row0;
    i64 my_offset[ceil_div(kHeads, kWarpThreads)];
#pragma unroll
    for (i32 i = 0; i < ceil_div(kHeads, kWarpThreads); ++i) {
        const i32 my_row = block.row0 + min(i * kWarpThreads + lane, heads - 1);
        my_offset[i] = whole ? item_out_offset<Work>(p, item, block.kv_head, my_row)
                             : workspace_row(p, item.partial_index, block.kv_head, my_row) * kHeadDimV;
    }
    constexpr i32 kFragments = kWarpThreads / 2;                              // of a thread, for each 32 heads
    const i32 column0 = first_column + thread / kWarpThreads * kWarpColumns;  // of the warp, in the first piece
    if (!whole || p.out_is_fp32) {
        float* const base = (whole ? static_cast<float*>(p.out) : p.partial_out) + column0 + lane / 4;
#pragma unroll
        for (i32 i = 0; i < kHeads / 2; ++i) {
            const i32 head = head_of(i, thread);
            float* const to = base + __shfl_sync(kFullWarp, my_offset[i / kFragments], head) + 8 * fragment_half(i);
            if (head >= heads) continue;
#pragma unroll
            for (i32 piece = 0; piece < kPieces; ++piece) {
                to[piece * kPieceColumns] = out[piece][i] * factors.of(i);
            }
        }
        return;
    }
    // Transposed, a quad holds one head: of two pieces, 16 columns each, four chunks of 16 bytes.
    u16* const base = static_cast<u16*>(p.out) + column0 + lane % 4 / 2 * kPieceColumns + lane % 2 * 8;
#pragma unroll
    for (i32 i = 0; i < kHeads / 2; i += 4) {
        const i32 head = 2 * i + lane / 4;
        u16* const to = base + __shfl_sync(kFullWarp, my_offset[i / kFragments], head);
#pragma unroll
        for (i32 piece = 0; piece < kPieces; piece += 2) {
            u32 words[4];
#pragma unroll
            for (i32 j = 0; j < 4; ++j) {
                const float (&columns)[kHeads / 2] = out[piece + j / 2];
                const i32 d = i + 2 * (j % 2);
                words[j] =
                    movmatrix_trans(cvt_x2(Element{}, columns[d] * factors.of(d), columns[d + 1] * factors.of(d + 1)));
            }
            quad_transpose(words, lane % 4);
            if (head < heads) {
                *reinterpret_cast<uint4*>(to + piece * kPieceColumns) =
                    make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
}
}  // namespace mla::attention
