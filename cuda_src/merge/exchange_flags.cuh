// How blocks of one index tell each other, over all ranks, that their slices have come.
#pragma once
#include "merge/exchange_params.cuh"
#include "ptx/system.cuh"

namespace mla::merge {
// One rank of the grid, as its blocks see it.
struct Member {
    const Mailbox* mailboxes;  // of all ranks, in shared memory
    i32 rank;
    u32 failed;  // an earlier wait has
    u32 epoch;

    MLA_DEVICE i32 half() const { return epoch & 1; }  // of the slabs and flags

    // True if this thread signals, and waits for, the rank of its number.
    MLA_DEVICE bool speaks(i32 world) const { return threadIdx.x < world && threadIdx.x != rank; }
};

MLA_DEVICE State& state(const MergeExchangeParams& p) { return p.states[blockIdx.y]; }
MLA_DEVICE Report& report(const MergeExchangeParams& p) { return p.reports[blockIdx.y]; }

MLA_DEVICE Member member(const MergeExchangeParams& p, const Mailbox* mailboxes) {
    return Member{mailboxes, p.rank + (i32)blockIdx.y, load_relaxed_system(&state(p).failed), state(p).epoch + 1};
}

// Index of the flag of `source`'s block `blockIdx.x` among a rank's flags.
MLA_DEVICE i32 flag_index(const MergeExchangeParams& p, const Member& m, i32 source) {
    return (m.half() * p.world + source) * kMaxBlocks + blockIdx.x;
}

MLA_DEVICE u64 signal_of(const MergeExchangeParams& p, const Member& m) { return (u64)(u32)p.call << 32 | m.epoch; }

// Tells the blocks of this index on all other ranks that this one has pushed, unless this rank has failed before.
// Returns true if it has told them, the same in all threads.
MLA_DEVICE bool signal(const MergeExchangeParams& p, const Member& m) {
    const bool failed = __syncthreads_or(m.failed);  // the slices have been written; each release covers them all
    u64* to = m.mailboxes[threadIdx.x % p.world].flags + flag_index(p, m, m.rank);
    if (!failed && m.speaks(p.world)) store_release_system(to, signal_of(p, m));
    return !failed;
}

// True if the host has requested an abort. Of the waiting blocks only one asks at a time: the host's memory is far, and
// when hundreds of blocks ask it, each waits for all the others' answers.
MLA_DEVICE bool host_aborts(const MergeExchangeParams& p, u32 turn) {
    return turn % gridDim.x == blockIdx.x && load_relaxed_system(&report(p).abort) != 0;
}

// One thread: until block `blockIdx.x` of `source` has pushed its slices of this call.
MLA_DEVICE Failure wait_for(const MergeExchangeParams& p, const Member& m, i32 source) {
    constexpr u32 kPolls = 64;  // between checks of anything but the flag
    const u64* from = m.mailboxes[m.rank].flags + flag_index(p, m, source);
    u64 start = 0;
    for (u32 polls = 1;; ++polls) {
        const u64 seen = load_acquire_system(from);
        if ((u32)seen == m.epoch) return seen == signal_of(p, m) ? kNone : kMismatch;
        if (polls % kPolls) continue;
        if (load_relaxed_system(&state(p).failed) || host_aborts(p, polls / kPolls)) return kAborted;
        const u64 now = globaltimer();
        if (start == 0) start = now;
        if (now - start >= (u64)p.timeout_ns) return kTimeout;
    }
}

// Tells the blocks that still wait and, if no block has yet, the host; then traps, if asked to, where the time is over.
template <bool kTraps>
MLA_DEVICE void tell(const MergeExchangeParams& p, const Member& m, Failure failure, i32 source) {
    if (atom_exchange_relaxed(&state(p).failed, 1) != 0) return;
    store_relaxed_system(&report(p).failure,
                         (u64)m.epoch << 32 | (u64)blockIdx.x << 16 | (u64)source << 8 | (u64)failure);
    if constexpr (kTraps) {
        __threadfence_system();  // the host can read why
        if (failure == kTimeout) __trap();
    }
}

// Waits for every other rank. Whether all slices have come, the same in all threads.
template <bool kTraps>
MLA_DEVICE bool hear(const MergeExchangeParams& p, const Member& m) {
    const i32 other = threadIdx.x;
    const Failure failure = m.speaks(p.world) ? wait_for(p, m, other) : kNone;
    if (failure != kNone) tell<kTraps>(p, m, failure, other);
    return !__syncthreads_or(failure != kNone);  // each acquire covers the whole block
}

// One thread of each block. The last one ends the call: all blocks have read the epoch, and none reads it again
// before the next kernel.
MLA_DEVICE void end_call(const MergeExchangeParams& p, const Member& m) {
    if (atom_add_acq_rel(&state(p).tickets, 1) != gridDim.x - 1) return;
    state(p).tickets = 0;
    state(p).epoch = m.epoch;
}
}  // namespace mla::merge
