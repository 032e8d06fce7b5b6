// Query rows as operands beside dequantised keys: latent columns in the keys' format, RoPE columns as they are.
//
// bf16 queries beside f16 keys are multiplied by a power of two per row, which puts the row's largest element between
// 2^14 and 2^15: what is down to 2^-31 of it then has all of its bits in f16. Scores are multiplied by the inverse.
#pragma once
#include "attention/sm90/record_keys.cuh"
#include "tile/elements.cuh"

namespace mla::attention::sm90 {
template <class A, class B>
constexpr bool kSameFormat = false;
template <class A>
constexpr bool kSameFormat<A, A> = true;

// A warp's copy of one row: lane i has chunks i, i + 32, i + 64 of eight elements.
template <class Tile>
struct QueryRow {
    static constexpr i32 kChunks = Tile::kSwTilesQk * kSw128Chunks;
    static constexpr i32 kOfLane = ceil_div(kChunks, kWarpThreads);
    uint4 chunk[kOfLane];

    // Null becomes zeros. A row may start at any element.
    MLA_DEVICE void load(const u16* from, i32 lane) {
#pragma unroll
        for (i32 i = 0; i < kOfLane; ++i) {
            const i32 at = (lane + i * kWarpThreads) * kChunkElems;
            chunk[i] = make_uint4(0, 0, 0, 0);
            if (from == nullptr || at >= Tile::kHeadDimQk) continue;
            if (reinterpret_cast<u64>(from) % 16 == 0) {
                chunk[i] = *reinterpret_cast<const uint4*>(from + at);
            } else {
                u32* words = &chunk[i].x;
#pragma unroll
                for (i32 j = 0; j < 4; ++j) words[j] = (u32)from[at + 2 * j + 1] << 16 | from[at + 2 * j];
            }
        }
    }
};

// The exponent of a row's largest finite element, biased, at least 15: so both factors below are normal numbers.
template <class Tile>
MLA_DEVICE i32 largest_exponent(const QueryRow<Tile>& row) {
    u32 largest = 15 << 7;
#pragma unroll
    for (i32 i = 0; i < row.kOfLane; ++i) {
        const u32* words = &row.chunk[i].x;
#pragma unroll
        for (i32 j = 0; j < 4; ++j) {
            const u32 low = words[j] & 0x7fff, high = words[j] >> 16 & 0x7fff;
            if (low < bfloat16::kExponentMask) largest = max(largest, low);
            if (high < bfloat16::kExponentMask) largest = max(largest, high);
        }
    }
    return __reduce_max_sync(kFullWarp, largest) >> 7;
}

MLA_DEVICE float power_of_two(i32 biased_exponent) { return __uint_as_float((u32)biased_exponent << 23); }

// Stores a row to row `at` of SW128 tiles of `sw_tile_bytes` each; returns the factor of its scores.
template <class Tile, class Element, class Latent>
MLA_DEVICE float store_query_row(u8* q, u32 sw_tile_bytes, const QueryRow<Tile>& row, i32 at, i32 lane) {
    constexpr bool kScaled = !kSameFormat<Element, Latent>;
    const i32 exponent = kScaled ? largest_exponent(row) : 0;
    const float up = kScaled ? power_of_two(2 * 127 + 14 - exponent) : 1.f;
#pragma unroll
    for (i32 i = 0; i < row.kOfLane; ++i) {
        const i32 chunk = lane + i * kWarpThreads, sw_tile = chunk / kSw128Chunks;
        if (chunk >= row.kChunks) continue;
        uint4 x = row.chunk[i];
        if (kScaled) {
            u32* words = &x.x;
#pragma unroll
            for (i32 j = 0; j < 4; ++j) {
                const float2 pair = unpack<Element>(words[j]);
                words[j] = sw_tile == Tile::kRopeSwTile ? cvt_x2(Element{}, pair.x * up, pair.y * up)
                                                        : cvt_x2(Latent{}, pair.x * up, pair.y * up);
            }
        }
        *reinterpret_cast<uint4*>(q + sw_tile * sw_tile_bytes + sw128_offset(at, chunk % kSw128Chunks)) = x;
    }
    return kScaled ? power_of_two(exponent - 14) : 1.f;
}
}  // namespace mla::attention::sm90
