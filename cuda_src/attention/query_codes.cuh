// Query rows in e4m3, by the rule of mla_cupy/reference/fp8_queries.py.
//
// A row in 16 bits is divided by the smallest power of two, of at least 2^-100, that leaves no magnitude above 448, and
// rounded to nearest, ties to even. A row with NaN or Inf is NaN throughout.
#pragma once
#include "common/types.cuh"
#include "ptx/fp8.cuh"
#include "tile/elements.cuh"

namespace mla::attention {
constexpr i32 kLeastQueryExponent = 127 - 100;  // biased, of a scale

// Biased exponent of a row's scale: the exponent of the row's largest magnitude less 8, plus one if the magnitude
// exceeds 1.75 times its power of two, since 448 = 1.75 * 2^8.
MLA_DEVICE i32 query_exponent(u32 largest) {
    constexpr u32 kAbove = 0x1fffff;  // carries into the exponent from fractions above 0.75
    return max((i32)(largest + kAbove >> 23) - 8, kLeastQueryExponent);
}

// Factor from a row's elements to codes, and its inverse. Both are NaN, or neither.
struct QueryScale {
    float down, up;
};

// `largest`: the bits of the row's largest magnitude, of any infinity or NaN if there is one.
MLA_DEVICE QueryScale query_scale(u32 largest) {
    const bool finite = largest < __float_as_uint(kMaxFloat) + 1;
    const i32 exponent = query_exponent(largest);
    const float nan = __uint_as_float(0x7fffffff);
    const float down = finite ? __uint_as_float((u32)(254 - exponent) << 23) : nan;
    return QueryScale{down, finite ? __uint_as_float((u32)exponent << 23) : nan};
}

// Bits of the largest magnitude among `bits` and eight elements.
template <class Element>
MLA_DEVICE u32 largest_magnitude(const uint4& chunk, u32 bits) {
    const u32* words = &chunk.x;
#pragma unroll
    for (i32 j = 0; j < 4; ++j) {
        const float2 pair = unpack<Element>(words[j]);
        bits = max(bits, max(__float_as_uint(fabsf(pair.x)), __float_as_uint(fabsf(pair.y))));
    }
    return bits;
}

template <class Element>
MLA_DEVICE uint2 query_codes(const uint4& chunk, float down) {
    u32 codes[2];
    const u32* words = &chunk.x;
#pragma unroll
    for (i32 j = 0; j < 2; ++j) {
        const float2 low = unpack<Element>(words[2 * j]), high = unpack<Element>(words[2 * j + 1]);
        codes[j] = cvt_e4m3_x2(low.x * down, low.y * down) | cvt_e4m3_x2(high.x * down, high.y * down) << 16;
    }
    return make_uint2(codes[0], codes[1]);
}

// Second term: the remainder of a chunk after its codes, also rounded to e4m3.
template <class Element>
MLA_DEVICE uint2 query_remainders(const uint4& chunk, float down, const uint2& of) {
    u32 codes[2];
    const u32* words = &chunk.x;
#pragma unroll
    for (i32 j = 0; j < 2; ++j) {
        const float2 low = unpack<Element>(words[2 * j]), high = unpack<Element>(words[2 * j + 1]);
        const u32 first = j == 0 ? of.x : of.y;
        const float2 less_low = cvt_f32_x2_e4m3(first), less_high = cvt_f32_x2_e4m3(first >> 16);
        codes[j] = cvt_e4m3_x2(fmaf(low.x, down, -less_low.x), fmaf(low.y, down, -less_low.y)) |
                   cvt_e4m3_x2(fmaf(high.x, down, -less_high.x), fmaf(high.y, down, -less_high.y)) << 16;
    }
    return make_uint2(codes[0], codes[1]);
}
}  // namespace mla::attention
