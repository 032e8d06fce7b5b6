// The softmax of a step of 32 tokens whose values have scales, one for each group of 128 columns.
//
// P of a group is weight times scale: the product is computed in float32, and only the product is rounded to float16.
// Each row keeps its products within float16 with a power of two of its own, which follows the row's largest product as
// a running maximum follows the largest score. So a token counts by its share of the row's output: neither a small
// weight nor a small scale alone makes it 0.
#pragma once
#include "attention/mma/softmax.cuh"

namespace mla::attention::mma {
// A row scales its largest product to 2^8 and does so again once a product reaches 2^15. Float16 ends at 2^16.
constexpr float kProductLog2 = 8.f;
constexpr u32 kProductEnd = 0x78007800, kSigns = 0x80008000;  // 2^15, twice
// Weights of tokens with tiny scales end here, well before their sum overflows.
constexpr float kMostWeight = 0x1p80f;
// Smaller scales count as this one where the power of two is chosen.
constexpr float kLeastScale = 0x1p-60f;

// SoftmaxRow for values with scales. Weights are 2^(x - max - shift); `sum` adds up the weights, not the products.
template <class Layout>
struct ScaledRow : SoftmaxRow<Layout, true> {
    using Base = SoftmaxRow<Layout, true>;
    using Scores = typename Base::Scores;
    static constexpr i32 kGroups = Layout::kWeights, kTokens = Layout::kTokens;
    using Scales = float[kTokens][kGroups];
    float shift;  // a whole number, so that it can be added to `max` without an error

    MLA_DEVICE void begin() { Base::begin(), shift = 0.f; }

    // Exponent that `sum` is relative to, in base 2.
    MLA_DEVICE float reference() const { return this->max + shift; }

    // Takes the step's scores and its tokens' scales, leaves P of each group; as SoftmaxRow::add_step.
    template <class Block>
    MLA_DEVICE void add_step(const Block& block, SoftmaxSlots<Layout>& s, const float (*of_step)[kGroups], i32 token,
                             bool masked, u32 present, float scale_log2) {
        Scores x;
        Scales scales;
        Base::load_scores(x, s);
        load_scales(scales, of_step + Base::first_token());
        if (masked) {
            present &= Base::seen_bits(block, token + Base::first_token());
            hide(scales, present);
        }
#pragma unroll
        for (i32 i = 0; i < kTokens; ++i) x[i] = present >> i & 1 ? x[i] * scale_log2 : negative_infinity();
        add_scores(s, x, scales);
    }

   private:
    MLA_DEVICE static void load_scales(Scales& scales, const float (*from)[kGroups]) {
        static_assert(kGroups == 4, "a token's scales are read at once");
#pragma unroll
        for (i32 i = 0; i < kTokens; ++i) {
            const float4 four = *reinterpret_cast<const float4*>(from[i]);
            scales[i][0] = four.x, scales[i][1] = four.y, scales[i][2] = four.z, scales[i][3] = four.w;
        }
    }

    // A token that the row does not see may have scales that are not finite.
    MLA_DEVICE static void hide(Scales& scales, u32 seen) {
#pragma unroll
        for (i32 i = 0; i < kTokens * kGroups; ++i) {
            if (!(seen >> i / kGroups & 1)) scales[i / kGroups][i % kGroups] = 0.f;
        }
    }

    // P is stored before it is known to fit, so that nobody waits for the vote.
    MLA_DEVICE void add_scores(SoftmaxSlots<Layout>& s, const Scores& x, const Scales& scales) {
        float weights, factor = 1.f;
        bool fits = weigh(weights, s, x, scales);
        const bool rescales = __any_sync(kFullWarp, !fits);
        if (rescales) {
            factor = follow(x, scales, fits);
            weigh(weights, s, x, scales);
        }
        this->sum += weights;
        if (Base::is_first()) s.scale[Base::row()] = factor;
        if (threadIdx.x % kWarpThreads == 0) s.rescales[threadIdx.x / kWarpThreads] = rescales;
    }

    // Stores P of each group and adds up the weights. Returns true if all are within their limits.
    MLA_DEVICE bool weigh(float& sum, SoftmaxSlots<Layout>& s, const Scores& x, const Scales& scales) const {
        float w[kTokens];
#pragma unroll
        for (i32 i = 0; i < kTokens; ++i) {
            w[i] = ex2_approx(x[i] - this->max - shift);  // two subtractions: beside a huge `max` a sum loses `shift`
            sum = i == 0 ? w[0] : sum + w[i];
        }
        u32 largest;
#pragma unroll
        for (i32 group = 0; group < kGroups; ++group) {
            u32* to = reinterpret_cast<u32*>(&s.p[group * Layout::kRows + Base::row()][Base::first_token()]);
#pragma unroll
            for (i32 i = 0; i < kTokens; i += 2) {
                const u32 p = cvt_x2(float16{}, w[i] * scales[i][group], w[i + 1] * scales[i + 1][group]);
                largest = group + i == 0 ? p & ~kSigns : max_x2(float16{}, largest, p & ~kSigns);
                to[i / 2] = p;
            }
        }
        return !(largest + (kSigns - kProductEnd) & kSigns) && !(sum > kMostWeight);
    }

    // Cold. Returns the factor of what the row has added up. Rows whose threads all `fit` stay as they are, since a
    // row's results must not depend on its neighbours'.
    MLA_DEVICE float follow(const Scores& x, const Scales& scales, bool fit) {
        float score = negative_infinity(), product = negative_infinity();
#pragma unroll
        for (i32 i = 0; i < kTokens; ++i) score = fmaxf(score, x[i]);
        const float to = fmaxf(this->max, Base::max_over_lanes(score));
#pragma unroll
        for (i32 i = 0; i < kTokens; ++i) product = fmaxf(product, x[i] - to + largest_log2(scales[i]));
        product = Base::max_over_lanes(product);
        if (Base::max_over_lanes(fit ? 0.f : 1.f) == 0.f) return 1.f;
        const float left = this->max - to + shift, next = fmaxf(left, ceilf(product - kProductLog2));
        const float factor = ex2_approx(left - next);
        this->max = to, shift = next;
        this->sum *= factor;
        return factor;
    }

    MLA_DEVICE static float largest_log2(const float (&scales)[kGroups]) {
        float largest = kLeastScale;
#pragma unroll
        for (i32 group = 0; group < kGroups; ++group) largest = fmaxf(largest, fabsf(scales[group]));
        return lg2_approx(fminf(largest, kMaxFloat));
    }
};

template <class Layout, bool = (Layout::kWeights > 1)>
struct CodeRow {
    using Type = SoftmaxRow<Layout, true>;
};
template <class Layout>
struct CodeRow<Layout, true> {
    using Type = ScaledRow<Layout>;
};
}  // namespace mla::attention::mma
