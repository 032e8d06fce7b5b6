// WGMMA: asynchronous matrix multiply by one warpgroup (sm_90a). D[64 x N] += A[64 x K] * B[K x N], with K = 16 for
// 16-bit and 32 for 8-bit elements.
//
// Fragment of thread t (w = t / 32, g = (t % 32) / 4, c = t % 4): d[i] is row 16w + g + 8 * ((i / 2) & 1),
// column 8 * (i / 4) + 2c + (i & 1). A in registers, for k-step j of 16 columns, is the same fragment packed in pairs.
// Sums in float16 are packed in pairs, too: word i has the columns of d[2i] and d[2i + 1].
#pragma once
#include "ptx/fp8.cuh"

namespace mla {
// A shared-memory matrix descriptor (tile/sw128.cuh builds them).
struct SmemDesc {
    u64 bits;
};

// The dimension along which an operand in shared memory is contiguous: the sum's, or its own.
enum class Major : u32 { K = 0, MN = 1 };

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

// wgmma_mma_async<kMajorA, kMajorB>(Element{}, d, a, b, accumulate): d += A B, or d = A B if `accumulate` is false.
// N follows from the size of `d`. A is in shared memory, or a fragment in registers; the words of one are pairs along
// K. 8-bit operands are K-major. A further N is one line at the end of the file.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-operation-wgmma-mma-async
// clang-format off

// The registers of D: their names in the instruction, and the operands (C is the constraint).
#define MLA_REGS4 "%0, %1, %2, %3"
#define MLA_REGS8 MLA_REGS4 ", %4, %5, %6, %7"
#define MLA_REGS12 MLA_REGS8 ", %8, %9, %10, %11"
#define MLA_REGS16 MLA_REGS12 ", %12, %13, %14, %15"
#define MLA_REGS20 MLA_REGS16 ", %16, %17, %18, %19"
#define MLA_REGS32 MLA_REGS16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MLA_REGS40 MLA_REGS32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MLA_REGS48 MLA_REGS40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MLA_REGS64 MLA_REGS32                                                                                          \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"                                 \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MLA_REGS96 MLA_REGS64                                                                                          \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"                                 \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MLA_REGS128 MLA_REGS96                                                                                         \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"                     \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define MLA_D4(C, d, i) C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3])
#define MLA_D8(C, d, i) MLA_D4(C, d, i), MLA_D4(C, d, i + 4)
#define MLA_D12(C, d, i) MLA_D8(C, d, i), MLA_D4(C, d, i + 8)
#define MLA_D16(C, d, i) MLA_D8(C, d, i), MLA_D8(C, d, i + 8)
#define MLA_D20(C, d, i) MLA_D16(C, d, i), MLA_D4(C, d, i + 16)
#define MLA_D32(C, d, i) MLA_D16(C, d, i), MLA_D16(C, d, i + 16)
#define MLA_D40(C, d, i) MLA_D32(C, d, i), MLA_D8(C, d, i + 32)
#define MLA_D48(C, d, i) MLA_D40(C, d, i), MLA_D8(C, d, i + 40)
#define MLA_D64(C, d, i) MLA_D32(C, d, i), MLA_D32(C, d, i + 32)
#define MLA_D96(C, d, i) MLA_D64(C, d, i), MLA_D32(C, d, i + 64)
#define MLA_D128(C, d, i) MLA_D64(C, d, i), MLA_D64(C, d, i + 64)

#define MLA_WGMMA(SHAPE, TYPES, REGS, A, B, ACCUMULATE, MAJORS)                                                        \
    "{\n .reg .pred p;\n setp.ne.b32 p, " ACCUMULATE ", 0;\n"                                                          \
    " wgmma.mma_async.sync.aligned." SHAPE "." TYPES " {" REGS "}, " A ", " B ", p, 1, 1" MAJORS ";\n}"

#define MLA_WGMMA_16_BIT(Element, TYPE, N, REGS, D, i0, i1, i2, i3, i4, i5, i6)                                        \
    template <Major kMajorA = Major::K, Major kMajorB = Major::K>                                                      \
    MLA_DEVICE void wgmma_mma_async(Element, float (&d)[i0], SmemDesc a, SmemDesc b, bool accumulate) {                \
        asm volatile(                                                                                                  \
            MLA_WGMMA("m64n" #N "k16", "f32." TYPE "." TYPE, REGS, "%" #i0, "%" #i1, "%" #i2,                          \
                      ", %" #i3 ", %" #i4)                                                                             \
            : D("+f", d, 0) : "l"(a.bits), "l"(b.bits), "r"((i32)accumulate), "n"((i32)kMajorA),                       \
              "n"((i32)kMajorB));                                                                                      \
    }                                                                                                                  \
    template <Major kMajorA = Major::K, Major kMajorB = Major::K>                                                      \
    MLA_DEVICE void wgmma_mma_async(Element, float (&d)[i0], const u32 (&a)[4], SmemDesc b, bool accumulate) {         \
        static_assert(kMajorA == Major::K, "a fragment is K-major");                                                   \
        asm volatile(                                                                                                  \
            MLA_WGMMA("m64n" #N "k16", "f32." TYPE "." TYPE, REGS,                                                     \
                      "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}", "%" #i4, "%" #i5, ", %" #i6)                         \
            : D("+f", d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits),                                 \
              "r"((i32)accumulate), "n"((i32)kMajorB));                                                                \
    }

#define MLA_WGMMA_8_BIT(SUM, Word, C, N, REGS, D, i0, i1, i2, i3, i4, i5, i6)                                          \
    template <Major kMajorA = Major::K, Major kMajorB = Major::K>                                                      \
    MLA_DEVICE void wgmma_mma_async(float8_e4m3fn, Word (&d)[i0], SmemDesc a, SmemDesc b, bool accumulate) {           \
        static_assert(kMajorA == Major::K && kMajorB == Major::K, "8-bit operands are K-major");                       \
        asm volatile(                                                                                                  \
            MLA_WGMMA("m64n" #N "k32", SUM ".e4m3.e4m3", REGS, "%" #i0, "%" #i1, "%" #i2, "")                          \
            : D(C, d, 0) : "l"(a.bits), "l"(b.bits), "r"((i32)accumulate));                                            \
    }                                                                                                                  \
    template <Major kMajorA = Major::K, Major kMajorB = Major::K>                                                      \
    MLA_DEVICE void wgmma_mma_async(float8_e4m3fn, Word (&d)[i0], const u32 (&a)[4], SmemDesc b, bool accumulate) {    \
        static_assert(kMajorA == Major::K && kMajorB == Major::K, "8-bit operands are K-major");                       \
        asm volatile(                                                                                                  \
            MLA_WGMMA("m64n" #N "k32", SUM ".e4m3.e4m3", REGS,                                                         \
                      "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}", "%" #i4, "%" #i5, "")                                \
            : D(C, d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"((i32)accumulate));             \
    }

#define MLA_WGMMA_SUMS_F32(N, ...)                                                                                     \
    MLA_WGMMA_16_BIT(bfloat16, "bf16", N, __VA_ARGS__)                                                                 \
    MLA_WGMMA_16_BIT(float16, "f16", N, __VA_ARGS__)                                                                   \
    MLA_WGMMA_8_BIT("f32", float, "+f", N, __VA_ARGS__)
#define MLA_WGMMA_SUMS_F16(N, ...) MLA_WGMMA_8_BIT("f16", u32, "+r", N, __VA_ARGS__)

// N; the names of D's registers and the operands; how many there are, which is the number of the next, and six more.
MLA_WGMMA_SUMS_F32(8, MLA_REGS4, MLA_D4, 4, 5, 6, 7, 8, 9, 10)
MLA_WGMMA_SUMS_F32(16, MLA_REGS8, MLA_D8, 8, 9, 10, 11, 12, 13, 14)
MLA_WGMMA_SUMS_F32(24, MLA_REGS12, MLA_D12, 12, 13, 14, 15, 16, 17, 18)
MLA_WGMMA_SUMS_F32(32, MLA_REGS16, MLA_D16, 16, 17, 18, 19, 20, 21, 22)
MLA_WGMMA_SUMS_F32(40, MLA_REGS20, MLA_D20, 20, 21, 22, 23, 24, 25, 26)
MLA_WGMMA_SUMS_F32(64, MLA_REGS32, MLA_D32, 32, 33, 34, 35, 36, 37, 38)
MLA_WGMMA_SUMS_F32(80, MLA_REGS40, MLA_D40, 40, 41, 42, 43, 44, 45, 46)
MLA_WGMMA_SUMS_F32(96, MLA_REGS48, MLA_D48, 48, 49, 50, 51, 52, 53, 54)
MLA_WGMMA_SUMS_F32(128, MLA_REGS64, MLA_D64, 64, 65, 66, 67, 68, 69, 70)
MLA_WGMMA_SUMS_F32(192, MLA_REGS96, MLA_D96, 96, 97, 98, 99, 100, 101, 102)
MLA_WGMMA_SUMS_F32(256, MLA_REGS128, MLA_D128, 128, 129, 130, 131, 132, 133, 134)
MLA_WGMMA_SUMS_F16(256, MLA_REGS64, MLA_D64, 64, 65, 66, 67, 68, 69, 70)

#undef MLA_REGS4
#undef MLA_REGS8
#undef MLA_REGS12
#undef MLA_REGS16
#undef MLA_REGS20
#undef MLA_REGS32
#undef MLA_REGS40
#undef MLA_REGS48
#undef MLA_REGS64
#undef MLA_REGS96
#undef MLA_REGS128
#undef MLA_D4
#undef MLA_D8
#undef MLA_D12
#undef MLA_D16
#undef MLA_D20
#undef MLA_D32
#undef MLA_D40
#undef MLA_D48
#undef MLA_D64
#undef MLA_D96
#undef MLA_D128
#undef MLA_WGMMA
#undef MLA_WGMMA_16_BIT
#undef MLA_WGMMA_8_BIT
#undef MLA_WGMMA_SUMS_F32
#undef MLA_WGMMA_SUMS_F16
// clang-format on
}  // namespace mla
