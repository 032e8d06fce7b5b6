// Query rows as operands for dequantised keys: latent columns in the keys' format, RoPE columns unchanged.
//
// bf16 queries with f16 keys are multiplied by a power of two per row, which puts the row's largest element between
// 2^14 and 2^15: elements down to 2^-31 of it keep all of their bits in f16. Scores are multiplied by the inverse.
#pragma once
#include "attention/record_tokens.cuh"
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

    // Null becomes zeros. A row, or each of its parts, may start at any element.
    template <class Row>
    MLA_DEVICE void load(const Row& row, i32 lane) {
#pragma unroll
        for (i32 i = 0; i < kOfLane; ++i) {
            const u16* from = part_of_row(row, i * kWarpThreads * kChunkElems);
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

    // From row `at` of SW128 tiles of `sw_tile_bytes` each.
    MLA_DEVICE void load_stored(const u8* q, u32 sw_tile_bytes, i32 at, i32 lane) {
        const u8* from = q + lane / kSw128Chunks * sw_tile_bytes + sw128_offset(at, lane % kSw128Chunks);
#pragma unroll
        for (i32 i = 0; i < kOfLane; ++i) {
            chunk[i] = make_uint4(0, 0, 0, 0);
            if (lane + i * kWarpThreads >= kChunks) continue;
            chunk[i] = *reinterpret_cast<const uint4*>(from + i * kWarpThreads / kSw128Chunks * sw_tile_bytes);
        }
    }
};

// The exponent of a row's largest element, biased, at least 15: so both factors below are normal numbers. Where it is
// Inf or NaN, that is all that counts of the row.
template <class Tile>
MLA_DEVICE i32 largest_exponent(const QueryRow<Tile>& row) {
    u32 largest = 15u << 24;  // signs are shifted out; the bits after an exponent do not matter
#pragma unroll
    for (i32 i = 0; i < row.kOfLane; ++i) {
        const u32* words = &row.chunk[i].x;
#pragma unroll
        for (i32 j = 0; j < 4; ++j) largest = max(largest, max(words[j] << 1, words[j] << 17));
    }
    return __reduce_max_sync(kFullWarp, largest) >> 24;
}

MLA_DEVICE float power_of_two(i32 biased_exponent) { return __uint_as_float((u32)biased_exponent << 23); }

// Stores a row to row `at` of SW128 tiles of `sw_tile_bytes` each; returns the factor of its scores. Every dequantising
// warp does this for several rows, while the mathematics wait: hence packed products.
template <class Tile, class Element, class Latent>
MLA_DEVICE float store_query_row(u8* q, u32 sw_tile_bytes, const QueryRow<Tile>& row, i32 at, i32 lane) {
    constexpr bool kScaled = !kSameFormat<Element, Latent>;
    constexpr i32 kSwTilesOfStep = kWarpThreads / kSw128Chunks;
    static_assert(!kScaled || Tile::kRopeSwTile % kSwTilesOfStep == 0, "a step has latent columns, or RoPE columns");
    const i32 exponent = kScaled ? largest_exponent(row) : 0;
    const float up = kScaled ? power_of_two(2 * 127 + 14 - exponent) : 1.f;
    const u32 up_pair = cvt_x2(Element{}, up, up);
    u8* to = q + lane / kSw128Chunks * sw_tile_bytes + sw128_offset(at, lane % kSw128Chunks);
#pragma unroll
    for (i32 i = 0; i < row.kOfLane; ++i) {
        if (lane + i * kWarpThreads >= row.kChunks) continue;
        uint4 x = row.chunk[i];
        if (kScaled) {
            u32* words = &x.x;
#pragma unroll
            for (i32 j = 0; j < 4; ++j) {
                words[j] = mul_x2(Element{}, words[j], up_pair);
                if (i * kSwTilesOfStep >= Tile::kRopeSwTile) continue;
                const float2 pair = unpack<Element>(words[j]);
                words[j] = cvt_x2(Latent{}, pair.x, pair.y);
            }
        }
        *reinterpret_cast<uint4*>(to + i * kSwTilesOfStep * sw_tile_bytes) = x;
    }
    return kScaled ? power_of_two(exponent - 14) : 1.f;
}
}  // namespace mla::attention::sm90
