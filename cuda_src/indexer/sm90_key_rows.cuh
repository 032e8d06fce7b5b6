// Products of a page's keys, the A operand of WGMMA, and the heads of a token: the layout over threads, and the order
// in which they add up logits. Every kernel adds in this order, so that logits have the same bits.
#pragma once
#include "common/types.cuh"

namespace mla::indexer {
// The four threads of a row share its heads. In the end each has a logit: thread c has row g + 8 (c % 2) of its warp's
// rows and, of two tokens, token c / 2.
struct RowThread {
    i32 c, row;  // `row`: row of the page

    MLA_DEVICE explicit RowThread(i32 thread)
        : c(thread % 4), row(thread / kWarpThreads * 16 + thread % kWarpThreads / 4 + 8 * (thread % 2)) {}
};

// Each thread of a pair has two numbers: the lower thread gets the sum of the first numbers, the upper thread the
// sum of the second numbers.
MLA_DEVICE float add_in_pair(float first, float second, i32 distance, bool is_upper) {
    return (is_upper ? second : first) + __shfl_xor_sync(kFullWarp, is_upper ? first : second, distance);
}
}  // namespace mla::indexer
