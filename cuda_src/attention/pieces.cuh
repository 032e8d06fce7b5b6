// Where a batch-invariant schedule keeps the first split of each request: behind its points.
#pragma once
#include "attention/decode_params.cuh"

namespace mla::attention {
MLA_DEVICE const i32* first_splits(const DecodeParams& p) {  // (b + 1,)
    return reinterpret_cast<const i32*>(p.schedule + p.num_splits + 1);
}
}  // namespace mla::attention
