// Query rows in e4m3 on Hopper: see attention/fp8_query_rows.cuh.
#pragma once
#include "attention/fp8_query_rows.cuh"
#include "attention/sm90/fp8_block.cuh"

namespace mla::attention::sm90 {
// Where chunk `at` of a row lies in the operand: RoPE columns are a half SW128 tile.
struct Fp8QueryPlace {
    static constexpr u32 kTermBytes = kFp8QueryBytes;

    MLA_DEVICE static u32 offset(i32 row, i32 at) {
        constexpr i32 kOfPanel = kSw128ByteColumns / kChunkElems;
        const i32 panel = at / kOfPanel, piece = at % kOfPanel / 2;
        const u32 in_panel = panel < kFp8Panels ? sw128_offset(row, piece) : sw64_offset(row, piece);
        return panel * kSw128Bytes + in_panel + at % 2 * 8;
    }
};

// kCount rows of the block by a warp: all of them are in flight before the first one is stored.
template <class Query, i32 kCount, class Block>
MLA_DEVICE void load_fp8_query_rows(const Block& block, i32 request, i32 first, i32 lane) {
    const float of_cache = cache_scale(block.params());
    typename Fp8QueryType<Query>::template RowOfLane<Fp8QueryPlace> rows[kCount];
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
        const i32 row = block.row0 + first + i;
        rows[i].load(row < block.s.rows ? fp8_query_row<Query>(block, request, row) : nullptr, lane);
    }
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
        float factor = rows[i].template store<Query, Block::Memory::kQueryTerms>(block.s.q, first + i, lane) * of_cache;
        if (lane != 0) continue;
        const i32 row = block.row0 + first + i;
        if (kIsCoded<Query> && row < block.s.rows) {
            factor *= query_row_scale(block.params(), request, block.kv_head, row);
        }
        block.s.q_factors[first + i] = factor;
    }
}

// By the math warps, each kRows / 8 rows; a half at a time where they have two terms, for which registers are few.
template <class Query, class Block>
MLA_DEVICE void load_fp8_query(const Block& block, i32 request, i32 warp, i32 lane) {
    constexpr i32 kOfWarp = Block::kRows / (2 * kWarpgroupWarps), kCount = kOfWarp / Block::Memory::kQueryTerms;
#pragma unroll 1
    for (i32 i = 0; i < kOfWarp; i += kCount) {
        load_fp8_query_rows<Query, kCount>(block, request, warp * kOfWarp + i, lane);
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
