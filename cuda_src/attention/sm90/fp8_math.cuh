// The steps of a math warpgroup of an attention block in FP8 on Hopper: scores, weights, its half of the output.
//
//   S = Q K^T              64 rows x 64 tokens, both operands in e4m3 and in shared memory
//   P = 2^(8 + S - m)      in e4m3; m: the tile's maximum of the row
//   O^T += f (V^T P^T)     64 columns at a time; V^T comes from tile/byte_fragments.cuh
//
// The tensor cores cut sums of e4m3 products off after 13 fraction bits, towards zero, after each 32 terms: sums over a
// whole sequence would shrink. So a tile's sum is theirs, and is added in float32, by the factor f = 2^(m - reference)
// of its row: a tile's weights have its own maximum, whatever came before. The sum of weights by which O is divided
// is made by the same products, and so loses what values lose.
#pragma once
#include "attention/online_softmax.cuh"
#include "attention/sm90/fp8_query.cuh"
#include "ptx/control.cuh"
#include "ptx/wgmma.cuh"

namespace mla::attention::sm90 {
// A reference after a tile: see kFp8ReferenceLog2.
MLA_DEVICE float moved_reference(float reference, float tile_max) {
    return is_far_above(tile_max, reference, kFp8ReferenceLog2) ? tile_max : reference;
}

template <class Owner>
struct Fp8Math {
    using Memory = typename Owner::Memory;
    static constexpr i32 kRows = Memory::kRows;
    static constexpr i32 kActiveWarps = kRows / kWarpColumns;  // warps with rows of the block
    static constexpr i32 kScoreParts = 3;                      // of the columns
    static constexpr i32 kScores = kFp8MmaRows * kTileTokens / kWarpgroupThreads;
    static constexpr i32 kBlockColumns = kSw128ByteColumns / 2;  // 64: of the output in a product
    static constexpr i32 kBlocks = kFp8PanelsOfSide * 2;
    static constexpr i32 kSums = kFp8MmaRows * kRows / kWarpgroupThreads;  // of a block
    static constexpr i32 kRowsOfLane = ceil_div(kRows, kWarpThreads);      // lane, lane + 32
    static constexpr i32 kTerms = Memory::kWeightTerms, kQueryTerms = Memory::kQueryTerms;

    // In `phases`: kv_full's come first, then p_full's of both sides and p_empty's of this one.
    static constexpr i32 kPFull = Memory::kStages, kPEmpty = kPFull + 2, kPhases = kPEmpty + 1;

    const Owner& block;
    Memory& s;
    i32 side, warp;  // 0: left, 1: right; of the side's warps. Both sides run the same instructions.
    // Scores of the next tile to score or of the one just scored. Sums of values use both arrays while nothing is
    // scored.
    float scores[kScores], spare[kScores];
    float out[kBlocks][kSums];  // O^T: see `head_of`
    // Per row of scores, for the tiles that this side has scored. The lanes of a quad share a register: the sum of the
    // weights, the sum of the rounded weights, and (twice) the reference of both. With a list the last lane holds the
    // row's maximum.
    float quad_state[kFragmentRows];
    float out_reference[kRowsOfLane];  // of the rows of `out`: the same in each warp
    Ring<kPhases> phases;

    MLA_DEVICE Fp8Math(const Owner& block, i32 warp)
        : block(block), s(block.s), side(warp / kWarpgroupWarps), warp(warp % kWarpgroupWarps) {}

    MLA_DEVICE bool active() const { return kActiveWarps == kWarpgroupWarps || warp < kActiveWarps; }
    MLA_DEVICE i32 thread() const { return warp * kWarpThreads + own_lane(); }
    MLA_DEVICE i32 score_row() const { return warp * kWarpColumns + own_lane() / 4; }  // and eight on

    MLA_DEVICE void sync_side() const { bar_sync(side == 0 ? Fp8LeftOnly : Fp8RightOnly, kWarpgroupThreads); }

    MLA_DEVICE void reset() {
#pragma unroll
        for (i32 b = 0; b < kBlocks; ++b) {
#pragma unroll
            for (i32 i = 0; i < kSums; ++i) out[b][i] = 0.f;
        }
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            quad_state[r] = own_lane() % 4 < 2 ? 0.f : kLowestMax;
            if (Memory::kListed && own_lane() % 4 == 3) quad_state[r] = negative_infinity();
        }
#pragma unroll
        for (i32 i = 0; i < kRowsOfLane; ++i) out_reference[i] = kLowestMax;
    }

    // ---- Scores ------------------------------------------------------------------------------------------------
    // Q and the keys of a tile: latent and RoPE columns.
    struct ScoreOperands {
        SmemDesc q, k, q_rope, k_rope;

        MLA_DEVICE ScoreOperands(const Memory& s, const Fp8Ring& ring, i32 stage)
            : q(uniform(k_major_desc(smem_addr(s.q)))),
              k(uniform(k_major_desc(s.tile(ring, stage)))),
              q_rope(uniform(sw64_desc(smem_addr(s.q) + kFp8LatentBytes))),
              k_rope(uniform(advance(SmemDesc{ring.rope_desc}, s.tile(ring, stage).value + kFp8LatentBytes))) {}
    };

    // Starts the sum of third `part` of the columns.
    MLA_DEVICE void start_scores(float (&to)[kScores], const ScoreOperands& of, i32 part) {
        constexpr i32 kOfPanel = kSw128ByteColumns / kMmaKBytes, kLatentSteps = kFp8Panels * kOfPanel;
        constexpr i32 kSteps = kMaxHeadDimQk / kMmaKBytes / kScoreParts;
        pin(to);
        wgmma_fence();
#pragma unroll
        for (i32 i = 0; i < kQueryTerms * kSteps; ++i) {  // smaller terms first: less of them is cut off
            const u32 term = (kQueryTerms - 1 - i / kSteps) * kFp8QueryBytes;
            const i32 step = part * kSteps + i % kSteps, rope_step = step - kLatentSteps;
            const u32 bytes = step / kOfPanel * kSw128Bytes + step % kOfPanel * kMmaKBytes;
            const SmemDesc a =
                rope_step < 0 ? advance(of.q, term + bytes) : advance(of.q_rope, term + rope_step * kMmaKBytes);
            const SmemDesc b = rope_step < 0 ? advance(of.k, bytes) : advance(of.k_rope, rope_step * kMmaKBytes);
            wgmma_mma_async(float8_e4m3fn{}, to, a, b, i > 0);
        }
        wgmma_commit_group();
    }

    MLA_DEVICE void add_to_scores(float (&part)[kScores]) {
        pin(scores);
        pin(part);
#pragma unroll
        for (i32 i = 0; i < kScores; ++i) scores[i] += part[i];
    }

    // Three sums of 192 columns each, added in float32: for terms of one sign, the tensor cores' own sum of all 576
    // would lose 0.5 %; these lose at most 0.1 %. The first one needs no registers beyond `scores`.
    MLA_DEVICE void begin_scores(i32 stage) {
        const ScoreOperands operands(s, block.ring, stage);
        mbarrier_wait(s.kv_full[stage], phases.full_parity(stage));
        if (Memory::kListed) fence_proxy_async();  // threads have written it
        start_scores(scores, operands, 0);
    }

    MLA_DEVICE void end_scores(i32 stage) {
        const ScoreOperands operands(s, block.ring, stage);
        float last[kScores];
        start_scores(spare, operands, 1);
        start_scores(last, operands, 2);
        wgmma_wait_group<1>();
        add_to_scores(spare);
        wgmma_wait_group<0>();
        add_to_scores(last);
    }

    MLA_DEVICE void score(i32 stage) {
        begin_scores(stage);
        end_scores(stage);
    }

    // Most tiles hide nothing.
    MLA_DEVICE void mask(const WorkItem& item, i32 tile, i32 stage) {
        const u64 present = Memory::kListed ? ~0ull : s.present[stage];
        if ((tile + 1) * kTileTokens <= item.seen_by_all && present == ~0ull) return;
        const i32 row = score_row(), thread = this->thread();
        if constexpr (Memory::kTree) {
            const i32 place = tile - first_tile_of_drafts(item.seen_by_all);
#pragma unroll
            for (i32 r = 0; r < kFragmentRows; ++r) {
                const u64 seen = place < 0 ? ~0ull : s.tree.of_tile[place][row + 8 * r];
                mask_row(scores, r, seen & present, thread);
            }
        } else {
            TileMask mask;
            mask.present = present;
#pragma unroll
            for (i32 r = 0; r < kFragmentRows; ++r) {
                const i32 visible = visible_tokens(block.p, item, block.row0 + row + 8 * r);
                mask.visible[r] = min(visible, item.tokens) - tile * kTileTokens;
            }
            mask_scores(scores, mask, thread);
        }
    }

    // ---- Weights -----------------------------------------------------------------------------------------------
    // The rows' maxima over the tile, in base 2. Unlike `tile_max` this runs four chains per row and interleaves both
    // rows' shuffles: `publish` would wait for a single chain.
    MLA_DEVICE void find_tops(float (&tops)[kFragmentRows], const float (&scale_log2)[kFragmentRows]) const {
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            float chain[4];
#pragma unroll
            for (i32 i = 0; i < 4; ++i) {
                const float* of = scores + 8 * i + 2 * r;
                chain[i] = fmaxf(fmaxf(of[0], of[1]), fmaxf(of[4], of[5]));
            }
            tops[r] = fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
        }
#pragma unroll
        for (i32 step = 1; step < 4; step *= 2) {
#pragma unroll
            for (i32 r = 0; r < kFragmentRows; ++r) {
                tops[r] = fmaxf(tops[r], __shfl_xor_sync(kFullWarp, tops[r], step));
            }
        }
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) tops[r] = fmaxf(tops[r] * scale_log2[r], kLowestMax);
    }

    // Four weights as four bytes. With two terms: the float16 weight's nearest e4m3, and the remainder.
    MLA_DEVICE static void round_weights(u32 (&to)[kTerms][8], i32 word, const float (&x)[4]) {
        if constexpr (kTerms == 1) {
            to[0][word] = cvt_e4m3_x2(x[0], x[1]) | cvt_e4m3_x2(x[2], x[3]) << 16;
        } else {
            const u32 low = cvt_x2(float16{}, x[0], x[1]), high = cvt_x2(float16{}, x[2], x[3]);
            const u32 codes = to[0][word] = cvt_e4m3_x2_f16(low) | cvt_e4m3_x2_f16(high) << 16;
            to[1][word] = cvt_e4m3_x2_f16(sub_f16_x2(low, cvt_f16_x2_e4m3(codes))) |
                          cvt_e4m3_x2_f16(sub_f16_x2(high, cvt_f16_x2_e4m3_high(codes))) << 16;
        }
    }

    // P of row r, four tokens a word. Returns the thread's sum of the weights before they are rounded.
    MLA_DEVICE float weights(u32 (&words)[kTerms][8], i32 r, float scale_log2, float top) {
        float shift = kFp8WeightLog2 - top;
        if (any_huge(top)) {
#pragma unroll
            for (i32 i = 0; i < kScores; ++i) {
                if (fragment_half(i) == r) scores[i] = __fmul_rn(scores[i], scale_log2) - top;
            }
            scale_log2 = 1.f, shift = kFp8WeightLog2;
        }
        float sum[2] = {0.f, 0.f};
#pragma unroll
        for (i32 i = 0; i < kTileTokens / 16; ++i) {
            float x[4];
#pragma unroll
            for (i32 k = 0; k < 4; ++k) {
                x[k] = ex2_approx(fmaf(scores[8 * i + k / 2 * 4 + 2 * r + k % 2], scale_log2, shift));
            }
            sum[0] += x[0] + x[1], sum[1] += x[2] + x[3];
            round_weights(words, 2 * i + r, x);
        }
        return sum[0] + sum[1];
    }

    // Sums of the rounded weights: P times a column of ones, on the warpgroup that holds P. They land in even columns
    // of the result, in the first lane of each quad. Each 32 tokens have a sum of their own. With two terms they are
    // not computed: almost every weight of eight bits loses some next to a large one, and the sum before rounding is as
    // accurate.
    static constexpr i32 kTileSteps = kTileTokens / kMmaKBytes;
    using RowSums = float[kTileSteps][4];

    MLA_DEVICE void start_row_sums(RowSums& sums, const u32 (&words)[8]) {
        const SmemDesc ones = uniform(make_desc(smem_addr(s.ones), 0, 0, kNoSwizzle));
#pragma unroll
        for (i32 step = 0; step < kTileSteps; ++step) pin(sums[step]);
        wgmma_fence();
#pragma unroll
        for (i32 step = 0; step < kTileSteps; ++step) {
            const u32* const of = words + 4 * step;
            const u32 a[4] = {of[0], of[1], of[2], of[3]};
            wgmma_mma_async(float8_e4m3fn{}, sums[step], a, ones, false);
        }
        wgmma_commit_group();
    }

    // Adds the tile's sums to the rows' sums, scaled by the tile's maxima: the first lane of a quad holds the sum of
    // the rounded weights, the second lane the sum before rounding.
    MLA_DEVICE void add_sums(RowSums& sums, const float (&before)[kFragmentRows], const float (&tops)[kFragmentRows],
                             i32 lane) {
        if constexpr (kTerms == 1) {
#pragma unroll
            for (i32 step = 0; step < kTileSteps; ++step) pin(sums[step]);
        }
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            float sum = before[r] + __shfl_xor_sync(kFullWarp, before[r], 1);
            sum += __shfl_xor_sync(kFullWarp, sum, 2);
            const float tile_sum = kTerms == 1 && lane % 4 == 0 ? sums[0][2 * r] + sums[1][2 * r] : sum;
            const float reference = __shfl_sync(kFullWarp, quad_state[r], Memory::kListed ? lane & ~3 | 2 : lane | 2);
            const float moved = moved_reference(reference, tops[r]);
            const float decay = ex2_approx(reference - moved), factor = ex2_approx(tops[r] - moved);
            const float others = Memory::kListed && lane % 4 == 3 ? fmaxf(quad_state[r], tops[r]) : moved;
            quad_state[r] = lane % 4 < 2 ? fmaf(quad_state[r], decay, tile_sum * factor) : others;
        }
    }

    // Leaves P and the tile's maxima for both sides. What they do not wait for comes after.
    MLA_DEVICE void publish(const WorkItem& item, i32 tile, i32 stage) {
        const i32 lane = own_lane();
        u32 words[kTerms][8];
        float tops[kFragmentRows], before[kFragmentRows];
        if (active()) {
            mask(item, tile, stage);
            float scale_log2[kFragmentRows];
#pragma unroll
            for (i32 r = 0; r < kFragmentRows; ++r) {
                scale_log2[r] = block.p.scale_log2 * s.q_factors[score_row() + 8 * r];
            }
            find_tops(tops, scale_log2);
#pragma unroll
            for (i32 r = 0; r < kFragmentRows; ++r) before[r] = weights(words, r, scale_log2[r], tops[r]);
        }
        if constexpr (kTerms > 1) {
            sync_side();  // all of its warps have scored the tile: P overwrites the RoPE columns
            store_byte_words(s.tile(block.ring, stage) + kFp8LatentBytes, words[1], warp, lane);
        }
        mbarrier_wait(s.p_empty[side], phases.empty_parity(kPEmpty));  // no earlier: the other side may still add it
        phases.advance(kPEmpty);
        if (active()) {
            if (lane % 4 == 0) s.tile_max[side][score_row()] = tops[0], s.tile_max[side][score_row() + 8] = tops[1];
            store_byte_words(smem_addr(s.p[side]), words[0], warp, lane);
            fence_proxy_async();  // of all terms
        }
        release(s.p_full[side], lane);
        RowSums sums;
        if constexpr (kTerms == 1) {
            if (!active()) {
#pragma unroll
                for (u32& word : words[0]) word = 0;
            }
            start_row_sums(sums, words[0]);
            wgmma_wait_group<0>();
        }
        if (active()) add_sums(sums, before, tops, lane);
    }

    // ---- Values ------------------------------------------------------------------------------------------------
    // The row of O that element i of a block of `out` belongs to, and of its first element. Its columns are
    // `column_of(b)` and, where i / 2 is odd, the next one.
    MLA_DEVICE i32 head_of(i32 i) const { return fragment_column(own_lane(), i); }
    MLA_DEVICE i32 column_of(i32 b) const {
        return side * (kHeadDimV / 2) + b * kBlockColumns + warp * kWarpColumns + own_lane() / 4 * 2;
    }

    // Multiplies the output by the warp's factors.
    MLA_DEVICE void rescale_out() {
        const float* factors = s.side[side].factors[warp] + head_of(0);
#pragma unroll
        for (i32 i = 0; i < kSums; i += 4) {
            const float2 by = *reinterpret_cast<const float2*>(factors + 2 * i);
#pragma unroll
            for (i32 b = 0; b < kBlocks; ++b) {
                out[b][i] *= by.x, out[b][i + 1] *= by.y, out[b][i + 2] *= by.x, out[b][i + 3] *= by.y;
            }
        }
    }

    MLA_DEVICE void share(const float (&values)[kRowsOfLane]) {
        const i32 lane = own_lane();
        __syncwarp();
#pragma unroll
        for (i32 i = 0; i < kRowsOfLane; ++i) {
            if (kRows % kWarpThreads == 0 || lane < kRows)
                s.side[side].factors[warp][lane + i * kWarpThreads] = values[i];
        }
        __syncwarp();
    }

    // The reference of the sums of row `thread`.
    MLA_DEVICE float own_reference() const {
        return kRowsOfLane > 1 && warp > 0 ? out_reference[kRowsOfLane - 1] : out_reference[0];
    }

    // The factors of a tile of side `of` become the warp's.
    MLA_DEVICE void take_factors(i32 of) {
        const i32 lane = own_lane();
        float moved[kRowsOfLane], factors[kRowsOfLane];
        bool any = false;
#pragma unroll
        for (i32 i = 0; i < kRowsOfLane; ++i) {
            const i32 row = kRows % kWarpThreads == 0 ? lane + i * kWarpThreads : lane % kRows;
            const float top = s.tile_max[of][row];
            moved[i] = moved_reference(out_reference[i], top);
            factors[i] = ex2_approx(top - moved[i]);
            any |= moved[i] != out_reference[i];
        }
        if (__any_sync(kFullWarp, any)) {
            float decay[kRowsOfLane];
#pragma unroll
            for (i32 i = 0; i < kRowsOfLane; ++i) {
                decay[i] = ex2_approx(out_reference[i] - moved[i]);
                out_reference[i] = moved[i];
            }
            share(decay);
            rescale_out();
        }
        share(factors);
    }

    // 0 * NaN is not 0: NaN becomes 0 in tokens that not every row of the block sees. A row that sees the token is NaN
    // by its score. Must wait until side `of` has scored the tile, since its values are its keys.
    MLA_DEVICE void sanitize(const WorkItem& item, i32 tile, i32 of, u8* values) {
        if (Memory::kListed) return;  // absent rows are written as zeros
        const i32 first = max(item.seen_by_all - tile * kTileTokens, 0), end = item.tokens - tile * kTileTokens;
        if (first >= kTileTokens) return;
        mbarrier_wait(s.p_full[of], phases.full_parity(kPFull + of));
        for (i32 i = thread(); i < (kTileTokens - first) * kSw128Chunks; i += kWarpgroupThreads) {
            const i32 row = first + i / kSw128Chunks;
#pragma unroll
            for (i32 panel = 0; panel < kFp8PanelsOfSide; ++panel) {
                uint4& chunk =
                    *reinterpret_cast<uint4*>(values + panel * kSw128Bytes + sw128_offset(row, i % kSw128Chunks));
                chunk = row < end ? without_nan(chunk) : make_uint4(0, 0, 0, 0);
            }
        }
        fence_proxy_async();  // before the next tile's copies
        sync_side();
    }

    // The operand of 64 columns.
    MLA_DEVICE void load_values(u32 (&a)[2][4], SmemAddr values, i32 b) {
#pragma unroll
        for (i32 step = 0; step < 2; ++step) {
            load_bytes_transposed(a[step], values + b / 2 * kSw128Bytes, step, b % 2 != 0);
        }
    }

    // Operand descriptors of the terms of a tile's P.
    using TermsOfP = SmemDesc[kTerms];

    // Starts a tile's sum for 64 columns, with the smaller term: see `start_scores`.
    MLA_DEVICE void start_sum(float (&sums)[kSums], u32 (&a)[2][4], const TermsOfP& p) {
        pin(sums);
        wgmma_fence();
#pragma unroll
        for (i32 i = 0; i < 2 * kTerms; ++i) {
            const i32 step = i % 2;
            wgmma_mma_async(float8_e4m3fn{}, sums, a[step], advance(p[kTerms - 1 - i / 2], step * kMmaKBytes), i > 0);
        }
        wgmma_commit_group();
    }

    // The warp's factors of a thread's rows of O, in pairs: all blocks have the same.
    static constexpr i32 kFactorPairs = kSums / 4;

    MLA_DEVICE void load_factors(float2 (&to)[kFactorPairs]) const {
        const float* factors = s.side[side].factors[warp] + head_of(0);
#pragma unroll
        for (i32 i = 0; i < kFactorPairs; ++i) to[i] = *reinterpret_cast<const float2*>(factors + 8 * i);
    }

    MLA_DEVICE void add_sum(float (&to)[kSums], float (&sums)[kSums], const float2 (&factors)[kFactorPairs]) {
        pin(sums);
#pragma unroll
        for (i32 i = 0; i < kSums; i += 4) {
            const float2 by = factors[i / 4];
            to[i] = fmaf(by.x, sums[i], to[i]), to[i + 1] = fmaf(by.y, sums[i + 1], to[i + 1]);
            to[i + 2] = fmaf(by.x, sums[i + 2], to[i + 2]), to[i + 3] = fmaf(by.y, sums[i + 3], to[i + 3]);
        }
    }

    // Adds the values of a tile, scored by side `of`, to this side's columns.
    MLA_DEVICE void add_values(const WorkItem& item, i32 tile, i32 stage, i32 of) {
        add_values_of<false>(item, tile, stage, of, 0);
    }

    // Adds a tile of this side, then scores the tile in stage `then`.
    MLA_DEVICE void add_values_and_score(const WorkItem& item, i32 tile, i32 stage, i32 then) {
        add_values_of<true>(item, tile, stage, side, then);
    }

    // Two blocks of 64 columns are in flight at a time, and with the last one the first part of the scores: the tensor
    // cores have work while results are added. Operands are read and factors computed before the waits.
    template <bool kThenScore>
    MLA_DEVICE void add_values_of(const WorkItem& item, i32 tile, i32 stage, i32 of, i32 then) {
        mbarrier_wait(s.kv_full[stage], phases.full_parity(stage));
        phases.advance(stage);
        const u32 offset = stage * block.ring.tile_bytes + side * kFp8PanelsOfSide * kSw128Bytes;
        sanitize(item, tile, of, s.kv + offset);
        const SmemAddr values = smem_addr(s.kv) + offset + byte_matrix_offset(warp, own_lane());
        TermsOfP p;
        p[0] = uniform(sw64_desc(smem_addr(s.p[of])));
        if constexpr (kTerms > 1) p[1] = uniform(sw64_desc(s.tile(block.ring, stage) + kFp8LatentBytes));
        float narrow[2][kSums];
        auto sums_of = [&](i32 b) -> float (&)[kSums] {
            if constexpr (kSums == kScores) {
                return b % 2 == 0 ? scores : spare;
            } else {
                return narrow[b % 2];
            }
        };
        u32 a[2][2][4];
        load_values(a[0], values, 0);
        load_values(a[1], values, 1);
        mbarrier_wait(s.p_full[of], phases.full_parity(kPFull + of));
        phases.advance(kPFull + of);
        take_factors(of);
        float2 factors[kFactorPairs];
        load_factors(factors);
        start_sum(sums_of(0), a[0], p);
        start_sum(sums_of(1), a[1], p);
#pragma unroll
        for (i32 b = 0; b < kBlocks; ++b) {
            const bool last = b + 1 == kBlocks;
            if (last && kThenScore) begin_scores(then);
            if (last && !kThenScore) {
                wgmma_wait_group<0>();
            } else {
                wgmma_wait_group<1>();
            }
            add_sum(out[b], sums_of(b), factors);
            if (b + 2 < kBlocks) {
                load_values(a[b % 2], values, b + 2);
                start_sum(sums_of(b), a[b % 2], p);
            }
        }
        release(s.p_empty[of], own_lane());
        release(s.kv_empty[stage], own_lane());
        if (kThenScore) end_scores(then);
    }
};
}  // namespace mla::attention::sm90
