// Query rows in e4m3, for products in FP8: as they come, or from 16 bits by the rule of attention/query_codes.cuh.
#pragma once
#include "attention/query_codes.cuh"
#include "attention/sm90/fp8_block.cuh"
#include "tile/elements.cuh"

namespace mla::attention::sm90 {
// A lane's chunks of a row, of eight elements each: lane, lane + 32 and, of the first eight lanes, lane + 64.
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
    template <class Element>
    MLA_DEVICE float store(u8* q, i32 row, i32 lane) const {
        const QueryScale scale = query_scale(largest<Element>());
#pragma unroll
        for (i32 i = 0; i < kOfLane; ++i) {
            const i32 at = lane + i * kWarpThreads;
            if (at >= kChunks) continue;
            *reinterpret_cast<uint2*>(q + offset(row, at)) = query_codes<Element>(chunk[i], scale.down);
        }
        return scale.up;
    }

    // Where chunk `at` of a row lies in the operand: two chunks are 16 bytes.
    MLA_DEVICE static u32 offset(i32 row, i32 at) {
        constexpr i32 kOfPanel = kSw128ByteColumns / kChunkElems;
        const i32 panel = at / kOfPanel, piece = at % kOfPanel / 2;
        const u32 in_panel = panel < kFp8Panels ? sw128_offset(row, piece) : sw64_offset(row, piece);
        return panel * kSw128Bytes + in_panel + at % 2 * 8;
    }
};

// A lane's pieces of a row that is in e4m3 already, of 16 codes each: lane and, of the first four lanes, lane + 32.
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

    // Stores the row as row `row` of the operand; the codes themselves give its scores no factor.
    template <class Query>
    MLA_DEVICE float store(u8* q, i32 row, i32 lane) const {
#pragma unroll
        for (i32 i = 0; i < kOfLane; ++i) {
            const i32 at = lane + i * kWarpThreads;
            if (at < kPieces) *reinterpret_cast<uint4*>(q + Fp8QueryRow::offset(row, 2 * at)) = piece[i];
        }
        return 1.f;
    }
};

// Of queries of a type: a lane's share of a row, how their memory is seen, and the 16-bit type of results.
template <class Query>
struct Fp8QueryType {
    using RowOfLane = Fp8QueryRow;
    using Stored = u16;
    using Element = Query;
};
template <>
struct Fp8QueryType<float8_e4m3fn> {
    using RowOfLane = Fp8CodedRow;
    using Stored = u8;
    using Element = bfloat16;
};

template <class Query>
constexpr bool kIsCoded = sizeof(typename Fp8QueryType<Query>::Stored) == 1;

// By the math warps, each kRows / 8 rows: all of them are in flight before the first one is stored.
template <class Query, class Block>
MLA_DEVICE void load_fp8_query(const Block& block, i32 request, i32 warp, i32 lane) {
    constexpr i32 kRows = Block::kRows, kOfWarp = kRows / (2 * kWarpgroupWarps);
    const DecodeParams& p = block.p;
    const i32 first = warp * kOfWarp, group = p.h_q / p.h_kv;
    const float of_cache = cache_scale(block.params());
    const auto* const q = reinterpret_cast<const typename Fp8QueryType<Query>::Stored*>(p.q);
    typename Fp8QueryType<Query>::RowOfLane rows[kOfWarp];
#pragma unroll
    for (i32 i = 0; i < kOfWarp; ++i) {
        const i32 row = block.row0 + first + i;
        const auto* from = q + request * p.q_stride_b_elems + row / group * p.q_stride_s_elems +
                           (i64)(block.kv_head * group + row % group) * p.q_stride_h_elems;
        rows[i].load(row < block.s.rows ? from : nullptr, lane);
    }
#pragma unroll
    for (i32 i = 0; i < kOfWarp; ++i) {
        float factor = rows[i].template store<Query>(block.s.q, first + i, lane) * of_cache;
        if (lane != 0) continue;
        const i32 row = block.row0 + first + i;
        if (kIsCoded<Query> && row < block.s.rows) {
            factor *= query_row_scale(block.params(), request, block.kv_head, row);
        }
        block.s.q_factors[first + i] = factor;
    }
    fence_proxy_async();
}

// Rows that the block does not have are zeros: once, by the whole block, before its first barrier.
template <class Storage>
MLA_DEVICE void clear_fp8_query(Storage& s) {
    if constexpr (Storage::kRows < kFp8MmaRows) {
        for (i32 i = threadIdx.x; i < sizeof(s.q) / sizeof(uint4); i += blockDim.x) {
            reinterpret_cast<uint4*>(s.q)[i] = make_uint4(0, 0, 0, 0);
        }
        fence_proxy_async();
    }
}
}  // namespace mla::attention::sm90
