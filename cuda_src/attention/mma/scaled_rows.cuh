// The softmax of a step of 32 tokens whose values have scales, one for each group of 128 columns.
//
// A weight times a scale may not fit float16: a scale can be 1e-10. Each token therefore splits its scales into the
// power of two of its largest scale and a remainder per group. P is the weight times the power, computed in float32;
// the value matmuls multiply by the remainder. Each row also divides P by a power of two that follows the row's largest
// P, as a running maximum follows the largest score, so that P fits float16. A token counts by its share of the row's
// output: neither a small weight nor a small scale alone makes it 0.
#pragma once
#include "attention/mma/softmax.cuh"

namespace mla::attention::mma {
// A row scales its largest P to 2^2, and does so again once P reaches 2^10. The rest of a scale is below 2^5, so that
// products stay below 2^15; float16 ends at 2^16.
constexpr float kLargestLog2 = 2.f;
constexpr u32 kLargestEnd = 0x64006400;  // 2^10, twice
constexpr i32 kRestLog2 = 4;
// Weights of tokens with tiny scales end here, well before their sum overflows.
constexpr float kMostWeight = 0x1p80f;
// Scales beyond these count as they do where the power of two is chosen.
constexpr float kLeastScale = 0x1p-60f, kMostScale = 0x1p100f;

// The power of two by which P is multiplied, from a token's scales.
MLA_DEVICE float scale_power(const float4& scales) {
    const float largest = fmaxf(fmaxf(fabsf(scales.x), fabsf(scales.y)), fmaxf(fabsf(scales.z), fabsf(scales.w)));
    const u32 exponent = __float_as_uint(fminf(fmaxf(largest, kLeastScale), kMostScale)) & 0x7f800000;
    return __uint_as_float(exponent - (kRestLog2 << 23));
}

// The rest of a scale, in float16 and below 2^5; 0 if the scale is not finite. Rows that see such a token get NaN from
// its score, and the other rows must not read NaN.
MLA_DEVICE u16 scale_rest(float scale, float power) {
    const float rest = scale * __uint_as_float((254 << 23) - __float_as_uint(power));
    return fabsf(rest) <= 65504.f ? (u16)cvt_x2(float16{}, rest, 0.f) : (u16)0;
}

// SoftmaxRow for values with scales. Weights are 2^(x - max - shift); `sum` adds up the weights, not P.
template <class Layout>
struct ScaledRow : SoftmaxRow<Layout, true> {
    using Base = SoftmaxRow<Layout, true>;
    using Scores = typename Base::Scores;
    static constexpr i32 kTokens = Layout::kTokens;
    using Powers = float[kTokens];
    float shift;  // a whole number, so that it can be added to `max` without an error

    MLA_DEVICE void begin() { Base::begin(), shift = 0.f; }

    // Exponent that `sum` is relative to, in base 2.
    MLA_DEVICE float reference() const { return this->max + shift; }

    // Like SoftmaxRow::add_step: turns the step's scores and its tokens' powers into P.
    template <class Block>
    MLA_DEVICE void add_step(const Block& block, SoftmaxSlots<Layout>& s, const float* of_step, i32 token, bool masked,
                             u32 present, float scale_log2) {
        Scores x;
        Powers powers;
        Base::load_scores(x, s);
        if (masked) present &= Base::seen_bits(block, token + Base::first_token());
#pragma unroll
        for (i32 i = 0; i < kTokens; ++i) {
            powers[i] = of_step[Base::first_token() + i];
            x[i] = present >> i & 1 ? __fmul_rn(x[i], scale_log2) : negative_infinity();
        }
        add_scores(s, x, powers);
    }

   private:
    // P is stored before the vote whether it fits, so that nothing waits for the vote.
    MLA_DEVICE void add_scores(SoftmaxSlots<Layout>& s, const Scores& x, const Powers& powers) {
        float weights, factor = 1.f;
        bool fits = weigh(weights, s, x, powers);
        const bool rescales = __any_sync(kFullWarp, !fits);
        if (rescales) {
            factor = follow(x, powers, fits);
            weigh(weights, s, x, powers);
        }
        this->sum += weights;
        if (Base::is_first()) s.scale[Base::row()] = factor;
        if (threadIdx.x % kWarpThreads == 0) s.rescales[threadIdx.x / kWarpThreads] = rescales;
    }

    // Stores P and adds up the weights. Returns true if all are within their limits.
    MLA_DEVICE bool weigh(float& sum, SoftmaxSlots<Layout>& s, const Scores& x, const Powers& powers) const {
        u32* to = reinterpret_cast<u32*>(&s.p[Base::row()][Base::first_token()]);
        u32 largest;
#pragma unroll
        for (i32 i = 0; i < kTokens; i += 2) {
            // Two subtractions: next to a huge `max` a sum would lose `shift`.
            const float w0 = ex2_approx(x[i] - this->max - shift), w1 = ex2_approx(x[i + 1] - this->max - shift);
            sum = i == 0 ? w0 + w1 : sum + (w0 + w1);
            const u32 p = cvt_x2(float16{}, w0 * powers[i], w1 * powers[i + 1]);
            largest = i == 0 ? p : max_x2(float16{}, largest, p);
            to[i / 2] = p;
        }
        return !(largest + (0x80008000 - kLargestEnd) & 0x80008000) && !(sum > kMostWeight);
    }

    // Cold path. Returns the factor of the row's earlier sums. Rows whose threads all `fit` stay unchanged, since a
    // row's results must not depend on its neighbours.
    MLA_DEVICE float follow(const Scores& x, const Powers& powers, bool fit) {
        float score = negative_infinity(), product = negative_infinity();
#pragma unroll
        for (i32 i = 0; i < kTokens; ++i) score = fmaxf(score, x[i]);
        const float to = fmaxf(this->max, Base::max_over_lanes(score));
#pragma unroll
        for (i32 i = 0; i < kTokens; ++i) product = fmaxf(product, x[i] - to + lg2_approx(powers[i]));
        product = Base::max_over_lanes(product);
        if (Base::max_over_lanes(fit ? 0.f : 1.f) == 0.f) return 1.f;
        const float left = this->max - to + shift, next = fmaxf(left, ceilf(product - kLargestLog2));
        const float factor = ex2_approx(left - next);
        this->max = to, shift = next;
        this->sum *= factor;
        return factor;
    }
};

template <class Layout, bool kScaled>
struct CodeRow {
    using Type = SoftmaxRow<Layout, true>;
};
template <class Layout>
struct CodeRow<Layout, true> {
    using Type = ScaledRow<Layout>;
};
}  // namespace mla::attention::mma
