// The variant of a kernel, checked: its element type.
#pragma once
#include "ptx/element.cuh"

#ifndef MLA_DTYPE
#error "MLA_DTYPE must be bfloat16 or float16"
#endif
using Element = MLA_DTYPE;
