// Results of rows whose weights were rounded before values were summed with them.
#pragma once
#include "attention/decode_output.cuh"

namespace mla::attention {
// Factor from a row's sum of values to the output of a work item, like output_factor. Values are divided by the sum of
// the rounded weights that multiplied them, so that a rounding error common to all weights cancels. A sink is weighed
// with the sum before rounding, as in the merge of pieces.
MLA_DEVICE float rounded_output_factor(const DecodeParams& p, const WorkItem& item, i32 kv_head, i32 row, float m,
                                       float sum, float rounded) {
    return rounded == 0.f ? 0.f : output_factor(p, item, kv_head, row, m, sum) * (sum / rounded);
}
}  // namespace mla::attention
