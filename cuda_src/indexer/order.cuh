// The order of a selection, as an unsigned key for each logit; and places in a paged cache.
#pragma once
#include "common/types.cuh"

namespace mla::indexer {
constexpr u32 kNoKey = 0, kNanKey = 1, kKeptKey = 0xffffffffu;

// Monotone in the order of the selection: NaN 1 < -inf < ... < -0 = +0 < ... < +inf.
MLA_DEVICE u32 order_key(float x) {
    const u32 bits = __float_as_uint(x + 0.f);  // -0 becomes +0
    if ((bits & 0x7fffffffu) > 0x7f800000u) return kNanKey;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The place of a page's token in the cache; -1 where int32 does not hold it, whatever the block table says.
MLA_DEVICE i32 place_in_cache(i32 page, i32 page_size, i32 token) {
    const i64 place = (i64)page * page_size + token;
    return (u64)place <= 0x7fffffffu ? (i32)place : -1;
}
}  // namespace mla::indexer
