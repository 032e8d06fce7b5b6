// The variant of a sparse backward kernel, checked: its element type, the width of a key, and whether what it adds to
// dKV is rounded, so that the order does not matter (attention/exact_addition.cuh).
#pragma once
#include "attention/dtype_variant.cuh"

#ifndef MLA_HEAD_DIM_QK
#error "MLA_HEAD_DIM_QK must be 576 or 512"
#endif
#ifndef MLA_DETERMINISTIC
#error "MLA_DETERMINISTIC must be 0 or 1"
#endif
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK;
constexpr i32 kHeadDimV = 512;
constexpr bool kDeterministic = MLA_DETERMINISTIC;
static_assert(kHeadDimQk == 576 || kHeadDimQk == 512, "d_qk");
