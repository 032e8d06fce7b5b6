// The half SW128 tile: 64 rows x 32 columns of 16-bit elements, 4 KB, in the 64-byte swizzle.
//
// Row r lies at byte 64 r; within it the 16-byte chunk c lies at chunk position c ^ (r / 2 % 4). Like the SW128 tile,
// it serves as K-major and as MN-major operand.
#pragma once
#include "tile/sw128.cuh"

namespace mla {
constexpr i32 kSw64Columns = kSw128Columns / 2;
constexpr u32 kSw64RowBytes = kSw128RowBytes / 2;
constexpr u32 kSw64Bytes = kSw128Rows * kSw64RowBytes;
constexpr i32 kSw64Chunks = kSw128Chunks / 2;
constexpr u32 kSw64AtomBytes = 512;  // 8 rows: a half SW128 tile must start at a multiple of it
constexpr i32 kSw64MmaSteps = kSw64Columns / kMmaK;

// Byte offset of 16-byte chunk `chunk` of row `row`.
MLA_DEVICE u32 sw64_offset(i32 row, i32 chunk) {
    return (u32)row * kSw64RowBytes + (u32)((chunk ^ (row / 2 & 3)) << 4);
}

// Rows are M or N and columns K, or rows are K and columns N. With one atom across, no leading offset is used.
MLA_DEVICE SmemDesc sw64_desc(SmemAddr sw_tile) { return make_desc(sw_tile, 16, kSw64AtomBytes, kSwizzle64); }

// Byte step from one wgmma to the next along K where rows are K; along columns it is kKMajorStepBytes.
constexpr u32 kSw64MnMajorStepBytes = kMmaK * kSw64RowBytes;
}  // namespace mla
