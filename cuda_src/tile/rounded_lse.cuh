// Weights that are recomputed from a row's log-sum-exp, P = exp2(score * scale - lse), in the unit of lse.
//
// An lse in float32 is rounded, and so is a score. From kHugeLse on that is many powers of two: P would be anything,
// infinity included. There, a score that is as near to lse as rounding allows is the row's maximum, and weighs 1.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/element.cuh"

namespace mla {
constexpr float kHugeLse = 0x1p26f, kLseRounding = 0x1p-22f;

// Not that of a row without keys, which is infinite.
MLA_DEVICE bool is_huge_lse(float lse) { return fabsf(lse) >= kHugeLse && fabsf(lse) <= kMaxFloat; }

// Whether a lane has such a row: uniform over the warp.
MLA_DEVICE bool any_huge_lse(float a, float b) { return __any_sync(kFullWarp, is_huge_lse(a) || is_huge_lse(b)); }

// The logarithm of a weight of such a row, and of any row.
MLA_DEVICE float huge_exponent(float score, float scale, float lse) {
    const float x = __fmul_rn(score, scale) - lse;
    return x > -kLseRounding * fabsf(lse) ? 0.f : x;
}
MLA_DEVICE float weight_exponent(float score, float scale, float lse) {
    return is_huge_lse(lse) ? huge_exponent(score, scale, lse) : fmaf(score, scale, -lse);
}

// The same from -lse; not `kHuge`: no lse of the warp is.
template <bool kHuge>
MLA_DEVICE float exponent_of(float score, float scale, float minus_lse) {
    return kHuge ? weight_exponent(score, scale, -minus_lse) : fmaf(score, scale, minus_lse);
}
}  // namespace mla
