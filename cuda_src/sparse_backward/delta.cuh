// delta of a row: the dot product of out and dout, by one warp.
#pragma once
#include "attention/shapes.cuh"
#include "tile/elements.cuh"
#include "tile/warp.cuh"

namespace mla::sparse_backward {
using namespace attention;
constexpr i32 kDeltaChunks = kHeadDimV / kChunkElems / kWarpThreads;  // per row and lane: 2

template <class Element>
MLA_DEVICE float add_dot(const uint4& a, const uint4& b, float sum) {
    const u32 *a_words = &a.x, *b_words = &b.x;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
        const float2 x = unpack<Element>(a_words[i]), y = unpack<Element>(b_words[i]);
        sum = fmaf(x.x, y.x, sum);
        sum = fmaf(x.y, y.y, sum);
    }
    return sum;
}

// A lane's part of 16-bit rows that begin at multiples of 16 bytes: all loads in flight at once.
struct DeltaLoads {
    uint4 out[kDeltaChunks], dout[kDeltaChunks];

    MLA_DEVICE void start(const u16* out_row, const u16* dout_row, i32 lane) {
#pragma unroll
        for (i32 i = 0; i < kDeltaChunks; ++i) {
            out[i] = reinterpret_cast<const uint4*>(out_row)[i * kWarpThreads + lane];
            dout[i] = reinterpret_cast<const uint4*>(dout_row)[i * kWarpThreads + lane];
        }
    }

    template <class Element>
    MLA_DEVICE float dot() const {
        float sum = 0.f;
#pragma unroll
        for (i32 i = 0; i < kDeltaChunks; ++i) sum = add_dot<Element>(out[i], dout[i], sum);
        return sum;
    }
};
}  // namespace mla::sparse_backward
