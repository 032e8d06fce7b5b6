// The caller's convention for log-sum-exps: their base, and the value of a row without a key.
#pragma once
#include "common/types.cuh"

namespace mla {
struct LseConvention {
    float factor;  // from base-2 logarithms to the caller's
    float empty;   // of a row without a key
};

// From a base-2 log-sum-exp; -Inf is a row without a key.
MLA_DEVICE float callers_lse(const LseConvention& convention, float lse2) {
    return lse2 == negative_infinity() ? convention.empty : lse2 * convention.factor;
}

// From a maximum of base-2 logarithms and the sum of 2^(logarithm - maximum), which is 0 of a row without a key.
MLA_DEVICE float callers_lse(const LseConvention& convention, float max, float sum) {
    return sum == 0.f ? convention.empty : (max + log2f(sum)) * convention.factor;
}
}  // namespace mla
