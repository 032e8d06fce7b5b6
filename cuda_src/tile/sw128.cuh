// The panel: 64 rows x 64 columns of 16-bit elements, 8 KB, in the 128-byte swizzle that TMA writes and WGMMA reads.
//
// Row r lies at byte 128 r; within it the 16-byte chunk c lies at chunk position c ^ (r % 8). A 64 x 576 tile is nine
// panels back to back. One and the same panel serves as K-major operand (Q, K, P: the product runs along columns)
// and as MN-major operand (V: the product runs along rows, that is tokens).
#pragma once
#include "ptx/wgmma.cuh"

constexpr i32 kPanelRows = 64;
constexpr i32 kPanelColumns = 64;
constexpr u32 kPanelRowBytes = 128;
constexpr u32 kPanelBytes = kPanelRows * kPanelRowBytes;
constexpr i32 kPanelChunks = 8;          // of 16 bytes in a row
constexpr u32 kSwizzleAtomBytes = 1024;  // 8 rows: a panel must start at a multiple of it
constexpr i32 kMmaK = 16;                // depth of one wgmma of 16-bit elements
constexpr i32 kPanelMmaSteps = kPanelColumns / kMmaK;

// Byte offset of 16-byte chunk `chunk` of row `row`.
MLA_DEVICE u32 panel_offset(i32 row, i32 chunk) { return (u32)row * kPanelRowBytes + (u32)((chunk ^ (row & 7)) << 4); }

// Layout types of a WGMMA descriptor (TMA's enumeration runs the other way).
constexpr u64 kSwizzle128 = 1ull << 62;
constexpr u64 kSwizzle64 = 2ull << 62;

// Fields of a WGMMA descriptor, in bytes.
MLA_DEVICE SmemDesc make_desc(SmemAddr start, u32 leading_bytes, u32 stride_bytes, u64 layout = kSwizzle128) {
    return SmemDesc{(u64)((start.value & 0x3ffffu) >> 4) | (u64)(leading_bytes >> 4) << 16 |
                    (u64)(stride_bytes >> 4) << 32 | layout};
}

// Rows are M or N, columns are K. The leading offset is not used by a swizzled K-major operand.
MLA_DEVICE SmemDesc k_major_desc(SmemAddr panel) { return make_desc(panel, 16, kSwizzleAtomBytes); }

// Rows are K, columns are N; further columns lie in the following panels.
MLA_DEVICE SmemDesc mn_major_desc(SmemAddr panel) { return make_desc(panel, kPanelBytes, kSwizzleAtomBytes); }

// The descriptor `bytes` further on. Only the address field changes: 32-bit addition, no carry into the other fields.
MLA_DEVICE SmemDesc advance(SmemDesc desc, u32 bytes) {
    return SmemDesc{(desc.bits & 0xffffffff00000000ull) | (u64)((u32)desc.bits + (bytes >> 4))};
}

// Byte step from one wgmma to the next along K.
constexpr u32 kKMajorStepBytes = kMmaK * 2;
constexpr u32 kMnMajorStepBytes = kMmaK * kPanelRowBytes;
