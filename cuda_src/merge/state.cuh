// Partial results: a normalised output and the log-sum-exp of the keys that it saw.
#pragma once
#include "common/types.cuh"

namespace mla::merge {
// The log-sum-exp in base 2; -Inf for an empty state, marked by either infinity. NaN propagates.
MLA_DEVICE float state_lse2(float lse, float to_log2) {
    return fabsf(lse) == -negative_infinity() ? negative_infinity() : __fmul_rn(lse, to_log2);
}

// The log-sum-exp of several, from their maximum and the sum of 2^(lse2 - maximum); -Inf if all are empty.
MLA_DEVICE float total_lse2(float max_lse2, float sum) {
    return sum == 0.f ? negative_infinity() : max_lse2 + log2f(sum);
}

template <typename Element>
MLA_DEVICE float read_element(const void* from, i64 at, i32 is_fp32) {
    return is_fp32 ? static_cast<const float*>(from)[at] : Element::to_float(static_cast<const u16*>(from)[at]);
}

struct alignas(16) Floats4 {
    float x[4];
};

struct alignas(8) Elements4 {
    u16 x[4];
};

template <typename Element>
MLA_DEVICE Floats4 read_elements4(const void* from, i64 at, i32 is_fp32) {
    if (is_fp32) return *reinterpret_cast<const Floats4*>(static_cast<const float*>(from) + at);
    const Elements4 raw = *reinterpret_cast<const Elements4*>(static_cast<const u16*>(from) + at);
    Floats4 wide;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) wide.x[i] = Element::to_float(raw.x[i]);
    return wide;
}

template <typename Element>
MLA_DEVICE void write_elements4(void* to, i64 at, const Floats4& x, i32 is_fp32) {
    if (is_fp32) {
        *reinterpret_cast<Floats4*>(static_cast<float*>(to) + at) = x;
        return;
    }
    Elements4 narrow;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) narrow.x[i] = Element::from_float(x.x[i]);
    *reinterpret_cast<Elements4*>(static_cast<u16*>(to) + at) = narrow;
}

template <typename Element>
MLA_DEVICE void write_element(void* to, i64 at, float x, i32 is_fp32) {
    if (is_fp32) {
        static_cast<float*>(to)[at] = x;
    } else {
        static_cast<u16*>(to)[at] = Element::from_float(x);
    }
}
}  // namespace mla::merge
