// Phases of a ring of shared-memory stages, each guarded by a full and an empty mbarrier.
#pragma once
#include "ptx/barrier.cuh"

namespace mla {
// One role's position in a ring. A stage's phase flips each time this role passes it.
template <i32 kStages>
struct Ring {
    u32 phases = 0;

    // Consumers wait for this parity on "full"; a fresh barrier blocks them.
    MLA_DEVICE u32 full_parity(i32 stage) const { return (phases >> stage) & 1u; }
    // Producers wait for this parity on "empty"; a fresh barrier lets them pass.
    MLA_DEVICE u32 empty_parity(i32 stage) const { return full_parity(stage) ^ 1u; }
    MLA_DEVICE void advance(i32 stage) { phases ^= 1u << stage; }
};

MLA_DEVICE void mbarrier_wait(MBarrier& barrier, u32 parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {
    }
}

// Fresh barriers of a ring, and how often producers and consumers arrive per phase.
template <i32 kStages>
MLA_DEVICE void init_ring(MBarrier (&full)[kStages], MBarrier (&empty)[kStages], u32 full_arrivals,
                          u32 empty_arrivals) {
    for (i32 stage = 0; stage < kStages; ++stage) {
        mbarrier_init(full[stage], full_arrivals);
        mbarrier_init(empty[stage], empty_arrivals);
    }
}

// A position with the stage: for rings that are walked by steps that no loop counter tells.
template <i32 kStages>
struct RingPosition {
    Ring<kStages> ring;
    i32 stage = 0;

    MLA_DEVICE void advance() {
        ring.advance(stage);
        stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    MLA_DEVICE i32 before() const { return stage == 0 ? kStages - 1 : stage - 1; }

    // Consumers wait until the stage is filled, producers until it is free.
    MLA_DEVICE void wait_full(MBarrier (&full)[kStages]) const { mbarrier_wait(full[stage], ring.full_parity(stage)); }
    MLA_DEVICE void wait_empty(MBarrier (&empty)[kStages]) const {
        mbarrier_wait(empty[stage], ring.empty_parity(stage));
    }
};

// A ring in one register, for a number of stages that is a power of two.
template <i32 kStages>
struct RingCount {
    static_assert((kStages & (kStages - 1)) == 0, "a power of two");
    u32 count = 0;  // of the steps so far

    MLA_DEVICE void advance() { ++count; }
    MLA_DEVICE i32 stage() const { return (i32)(count % kStages); }
    MLA_DEVICE u32 full_parity() const { return count / kStages & 1u; }

    MLA_DEVICE void wait_full(MBarrier (&full)[kStages]) const { mbarrier_wait(full[stage()], full_parity()); }
    MLA_DEVICE void wait_empty(MBarrier (&empty)[kStages]) const { mbarrier_wait(empty[stage()], full_parity() ^ 1u); }
};

// Each warp releases a stage once all its lanes are done with it.
MLA_DEVICE void release(MBarrier& empty, i32 thread) {
    __syncwarp();
    if (thread % kWarpThreads == 0) mbarrier_arrive(empty);
}
}  // namespace mla
