// Results that are turned back by RoPE (attention/output_rope.cuh), of two warpgroups that share a block's rows.
#pragma once
#include "attention/output_rope.cuh"
#include "attention/sm90/two_warpgroups.cuh"

namespace mla::attention::sm90 {
// Turns the last columns back, which the right warpgroup has.
template <class Block>
MLA_DEVICE void turn_back(const Block& block, const GroupItem& item, Math& math, i32 thread) {
    constexpr i32 kFirst = kOutPerThread - kOutPerThread * kHeadDimRope / (kHeadDimV / 2);
    if (!turns_back(block.p)) return;
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const RowAngles angles = angles_of_row(block.p, item, block.row0 + fragment_row(thread) + 8 * r);
#pragma unroll
        for (i32 i = kFirst + 2 * r; i < kOutPerThread; i += 4) {
            const i32 column = kFirstTurnedColumn + (i - kFirst) / 4 * 8 + fragment_column(thread);
            turn_pair(angles, column, math.out[i], math.out[i + 1]);
        }
    }
}
}  // namespace mla::attention::sm90
