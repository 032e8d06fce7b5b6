// Finding and clearing NaN and Inf in packed 16-bit elements.
#pragma once
#include "ptx/element.cuh"

namespace mla {
// Zeroes the elements of `chunk` whose exponent is all ones; true if there was one.
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

// Looks whether there is an element whose exponent is all ones, in three instructions a word.
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
