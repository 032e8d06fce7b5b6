// The layout of WGMMA accumulators (ptx/wgmma.cuh), and operations on rows, which the four lanes of a quad share.
#pragma once
#include "ptx/convert.cuh"

namespace mla {
constexpr i32 kFragmentRows = 2;  // a thread holds elements of two rows, eight apart

// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-operation-wgmma-mma-async
// Place of element d[i] of a thread's accumulator: the first of the thread's rows and columns ...
MLA_DEVICE i32 fragment_row(i32 thread) { return (thread / kWarpThreads) * 16 + (thread % kWarpThreads) / 4; }
MLA_DEVICE i32 fragment_column(i32 thread) { return (thread % 4) * 2; }
// ... which of its two rows d[i] is in, and the row and column themselves.
MLA_DEVICE constexpr i32 fragment_half(i32 i) { return (i / 2) & 1; }
MLA_DEVICE i32 fragment_row(i32 thread, i32 i) { return fragment_row(thread) + 8 * fragment_half(i); }
MLA_DEVICE i32 fragment_column(i32 thread, i32 i) { return 8 * (i / 4) + fragment_column(thread) + (i & 1); }

MLA_DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}

MLA_DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(kFullWarp, x, 1);
    return x + __shfl_xor_sync(kFullWarp, x, 2);
}

// Four lanes, kStep apart, hold one word of each of four chunks; afterwards lane c of them holds chunk c.
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

// Transposes within a quad.
MLA_DEVICE void quad_transpose(u32 (&w)[4], i32 lane) { transpose_lanes<1>(w, lane); }

// Stores the thread's row `r` of an accumulator, times `factor`, in 16 bits, 64 bytes per quad at a time. All lanes
// take part, also lanes with a row that is not `stored`; the first column goes to `to`.
template <class Element, i32 kCount>
MLA_DEVICE void store_row(Element, u16* to, const float (&d)[kCount], i32 r, float factor, bool stored, i32 thread) {
#pragma unroll
    for (i32 i = 0; i < kCount / 4; i += 4) {
        u32 words[4];
#pragma unroll
        for (i32 j = 0; j < 4; ++j) {
            const i32 low = 4 * (i + j) + 2 * r;
            words[j] = cvt_x2(Element{}, d[low] * factor, d[low + 1] * factor);
        }
        quad_transpose(words, thread % 4);
        if (stored) {
            *reinterpret_cast<uint4*>(to + 8 * (i + thread % 4)) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

// 16 rows x 32 columns of an accumulator: neighbouring quads 2 g and 2 g + 1 exchange halves, so that each row's 32
// columns are in their eight lanes. Afterwards, for lane c of a quad:
//
//   element         row               columns
//   x[r][0]         8 r + 2 g         even quad 0..15, odd quad 16..31
//   x[r][1]         8 r + 2 g + 1     the same
//   x[r][.][0..3]                     of those 16: 2 c, 2 c + 1, 2 c + 8, 2 c + 9
MLA_DEVICE void exchange_quads(float (&x)[kFragmentRows][2][4], const float* d, bool odd) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            const float low = d[2 * r + i % 2 + i / 2 * 4], high = d[2 * r + i % 2 + i / 2 * 4 + 8];
            const float received = __shfl_xor_sync(kFullWarp, odd ? low : high, 4);
            x[r][0][i] = odd ? received : low;
            x[r][1][i] = odd ? high : received;
        }
    }
}
}  // namespace mla
