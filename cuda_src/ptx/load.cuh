// Loads from global memory that stay where they are written.
#pragma once
#include "common/types.cuh"

namespace mla {
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
}  // namespace mla
