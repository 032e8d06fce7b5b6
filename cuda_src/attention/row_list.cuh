// Lists of kv rows, one per query. attention_row_lists makes them from the caller's indices; the other sparse kernels
// see nothing else of the indices. A list holds the valid rows, then kNoRow up to the end of its last tile of
// kTileTokens rows.
#pragma once
#include "attention/shapes.cuh"

namespace mla::attention {
constexpr i32 kNoRow = -1;
}  // namespace mla::attention
