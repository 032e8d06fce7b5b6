// The SW128 tile: 64 rows x 64 columns of 16-bit elements, 8 KB, in the 128-byte swizzle that TMA writes and WGMMA
// reads.
//
// Row r lies at byte 128 r; within it the 16-byte chunk c lies at chunk position c ^ (r % 8). A 64 x 576 tile is nine
// SW128 tiles back to back. One SW128 tile serves as K-major operand (Q, K, P: the product runs along
// columns) and as MN-major operand (V: the product runs along rows, that is tokens).
#pragma once
#include "ptx/barrier.cuh"
#include "ptx/control.cuh"
#include "ptx/matrix.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fragment.cuh"

namespace mla {
constexpr i32 kSw128Rows = 64;
constexpr i32 kSw128Columns = 64;
constexpr u32 kSw128RowBytes = 128;
constexpr u32 kSw128Bytes = kSw128Rows * kSw128RowBytes;
constexpr i32 kSw128Chunks = 8;          // of 16 bytes in a row
constexpr u32 kSwizzleAtomBytes = 1024;  // 8 rows: an SW128 tile must start at a multiple of it
constexpr i32 kMmaK = 16;                // depth of one wgmma of 16-bit elements
constexpr i32 kSw128MmaSteps = kSw128Columns / kMmaK;

// Byte offset of 16-byte chunk `chunk` of row `row`.
MLA_DEVICE u32 sw128_offset(i32 row, i32 chunk) { return (u32)row * kSw128RowBytes + (u32)((chunk ^ (row & 7)) << 4); }

// Layout types of a WGMMA descriptor (TMA's enumeration runs the other way).
constexpr u64 kSwizzle128 = 1ull << 62;
constexpr u64 kSwizzle64 = 2ull << 62;

// Fields of a WGMMA descriptor, in bytes.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-operation-wgmma-mma-async
MLA_DEVICE SmemDesc make_desc(SmemAddr start, u32 leading_bytes, u32 stride_bytes, u64 layout = kSwizzle128) {
    return SmemDesc{(u64)((start.value & 0x3ffffu) >> 4) | (u64)(leading_bytes >> 4) << 16 |
                    (u64)(stride_bytes >> 4) << 32 | layout};
}

// Rows are M or N, columns are K. The next 8 rows are `next_rows` bytes further. The leading offset is not used by a
// swizzled K-major operand.
MLA_DEVICE SmemDesc k_major_desc(SmemAddr sw_tile, u32 next_rows = kSwizzleAtomBytes) {
    return make_desc(sw_tile, 16, next_rows);
}

// Rows are K, columns are N; further columns lie in the following SW128 tiles.
MLA_DEVICE SmemDesc mn_major_desc(SmemAddr sw_tile, u32 next_tile = kSw128Bytes, u32 next_rows = kSwizzleAtomBytes) {
    return make_desc(sw_tile, next_tile, next_rows);
}

// Changes the distance of the next 8 rows; the start is not touched.
MLA_DEVICE SmemDesc with_next_rows(SmemDesc desc, u32 next_rows) {
    constexpr u64 kField = 0x3fffull << 32;
    return SmemDesc{(desc.bits & ~kField) | (u64)(next_rows >> 4) << 32};
}

// The descriptor `bytes` further on. Only the address field changes: 32-bit addition, no carry into the other fields.
MLA_DEVICE SmemDesc advance(SmemDesc desc, u32 bytes) {
    return SmemDesc{(desc.bits & 0xffffffff00000000ull) | (u64)((u32)desc.bits + (bytes >> 4))};
}

// The descriptor with its address, and everything computed from it, in uniform registers for WGMMA: one instruction per
// product instead of nine. A reduction over the warp writes such a register; a shuffle does not always. The address is
// opaque: otherwise the compiler keeps every sum of address and step in a register across the loop.
MLA_DEVICE SmemDesc uniform(SmemDesc desc) {
    i32 low = (i32)desc.bits;
    opaque(low);
    return SmemDesc{(desc.bits & 0xffffffff00000000ull) | __reduce_or_sync(kFullWarp, (u32)low)};
}

// Byte step from one wgmma to the next along K.
constexpr u32 kKMajorStepBytes = kMmaK * 2;
constexpr u32 kMnMajorStepBytes = kMmaK * kSw128RowBytes;

// ---- Fragments -------------------------------------------------------------------------------------------------
// Offset in the SW128 tile of this lane's row of step `step`, a 16x16 block, for ldmatrix and stmatrix.
MLA_DEVICE u32 matrix_offset(i32 thread, i32 step) {
    const i32 row = (thread / kWarpThreads) * 16 + thread % 16;
    return sw128_offset(row, step * 2 + (thread % kWarpThreads) / 16);
}

MLA_DEVICE void load_sw128(u32 (&fragment)[kSw128MmaSteps][4], const u8* sw_tile, i32 thread) {
#pragma unroll
    for (i32 step = 0; step < kSw128MmaSteps; ++step) {
        ldmatrix_x4(fragment[step], smem_addr(sw_tile) + matrix_offset(thread, step));
    }
}

// For WGMMA or a bulk copy to read, after a barrier.
MLA_DEVICE void store_sw128(u8* sw_tile, const u32 (&fragment)[kSw128MmaSteps][4], i32 thread) {
#pragma unroll
    for (i32 step = 0; step < kSw128MmaSteps; ++step) {
        stmatrix_x4(smem_addr(sw_tile) + matrix_offset(thread, step), fragment[step]);
    }
    fence_proxy_async();
}

// The transpose, 16 rows per step, of one or more SW128 tiles below each other.
template <i32 kSteps>
MLA_DEVICE void load_sw128_transposed(u32 (&fragment)[kSteps][4], const u8* sw_tiles, i32 thread) {
    const i32 warp = thread / kWarpThreads, lane = thread % kWarpThreads;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
        const i32 row = step * kMmaK + lane / 16 * 8 + lane % 8;
        ldmatrix_x4_trans(fragment[step], smem_addr(sw_tiles) + sw128_offset(row, 2 * warp + lane / 8 % 2));
    }
}
}  // namespace mla
