// e4m3 numbers: the element type, packed conversions, and the same in integer arithmetic for GPUs without the
// instruction.
#pragma once
#include "ptx/element.cuh"

namespace mla {
constexpr float kMaxE4m3 = 448.f;
constexpr u32 kE4m3Nan = 0x7f;

// The bits of the nearest e4m3 number, ties to even, saturating; NaN is 0x7f.
MLA_DEVICE u32 e4m3_bits(float x) {
    const u32 sign = __float_as_uint(x) >> 24 & 0x80;
    const float size = fminf(fabsf(x), kMaxE4m3);
    if (x != x) return kE4m3Nan;
    if (size < 0.015625f) return sign | (u32)__float2int_rn(size * 512.f);  // below 2^-6 a step is 2^-9
    const u32 bits = __float_as_uint(size);
    return sign | ((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120u << 3);
}

// The value of e4m3 bits. The exponents of e4m3 and fp32 differ by 120; subnormal numbers come out right as well.
MLA_DEVICE float e4m3_value(u32 bits) {
    const float size = __uint_as_float((bits & 0x7f) << 20) * 1.329227995784916e36f;  // 2^120
    const float value = (bits & 0x7f) == kE4m3Nan ? __uint_as_float(0x7fffffff) : size;
    return bits & 0x80 ? -value : value;
}

// The 8-bit element type of operands: -DMLA_DTYPE=float8_e4m3fn.
struct float8_e4m3fn {
    MLA_DEVICE static float to_float(u8 bits) { return e4m3_value(bits); }
};

// The bytes of a word, or of four, without those that are e4m3's NaN.
MLA_DEVICE u32 without_nan(u32 codes) {
    const u32 nan = ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
    return codes & ~((nan >> 7) * 0xffu);
}
MLA_DEVICE uint4 without_nan(const uint4& codes) {
    return make_uint4(without_nan(codes.x), without_nan(codes.y), without_nan(codes.z), without_nan(codes.w));
}

// Two floats to two e4m3 numbers, `lo` in the low byte.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
MLA_DEVICE u32 cvt_e4m3_x2(float lo, float hi) {
#if __CUDA_ARCH__ >= 890
    u16 packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(hi), "f"(lo));
    return packed;
#else
    return e4m3_bits(lo) | e4m3_bits(hi) << 8;
#endif
}

// Two f16 numbers, the first one in the low half, to two e4m3 numbers (sm_89 and later).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
MLA_DEVICE u32 cvt_e4m3_x2_f16(u32 halves) {
    u16 packed;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(packed) : "r"(halves));
    return packed;
}

// Differences of two pairs of f16 numbers.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#half-precision-floating-point-instructions-sub
MLA_DEVICE u32 sub_f16_x2(u32 x, u32 y) {
    u32 difference;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(x), "r"(y));
    return difference;
}

// Products of two pairs of f16 numbers.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#half-precision-floating-point-instructions-mul
MLA_DEVICE u32 mul_f16_x2(u32 x, u32 y) {
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
    return product;
}

// Two e4m3 numbers, in the low half of `codes`, to two f16 numbers, which hold them exactly (sm_89 and later).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
MLA_DEVICE u32 cvt_f16_x2_e4m3(u32 codes) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)codes));
    return halves;
}

// Converts the two codes in the high half, without a shift.
MLA_DEVICE u32 cvt_f16_x2_e4m3_high(u32 codes) {
    u32 halves;
    asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n cvt.rn.f16x2.e4m3x2 %0, high;\n}"
        : "=r"(halves)
        : "r"(codes));
    return halves;
}

// Four e4m3 numbers to f16 numbers, which hold them exactly, on any GPU since Ampere.
MLA_DEVICE void f16_x4_of_e4m3(u32 codes, u32& low, u32& high) {
#if __CUDA_ARCH__ >= 890
    low = cvt_f16_x2_e4m3(codes), high = cvt_f16_x2_e4m3_high(codes);
#else
    // The fields of e4m3 are f16's with an exponent smaller by 8. NaN, all ones, gets the one bit of the exponent that
    // it lacks.
    constexpr u32 kSigns = 0x80808080, kTo256 = 0x5c005c00;
    const u32 nan = ((codes & ~kSigns) + 0x01010101) & kSigns;
    const auto halves = [&](u32 bytes) {  // the selected two bytes, in the upper bytes of 16 bits
        const u32 x = __byte_perm(codes, 0, bytes), n = __byte_perm(nan, 0, bytes);
        return mul_f16_x2((x & 0x80008000) | (x >> 1 & 0x3f803f80) | n >> 1, kTo256);
    };
    low = halves(0x1404), high = halves(0x3424);
#endif
}

// Two e4m3 numbers, in the low half of `codes`, to two floats.
MLA_DEVICE float2 cvt_f32_x2_e4m3(u32 codes) {
#if __CUDA_ARCH__ >= 890
    const u32 halves = cvt_f16_x2_e4m3(codes);
    return make_float2(float16::to_float((u16)halves), float16::to_float((u16)(halves >> 16)));
#else
    return make_float2(e4m3_value(codes & 0xff), e4m3_value(codes >> 8 & 0xff));
#endif
}
}  // namespace mla
