// Approximations and packed conversions: one instruction, one function.
#pragma once
#include "ptx/element.cuh"

namespace mla {
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2
MLA_DEVICE float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-lg2
MLA_DEVICE float lg2_approx(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-rcp
MLA_DEVICE float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two products at once, each rounded to nearest even (of bf16: sm_90 and later).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#half-precision-floating-point-instructions-mul
MLA_DEVICE u32 mul_x2(float16, u32 a, u32 b) {
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

MLA_DEVICE u32 mul_x2(bfloat16, u32 a, u32 b) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// Two sums at once, each rounded to nearest even.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#half-precision-floating-point-instructions-add
MLA_DEVICE u32 add_x2(float16, u32 a, u32 b) {
    u32 sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

// a * b + c of two pairs, rounded once.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#half-precision-floating-point-instructions-fma
MLA_DEVICE u32 fma_x2(float16, u32 a, u32 b, u32 c) {
    u32 sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// The larger of two, twice; NaN only where both are.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#half-precision-floating-point-instructions-max
MLA_DEVICE u32 max_x2(float16, u32 a, u32 b) {
    u32 larger;
    asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// The larger magnitude of each half, NaN if one of the two is; the sign is the sign of their product (sm_86 and later).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#half-precision-floating-point-instructions-max
MLA_DEVICE u32 max_abs_x2(float16, u32 a, u32 b) {
    u32 larger;
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

MLA_DEVICE u32 max_abs_x2(bfloat16, u32 a, u32 b) {
    u32 larger;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// Two floats to two 16-bit values in one word, round to nearest even. The instruction's first operand is the high half.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
MLA_DEVICE u32 cvt_x2(bfloat16, float lo, float hi) {
#if __CUDA_ARCH__ >= 800
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
#else
    return bfloat16::from_float(lo) | (u32)bfloat16::from_float(hi) << 16;
#endif
}

MLA_DEVICE u32 cvt_x2(float16, float lo, float hi) {
#if __CUDA_ARCH__ >= 800
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
#else
    return float16::from_float(lo) | (u32)float16::from_float(hi) << 16;
#endif
}
}  // namespace mla
