// The half panel: 64 rows x 32 columns of 16-bit elements, 4 KB, in the 64-byte swizzle.
//
// Row r lies at byte 64 r; within it the 16-byte chunk c lies at chunk position c ^ (r / 2 % 4). Like the panel, it
// serves as K-major and as MN-major operand.
#pragma once
#include "tile/panel.cuh"

constexpr i32 kHalfPanelColumns = kPanelColumns / 2;
constexpr u32 kHalfPanelRowBytes = kPanelRowBytes / 2;
constexpr u32 kHalfPanelBytes = kPanelRows * kHalfPanelRowBytes;
constexpr i32 kHalfPanelChunks = kPanelChunks / 2;
constexpr u32 kHalfPanelAtomBytes = 512;  // 8 rows: a half panel must start at a multiple of it
constexpr i32 kHalfPanelMmaSteps = kHalfPanelColumns / kMmaK;

// Byte offset of 16-byte chunk `chunk` of row `row`.
MLA_DEVICE u32 half_panel_offset(i32 row, i32 chunk) {
    return (u32)row * kHalfPanelRowBytes + (u32)((chunk ^ (row / 2 & 3)) << 4);
}

// Rows are M or N and columns K, or rows are K and columns N. With one atom across, no leading offset is used.
MLA_DEVICE SmemDesc half_panel_desc(SmemAddr half_panel) {
    return make_desc(half_panel, 16, kHalfPanelAtomBytes, kSwizzle64);
}

// Byte step from one wgmma to the next along K where rows are K; along columns it is kKMajorStepBytes.
constexpr u32 kHalfMnMajorStepBytes = kMmaK * kHalfPanelRowBytes;
