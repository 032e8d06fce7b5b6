// Keeps the blocks of a grid in lockstep while they sweep over the same memory, so that data that one of them brings
// into L2 is still there when the others need it.
//
// Each block reports its progress, and waits while it is ahead of the mean of all blocks. The wait is bounded: if the
// others do not catch up (they may not even be resident), the block continues without lockstep. So nothing can hang,
// and only speed depends on it.
#pragma once
#include "common/types.cuh"

namespace mla::sparse_backward {
constexpr i32 kSweepSteps = 64;   // per sweep
constexpr i32 kMaxLeadSteps = 2;  // steps that a block may lead the mean without waiting
constexpr i32 kMaxPolls = 64;     // some 20 us
constexpr u64 kFinishedSteps = 1ull << 48;

// In shared memory; one thread uses it.
struct L2Lockstep {
    i64 reported;
    i32 alone;

    MLA_DEVICE void init() {
        reported = 0;
        alone = 0;
    }

    // The block is at step `step` of all its sweeps. `progress` adds up the steps of all blocks.
    MLA_DEVICE void report(u64* progress, i64 step) {
        atomicAdd(progress, (u64)(step - reported));
        reported = step;
        if (alone || step <= kMaxLeadSteps) return;
        const u64 enough = (u64)(step - kMaxLeadSteps) * gridDim.x;
        for (i32 poll = 0; poll < kMaxPolls; ++poll) {
            if (*static_cast<volatile u64*>(progress) >= enough) return;
        }
        alone = 1;
    }
    // No block waits for this one any more.
    MLA_DEVICE static void finish(u64* progress) { atomicAdd(progress, kFinishedSteps); }
};
}  // namespace mla::sparse_backward
