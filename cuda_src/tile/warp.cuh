// What all lanes of a warp get alike: its number, and reductions over them.
#pragma once
#include "common/types.cuh"

// The warp's number in its block, known to the compiler to be the same in all lanes: a dispatch of roles by it must not
// look divergent.
MLA_DEVICE i32 uniform_warp() { return __shfl_sync(kFullWarp, threadIdx.x / kWarpThreads, 0); }

MLA_DEVICE float warp_max(float x) {
#pragma unroll
    for (i32 step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, step));
    return x;
}

MLA_DEVICE float warp_sum(float x) {
#pragma unroll
    for (i32 step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
    return x;
}
