// Sums over heads of a math thread, in float32 or float16; the tensor cores accumulate in the same type. The thread
// owns two rows of an m64 tile of queries, two heads of one token, and all tiles add to the same sums.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/wgmma.cuh"

namespace mla::indexer::logits::sm90 {
// Defines, for products and sums of type float or float16, the keys of a tile, the weights of two heads, and the sums
// of two neighbouring keys in each chunk of eight.
template <class Accumulator>
struct HeadSums;

template <>
struct HeadSums<float> {
    static constexpr bool kHalf = false;
    static constexpr i32 kTileKeys = 128, kChunks = kTileKeys / 8;
    typedef float Products[4 * kChunks];
    typedef float2 Weights;

    float sums[2 * kChunks] = {};

    MLA_DEVICE void add(const Products& d, float2 weights) {
#pragma unroll
        for (i32 i = 0; i < 2 * kChunks; ++i) {
            const i32 at = i / 2 * 4 + i % 2;
            sums[i] = fmaf(fmaxf(d[at], 0.f), weights.x, sums[i]);
            sums[i] = fmaf(fmaxf(d[at + 2], 0.f), weights.y, sums[i]);
        }
    }
    MLA_DEVICE float2 of(i32 chunk) const { return make_float2(sums[2 * chunk], sums[2 * chunk + 1]); }
};

// Half the registers per key leave room for twice the keys. Two neighbouring keys share a word.
template <>
struct HeadSums<float16> {
    static constexpr bool kHalf = true;
    static constexpr i32 kTileKeys = 256, kChunks = kTileKeys / 8;
    typedef u32 Products[2 * kChunks];
    typedef u32 Weights;

    u32 sums[kChunks] = {};

    MLA_DEVICE void add(const Products& d, u32 weights) {
        const u32 x = weights << 16 | (weights & 0xffff), y = weights >> 16 | (weights & 0xffff0000);
#pragma unroll
        for (i32 i = 0; i < kChunks; ++i) {
            sums[i] = fma_x2(float16{}, max_x2(float16{}, d[2 * i], 0), x, sums[i]);
            sums[i] = fma_x2(float16{}, max_x2(float16{}, d[2 * i + 1], 0), y, sums[i]);
        }
    }
    MLA_DEVICE float2 of(i32 chunk) const {
        return make_float2(float16::to_float((u16)sums[chunk]), float16::to_float((u16)(sums[chunk] >> 16)));
    }
};

// Divisor of float16 weights: a power of two, from their largest magnitude, that makes them less than 1/32. A thread
// has at most 32 heads, and their products do not exceed 57,344, so the sum of a thread does not, either. At most
// 2^126, so that its inverse is normal.
constexpr i32 kThreadHeadsLog2 = 5;

MLA_DEVICE float scale_of_weights(float largest) {
    const u32 exponent = (__float_as_uint(largest) >> 23) + 1 + kThreadHeadsLog2;
    return __uint_as_float(min(exponent, 253u) << 23);
}
MLA_DEVICE float inverse_power_of_2(float x) { return __uint_as_float((254u << 23) - __float_as_uint(x)); }
}  // namespace mla::indexer::logits::sm90
