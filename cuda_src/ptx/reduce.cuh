// Relaxed additions, without a result: to global memory, and to shared memory.
#pragma once
#include "common/types.cuh"

namespace mla {
// Predicated: nothing is added if `wanted` is 0.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-red
MLA_DEVICE void red_add_v4(float* to, float x, float y, float z, float w, i32 wanted) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.s32 p, %5, 0;\n"
        " @p red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
        "f"(x), "f"(y), "f"(z), "f"(w), "r"(wanted)
        : "memory");
}

// Unconditional: the compiler turns a condition into a branch.
MLA_DEVICE void red_add_v4(float* to, float x, float y, float z, float w) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w)
                 : "memory");
}

MLA_DEVICE void red_add_v2(float* to, float x, float y, i32 wanted) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.s32 p, %3, 0;\n @p red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};\n}" ::"l"(to),
        "f"(x), "f"(y), "r"(wanted)
        : "memory");
}

// Two neighbours, on any GPU: one instruction from sm_90 on, two before.
MLA_DEVICE void red_add_x2(float* to, float x, float y) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
#else
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;\n red.relaxed.gpu.global.add.f32 [%0 + 4], %2;" ::"l"(to),
                 "f"(x), "f"(y)
                 : "memory");
#endif
}

// Increments by one. The hardware combines lanes with the same address.
MLA_DEVICE void red_shared_inc(SmemAddr to) {
    asm volatile("red.relaxed.cta.shared.add.u32 [%0], 1;" ::"r"(to.value) : "memory");
}

// Wraps around.
MLA_DEVICE void red_add(i32* to, i32 x) {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
}  // namespace mla
