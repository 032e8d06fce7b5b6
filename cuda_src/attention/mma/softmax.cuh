// The softmax of a step of 32 tokens: the warps exchange partial scores in shared memory, and several threads share a
// row.
#pragma once
#include "attention/mma/key_ring.cuh"
#include "attention/online_softmax.cuh"

namespace mla::attention::mma {
constexpr i32 kQuarters = 4;  // of d; four warps score the same tokens

template <i32 kRows_, i32 kStepTokens>
struct SoftmaxLayout {
    static constexpr i32 kRows = kRows_;
    static constexpr i32 kLanes = kThreads / kRows;       // threads per row
    static constexpr i32 kTokens = kStepTokens / kLanes;  // tokens per thread
    // Eight more than a step: rows of scores, and rows of P for ldmatrix, hit different banks.
    static constexpr i32 kPitch = kStepTokens + 8;
    static_assert(kTokens == 2 || kTokens == 4, "within what one warp copies");
};

// Data that the warps exchange in shared memory.
template <class Layout>
struct SoftmaxSlots {
    alignas(16) float scores[kQuarters][Layout::kRows][Layout::kPitch];
    alignas(16) u16 p[Layout::kRows][Layout::kPitch];
    float scale[Layout::kRows];      // factor of earlier sums under a step's new maximum
    alignas(8) u8 rescales[kWarps];  // 1: a warp's rows have such a factor
};

// One row, seen from one of the threads that share it. With kVotes the step's maximum is computed only if some score of
// a warp is large enough to move a running maximum, which is rare: a vote instead of a chain of shuffles. The true
// maximum is then unknown.
template <class Layout, bool kVotes = false>
struct SoftmaxRow {
    using Scores = float[Layout::kTokens];
    float max, sum, row_max;  // running maximum; the thread's share of the sum; the true maximum, or -inf

    MLA_DEVICE static i32 row() { return (i32)threadIdx.x / Layout::kLanes; }
    MLA_DEVICE static i32 first_token() { return (i32)threadIdx.x % Layout::kLanes * Layout::kTokens; }  // of a step
    MLA_DEVICE static bool is_first() { return threadIdx.x % Layout::kLanes == 0; }

    MLA_DEVICE void begin() { max = kLowestMax, sum = 0.f, row_max = negative_infinity(); }

    // Exponent that `sum` is relative to, in base 2.
    MLA_DEVICE float reference() const { return max; }

    MLA_DEVICE float whole_sum() const {
        return over_lanes(sum, [](float a, float b) { return a + b; });
    }

    // The partial scores of a step, added up.
    MLA_DEVICE static void load_scores(Scores& x, const SoftmaxSlots<Layout>& s) {
#pragma unroll
        for (i32 quarter = 0; quarter < kQuarters; ++quarter) {
            const float* from = &s.scores[quarter][row()][first_token()];
#pragma unroll
            for (i32 i = 0; i < Layout::kTokens; i += 2) {
                const float2 pair = *reinterpret_cast<const float2*>(from + i);
                x[i] = quarter == 0 ? pair.x : x[i] + pair.x;
                x[i + 1] = quarter == 0 ? pair.y : x[i + 1] + pair.y;
            }
        }
    }

    // Takes the step's scores, leaves its P. `token` is the step's first; `present` has a bit for each of this
    // thread's. `masked`: not every row sees all of the step.
    template <class Element, class Block>
    MLA_DEVICE void add_step(Element element, const Block& block, SoftmaxSlots<Layout>& s, i32 token, bool masked,
                             u32 present) {
        add_step(element, block, s, token, masked, present, block.p.scale_log2);
    }

    // With a scale of the row's own.
    template <class Element, class Block>
    MLA_DEVICE void add_step(Element element, const Block& block, SoftmaxSlots<Layout>& s, i32 token, bool masked,
                             u32 present, float scale_log2) {
        Scores x;
        load_scores(x, s);
        add_scores(element, block, s, x, token, masked, present, scale_log2);
    }

    // add_scores for scores that are already loaded.
    template <class Element, class Block>
    MLA_DEVICE void add_scores(Element, const Block& block, SoftmaxSlots<Layout>& s, Scores& x, i32 token, bool masked,
                               u32 present, float scale_log2) {
        if (masked) present &= seen_bits(block, token + first_token());
        float largest = negative_infinity();
#pragma unroll
        for (i32 i = 0; i < Layout::kTokens; ++i) {
            x[i] = present >> i & 1 ? __fmul_rn(x[i], scale_log2) : negative_infinity();
            largest = fmaxf(largest, x[i]);
        }
        bool rescales = false;
        float factor = 1.f;
        if (kVotes) {
            rescales = __any_sync(kFullWarp, is_far_above(largest, max));
            if (rescales) factor = move_max(max_over_lanes(largest));
        } else {
            largest = max_over_lanes(largest);
            row_max = fmaxf(row_max, largest);
            factor = move_max(largest);
        }
        u32* to = reinterpret_cast<u32*>(&s.p[row()][first_token()]);
#pragma unroll
        for (i32 i = 0; i < Layout::kTokens; i += 2) {
            const float p0 = ex2_approx(x[i] - max), p1 = ex2_approx(x[i + 1] - max);
            sum += p0 + p1;
            to[i / 2] = cvt_x2(Element{}, p0, p1);
        }
        if (is_first()) s.scale[row()] = factor;
        if (!kVotes) rescales = __any_sync(kFullWarp, factor != 1.f);
        if (threadIdx.x % kWarpThreads == 0) s.rescales[threadIdx.x / kWarpThreads] = rescales;
    }

   protected:
    // Lazy: see attention/online_softmax.cuh.
    MLA_DEVICE float move_max(float largest) {
        if (!is_far_above(largest, max)) return 1.f;
        const float factor = ex2_approx(max - largest);
        max = largest;
        sum *= factor;
        return factor;
    }

    template <class Block>
    MLA_DEVICE static u32 seen_bits(const Block& block, i32 token) {
        const SeenTokens seen = seen_tokens(block.p, block.item(), block.row0 + row());
        u32 bits = 0;
#pragma unroll
        for (i32 i = 0; i < Layout::kTokens; ++i) bits |= (u32)seen.contain(token + i) << i;
        return bits;
    }

    MLA_DEVICE static float max_over_lanes(float x) {
        return over_lanes(x, [](float a, float b) { return fmaxf(a, b); });
    }

    template <class Operation>
    MLA_DEVICE static float over_lanes(float x, Operation operation) {
#pragma unroll
        for (i32 step = Layout::kLanes / 2; step > 0; step /= 2) {
            x = operation(x, __shfl_xor_sync(kFullWarp, x, step));
        }
        return x;
    }
};
}  // namespace mla::attention::mma
