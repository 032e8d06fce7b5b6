// The sizes of MLA and of its tiles that every kernel uses.
#pragma once
#include "common/types.cuh"

namespace mla::attention {
constexpr i32 kHeadDimV = 512;                           // a value: the first columns of its key
constexpr i32 kHeadDimRope = 64;                         // the columns after them, where a key has any
constexpr i32 kMaxHeadDimQk = kHeadDimV + kHeadDimRope;  // a key with RoPE columns
constexpr i32 kTileTokens = 64;                          // tokens per tile: the unit of schedules and of lists of rows

MLA_DEVICE constexpr bool is_head_dim_qk(i32 columns) { return columns == kHeadDimV || columns == kMaxHeadDimQk; }
// Keys of smaller latents, and the width of a key's value.
MLA_DEVICE constexpr bool is_narrow_head_dim_qk(i32 columns) { return columns == 320 || columns == 288; }
MLA_DEVICE constexpr i32 head_dim_v(i32 columns) { return is_narrow_head_dim_qk(columns) ? 256 : kHeadDimV; }
}  // namespace mla::attention
