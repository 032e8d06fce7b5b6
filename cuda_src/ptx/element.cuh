// The two 16-bit element types. A kernel's variant names one of them: -DMLA_DTYPE=bfloat16 or float16.
#pragma once
#include "common/types.cuh"

namespace mla {
struct bfloat16 {
    static constexpr u32 kExponentMask = 0x7f80;

    // bf16 is the upper half of a float, so both directions are integer operations, the same on every GPU.
    MLA_DEVICE static float to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }
    MLA_DEVICE static u16 from_float(float x) {
        u32 bits = __float_as_uint(x);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // NaN: rounding could turn its payload into Inf
        return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
};

struct float16 {
    static constexpr u32 kExponentMask = 0x7c00;

    MLA_DEVICE static float to_float(u16 bits) {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
    MLA_DEVICE static u16 from_float(float x) {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
        return bits;
    }
};
}  // namespace mla
