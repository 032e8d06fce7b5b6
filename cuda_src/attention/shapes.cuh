// The sizes of MLA and of its tiles that every kernel uses.
#pragma once
#include "common/types.cuh"

namespace mla::attention {
constexpr i32 kHeadDimV = 512;                           // a value: the first columns of its key
constexpr i32 kHeadDimRope = 64;                         // the columns after them, where a key has any
constexpr i32 kMaxHeadDimQk = kHeadDimV + kHeadDimRope;  // a key with RoPE columns
constexpr i32 kTileTokens = 64;                          // tokens per tile: the unit of schedules and of lists of rows

constexpr i32 kNarrowHeadDimV = 256;  // the same of keys that are narrower than kHeadDimV

MLA_DEVICE constexpr bool is_head_dim_qk(i32 columns) { return columns == kHeadDimV || columns == kMaxHeadDimQk; }
MLA_DEVICE constexpr bool is_narrow_head_dim_qk(i32 columns) { return columns == 320 || columns == 288; }
}  // namespace mla::attention
