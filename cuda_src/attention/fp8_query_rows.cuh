// Query rows in e4m3 for FP8 matmuls: copied as they are, or quantised from 16 bits by attention/query_codes.cuh.
//
// A kernel passes a type `Place` for the layout in shared memory. Place::offset(row, at) is the offset of the row's
// chunk `at` of eight codes; two chunks are 16 bytes. A second term, if any, lies kTermBytes further on.
#pragma once
#include "attention/fp8_scales.cuh"
#include "attention/query_codes.cuh"
#include "tile/elements.cuh"

namespace mla::attention {
// A lane's chunks of a row, of eight elements each: lane, lane + 32 and, of the first eight lanes, lane + 64.
template <class Place>
struct Fp8QueryRow {
    static constexpr i32 kChunks = kMaxHeadDimQk / kChunkElems, kOfLane = ceil_div(kChunks, kWarpThreads);
    uint4 chunk[kOfLane];

    // Null becomes zeros. A row may start at any element.
    MLA_DEVICE void load(const u16* from, i32 lane) {
        const bool aligned = reinterpret_cast<u64>(from) % 16 == 0;
#pragma unroll
        for (i32 i = 0; i < kOfLane; ++i) {
            const i32 at = lane + i * kWarpThreads;
            chunk[i] = make_uint4(0, 0, 0, 0);
            if (from == nullptr || at >= kChunks) continue;
            const u16* elements = from + at * kChunkElems;
            if (aligned) {
                chunk[i] = *reinterpret_cast<const uint4*>(elements);
            } else {
                u32* words = &chunk[i].x;
#pragma unroll
                for (i32 j = 0; j < 4; ++j) words[j] = (u32)elements[2 * j + 1] << 16 | elements[2 * j];
            }
        }
    }

    // The bits of the row's largest magnitude, of any infinity or NaN if there is one.
    template <class Element>
    MLA_DEVICE u32 largest() const {
        u32 bits = 0;
#pragma unroll
        for (i32 i = 0; i < kOfLane; ++i) bits = largest_magnitude<Element>(chunk[i], bits);
        return __reduce_max_sync(kFullWarp, bits);
    }

    // Stores the row, rounded, as row `row` of the operand; returns the factor of its scores.
    template <class Element, i32 kTerms = 1>
    MLA_DEVICE float store(u8* q, i32 row, i32 lane) const {
        const QueryScale scale = query_scale(largest<Element>());
#pragma unroll
        for (i32 i = 0; i < kOfLane; ++i) {
            const i32 at = lane + i * kWarpThreads;
            if (at >= kChunks) continue;
            const uint2 codes = query_codes<Element>(chunk[i], scale.down);
            *reinterpret_cast<uint2*>(q + Place::offset(row, at)) = codes;
            if constexpr (kTerms > 1) {
                *reinterpret_cast<uint2*>(q + Place::kTermBytes + Place::offset(row, at)) =
                    query_remainders<Element>(chunk[i], scale.down, codes);
            }
        }
        return scale.up;
    }
};

// A lane's pieces of a row that is in e4m3 already, of 16 codes each: lane and, of the first four lanes, lane + 32.
template <class Place>
struct Fp8CodedRow {
    static constexpr i32 kCodes = sizeof(uint4), kPieces = kMaxHeadDimQk / kCodes;
    static constexpr i32 kOfLane = ceil_div(kPieces, kWarpThreads);
    uint4 piece[kOfLane];

    // Null becomes zeros. A row may start at any byte.
    MLA_DEVICE void load(const u8* from, i32 lane) {
        const bool aligned = reinterpret_cast<u64>(from) % sizeof(uint4) == 0;
#pragma unroll
        for (i32 i = 0; i < kOfLane; ++i) {
            const i32 at = lane + i * kWarpThreads;
            piece[i] = make_uint4(0, 0, 0, 0);
            if (from == nullptr || at >= kPieces) continue;
            const u8* codes = from + at * kCodes;
            if (aligned) {
                piece[i] = *reinterpret_cast<const uint4*>(codes);
            } else {
                u32* words = &piece[i].x;
#pragma unroll
                for (i32 j = 0; j < kCodes; ++j) words[j / 4] |= (u32)codes[j] << j % 4 * 8;
            }
        }
    }

    // Stores the row as row `row` of the operand. e4m3 codes need no factor for its scores.
    template <class Query, i32 kTerms = 1>
    MLA_DEVICE float store(u8* q, i32 row, i32 lane) const {
        static_assert(kTerms == 1, "codes need no second term");
#pragma unroll
        for (i32 i = 0; i < kOfLane; ++i) {
            const i32 at = lane + i * kWarpThreads;
            if (at < kPieces) *reinterpret_cast<uint4*>(q + Place::offset(row, 2 * at)) = piece[i];
        }
        return 1.f;
    }
};

// Per query type: a lane's share of a row, its view of memory, and the 16-bit type of results.
template <class Query>
struct Fp8QueryType {
    template <class Place>
    using RowOfLane = Fp8QueryRow<Place>;
    using Stored = u16;
    using Element = Query;
};
template <>
struct Fp8QueryType<float8_e4m3fn> {
    template <class Place>
    using RowOfLane = Fp8CodedRow<Place>;
    using Stored = u8;
    using Element = bfloat16;
};

template <class Query>
constexpr bool kIsCoded = sizeof(typename Fp8QueryType<Query>::Stored) == 1;

// The caller's memory of row `row` of the block, one that the KV head has.
template <class Query, class Block>
MLA_DEVICE const typename Fp8QueryType<Query>::Stored* fp8_query_row(const Block& block, i32 request, i32 row) {
    const DecodeParams& p = block.p;
    const i32 group = p.h_q / p.h_kv;
    return reinterpret_cast<const typename Fp8QueryType<Query>::Stored*>(p.q) + request * p.q_stride_b_elems +
           row / group * p.q_stride_s_elems + (i64)(block.kv_head * group + row % group) * p.q_stride_h_elems;
}
}  // namespace mla::attention
