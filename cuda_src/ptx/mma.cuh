// Warp-wide products of 16-bit matrices in registers: mma.sync, on every GPU since Ampere.
#pragma once
#include "ptx/element.cuh"

namespace mla {
// D (16 x 8, fp32) += A (16 x 16, row-major) B (16 x 8, column-major). For lane 4 g + c:
//
//   a[0], a[1]   rows g, g + 8; columns 2 c, 2 c + 1
//   a[2], a[3]   the same rows; columns 2 c + 8, 2 c + 9
//   b0, b1       column g; rows 2 c, 2 c + 1; and 2 c + 8, 2 c + 9
//   d[0..1]      row g; columns 2 c, 2 c + 1
//   d[2..3]      row g + 8
//
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-mma
MLA_DEVICE void mma_m16n8k16(bfloat16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        " {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

MLA_DEVICE void mma_m16n8k16(float16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        " {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
}  // namespace mla
