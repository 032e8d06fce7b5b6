// The variant of a sparse forward kernel, checked: its element type, and the width of a key. To be included before
// attention/decode_params.cuh, which has a default for the width and makes kHeadDimQk of it.
#pragma once
#include "attention/dtype_variant.cuh"

#ifndef MLA_HEAD_DIM_QK
#error "MLA_HEAD_DIM_QK must be 576 or 512"
#endif
