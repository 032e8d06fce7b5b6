// A tile of keys in shared memory, in the decode kernels for Hopper: 64 tokens in panels of 64 columns, in two halves.
#pragma once
#include "attention/split_work.cuh"
#include "tile/panel.cuh"
#include "tile/ring.cuh"

constexpr i32 kStagesKV = 2;
constexpr i32 kPanelsQk = kHeadDimQk / kPanelColumns;       // 9, or 8 without RoPE
constexpr i32 kPanelsV = kHeadDimV / kPanelColumns;         // 8
constexpr i32 kPanelsHalf = kHeadDimV / 2 / kPanelColumns;  // 4: one half of the values
constexpr i32 kPanelsRope = kPanelsQk - kPanelsV;           // 1 or 0
constexpr u32 kTileBytes = kPanelsQk * kPanelBytes;
// A tile arrives, and is released, in two halves: what a warpgroup multiplies P with; the RoPE panel comes with the
// left one.
constexpr u32 kHalfBytes = kPanelsHalf * kPanelBytes;
constexpr u32 kLeftBytes = kPanelsRope * kPanelBytes + kHalfBytes;  // panels 8, 0..3
constexpr u32 kRightBytes = kHalfBytes;                             // panels 4..7
static_assert(kLeftBytes + kRightBytes == kTileBytes, "the halves are the tile");

// The i-th panel to arrive, and to be scored: 8, 0..7.
MLA_DEVICE constexpr i32 panel_in_order(i32 i) { return i < kPanelsRope ? kPanelsV + i : i - kPanelsRope; }
constexpr i32 kPanelsLeft = kPanelsRope + kPanelsHalf;  // of these, the left half

struct HalfBarriers {
    MBarrier left, right;
};

// Every fragment starts at stage 0.
MLA_DEVICE i32 stage_of(const Fragment& fragment, i32 tile) { return (tile - fragment.tile_begin) & (kStagesKV - 1); }
