// Reductions over the lanes of a warp; every lane gets the result.
#pragma once
#include "common/types.cuh"

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
