// Attention to FP8 records for few query rows: the mathematics. See attention/sm90/small_records.cuh.
#pragma once
#include "attention/sm90/raised_weights.cuh"
#include "attention/sm90/record_query.cuh"
#include "attention/sm90/small_records_storage.cuh"
#include "attention/sm90/window_values.cuh"

namespace mla::attention::sm90 {
// ---- Math role -------------------------------------------------------------------------------------------------
template <class C>
struct SmallMath : SwappedMath<C::kBlockRows, kSwTilesV> {
    i32 group, stage, q_stage;
    Ring<kStagesKV> ring;
};

// S^T of the tile in the current stage, each group on arrival. Returns the present tokens.
template <class C>
MLA_DEVICE u64 score(SmallStorage<C>& s, SmallMath<C>& math, i32 thread) {
    const SmemDesc k = uniform(k_major_desc(smem_addr(s.kv[math.stage])));
    const SmemDesc q = uniform(k_major_desc(smem_addr(s.q[math.q_stage])));
    const u32 parity = math.ring.full_parity(math.stage);
    pin(math.scores);
#pragma unroll
    for (i32 i = 0; i < C::kSwTilesQk; ++i) {
        if (i % C::kGroupSwTiles == 0) {
            mbarrier_wait(s.kv_full[math.stage][C::group_of(i)], parity);
            if (C::kFencedByReaders) fence_proxy_async();
            wgmma_fence();
        }
        const SmemDesc a = advance(k, i * kSw128Bytes), b = advance(q, i * C::kQSwTileBytes);
        if (i == C::kRopeSwTile) {
            multiply_abt<kSw128MmaSteps>(typename C::Rope{}, math.scores, a, b, true);
        } else {
            multiply_abt<kSw128MmaSteps>(typename C::Latent{}, math.scores, a, b, i > 0);
        }
    }
    wgmma_commit_group();
    // Reads the next operands while the matmuls are in flight.
    constexpr bool kScaled = !kSameFormat<typename C::Element, typename C::Latent>;
    HeadValues<C::kBlockRows> factors;
#pragma unroll
    for (i32 k = 0; k < kHeadsOfThread<C::kBlockRows>; ++k) {
        if (kScaled) factors.value[k] = s.q_factors[math.q_stage][kth_head(k, thread)];
    }
    const u64 present = s.present[math.stage];
    wgmma_wait_group<0>();
    pin(math.scores);
    if constexpr (kScaled) factors.multiply(math.scores);
    return present;
}

// HeadState::move_max for raised weights.
template <i32 kRaisedLog2, i32 kHeads>
MLA_DEVICE HeadValues<kHeads> move_raised_max(HeadState<kHeads>& heads, const float (&warps)[kWarpgroupWarps][kHeads],
                                              float scale_log2, i32 thread) {
    HeadValues<kHeads> scale;
#pragma unroll
    for (i32 k = 0; k < kHeadsOfThread<kHeads>; ++k) {
        const float top = max_of_warps(warps, kth_head(k, thread)) * scale_log2;
        heads.row_max.value[k] = fmaxf(heads.row_max.value[k], top);
        const float tile = __fadd_rn(top, -(float)kRaisedLog2), max = heads.max.value[k];
        const float to = is_far_above(tile, max) ? tile : max;
        scale.value[k] = ex2_approx(max - to);
        heads.sum.value[k] *= scale.value[k];
        heads.max.value[k] = to;
    }
    return scale;
}

// Same steps as update_maxima.
template <class C>
MLA_DEVICE void update_raised_maxima(SmallMath<C>& math, float (&warps)[kWarpgroupWarps][C::kBlockRows],
                                     float scale_log2, i32 barrier, i32 thread) {
    store_warp_maxima_by_halves<C::kBlockRows>(warps[thread / kWarpThreads], math.scores, thread);
    bar_sync(barrier, kWarpgroupThreads);
    const HeadValues<C::kBlockRows> scale =
        move_raised_max<kRaisedWeights<typename C::Latent>>(math.heads, warps, scale_log2, thread);
    if (!scale.any_but_one()) return;
#pragma unroll
    for (auto& columns : math.out) scale.multiply(columns);
}

// O^T += V^T P^T; each group of the stage is released as soon as it has been multiplied.
template <class C>
MLA_DEVICE void add_values(SmallStorage<C>& s, SmallMath<C>& math, bool keeps, i32 thread) {
    const SmemDesc v = uniform(mn_major_desc(smem_addr(s.kv[math.stage])));
    const SmemDesc p = uniform(k_major_desc(smem_addr(s.p[math.group])));
#pragma unroll
    for (auto& columns : math.out) pin(columns);
    wgmma_fence();
#pragma unroll
    for (i32 sw_tile = 0; sw_tile < kSwTilesV; ++sw_tile) {
        multiply_atbt<kSw128MmaSteps>(typename C::Latent{}, math.out[sw_tile], advance(v, sw_tile * kSw128Bytes), p,
                                      true);
        if (sw_tile + 1 == kSwTilesV || C::group_of(sw_tile + 1) != C::group_of(sw_tile)) wgmma_commit_group();
    }
    static_assert(C::kGroups == 3, "as many groups are committed");
    wgmma_wait_group<2>();
    if (!keeps) release(s.kv_empty[math.stage][0], thread);
    wgmma_wait_group<1>();
    if (!keeps) release(s.kv_empty[math.stage][1], thread);
    wgmma_wait_group<0>();
    if (!keeps) release(s.kv_empty[math.stage][2], thread);
#pragma unroll
    for (auto& columns : math.out) pin(columns);
}

// Most tiles hide nothing.
template <class C>
MLA_DEVICE void mask_tile(const SmallBlock<C>& block, SmallMath<C>& math, u64 present, const WorkItem& item, i32 tile,
                          i32 thread) {
    if constexpr (!C::Tokens::kMasked) {
        mask_absent(math.scores, present, thread);
    } else {
        using Work = typename C::Tokens::Work;
        if (Work::all_rows_see(item, tile) && present == ~0ull) return;
        i32 row0 = block.row0;
        opaque(row0);  // otherwise the divisions below are hoisted, and their results occupy registers in the loop
        if constexpr (C::kTree) {
#pragma unroll
            for (i32 k = 0; k < kHeadsOfThread<C::kBlockRows>; ++k) {
                const SeenTokens seen = seen_of_tree(block.p, item, row0 + kth_head(k, thread));
                mask_head(math.scores, k, seen.of_tile(tile * kTileTokens) & present, thread);
            }
            return;
        }
        KeyMask<C::kBlockRows> mask;
        mask.present = present;
#pragma unroll
        for (i32 k = 0; k < kHeadsOfThread<C::kBlockRows>; ++k) {
            mask.visible[k] = Work::visible(block.p, item, row0 + kth_head(k, thread)) - tile * kTileTokens;
        }
        mask_keys(math.scores, mask, thread);
        if constexpr (Work::kForms) {
#pragma unroll
            for (i32 k = 0; k < kHeadsOfThread<C::kBlockRows>; ++k) {
                const i32 seen_from = Work::window_begin(block.p, item, row0 + kth_head(k, thread));
                mask_keys_before(math.scores, k, seen_from - tile * kTileTokens, thread);
            }
        }
    }
}

// Makes V finite where not every row of the block sees the token; all scores of the tile must be done. The proxy fence
// after P covers these writes, too. A row that does see NaN in a latent has a score of NaN, and so is NaN as a whole:
// nothing needs to be restored.
template <class C>
MLA_DEVICE void sanitize_v(const SmallBlock<C>& block, const SmallMath<C>& math, const WorkItem& item, i32 tile,
                           i32 thread) {
    if constexpr (C::Tokens::kMasked) {
        const i32 first = tile * kTileTokens;
        i32 found;
        if constexpr (C::Tokens::Work::kForms) {
            const GroupItem& of = C::Tokens::Work::of(item);
            const bool from_begin = of.seen_from <= max(first, of.first_token);
            if (from_begin && item.seen_by_all >= min(first + kTileTokens, item.tokens)) return;
            sanitize_window<typename C::Latent, kSwTilesV>(block.s.kv[math.stage], of, tile, found, thread);
            return;
        }
        if (item.seen_by_all >= min(first + kTileTokens, item.tokens)) return;  // absent rows are zeros
        sanitize_rows<typename C::Latent, kSwTilesV>(block.s.kv[math.stage], max(item.seen_by_all - first, 0),
                                                     item.tokens - first, found, item.request, thread);
    }
}

template <class C>
MLA_DEVICE void process_tile(SmallBlock<C>& block, SmallMath<C>& math, const WorkItem& item, i32 tile, i32 thread) {
    SmallStorage<C>& s = block.s;
    const float scale_log2 = block.p.scale_log2;
    const u64 present = score(s, math, thread);
    const bool last = tile + C::kMathGroups >= item.tile_end;
    if (last) release(s.q_empty[math.q_stage], thread);
    mask_tile(block, math, present, item, tile, thread);
    if constexpr (kRaisedWeights<typename C::Latent> != 0) {
        update_raised_maxima<C>(math, s.warp_values[math.group], scale_log2, MathOnly + math.group, thread);
    } else {
        update_maxima</*kByHalves=*/true>(math, s.warp_values[math.group], scale_log2, MathOnly + math.group, thread);
    }
    sanitize_v(block, math, item, tile, thread);
    store_p(typename C::Latent{}, math.heads, math.scores, smem_addr(s.p[math.group]), scale_log2, thread);
    bar_sync(MathOnly + math.group, kWarpgroupThreads);
    add_values(s, math, math.group > 0 && last, thread);
    math.ring.advance(math.stage);
    if (C::kMathGroups == 1) math.stage ^= 1;
}

// The second math warpgroup's part of a work item. It lies in the memory of stage 1, whose last tile that warpgroup has
// therefore not released. Per thread: maxima, sums and largest scores, then its columns. The thread of the first
// warpgroup with the same number holds the same heads and columns.
template <class C>
struct MathPart {
    static constexpr i32 kHeads = kHeadsOfThread<C::kBlockRows>;
    float* at;

    MLA_DEVICE MathPart(SmallStorage<C>& s, i32 thread) : at(reinterpret_cast<float*>(s.kv[1]) + thread) {}
    MLA_DEVICE float& max(i32 head) const { return at[head * kWarpgroupThreads]; }
    MLA_DEVICE float& sum(i32 head) const { return at[(kHeads + head) * kWarpgroupThreads]; }
    MLA_DEVICE float& row_max(i32 head) const { return at[(2 * kHeads + head) * kWarpgroupThreads]; }
    MLA_DEVICE float& out(i32 sw_tile, i32 i) const {
        return at[(3 * kHeads + sw_tile * (C::kBlockRows / 2) + i) * kWarpgroupThreads];
    }
};
template <class C>
constexpr bool kPartFits =
    4 * kWarpgroupThreads * (3 * kHeadsOfThread<C::kBlockRows> + kSwTilesV * C::kBlockRows / 2) <= C::kTileBytes;

template <class C>
MLA_DEVICE void leave_part(SmallStorage<C>& s, const SmallMath<C>& math, i32 thread) {
    static_assert(kPartFits<C>, "a stage has room for a part");
    const MathPart<C> part(s, thread);
    bar_sync(MathOnly + math.group, kWarpgroupThreads);  // all have multiplied the tile
#pragma unroll
    for (i32 k = 0; k < part.kHeads; ++k) {
        part.max(k) = math.heads.max.value[k];
        part.sum(k) = math.heads.sum.value[k];
        if (C::Tokens::kWithRowMax) part.row_max(k) = math.heads.row_max.value[k];
    }
#pragma unroll
    for (i32 t = 0; t < kSwTilesV; ++t) {
#pragma unroll
        for (i32 i = 0; i < C::kBlockRows / 2; ++i) part.out(t, i) = math.out[t][i];
    }
}

// Which warpgroup has which tiles depends on where the item begins, so the sum must not depend on it: no operation is
// fused.
template <class C>
MLA_DEVICE void add_part(SmallStorage<C>& s, SmallMath<C>& math, i32 thread) {
    const MathPart<C> part(s, thread);
    HeadValues<C::kBlockRows> mine, theirs;
#pragma unroll
    for (i32 k = 0; k < part.kHeads; ++k) {
        const float max = fmaxf(math.heads.max.value[k], part.max(k));
        mine.value[k] = ex2_approx(math.heads.max.value[k] - max);
        theirs.value[k] = ex2_approx(part.max(k) - max);
        math.heads.max.value[k] = max;
        math.heads.sum.value[k] =
            __fadd_rn(__fmul_rn(math.heads.sum.value[k], mine.value[k]), __fmul_rn(part.sum(k), theirs.value[k]));
        if (C::Tokens::kWithRowMax) {
            math.heads.row_max.value[k] = fmaxf(math.heads.row_max.value[k], part.row_max(k));
        }
    }
#pragma unroll
    for (i32 t = 0; t < kSwTilesV; ++t) {
#pragma unroll
        for (i32 i = 0; i < C::kBlockRows / 2; ++i) {
            math.out[t][i] = __fadd_rn(__fmul_rn(math.out[t][i], mine.of(i)), __fmul_rn(part.out(t, i), theirs.of(i)));
        }
    }
}

// Called by both math warpgroups; the first one holds the whole item afterwards. `has_part`: the second one had a tile.
template <class C>
MLA_DEVICE void merge_parts(SmallStorage<C>& s, SmallMath<C>& math, bool has_part, i32 thread) {
    if (math.group > 0 && has_part) leave_part(s, math, thread);
    bar_sync(MathBoth, 2 * kWarpgroupThreads);
    if (math.group == 0 && has_part) add_part(s, math, thread);
    bar_sync(MathBoth, 2 * kWarpgroupThreads);
    if (math.group == 0 || !has_part) return;
    for (MBarrier& empty : s.kv_empty[1]) release(empty, thread);
}

template <class C>
MLA_DEVICE void run_math_role(SmallBlock<C>& block, i32 group, i32 thread) {
    using Element = typename C::Element;
    const DecodeParams& p = block.p;
    SmallStorage<C>& s = block.s;
    using Held = typename C::Tokens::Work;
    SmallMath<C> math;
    math.group = math.stage = group;
    math.q_stage = 0;
    i32 stage = 0;
    typename Held::HeldItem item;
    using Work = WorkIteratorOf<Held>;
    for (Work walk(p, block.split, C::Tokens::kMasked ? block.hidden : 0); walk.next(p, item);) {
        math.reset();
        const i32 tiles = item.tile_end - item.tile_begin;
        if (tiles > 0) {
            const i32 skipped = C::kMathGroups > 1 ? group ^ stage : 0;  // tiles of a stage belong to one warpgroup
#pragma unroll 1
            for (i32 tile = item.tile_begin + skipped; tile < item.tile_end; tile += C::kMathGroups) {
                process_tile(block, math, item, tile, thread);
            }
            if constexpr (C::kMathGroups > 1) {
                if (skipped >= tiles) release(s.q_empty[math.q_stage], thread);
                merge_parts(s, math, (tiles + stage) / 2 > 0, thread);
                stage = (stage + tiles) & 1;
            }
            math.q_stage = (math.q_stage + 1) % C::kStagesQ;
        }
        if (group > 0) continue;
        if constexpr (kHasValueScale<typename C::TokenRecord>) {
#pragma unroll
            for (auto& columns : math.out) {
#pragma unroll
                for (float& x : columns) x *= p.value_scale;
            }
        }
        constexpr bool kTurned = Held::kForms && C::kHeadDimQk == kHeadDimV;
        if constexpr (kTurned) turn_back<C::kBlockRows>(p, item, block.row0, math.out[kSwTilesV - 1], thread);
        const BlockHeadsOf<Held> heads{block.kv_head, block.row0, block.rows_of(item)};
        store_result<C::Tokens::kWithRowMax>(Element{}, p, item, heads, math, s.warp_values[0], s.stats, 0, true,
                                             MathOnly, thread);
    }
}
}  // namespace mla::attention::sm90
