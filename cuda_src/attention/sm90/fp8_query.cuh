// Query rows in e4m3 on Hopper: see attention/fp8_query_rows.cuh.
#pragma once
#include "attention/fp8_query_rows.cuh"
#include "attention/sm90/fp8_block.cuh"
#include "ptx/copy.cuh"

namespace mla::attention::sm90 {
// Place of chunk `at` of a row in the operand: RoPE columns are half an SW128 tile.
struct Fp8QueryPlace {
    static constexpr u32 kTermBytes = kFp8QueryBytes;

    MLA_DEVICE static u32 offset(i32 row, i32 at) {
        constexpr i32 kOfPanel = kSw128ByteColumns / kChunkElems;
        const i32 panel = at / kOfPanel, piece = at % kOfPanel / 2;
        const u32 in_panel = panel < kFp8Panels ? sw128_offset(row, piece) : sw64_offset(row, piece);
        return panel * kSw128Bytes + in_panel + at % 2 * 8;
    }
};

// A warp's share of the query rows of a block, kRows / 8 of them: `start` requests them, `finish` stores them in shared
// memory. The code runs once per work item and must be fetched each time, often from memory, so it is short and does
// not jump: each lane prepares one row, and rows that do not begin at multiples of 16 bytes are handled separately, one
// at a time.
template <class Query, class Block>
struct Fp8QueryLoad {
    using OfQuery = Fp8QueryType<Query>;
    using Stored = typename OfQuery::Stored;
    using LaneShare = typename OfQuery::template RowOfLane<Fp8QueryPlace>;
    static constexpr i32 kOfWarp = Block::kRows / (2 * kWarpgroupWarps), kTerms = Block::Memory::kQueryTerms;
    static constexpr bool kCoded = kIsCoded<Query>;

    const Block& block;
    i32 first, lane;  // of the block's rows: the warp's first one
    // For row lane % kOfWarp of the warp: its memory, null if the block has no such row, and the factor of its scores.
    const Stored* from;
    float factor;
    bool aligned;
    LaneShare rows[kCoded ? 1 : kOfWarp / kTerms];  // of 16 bits, in flight

    MLA_DEVICE Fp8QueryLoad(const Block& block, i32 warp, i32 lane) : block(block), first(warp * kOfWarp), lane(lane) {}

    MLA_DEVICE const Stored* row_from(i32 i) const {
        return reinterpret_cast<const Stored*>(__shfl_sync(kFullWarp, reinterpret_cast<u64>(from), i));
    }

    MLA_DEVICE void start(i32 request) {
        const i32 row = block.row0 + first + lane % kOfWarp;
        const bool there = row < block.s.rows;
        from = there ? fp8_query_row<Query>(block, request, row) : nullptr;
        factor = cache_scale(block.params());
        if (kCoded && there) factor *= query_row_scale(block.params(), request, block.kv_head, row);
        aligned = __all_sync(kFullWarp, reinterpret_cast<u64>(from) % sizeof(uint4) == 0);
        if (!aligned) return;
        if constexpr (kCoded) {
#pragma unroll 1
            for (i32 i = 0; i < kOfWarp; ++i) copy_row(row_from(i), first + i);
        } else if (there && lane < kOfWarp) {
            cp_async_bulk_prefetch_l2(from, kMaxHeadDimQk * sizeof(Stored));
        }
    }

    MLA_DEVICE void finish() {
        if (!aligned) {
#pragma unroll 1
            for (i32 i = 0; i < kOfWarp; ++i) {
                LaneShare row;
                row.load(row_from(i), lane);
                store_row(row, i);
            }
        } else if constexpr (kCoded) {
            cp_async_wait_all();
        } else {
#pragma unroll 1
            for (i32 i = 0; i < kOfWarp; i += kOfWarp / kTerms) {  // with two terms a half at a time: registers are few
                load_rows(i);
                store_rows(i);
            }
        }
        if (kCoded && lane < kOfWarp) block.s.q_factors[first + lane] = factor;
        fence_proxy_async();
    }

    MLA_DEVICE void copy_row(const Stored* row_at, i32 row) const {
        const void* const any = block.p.kv;  // at a multiple of 16 bytes, as `q` need not be where no row is
#pragma unroll
        for (i32 i = 0; i < LaneShare::kOfLane; ++i) {
            const i32 at = lane + i * kWarpThreads;
            const void* const piece = row_at == nullptr ? any : row_at + at * sizeof(uint4);
            if (at < LaneShare::kPieces) {
                cp_async_16(smem_addr(block.s.q + Fp8QueryPlace::offset(row, 2 * at)), piece, row_at != nullptr);
            }
        }
    }

    // A row at a multiple of 16 bytes, without a branch.
    MLA_DEVICE void load_aligned(LaneShare& row, const u16* row_at) const {
#pragma unroll
        for (i32 i = 0; i < LaneShare::kOfLane; ++i) {
            const i32 at = lane + i * kWarpThreads;
            row.chunk[i] = make_uint4(0, 0, 0, 0);
            if (row_at != nullptr && at < LaneShare::kChunks) {
                row.chunk[i] = reinterpret_cast<const uint4*>(row_at)[at];
            }
        }
    }
    MLA_DEVICE void load_rows(i32 begin) {
#pragma unroll
        for (i32 i = 0; i < kOfWarp / kTerms; ++i) load_aligned(rows[i], row_from(begin + i));
    }
    MLA_DEVICE void store_rows(i32 begin) {
#pragma unroll
        for (i32 i = 0; i < kOfWarp / kTerms; ++i) {
            store_row(rows[i], begin + i);
            __syncwarp();  // rows one after the other: those in flight leave few registers
        }
    }
    MLA_DEVICE void store_row(const LaneShare& row, i32 i) const {
        const float up = row.template store<Query, kTerms>(block.s.q, first + i, lane);
        if (!kCoded && lane == 0) block.s.q_factors[first + i] = up * factor;
    }
};

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
