// WGMMA of 16-bit operands with N = 128 (sm_90a): see ptx/wgmma.cuh.
#pragma once
#include "ptx/wgmma.cuh"

namespace mla {
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-operation-wgmma-mma-async
// clang-format off
#define MLA_D8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]),                                       \
    "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MLA_D32(d, i) MLA_D8(d, i), MLA_D8(d, i + 8), MLA_D8(d, i + 16), MLA_D8(d, i + 24)

// The A operand in shared memory, or in registers.
#define MLA_WGMMA_N128(Element, Type)                                                                                  \
template <bool kTransposeB, bool kTransposeA = false>                                                                  \
MLA_DEVICE void wgmma_m64n128k16(Element, float (&d)[64], SmemDesc a, SmemDesc b, bool accumulate) {                   \
    asm volatile(                                                                                                      \
        "{\n .reg .pred p;\n setp.ne.b32 p, %66, 0;\n wgmma.mma_async.sync.aligned.m64n128k16.f32." Type "." Type " "  \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"                                       \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"                              \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"                              \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"                              \
        ", %64, %65, p, 1, 1, %67, %68;\n}"                                                                            \
        : MLA_D32(d, 0), MLA_D32(d, 32) : "l"(a.bits), "l"(b.bits), "r"((i32)accumulate), "n"((i32)kTransposeA),       \
          "n"((i32)kTransposeB));                                                                                      \
}                                                                                                                      \
template <bool kTransposeB>                                                                                            \
MLA_DEVICE void wgmma_m64n128k16(Element, float (&d)[64], const u32 (&a)[4], SmemDesc b, bool accumulate) {            \
    asm volatile(                                                                                                      \
        "{\n .reg .pred p;\n setp.ne.b32 p, %69, 0;\n wgmma.mma_async.sync.aligned.m64n128k16.f32." Type "." Type " "  \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"                                       \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"                              \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"                              \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"                              \
        ", {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"                                                                \
        : MLA_D32(d, 0), MLA_D32(d, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits),                     \
          "r"((i32)accumulate), "n"((i32)kTransposeB));                                                                \
}

MLA_WGMMA_N128(bfloat16, "bf16")
MLA_WGMMA_N128(float16, "f16")

#undef MLA_WGMMA_N128
#undef MLA_D32
#undef MLA_D8
// clang-format on
}  // namespace mla
