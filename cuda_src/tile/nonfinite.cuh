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
}  // namespace mla
