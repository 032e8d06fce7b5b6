// Lists of kv rows, one per query: what attention_row_lists makes of the caller's indices, and all that the other
// sparse kernels see of them. A list holds the valid rows only, then kNoRow up to the end of its last tile of
// kTileTokens rows.
#pragma once
#include "attention/shapes.cuh"

namespace mla::attention {
constexpr i32 kNoRow = -1;
}  // namespace mla::attention
