// Weights that are recomputed from a row's log-sum-exp: P = exp2(score - lse2).
#pragma once
#include "ptx/element.cuh"

namespace mla {
// From here on float32 rounds lse2 to whole numbers, and more coarsely: weights would be off by powers of two, up to
// infinity. A row with such an lse has no weights, like a row without keys, which has an infinite lse.
constexpr float kHugeLse2 = 0x1p24f;

// The limit for a natural log-sum-exp.
constexpr float kLargestLse = kHugeLse2 * 0.693147181f;
MLA_DEVICE bool has_weights(float lse) { return fabsf(lse) <= kLargestLse; }

// +Inf if the row has no weights. NaN propagates.
MLA_DEVICE float lse2_of_weights(float lse2) { return fabsf(lse2) >= kHugeLse2 ? -negative_infinity() : lse2; }
}  // namespace mla
