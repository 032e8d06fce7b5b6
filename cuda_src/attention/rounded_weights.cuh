// Results of rows whose weights were rounded before values were summed with them.
#pragma once
#include "attention/decode_output.cuh"

namespace mla::attention {
// What turns such a sum of values into the output of a work item, as output_factor does. Values are divided by the sum
// of the weights that they were summed with, so that what rounding adds to all of them cancels; a sink is weighed with
// the sum before rounding, as it is where pieces are merged.
MLA_DEVICE float rounded_output_factor(const DecodeParams& p, const WorkItem& item, i32 kv_head, i32 row, float m,
                                       float sum, float rounded) {
    return rounded == 0.f ? 0.f : output_factor(p, item, kv_head, row, m, sum) * (sum / rounded);
}
}  // namespace mla::attention
