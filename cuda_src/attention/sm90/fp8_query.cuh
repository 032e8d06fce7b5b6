// Query rows in e4m3, for products in FP8: as they come, or from 16 bits by the rule of
// mla_cupy/reference/fp8_queries.py.
//
// A row in 16 bits is divided by the smallest power of two, of at least 2^-100, that leaves no magnitude above 448, and
// rounded to nearest, ties to even. A row with NaN or Inf is NaN throughout.
#pragma once
#include "attention/sm90/fp8_block.cuh"
#include "ptx/fp8.cuh"
#include "tile/elements.cuh"

namespace mla::attention::sm90 {
constexpr i32 kLeastQueryExponent = 127 - 100;  // biased, of a scale

// The biased exponent of a row's scale: that of its largest magnitude, less 8, and one more where that is above 1.75
// times its power of two, since 448 = 1.75 * 2^8.
MLA_DEVICE i32 query_exponent(u32 largest) {
    constexpr u32 kAbove = 0x1fffff;  // carries into the exponent from fractions above 0.75
    return max((i32)(largest + kAbove >> 23) - 8, kLeastQueryExponent);
}

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
        for (i32 i = 0; i < kOfLane; ++i) {
            const u32* words = &chunk[i].x;
#pragma unroll
            for (i32 j = 0; j < 4; ++j) {
                const float2 pair = unpack<Element>(words[j]);
                bits = max(bits, max(__float_as_uint(fabsf(pair.x)), __float_as_uint(fabsf(pair.y))));
            }
        }
        return __reduce_max_sync(kFullWarp, bits);
    }

    // Stores the row, rounded, as row `row` of the operand; returns the factor of its scores.
    template <class Element>
    MLA_DEVICE float store(u8* q, i32 row, i32 lane) const {
        const u32 most = largest<Element>();
        const bool finite = most < __float_as_uint(kMaxFloat) + 1;
        const i32 exponent = query_exponent(most);
        const float nan = __uint_as_float(0x7fffffff);
        const float down = finite ? __uint_as_float((u32)(254 - exponent) << 23) : nan;
#pragma unroll
        for (i32 i = 0; i < kOfLane; ++i) {
            const i32 at = lane + i * kWarpThreads;
            if (at >= kChunks) continue;
            u32 codes[2];
            const u32* words = &chunk[i].x;
#pragma unroll
            for (i32 j = 0; j < 2; ++j) {
                const float2 low = unpack<Element>(words[2 * j]), high = unpack<Element>(words[2 * j + 1]);
                codes[j] = cvt_e4m3_x2(low.x * down, low.y * down) | cvt_e4m3_x2(high.x * down, high.y * down) << 16;
            }
            *reinterpret_cast<uint2*>(q + offset(row, at)) = make_uint2(codes[0], codes[1]);
        }
        return finite ? __uint_as_float((u32)exponent << 23) : nan;
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

    // Stores the row as row `row` of the operand; its scores have no factor but that of the launch.
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

// By the math warps, each kRows / 8 rows: all of them are in flight before the first one is stored.
template <class Query, class Block>
MLA_DEVICE void load_fp8_query(const Block& block, i32 request, i32 warp, i32 lane) {
    constexpr i32 kRows = Block::kRows, kOfWarp = kRows / (2 * kWarpgroupWarps);
    const DecodeParams& p = block.p;
    const i32 first = warp * kOfWarp, group = p.h_q / p.h_kv;
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
        const float factor = rows[i].template store<Query>(block.s.q, first + i, lane);
        if (lane == 0) block.s.q_factors[first + i] = factor;
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
