// Keeps the blocks of a grid near each other while they sweep over the same memory, so that what one of them brings
// into the L2 is still there when the others want it.
//
// Each block reports how far it has come, and waits while it is ahead of the mean of all. It never waits for long: if
// the others do not come (they may not even be running), it goes on alone. So nothing can hang, and only speed depends
// on it.
#pragma once
#include "common/types.cuh"

constexpr i32 kPaceSteps = 64;  // of a sweep
constexpr i32 kPaceLead = 2;    // steps ahead of the mean that nobody waits for
constexpr i32 kPacePolls = 64;  // some 20 us
constexpr u64 kPaceFinished = 1ull << 48;

// In shared memory; one thread uses it.
struct Pace {
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
        if (alone || step <= kPaceLead) return;
        const u64 enough = (u64)(step - kPaceLead) * gridDim.x;
        for (i32 poll = 0; poll < kPacePolls; ++poll) {
            if (*static_cast<volatile u64*>(progress) >= enough) return;
        }
        alone = 1;
    }
    // Nobody waits for this block any more.
    MLA_DEVICE static void finish(u64* progress) { atomicAdd(progress, kPaceFinished); }
};
