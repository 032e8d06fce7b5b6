// The 8-bit element type of operands: -DMLA_DTYPE=float8_e4m3fn.
#pragma once
#include "ptx/fp8.cuh"

namespace mla {
struct float8_e4m3fn {
    MLA_DEVICE static float to_float(u8 bits) { return e4m3_value(bits); }
};
}  // namespace mla
