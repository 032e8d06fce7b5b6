// e2m1 numbers in integer arithmetic, for all GPUs without the instructions.
#pragma once
#include "common/types.cuh"

namespace mla {
// The bits of the nearest e2m1 number, ties to even, saturating; NaN is 0.
MLA_DEVICE u32 e2m1_bits(float x) {
    const float size = fabsf(x);
    const u32 code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                     (size >= 3.5f) + (size > 5.f);
    return x == x ? __float_as_uint(x) >> 28 & 8 | code : 0;
}

// Eight e2m1 numbers, the first one in the lowest bits, to e4m3, which holds them exactly. The magnitudes' bytes are
// picked from a table of eight.
MLA_DEVICE uint2 e4m3_x8_of_e2m1(u32 codes) {
    constexpr u32 kTo3 = 0x3c383000, kTo7 = 0x4c484440;  // 0, 0.5, 1, 1.5; 2, 3, 4, 6
    constexpr u32 kSigns = 0x80808080;
    const u32 sizes = codes & 0x77777777, shifted = codes << 4;
    return make_uint2(__byte_perm(kTo3, kTo7, sizes) | (__byte_perm(codes, shifted, 0x1504) & kSigns),
                      __byte_perm(kTo3, kTo7, sizes >> 16) | (__byte_perm(codes, shifted, 0x3726) & kSigns));
}
}  // namespace mla
