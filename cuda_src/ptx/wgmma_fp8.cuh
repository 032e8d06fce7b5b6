// WGMMA of e4m3 operands (sm_90a): D[64 x N] += A[64 x 32] * B[32 x N], both K-major in shared memory, fp32
// accumulators.
//
// Fragments are those of ptx/wgmma.cuh.
#pragma once
#include "ptx/float8.cuh"
#include "ptx/wgmma.cuh"

namespace mla {
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-operation-wgmma-mma-async
// clang-format off
#define MLA_D8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]),                                       \
    "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MLA_D32(d, i) MLA_D8(d, i), MLA_D8(d, i + 8), MLA_D8(d, i + 16), MLA_D8(d, i + 24)

MLA_DEVICE void wgmma_m64n32k32(float8_e4m3fn, float (&d)[16], SmemDesc a, SmemDesc b, bool accumulate) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %18, 0;\n wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
        ", %16, %17, p, 1, 1;\n}"
        : MLA_D8(d, 0), MLA_D8(d, 8) : "l"(a.bits), "l"(b.bits), "r"((i32)accumulate));
}

MLA_DEVICE void wgmma_m64n64k32(float8_e4m3fn, float (&d)[32], SmemDesc a, SmemDesc b, bool accumulate) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
        ", %32, %33, p, 1, 1;\n}"
        : MLA_D32(d, 0) : "l"(a.bits), "l"(b.bits), "r"((i32)accumulate));
}

MLA_DEVICE void wgmma_m64n128k32(float8_e4m3fn, float (&d)[64], SmemDesc a, SmemDesc b, bool accumulate) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %66, 0;\n wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
        ", %64, %65, p, 1, 1;\n}"
        : MLA_D32(d, 0), MLA_D32(d, 32) : "l"(a.bits), "l"(b.bits), "r"((i32)accumulate));
}

// Accumulators in float16: a word has two neighbouring columns of a row, d[i] those of fp32's d[2i] and d[2i + 1].
#define MLA_H8(d, i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]),                                       \
    "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])
#define MLA_H32(d, i) MLA_H8(d, i), MLA_H8(d, i + 8), MLA_H8(d, i + 16), MLA_H8(d, i + 24)

MLA_DEVICE void wgmma_m64n256k32(float8_e4m3fn, u32 (&d)[64], SmemDesc a, SmemDesc b, bool accumulate) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %66, 0;\n wgmma.mma_async.sync.aligned.m64n256k32.f16.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
        ", %64, %65, p, 1, 1;\n}"
        : MLA_H32(d, 0), MLA_H32(d, 32) : "l"(a.bits), "l"(b.bits), "r"((i32)accumulate));
}

#undef MLA_D8
#undef MLA_D32
#undef MLA_H8
#undef MLA_H32
// clang-format on
}  // namespace mla
