// Attention in FP8 on Hopper: the roles of two math warpgroups, which score tiles in turn and own half of the columns.
//
// Each warpgroup scores its own tile, stores P, adds the other's tile and then its own, during which the next scores
// begin: while one warpgroup computes weights, the other issues products.
//
//   left    | S0 | weights 0 | O_L += P0 V0_L, S2 | weights 2 | O_L += P1 V1_L | O_L += P2 V2_L, S4 | ...
//   right   | S1 |   weights 1   | O_R += P0 V0_R | O_R += P1 V1_R, S3 | weights 3 | O_R += P2 V2_R | ...
//
// Sums stay in float32 registers and are merged in float32: see attention/sm90/fp8_math.cuh.
#pragma once
#include "attention/rounded_weights.cuh"
#include "attention/sm90/fp8_math.cuh"

namespace mla::attention::sm90 {
// ---- Epilogue --------------------------------------------------------------------------------------------------
// The maxima of a side's rows, in the place of its P.
template <class Memory>
MLA_DEVICE float* fp8_row_maxima(Memory& s, i32 side) {
    return reinterpret_cast<float*>(s.p[side]);
}

// Gives back part of the loss of weight sums that exceeds the loss of value sums: the tensor cores cut bits off,
// weights have one sign, and values of mean 0 lose nothing. The correction balances the two cases: results are as much
// too small for values of one sign as too large for values of mean 0 (cuda_src/decode/fp8.md has a table). A sum of 32
// tokens alone loses little. Sums of weights in two terms lose nothing and are made smaller for the same reason.
template <i32 kTerms>
MLA_DEVICE float fp8_regain(i32 tokens) {
    constexpr float kRegain = kTerms == 1 ? 1.00015f : 0.99955f;
    return tokens > kMmaKBytes ? kRegain : 1.f;
}

// The thread's row of the block: final or partial results of both sides' sums. `out_reference` is this side's.
template <class Block>
MLA_DEVICE void finish_fp8_row(const Block& block, const WorkItem& item, i32 side, float out_reference, i32 row) {
    auto &left = block.s.side[0].stats, &right = block.s.side[1].stats;
    auto& own = block.s.side[side].stats;
    own.factor[row] = 0.f;
    if (block.row0 + row >= block.s.rows) return;
    const DecodeParams& p = block.p;
    const float reference = fmaxf(left.reference[row], right.reference[row]);
    const float of_left = ex2_approx(left.reference[row] - reference);
    const float of_right = ex2_approx(right.reference[row] - reference);
    const float sum = fmaf(left.sum[row], of_left, right.sum[row] * of_right);
    const float rounded = fmaf(left.rounded_sum[row], of_left, right.rounded_sum[row] * of_right) *
                          fp8_regain<Block::Memory::kWeightTerms>(item.tokens);
    const i32 global_row = block.row0 + row;
    const float factor =
        rounded_output_factor(p, item, block.kv_head, global_row, reference - kFp8WeightLog2, sum, rounded);
    own.factor[row] = factor * ex2_approx(out_reference - reference) * (p.value_scale * cache_scale(block.params()));
    if (side != 0) return;
    store_row_lse(p, item, block.kv_head, global_row, row_lse2(reference - kFp8WeightLog2, sum));
    if constexpr (Block::Memory::kListed) {
        const float row_max = fmaxf(fp8_row_maxima(block.s, 0)[row], fp8_row_maxima(block.s, 1)[row]);
        store_row_max(p, item, block.kv_head, global_row, with_nan_of(sum, row_max));
    }
}

// Writes this side's columns of the rows, in float32 or in 16 bits, two neighbouring columns per thread. Everything
// that depends on the row is one offset, which a lane holds for its rows. The code runs once per work item and must be
// fetched each time, so it is short.
template <class Element, bool kWide, class Math>
MLA_DEVICE void store_fp8_rows(const Math& math, u8* to, const i64 (&offsets)[Math::kRowsOfLane]) {
    constexpr i32 kBytes = kWide ? sizeof(float) : sizeof(u16);
    to += math.column_of(0) * kBytes;
    const float* factors = math.s.side[math.side].stats.factor + math.head_of(0);
#pragma unroll
    for (i32 i = 0; i < Math::kSums; i += 4) {
        const float2 by = *reinterpret_cast<const float2*>(factors + 2 * i);
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
            const i32 row = math.head_of(i) + e;
            const i64 offset = __shfl_sync(kFullWarp, offsets[2 * i / kWarpThreads], row % kWarpThreads);
            if (offset < 0) continue;
            u8* const row_at = to + offset;
            const float factor = e == 0 ? by.x : by.y;
#pragma unroll
            for (i32 b = 0; b < Math::kBlocks; ++b) {
                const float x = math.out[b][i + e] * factor, y = math.out[b][i + e + 2] * factor;
                u8* const at = row_at + b * Math::kBlockColumns * kBytes;
                if constexpr (kWide) {
                    *reinterpret_cast<float2*>(at) = make_float2(x, y);
                } else {
                    *reinterpret_cast<u32*>(at) = cvt_x2(Element{}, x, y);
                }
            }
        }
    }
}

// Partial results of bfloat16 results may be bfloat16, too. That adds less error than e4m3 weights, and halves the
// traffic of few sequences, whose tokens many blocks share.
template <class Element, class Math>
MLA_DEVICE void store_fp8_out(const Math& math, const WorkItem& item) {
    const auto& block = math.block;
    const DecodeParams& p = block.p;
    const bool whole = item.partial_index == kNotSplit;
    const bool wide = whole ? p.out_is_fp32 : !block.params().bf16_partials;
    i64 offsets[Math::kRowsOfLane];  // of a lane's rows, in bytes; negative: the block has no such row
#pragma unroll
    for (i32 i = 0; i < Math::kRowsOfLane; ++i) {
        const i32 row = block.row0 + own_lane() + i * kWarpThreads;
        const i64 offset = whole ? out_offset(p, item.request, block.kv_head, row)
                                 : workspace_row(p, item.partial_index, block.kv_head, row) * kHeadDimV;
        offsets[i] = row < block.s.rows ? offset * (i64)(wide ? sizeof(float) : sizeof(u16)) : -1;
    }
    u8* const to = whole ? static_cast<u8*>(p.out) : reinterpret_cast<u8*>(p.partial_out);
    if (wide) {
        store_fp8_rows<Element, true>(math, to, offsets);
    } else {
        store_fp8_rows<Element, false>(math, to, offsets);
    }
}

template <class Element, class Math>
MLA_DEVICE void finish_fp8_item(Math& math, const WorkItem& item) {
    auto& stats = math.s.side[math.side].stats;
    math.sync_side();  // the side's factors have been read: `stats` take their place
    if (math.active()) {
        const i32 lane = own_lane();
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            const i32 row = math.score_row() + 8 * r;
            float* const to = lane % 4 == 0 ? stats.rounded_sum : lane % 4 == 1 ? stats.sum : stats.reference;
            if (lane % 4 < 3) to[row] = math.quad_state[r];
        }
    }
    bar_sync(Fp8BothSides, kFp8MathThreads);
    if constexpr (Math::Memory::kListed) {  // P has been read
        if (math.active() && own_lane() % 4 == 3) {
#pragma unroll
            for (i32 r = 0; r < kFragmentRows; ++r) {
                fp8_row_maxima(math.s, math.side)[math.score_row() + 8 * r] = math.quad_state[r];
            }
        }
        bar_sync(Fp8BothSides, kFp8MathThreads);
    }
    const i32 thread = math.thread();
    if (thread < Math::kRows) finish_fp8_row(math.block, item, math.side, math.own_reference(), thread);
    math.sync_side();
    store_fp8_out<Element>(math, item);
}

// ---- Roles -----------------------------------------------------------------------------------------------------
// A work item's tiles, the first one in `stage`; returns the stage after the last one.
template <class Math>
MLA_DEVICE i32 add_fp8_tiles(Math& math, const WorkItem& item, i32 stage) {
    const auto& ring = math.block.ring;
    i32 next = item.tile_begin;              // to be added; lies in `stage`
    i32 tile = item.tile_begin + math.side;  // to be scored, or scored
    auto step = [&] { ++next, stage = ring.next(stage); };
    if (tile < item.tile_end) {
        math.score(math.side == 0 ? stage : ring.next(stage));
#pragma unroll 1
        for (;; tile += 2) {
            math.publish(item, tile, tile > next ? ring.next(stage) : stage);
            if (next < tile) {  // the other side's
                math.add_values(item, next, stage, 1 - math.side);
                step();
            }
            if (tile + 2 >= item.tile_end) break;
            math.add_values_and_score(item, next, stage, ring.next(ring.next(stage)));
            step();
        }
    }
#pragma unroll 1
    for (; next < item.tile_end; step()) math.add_values(item, next, stage, (next - item.tile_begin) & 1);
    return stage;
}

// Called by one thread per row: stores what the rows see of the two tiles that may contain drafts.
template <class Block>
MLA_DEVICE void store_fp8_tree_words(const Block& block, const WorkItem& item, i32 row) {
    if constexpr (Block::Memory::kTree) {
        if (row >= Block::kRows) return;
        const SeenTokens seen = seen_of_tree(block.p, item, block.row0 + row);
        const i32 first_tile = first_tile_of_drafts(seen.first);
#pragma unroll
        for (i32 i = 0; i < 2; ++i) block.s.tree.of_tile[i][row] = seen.of_tile((first_tile + i) * kTileTokens);
    }
}

// A math warpgroup, by its warp of both.
template <class Query, class Block>
MLA_DEVICE void run_fp8_side(const Block& block, i32 warp) {
    Fp8Math<Block> math(block, warp);
    i32 stage = 0;
    WorkItem item;
    for (Fp8WorkIterator walk(block.p, block.split, block.hidden); walk.goes_on(block.p);) {
        Fp8QueryLoad<Query, Block> query(block, warp, own_lane());
        query.start(walk.request);  // before the request's length is known: one trip to memory less
        walk.take(block.p, item);
        query.finish();
        if (item.tile_begin < item.tile_end && math.side == 0) store_fp8_tree_words(block, item, math.thread());
        bar_sync(Fp8BothSides, kFp8MathThreads);
        math.reset();
        stage = add_fp8_tiles(math, item, stage);
        finish_fp8_item<typename Fp8QueryType<Query>::Element>(math, item);
    }
}
}  // namespace mla::attention::sm90
