// Loads from global memory that stay where they are written.
#pragma once
#include "common/types.cuh"

namespace mla {
// 16 bytes. Volatile: a load issued early stays early.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
MLA_DEVICE uint4 ld_global_16(const void* from) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
}

// 16 bytes, or zeros where `present` is false (nothing is read then). Volatile: a load issued early stays early.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
MLA_DEVICE uint4 ld_global_16(const void* from, bool present) {
    uint4 x = make_uint4(0, 0, 0, 0);
    asm volatile(
        "{\n .reg .pred present;\n setp.ne.b32 present, %5, 0;\n"
        " @present ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
        : "l"(from), "r"((i32)present));
    return x;
}

// Loads 8 bytes.
MLA_DEVICE uint2 ld_global_8(const void* from, bool present) {
    uint2 x = make_uint2(0, 0);
    asm volatile(
        "{\n .reg .pred present;\n setp.ne.b32 present, %3, 0;\n"
        " @present ld.global.v2.u32 {%0, %1}, [%2];\n}"
        : "+r"(x.x), "+r"(x.y)
        : "l"(from), "r"((i32)present));
    return x;
}

// Loads 4 bytes.
MLA_DEVICE u32 ld_global_4(const void* from, bool present) {
    u32 x = 0;
    asm volatile(
        "{\n .reg .pred present;\n setp.ne.b32 present, %2, 0;\n"
        " @present ld.global.u32 %0, [%1];\n}"
        : "+r"(x)
        : "l"(from), "r"((i32)present));
    return x;
}

// Loads 4 bytes from L2. L1 might hold data that an earlier kernel has yet to change.
MLA_DEVICE u32 ld_global_l2_4(const void* from, bool present) {
    u32 x = 0;
    asm volatile(
        "{\n .reg .pred present;\n setp.ne.b32 present, %2, 0;\n"
        " @present ld.global.cg.u32 %0, [%1];\n}"
        : "+r"(x)
        : "l"(from), "r"((i32)present));
    return x;
}

// 16 bytes with an L2 policy, such as kEvictFirst, not kept in L1. A plain load except on Hopper, where the policy was
// measured: it costs registers.
MLA_DEVICE float4 ld_global_16_once(const float4* from, bool present, u64 l2_policy) {
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#if __CUDA_ARCH__ == 900
    asm volatile(
        "{\n .reg .pred present;\n setp.ne.b32 present, %5, 0;\n"
        " @present ld.global.L1::no_allocate.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %6;\n}"
        : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
        : "l"(from), "r"((i32)present), "l"(l2_policy));
#else
    if (present) x = *from;
#endif
    return x;
}
// 16 bytes of shared memory, at once and where it is written.
MLA_DEVICE float4 ld_shared_v4(SmemAddr from) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(from.value)
                 : "memory");
    return x;
}

MLA_DEVICE void st_shared_v2(SmemAddr to, float2 x) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to.value), "f"(x.x), "f"(x.y) : "memory");
}
}  // namespace mla
