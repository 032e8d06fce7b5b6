// WGMMA: asynchronous matrix multiply by one warpgroup (sm_90a). D[64 x N] += A[64 x 16] * B[16 x N], fp32
// accumulators.
//
// Fragment of thread t (w = t / 32, g = (t % 32) / 4, c = t % 4): d[i] is row 16w + g + 8 * ((i / 2) & 1),
// column 8 * (i / 4) + 2c + (i & 1). A in registers, for k-step j of 16 columns, is the same fragment packed in pairs.
// `accumulate` false overwrites D. kTransposeA, kTransposeB say that A, B are MN-major in shared memory.
#pragma once
#include "ptx/element.cuh"

namespace mla {
// A shared-memory matrix descriptor (tile/sw128.cuh builds them).
struct SmemDesc {
    u64 bits;
};

// Before the first wgmma, and after any register write to an accumulator or an A fragment.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
MLA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MLA_DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kNewest groups are in flight.
template <i32 kNewest>
MLA_DEVICE void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest) : "memory");
}

// Keeps the compiler from moving register accesses of an accumulator across this point: it cannot know that a
// wgmma in flight still writes them.
template <i32 kCount>
MLA_DEVICE void pin(float (&d)[kCount]) {
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <i32 kCount>
MLA_DEVICE void pin(u32 (&d)[kCount]) {
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-operation-wgmma-mma-async
// clang-format off
#define MLA_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MLA_D8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]),                                       \
    "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MLA_D32(d, i) MLA_D8(d, i), MLA_D8(d, i + 8), MLA_D8(d, i + 16), MLA_D8(d, i + 24)
#define MLA_D128(d) MLA_D32(d, 0), MLA_D32(d, 32), MLA_D32(d, 64), MLA_D32(d, 96)
#define MLA_REGS8 "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define MLA_REGS12 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}"
#define MLA_REGS16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define MLA_REGS32                                                                                                     \
    "{"                                                                                                                \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"                                            \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                                   \
    "}"
#define MLA_REGS128                                                                                                    \
    "{"                                                                                                                \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"                                            \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"                                  \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"                                  \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"                                  \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"                                  \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"                                  \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"                      \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"                   \
    "}"

#define MLA_DEFINE_WGMMA_N8(Element, TYPE)                                                                             \
    template <bool kTransposeB, bool kTransposeA = false>                                                              \
    MLA_DEVICE void wgmma_m64n8k16(Element, float (&d)[4], SmemDesc a, SmemDesc b, bool accumulate) {                  \
        asm volatile(                                                                                                  \
            "{\n .reg .pred p;\n setp.ne.b32 p, %6, 0;\n wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE "." TYPE " "  \
            "{%0, %1, %2, %3}, %4, %5, p, 1, 1, %7, %8;\n}"                                                            \
            : MLA_D4(d, 0) : "l"(a.bits), "l"(b.bits), "r"((i32)accumulate), "n"((i32)kTransposeA),                    \
              "n"((i32)kTransposeB));                                                                                  \
    }
MLA_DEFINE_WGMMA_N8(bfloat16, "bf16")
MLA_DEFINE_WGMMA_N8(float16, "f16")

#define MLA_DEFINE_WGMMA_N16(Element, TYPE)                                                                            \
    template <bool kTransposeB, bool kTransposeA = false>                                                              \
    MLA_DEVICE void wgmma_m64n16k16(Element, float (&d)[8], SmemDesc a, SmemDesc b, bool accumulate) {                 \
        asm volatile(                                                                                                  \
            "{\n .reg .pred p;\n setp.ne.b32 p, %10, 0;\n wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE " " \
            MLA_REGS8 ", %8, %9, p, 1, 1, %11, %12;\n}"                                                                \
            : MLA_D8(d, 0) : "l"(a.bits), "l"(b.bits), "r"((i32)accumulate), "n"((i32)kTransposeA),                    \
              "n"((i32)kTransposeB));                                                                                  \
    }
MLA_DEFINE_WGMMA_N16(bfloat16, "bf16")
MLA_DEFINE_WGMMA_N16(float16, "f16")

#define MLA_DEFINE_WGMMA_N24(Element, TYPE)                                                                            \
    template <bool kTransposeB, bool kTransposeA = false>                                                              \
    MLA_DEVICE void wgmma_m64n24k16(Element, float (&d)[12], SmemDesc a, SmemDesc b, bool accumulate) {                \
        asm volatile(                                                                                                  \
            "{\n .reg .pred p;\n setp.ne.b32 p, %14, 0;\n wgmma.mma_async.sync.aligned.m64n24k16.f32." TYPE "." TYPE " " \
            MLA_REGS12 ", %12, %13, p, 1, 1, %15, %16;\n}"                                                             \
            : MLA_D8(d, 0), MLA_D4(d, 8) : "l"(a.bits), "l"(b.bits), "r"((i32)accumulate), "n"((i32)kTransposeA),      \
              "n"((i32)kTransposeB));                                                                                  \
    }
MLA_DEFINE_WGMMA_N24(bfloat16, "bf16")
MLA_DEFINE_WGMMA_N24(float16, "f16")

#define MLA_DEFINE_WGMMA_N32(Element, TYPE)                                                                            \
    template <bool kTransposeB, bool kTransposeA = false>                                                              \
    MLA_DEVICE void wgmma_m64n32k16(Element, float (&d)[16], SmemDesc a, SmemDesc b, bool accumulate) {                \
        asm volatile(                                                                                                  \
            "{\n .reg .pred p;\n setp.ne.b32 p, %18, 0;\n wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " " \
            MLA_REGS16 ", %16, %17, p, 1, 1, %19, %20;\n}"                                                             \
            : MLA_D8(d, 0), MLA_D8(d, 8) : "l"(a.bits), "l"(b.bits), "r"((i32)accumulate), "n"((i32)kTransposeA),      \
              "n"((i32)kTransposeB));                                                                                  \
    }                                                                                                                  \
    template <bool kTransposeB>                                                                                        \
    MLA_DEVICE void wgmma_m64n32k16(Element, float (&d)[16], const u32 (&a)[4], SmemDesc b, bool accumulate) {         \
        asm volatile(                                                                                                  \
            "{\n .reg .pred p;\n setp.ne.b32 p, %21, 0;\n wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " " \
            MLA_REGS16 ", {%16, %17, %18, %19}, %20, p, 1, 1, %22;\n}"                                                 \
            : MLA_D8(d, 0), MLA_D8(d, 8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits),                    \
              "r"((i32)accumulate), "n"((i32)kTransposeB));                                                            \
    }
MLA_DEFINE_WGMMA_N32(bfloat16, "bf16")
MLA_DEFINE_WGMMA_N32(float16, "f16")

#define MLA_DEFINE_WGMMA_N64(Element, TYPE)                                                                            \
    template <bool kTransposeB, bool kTransposeA = false>                                                              \
    MLA_DEVICE void wgmma_m64n64k16(Element, float (&d)[32], SmemDesc a, SmemDesc b, bool accumulate) {                \
        asm volatile(                                                                                                  \
            "{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " \
            MLA_REGS32 ", %32, %33, p, 1, 1, %35, %36;\n}"                                                             \
            : MLA_D32(d, 0) : "l"(a.bits), "l"(b.bits), "r"((i32)accumulate), "n"((i32)kTransposeA),                   \
              "n"((i32)kTransposeB));                                                                                  \
    }                                                                                                                  \
    template <bool kTransposeB>                                                                                        \
    MLA_DEVICE void wgmma_m64n64k16(Element, float (&d)[32], const u32 (&a)[4], SmemDesc b, bool accumulate) {         \
        asm volatile(                                                                                                  \
            "{\n .reg .pred p;\n setp.ne.b32 p, %37, 0;\n wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " \
            MLA_REGS32 ", {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"                                                 \
            : MLA_D32(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"((i32)accumulate),           \
              "n"((i32)kTransposeB));                                                                                  \
    }
MLA_DEFINE_WGMMA_N64(bfloat16, "bf16")
MLA_DEFINE_WGMMA_N64(float16, "f16")

#define MLA_DEFINE_WGMMA_N256(Element, TYPE)                                                                           \
    template <bool kTransposeB>                                                                                        \
    MLA_DEVICE void wgmma_m64n256k16(Element, float (&d)[128], SmemDesc a, SmemDesc b, bool accumulate) {              \
        asm volatile(                                                                                                  \
            "{\n .reg .pred p;\n setp.ne.b32 p, %130, 0;\n wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " " \
            MLA_REGS128 ", %128, %129, p, 1, 1, 0, %131;\n}"                                                           \
            : MLA_D128(d) : "l"(a.bits), "l"(b.bits), "r"((i32)accumulate), "n"((i32)kTransposeB));                    \
    }                                                                                                                  \
    template <bool kTransposeB>                                                                                        \
    MLA_DEVICE void wgmma_m64n256k16(Element, float (&d)[128], const u32 (&a)[4], SmemDesc b, bool accumulate) {       \
        asm volatile(                                                                                                  \
            "{\n .reg .pred p;\n setp.ne.b32 p, %133, 0;\n wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " " \
            MLA_REGS128 ", {%128, %129, %130, %131}, %132, p, 1, 1, %134;\n}"                                          \
            : MLA_D128(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"((i32)accumulate),             \
              "n"((i32)kTransposeB));                                                                                  \
    }
MLA_DEFINE_WGMMA_N256(bfloat16, "bf16")
MLA_DEFINE_WGMMA_N256(float16, "f16")

#undef MLA_DEFINE_WGMMA_N8
#undef MLA_DEFINE_WGMMA_N16
#undef MLA_DEFINE_WGMMA_N24
#undef MLA_DEFINE_WGMMA_N32
#undef MLA_DEFINE_WGMMA_N64
#undef MLA_DEFINE_WGMMA_N256
#undef MLA_REGS8
#undef MLA_REGS12
#undef MLA_REGS16
#undef MLA_REGS32
#undef MLA_REGS128
#undef MLA_D4
#undef MLA_D8
#undef MLA_D32
#undef MLA_D128
// clang-format on
}  // namespace mla
