// Rows of 16-bit elements: loaded from any address, multiplied as floats; finding and clearing NaN and Inf in them.
#pragma once
#include "ptx/element.cuh"

namespace mla {
constexpr i32 kChunkElems = 8;  // 16 bytes

template <class Element>
MLA_DEVICE float2 unpack(u32 word) {
    return make_float2(Element::to_float((u16)(word & 0xffff)), Element::to_float((u16)(word >> 16)));
}

// Eight elements at once, by one load where the address allows.
template <class Element>
MLA_DEVICE void load_chunk(float (&to)[kChunkElems], const u16* from) {
    if (reinterpret_cast<u64>(from) % 16 == 0) {
        const uint4 chunk = *reinterpret_cast<const uint4*>(from);
        const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            const float2 pair = unpack<Element>(words[i]);
            to[2 * i] = pair.x;
            to[2 * i + 1] = pair.y;
        }
    } else {
#pragma unroll
        for (i32 i = 0; i < kChunkElems; ++i) to[i] = Element::to_float(from[i]);
    }
}

// Loads a chunk of fp32.
template <class Element>
MLA_DEVICE void load_chunk(float (&to)[kChunkElems], const float* from) {
    if (reinterpret_cast<u64>(from) % 16 == 0) {
        const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
        to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
        to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
    } else {
#pragma unroll
        for (i32 i = 0; i < kChunkElems; ++i) to[i] = from[i];
    }
}

// Copies kElems elements by one warp, in 16-byte pieces where the address allows; null becomes zeros. `to` needs only
// 4-byte alignment.
template <i32 kElems>
MLA_DEVICE void copy_row(u16* to, const u16* from, i32 lane) {
    u32* words = reinterpret_cast<u32*>(to);
    if (from == nullptr) {
        for (i32 i = lane; i < kElems / 2; i += kWarpThreads) words[i] = 0;
    } else if (reinterpret_cast<u64>(from) % 16 == 0) {
        for (i32 i = lane; i < kElems / kChunkElems; i += kWarpThreads) {
            const uint4 chunk = reinterpret_cast<const uint4*>(from)[i];
            words[4 * i] = chunk.x;
            words[4 * i + 1] = chunk.y;
            words[4 * i + 2] = chunk.z;
            words[4 * i + 3] = chunk.w;
        }
    } else {
        for (i32 i = lane; i < kElems; i += kWarpThreads) to[i] = from[i];
    }
}

// The product of two rows in shared memory, aligned to 4 bytes.
template <class Element>
MLA_DEVICE float dot(const u16* a, const u16* b, i32 elems) {
    const u32 *a_words = reinterpret_cast<const u32*>(a), *b_words = reinterpret_cast<const u32*>(b);
    float even = 0.f, odd = 0.f;
#pragma unroll 8
    for (i32 i = 0; i < elems / 2; ++i) {
        const float2 x = unpack<Element>(a_words[i]), y = unpack<Element>(b_words[i]);
        even = fmaf(x.x, y.x, even);
        odd = fmaf(x.y, y.y, odd);
    }
    return even + odd;
}

// A dot product of rows at any address, for warps with few registers.
template <class Element>
MLA_DEVICE float plain_dot(const u16* a, const u16* b, i32 elems) {
    float sum = 0.f;
#pragma unroll 1
    for (i32 i = 0; i < elems / 2; ++i) {
        const float2 x = unpack<Element>(reinterpret_cast<const u32*>(a)[i]);
        const float2 y = unpack<Element>(reinterpret_cast<const u32*>(b)[i]);
        sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
    }
    return sum;
}

// ---- NaN and Inf -----------------------------------------------------------------------------------------------
// Zeroes the elements of `chunk` with an exponent of all ones; true if there was one.
template <class Element>
MLA_DEVICE bool zero_nonfinite(uint4& chunk) {
    u32* words = &chunk.x;
    bool found = false;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
        const bool low = (words[i] & Element::kExponentMask) == Element::kExponentMask;
        const bool high = (words[i] >> 16 & Element::kExponentMask) == Element::kExponentMask;
        words[i] &= (low ? 0u : 0xffffu) | (high ? 0u : 0xffff0000u);
        found |= low || high;
    }
    return found;
}

// Detects elements with an exponent of all ones, in three instructions per word.
template <class Element>
struct NonfiniteFinder {
    u32 finite = 0xffffffffu;  // the highest bit of each half: all of its elements so far

    MLA_DEVICE void look(uint4 chunk) {
        constexpr u32 kMask = Element::kExponentMask * 0x10001u;
        const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (i32 i = 0; i < 4; ++i) finite &= (~words[i] & kMask) + 0x7fff7fffu;  // a carry unless there are only ones
    }
    MLA_DEVICE bool found() const { return (finite & 0x80008000u) != 0x80008000u; }
};
}  // namespace mla
