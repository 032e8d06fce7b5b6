// 8x8 matrices of 16-bit elements between registers and shared memory, four at a time.
#pragma once
#include "common/types.cuh"

namespace mla {
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix
MLA_DEVICE void ldmatrix_x4(u32 (&r)[4], SmemAddr from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from.value)
                 : "memory");
}

// Each matrix transposed.
MLA_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], SmemAddr from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from.value)
                 : "memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-stmatrix
MLA_DEVICE void stmatrix_x4(SmemAddr to, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to.value), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

MLA_DEVICE void stmatrix_x4_trans(SmemAddr to, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to.value), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// Two matrices, addressed by lanes 0 to 15.
MLA_DEVICE void stmatrix_x2_trans(SmemAddr to, const u32 (&r)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to.value), "r"(r[0]), "r"(r[1])
                 : "memory");
}

// One matrix, in registers, transposed.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-movmatrix
MLA_DEVICE u32 movmatrix_trans(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
}  // namespace mla
