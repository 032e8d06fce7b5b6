// Masks of dense attention: the keys of its sequence that a query sees. All heads share them.
//
// Bit j % 8 of byte j / 8 of a query's row is key j, counted from the first of its sequence; keys beyond the row are
// hidden. Rows begin at multiples of 16 bytes and are padded to such a multiple.
#pragma once
#include "dense/params.cuh"
#include "ptx/load.cuh"
#include "tile/fragment.cuh"

namespace mla::dense {
MLA_DEVICE bool mask_bit(const PrefillParams& p, i64 query, i32 key) {
    if (key / 8 >= p.mask_bytes) return false;
    return p.mask[query * p.mask_stride_bytes + key / 8] >> key % 8 & 1;
}

// A query's bits for tile number `tile` of the keys, the first key's lowest; zeros unless `present`.
template <i32 kTileKeys>
MLA_DEVICE uint4 mask_words(const PrefillParams& p, i64 query, i32 tile, bool present) {
    const i32 byte = tile * kTileKeys / 32 * 4;
    const u8* from = p.mask + query * p.mask_stride_bytes + byte;
    if constexpr (kTileKeys == 128) {
        return ld_global_16(from, present && byte < p.mask_bytes);
    } else {
        static_assert(kTileKeys % 16 == 0 && kTileKeys <= 96 - 16, "three words have the tile");
        u32 words[3];
#pragma unroll
        for (i32 i = 0; i < 3; ++i) words[i] = ld_global_4(from + 4 * i, present && byte + 4 * i < p.mask_bytes);
        const i32 shift = tile * kTileKeys % 32;
        return make_uint4(__funnelshift_r(words[0], words[1], shift), __funnelshift_r(words[1], words[2], shift),
                          words[2] >> shift, 0);
    }
}

// Hides the scores of row r of a thread's two; `bits` are the row's, as mask_words returns them.
template <i32 kCount>
MLA_DEVICE void hide_scores(float (&scores)[kCount], i32 r, const uint4& bits, i32 thread) {
    const i32 shift = fragment_column(thread);
    const u32 seen[4] = {bits.x >> shift, bits.y >> shift, bits.z >> shift, bits.w >> shift};
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
        const i32 column = fragment_column(0, i);  // column of thread 0; the thread's own is `shift` further on
        if (fragment_half(i) == r && !(seen[column / 32] >> column % 32 & 1)) scores[i] = negative_infinity();
    }
}
}  // namespace mla::dense
