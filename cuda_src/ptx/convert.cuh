// Approximations and packed conversions: one instruction, one function.
#pragma once
#include "ptx/element.cuh"

MLA_DEVICE float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

MLA_DEVICE float lg2_approx(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two floats to two 16-bit values in one word, round to nearest even. PTX takes the high half first.
MLA_DEVICE u32 cvt_x2(bfloat16, float lo, float hi) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
}

MLA_DEVICE u32 cvt_x2(float16, float lo, float hi) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
}
