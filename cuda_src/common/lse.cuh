// Log-sum-exps: the total of several, and what callers get.
#pragma once
#include "common/types.cuh"

namespace mla {
struct LseConvention {
    float factor;  // from base-2 logarithms to the caller's
    float empty;   // of a row without a key
};

// The base-2 log-sum-exp of several, from their maximum and the sum of 2^(lse2 - maximum); -Inf if all are empty.
MLA_DEVICE float total_lse2(float max_lse2, float sum) {
    return sum == 0.f ? negative_infinity() : max_lse2 + log2f(sum);
}

// A base-2 log-sum-exp as the caller wants it; -Inf is a row without a key.
MLA_DEVICE float callers_lse(const LseConvention& convention, float lse2) {
    return lse2 == negative_infinity() ? convention.empty : lse2 * convention.factor;
}
}  // namespace mla
