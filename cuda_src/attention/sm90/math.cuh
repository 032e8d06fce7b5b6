// The steps of a math warpgroup of an attention block on Hopper: scores, softmax, its half of the output. A schedule
// (attention/sm90/seesaw.cuh) puts them in order.
#pragma once
#include "attention/online_softmax.cuh"
#include "attention/output_rope.cuh"
#include "attention/sm90/block.cuh"
#include "attention/sm90/nonfinite_values.cuh"
#include "ptx/control.cuh"
#include "ptx/wgmma.cuh"
#include "tile/sw128_fragments.cuh"

namespace mla::attention::sm90 {
// Named barriers within one warpgroup. A schedule's own come after them.
enum SharedNamedBarrier : i32 { LeftOnly = 1, RightOnly, FirstFreeBarrier };

MLA_DEVICE constexpr i32 own_barrier(bool right) { return right ? RightOnly : LeftOnly; }

// ---- Math roles ------------------------------------------------------------------------------------------------
constexpr i32 kScoresPerThread = kBlockM * kTileTokens / kWarpgroupThreads;
constexpr i32 kOutPerThread = kBlockM * (kHeadDimV / 2) / kWarpgroupThreads;

// One warpgroup's share of the work: its tile's scores and softmax, its half of the output.
struct Math {
    float scores[kScoresPerThread];
    float out[kOutPerThread];
    u32 p_fragment[kSw128MmaSteps][4];
    u32 q_resident[kSw128MmaSteps][4];
    RowState rows;
    Ring<kStagesKV> ring;
    Ring<1> q_ring;
    Ring<1> sums_ring;
};

template <bool kRight, class C>
MLA_DEVICE u8* v_sw_tiles(Storage<C>& s, i32 stage) {
    return s.kv[stage] + (kRight ? kHalfBytes : 0);
}

// A gathered tile is written through the generic proxy: each consumer fences after its wait, before WGMMA reads it.
// (Bulk copies need no fence.)
template <class C>
MLA_DEVICE void fence_gathered() {
    if (C::kFencedByConsumers) fence_proxy_async();
}

template <class C>
MLA_DEVICE void load_q_resident(Storage<C>& s, Math& math, i32 thread) {
    mbarrier_wait(s.q_full, math.q_ring.full_parity(0));
    math.q_ring.advance(0);
    fence_gathered<C>();
    if constexpr (C::kResidentSwTile != kNothingResident) load_sw128(math.q_resident, s.q_resident(), thread);
}

// The rows' maxima over a tile, as the running ones follow them. Not fused with the scale: that spills (NVRTC 12.9).
template <class C, i32 kCount>
MLA_DEVICE void followed_max(float (&to)[kFragmentRows], const float (&scores)[kCount],
                             const float (&scale_log2)[kFragmentRows]) {
    tile_max(to, scores, scale_log2);
    if constexpr (C::kRaisedLog2 != 0) {
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) to[r] = __fadd_rn(to[r], -(float)C::kRaisedLog2);
    }
}

// What takes the scores of the thread's rows to base 2, and back to the queries' unit where these were scaled: by a
// power of two, so the product is exact.
template <class C>
MLA_DEVICE void score_scales(float (&to)[kFragmentRows], const Block<C>& block, i32 thread) {
    to[0] = to[1] = block.p.scale_log2;
    if constexpr (C::kScaledQueries) {
        float factors[kFragmentRows];
        load_rows(factors, block.s.extra.q_factors, thread);
        to[0] *= factors[0];
        to[1] *= factors[1];
    }
}

// Q, and the keys in `stage`, as operands of S = Q K^T.
struct ScoreOperands {
    SmemDesc q, k;
    u32 parity;

    template <class C>
    MLA_DEVICE ScoreOperands(Storage<C>& s, const Math& math, i32 stage)
        : q(uniform(k_major_desc(smem_addr(s.q)))),
          k(uniform(k_major_desc(smem_addr(s.kv[stage]), C::Layout::kNextRows))),
          parity(math.ring.full_parity(stage)) {}
};

// Issues what a half of the keys in `stage` adds to S, as soon as it has arrived.
template <bool kRightHalf, class C>
MLA_DEVICE void issue_scores(Storage<C>& s, Math& math, i32 stage, const ScoreOperands& of) {
    constexpr i32 kBegin = kRightHalf ? C::kSwTilesLeft : 0, kEnd = kRightHalf ? C::kSwTilesQk : C::kSwTilesLeft;
    const SmemDesc &q = of.q, &k = of.k;
    mbarrier_wait(kRightHalf ? s.kv_full[stage].right : s.kv_full[stage].left, of.parity);
    fence_gathered<C>();
    wgmma_fence();
#pragma unroll
    for (i32 i = kBegin; i < kEnd; ++i) {
        const i32 sw_tile = C::sw_tile_in_order(i);
#pragma unroll
        for (i32 step = 0; step < kSw128MmaSteps; ++step) {
            const u32 bytes = sw_tile * kSw128Bytes + step * kKMajorStepBytes;
            const SmemDesc keys = C::Layout::keys_desc(k, sw_tile);
            const u32 key_bytes = C::Layout::sw_tile_offset(sw_tile) + step * kKMajorStepBytes;
            const bool accumulate = i > 0 || step > 0;
            if (sw_tile == C::kResidentSwTile) {
                wgmma_mma_async(typename C::Rope{}, math.scores, math.q_resident[step], advance(keys, key_bytes),
                                accumulate);
            } else if (sw_tile == C::kSwTilesQk - 1) {
                wgmma_mma_async(typename C::Rope{}, math.scores, advance(q, bytes), advance(keys, key_bytes),
                                accumulate);
            } else {
                wgmma_mma_async(typename C::Latent{}, math.scores, advance(q, bytes), advance(keys, key_bytes),
                                accumulate);
            }
        }
    }
}

// Starts S = Q K^T of the tile in `stage`.
template <class C>
MLA_DEVICE void start_scores(Storage<C>& s, Math& math, i32 stage) {
    const ScoreOperands operands(s, math, stage);
    pin(math.scores);
    issue_scores<false>(s, math, stage, operands);
    issue_scores<true>(s, math, stage, operands);
    wgmma_commit_group();
}

// From a step of 16 tokens of O += P V to the next.
template <class C>
constexpr u32 kValueStepBytes = kMmaK / C::Layout::kRowsInAtom * C::Layout::kNextRows;

// One step of O += P V.
template <class C, class Operand>
MLA_DEVICE void add_product(Math& math, const Operand& p, SmemDesc v) {
    if constexpr (!C::kHalvedProducts) {
        wgmma_mma_async<Major::K, Major::MN>(typename C::Latent{}, math.out, p, v, true);
    } else {
#pragma unroll
        for (i32 half = 0; half < 2; ++half) {
            auto& columns = reinterpret_cast<float (&)[kOutPerThread / 2]>(math.out[half * kOutPerThread / 2]);
            wgmma_mma_async<Major::K, Major::MN>(typename C::Latent{}, columns, p,
                                                 advance(v, half * 2 * C::Layout::kNextSwTile), true);
        }
    }
}

// The descriptor of V is written out in both: as a function it made the kernels with the plain layout 8 instructions
// longer (NVRTC 12.9).

// Starts O += P V with P in registers (this warpgroup's own tile) ...
template <bool kRight, class C>
MLA_DEVICE void start_own_product(Storage<C>& s, Math& math, i32 stage) {
    const SmemDesc v =
        uniform(mn_major_desc(smem_addr(v_sw_tiles<kRight>(s, stage)), C::Layout::kNextSwTile, C::Layout::kNextRows));
    pin(math.out);
    wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < kSw128MmaSteps; ++step) {
        add_product<C>(math, math.p_fragment[step], advance(v, step * kValueStepBytes<C>));
    }
    wgmma_commit_group();
}

// ... and with P in shared memory (the other warpgroup's tile).
template <bool kRight, class C>
MLA_DEVICE void start_other_product(Storage<C>& s, Math& math, i32 stage) {
    const SmemDesc v =
        uniform(mn_major_desc(smem_addr(v_sw_tiles<kRight>(s, stage)), C::Layout::kNextSwTile, C::Layout::kNextRows));
    const SmemDesc p = uniform(k_major_desc(smem_addr(s.p(stage))));
    pin(math.out);
    wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < kSw128MmaSteps; ++step) {
        add_product<C>(math, advance(p, step * kKMajorStepBytes), advance(v, step * kValueStepBytes<C>));
    }
    wgmma_commit_group();
}

// Waits for all products in flight. Only then may operands and accumulators be touched.
MLA_DEVICE void finish(Math& math) {
    wgmma_wait_group<0>();
    pin(math.scores);
    pin(math.out);
}

// Makes this warpgroup's half of V finite where not every row of the block sees the token.
//
// A sparse tile needs none of this: all rows of the block see its tokens, and past the list's end there are zeros.
template <bool kRight, class C>
MLA_DEVICE void sanitize_v(Block<C>& block, const WorkItem& item, i32 tile, i32 stage, i32 thread) {
    if (C::kSparse) return;
    const i32 seen_by_all = item.seen_by_all - tile * kTileTokens;
    if constexpr (C::Work::kForms) {
        if (all_rows_see(C::Work::of(item), tile)) return;
    } else {
        if (seen_by_all >= kTileTokens) return;
    }
    bar_sync(own_barrier(kRight), kWarpgroupThreads);  // the other warps' scores are done too: they read these rows
    if constexpr (C::Work::kForms) {
        sanitize_window<typename C::Element, kSwTilesHalf, typename C::Layout>(
            v_sw_tiles<kRight>(block.s, stage), C::Work::of(item), tile, block.s.nonfinite_request[kRight], thread);
    } else {
        sanitize_rows<typename C::Element, kSwTilesHalf, typename C::Layout>(
            v_sw_tiles<kRight>(block.s, stage), max(seen_by_all, 0), item.tokens - tile * kTileTokens,
            block.s.nonfinite_request[kRight], item.request, thread);
    }
    fence_proxy_async();
    bar_sync(own_barrier(kRight), kWarpgroupThreads);
}

// Masks the scores of `tile`, which lies in `stage`. Most tiles hide nothing.
template <class C>
MLA_DEVICE void mask_tile(const Block<C>& block, Math& math, const WorkItem& item, i32 tile, i32 stage, i32 thread) {
    const u64 present = C::kSparse && !C::kSkipsTokens ? ~0ull : block.s.present[stage];
    if constexpr (C::kSkipsTokens) {  // of a list: every row sees the same
        if (present == ~0ull) return;
        opaque(thread);  // what follows from it is not worth registers across the loop
        mask_scores(math.scores, TileMask{{kTileTokens, kTileTokens}, present}, thread);
        return;
    }
    if constexpr (C::Work::kForms) {
        if (all_rows_see(C::Work::of(item), tile) && present == ~0ull) return;
    } else {
        if ((tile + 1) * kTileTokens <= item.seen_by_all && present == ~0ull) return;
    }
    i32 row = block.row0 + fragment_row(thread);
    opaque(row);
    if constexpr (C::kTree) {
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            const i32 place = tile - first_tile_of_drafts(item.seen_by_all);
            const u64 seen = place < 0 ? ~0ull : block.s.tree.of_tile[place][row - block.row0 + 8 * r];
            mask_row(math.scores, r, seen & present, thread);
        }
        return;
    }
    TileMask mask;
    mask.present = present;
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 visible = visible_of<typename C::Work>(block.p, item, row + 8 * r);
        mask.visible[r] = min(visible, item.tokens) - tile * kTileTokens;
    }
    mask_scores(math.scores, mask, thread);
    if constexpr (C::Work::kForms) {
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            mask_before(math.scores, r, window_begin(block.p, item, row + 8 * r) - tile * kTileTokens, thread);
        }
    }
}

// Adds up both warpgroups' shares of the sums. The left one, which reports them, also gets the largest scores of both.
template <bool kRight, class C>
MLA_DEVICE void total_sums(float (&sums)[kFragmentRows], Storage<C>& s, Math& math, i32 thread) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) sums[r] = quad_sum(math.rows.sum[r]);
    store_rows(s.sums[kRight], sums, thread);
    if (C::kWithRowMax && kRight) store_rows(s.right_row_max, math.rows.row_max, thread);
    mbarrier_arrive(s.sums_ready[kRight]);
    mbarrier_wait(s.sums_ready[!kRight], math.sums_ring.full_parity(0));
    math.sums_ring.advance(0);
    float other[kFragmentRows];
    load_rows(other, s.sums[!kRight], thread);
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) sums[r] += other[r];
    if (C::kWithRowMax && !kRight) {
        load_rows(other, s.right_row_max, thread);
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) math.rows.row_max[r] = fmaxf(math.rows.row_max[r], other[r]);
    }
}

// ---- Epilogue --------------------------------------------------------------------------------------------------
// It runs once per work item, so its instructions are rarely in the cache: what takes divisions is computed once per
// row, by lane i for row i of the warp's 16 (the upper lanes repeat that), and shuffled.
constexpr i32 kRowsPerWarp = kBlockM / kWarpgroupWarps;

// From the fragment's rows to a lane per row ...
MLA_DEVICE float of_my_row(const float (&values)[kFragmentRows], i32 lane) {
    const float low = __shfl_sync(kFullWarp, values[0], lane % 8 * 4);
    const float high = __shfl_sync(kFullWarp, values[1], lane % 8 * 4);
    return lane % kRowsPerWarp < 8 ? low : high;
}

// ... and back: the lane that knows fragment row r.
MLA_DEVICE i32 lane_of_row(i32 r, i32 lane) { return lane / 4 + 8 * r; }

// Turns the last columns back, which the right warpgroup has.
template <class C>
MLA_DEVICE void turn_back(const Block<C>& block, const GroupItem& item, Math& math, i32 thread) {
    constexpr i32 kFirst = kOutPerThread - kOutPerThread * kHeadDimRope / (kHeadDimV / 2);
    if (!turns_back(block.p)) return;
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const RowAngles angles = angles_of_row(block.p, item, block.row0 + fragment_row(thread) + 8 * r);
#pragma unroll
        for (i32 i = kFirst + 2 * r; i < kOutPerThread; i += 4) {
            const i32 column = kFirstTurnedColumn + (i - kFirst) / 4 * 8 + fragment_column(thread);
            turn_pair(angles, column, math.out[i], math.out[i + 1]);
        }
    }
}

// Writes this warpgroup's 256 columns of the rows, in pieces of 32 bytes (fp32) or 64 bytes (16 bits) per quad.
template <bool kRight, class C>
MLA_DEVICE void store_out(const Block<C>& block, const WorkItem& item, const Math& math, float my_factor, i32 row0,
                          i32 my_row, i32 thread) {
    const DecodeParams& p = block.p;
    const bool whole = item.partial_index == kNotSplit;
    const i32 lane = thread % kWarpThreads;
    const i64 my_offset = whole ? item_out_offset<typename C::Work>(p, item, block.kv_head, my_row)
                                : workspace_row(p, item.partial_index, block.kv_head, my_row) * kHeadDimV;
    constexpr i32 kFirstColumn = kRight ? kHeadDimV / 2 : 0;
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i64 offset = __shfl_sync(kFullWarp, my_offset, lane_of_row(r, lane)) + kFirstColumn;
        const float factor = __shfl_sync(kFullWarp, my_factor, lane_of_row(r, lane));
        const bool stored = row0 + fragment_row(thread) + 8 * r < block.rows_of(item);
        if (!whole || p.out_is_fp32) {
            float* const to = (whole ? static_cast<float*>(p.out) : p.partial_out) + offset + fragment_column(thread);
            if (!stored) continue;
#pragma unroll
            for (i32 i = 0; i < kOutPerThread / 4; ++i) {
                *reinterpret_cast<float2*>(to + 8 * i) =
                    make_float2(math.out[4 * i + 2 * r] * factor, math.out[4 * i + 2 * r + 1] * factor);
            }
        } else {
            store_row(typename C::Element{}, static_cast<u16*>(p.out) + offset, math.out, r, factor, stored, thread);
        }
    }
}

template <bool kRight, class C>
MLA_DEVICE void store_result(const Block<C>& block, const WorkItem& item, const Math& math,
                             const float (&sums)[kFragmentRows], i32 thread) {
    const DecodeParams& p = block.p;
    const i32 lane = thread % kWarpThreads;
    i32 row0 = block.row0;
    if constexpr (C::Work::kForms && C::kSparse) opaque(row0);  // or the row would be kept across the loop, and spilled
    const i32 row = row0 + thread / kWarpThreads * kRowsPerWarp + lane % kRowsPerWarp;
    const i32 my_row = min(row, block.rows_of(item) - 1);
    const float my_max = of_my_row(math.rows.max, lane), my_sum = of_my_row(sums, lane);
    const float my_row_max = C::kWithRowMax && !kRight ? of_my_row(math.rows.row_max, lane) : 0.f;
    if (!kRight && lane < kRowsPerWarp && row < block.rows_of(item)) {
        store_row_lse<typename C::Work>(p, item, block.kv_head, row, row_lse2(my_max, my_sum));
        if (C::kWithRowMax) store_row_max(p, item, block.kv_head, row, with_nan_of(my_sum, my_row_max));
    }
    float factor = output_factor(p, item, block.kv_head, my_row, my_max, my_sum);
    if constexpr (C::kValueScale) factor *= p.value_scale;
    store_out<kRight>(block, item, math, factor, row0, my_row, thread);
}

template <class C>
MLA_DEVICE void note_huge_rows(Storage<C>& s, const RowState& rows, i32 thread) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 row = fragment_row(thread) + 8 * r;
        if (is_huge(rows.max[r])) atomicOr(&s.huge_rows[row / kWarpThreads], 1u << row % kWarpThreads);
    }
}

// One math warpgroup; `tiles` processes the tiles of a work item, in the order of the schedule.
template <bool kRight, class C, class Tiles>
MLA_DEVICE void run_math_role(Block<C>& block, i32 thread, Tiles tiles) {
    Storage<C>& s = block.s;
    Math math;
    typename C::Work::HeldItem item;
    for (WorkIteratorOf<typename C::Work> walk(block.p, block.split, block.hidden); walk.next(block.p, item);) {
        math.rows.reset();
#pragma unroll
        for (i32 i = 0; i < kOutPerThread; ++i) math.out[i] = 0.f;
        float sums[kFragmentRows] = {0.f, 0.f};
        bool has_nonfinite = false;
        if (item.tile_begin < item.tile_end) {
            load_q_resident(s, math, thread);
            tiles(math, item);
            total_sums<kRight>(sums, s, math, thread);
            has_nonfinite = !C::kSparse && s.nonfinite_request[kRight] == item.request;
            release(s.q_empty, thread);  // only now: the next work item may overwrite what was read above
        }
        if constexpr (C::Work::kForms && C::kSparse) walk.describe_again(block.p, item);
        constexpr bool kTurned = C::Work::kForms && (!C::kSparse || C::kHeadDimQk == kHeadDimV);
        if constexpr (kRight && kTurned) turn_back(block, item, math, thread);
        store_result<kRight>(block, item, math, sums, thread);
        if constexpr (!kRight && C::kRedoesHugeRows) note_huge_rows(s, math.rows, thread);
        if (has_nonfinite) {
            bar_sync(own_barrier(kRight), kWarpgroupThreads);  // the results are stored
            fixup_nonfinite<typename C::Element, kHeadDimV / 2>(block, item, kRight ? kHeadDimV / 2 : 0, thread);
        }
    }
}
}  // namespace mla::attention::sm90
