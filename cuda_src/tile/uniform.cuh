// Numbers in uniform registers, one set per warp in addition to its threads' registers. From sm_80 on.
#pragma once
#include "common/types.cuh"

namespace mla {
// A number that all lanes have: a reduction over the warp writes a uniform register.
MLA_DEVICE i32 in_uniform(i32 x) { return (i32)__reduce_or_sync(kFullWarp, (u32)x); }
}  // namespace mla
