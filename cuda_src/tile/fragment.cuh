// Where the elements of a WGMMA accumulator lie (ptx/wgmma.cuh), and rows shared by the four lanes of a quad.
#pragma once
#include "common/types.cuh"

constexpr i32 kFragmentRows = 2;  // a thread holds elements of two rows, eight apart

// Row of d[i] is fragment_row(thread) + 8 * fragment_half(i); column is 8 * (i / 4) + fragment_column(thread) + (i &
// 1).
MLA_DEVICE i32 fragment_row(i32 thread) { return (thread / kWarpThreads) * 16 + (thread % kWarpThreads) / 4; }
MLA_DEVICE i32 fragment_column(i32 thread) { return (thread % 4) * 2; }
MLA_DEVICE constexpr i32 fragment_half(i32 i) { return (i / 2) & 1; }

MLA_DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}

MLA_DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(kFullWarp, x, 1);
    return x + __shfl_xor_sync(kFullWarp, x, 2);
}

// Four lanes, kStep apart, hold words [0..3] of four chunks, one word a chunk; afterwards lane c of them holds chunk c.
template <i32 kStep>
MLA_DEVICE void transpose_lanes(u32 (&w)[4], i32 lane) {
    const bool odd = lane & kStep, high = lane & 2 * kStep;
#pragma unroll
    for (i32 i = 0; i < 4; i += 2) {
        const u32 received = __shfl_xor_sync(kFullWarp, odd ? w[i] : w[i + 1], kStep);
        (odd ? w[i] : w[i + 1]) = received;
    }
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
        const u32 received = __shfl_xor_sync(kFullWarp, high ? w[i] : w[i + 2], 2 * kStep);
        (high ? w[i] : w[i + 2]) = received;
    }
}

// Of a quad.
MLA_DEVICE void quad_transpose(u32 (&w)[4], i32 lane) { transpose_lanes<1>(w, lane); }
