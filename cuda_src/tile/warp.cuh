// The warp's index, uniform in it, and sums and maxima over its lanes.
#pragma once
#include "common/types.cuh"

namespace mla {
// The warp's index in its block, known to the compiler to be uniform: a dispatch of roles must not look divergent.
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

// The sum over the lanes up to this one.
template <class Integer>
MLA_DEVICE Integer warp_inclusive_sum(Integer x) {
    const i32 lane = threadIdx.x % kWarpThreads;
#pragma unroll
    for (i32 step = 1; step < kWarpThreads; step *= 2) {
        const Integer before = __shfl_up_sync(kFullWarp, x, step);
        if (lane >= step) x += before;
    }
    return x;
}
}  // namespace mla
