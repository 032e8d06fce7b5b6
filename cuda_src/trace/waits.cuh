// Records of when each warp waits, and for what.
//
// No kernel includes this file. A traced build is compiled from two lines, which include this file and then the kernel,
// and from here on the names of all waits stand for the functions below. The entry gets one more statement, a
// `TracedWarp` after its brace. So a trace needs no change to a kernel, and a build without it is identical.
//
// A record has the clocks at both ends of a wait, and its place in the source. It costs ten instructions that do not
// wait for memory, and ptxas interleaves the kernel's own; `MLA_TRACE_LEAN` costs three more instructions and fewer
// registers. Where `MLA_TRACE_ONLY` lists sites, waits elsewhere are compiled as if there were no trace.
#pragma once
#include "common/types.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/timer.cuh"
#include "ptx/trace.cuh"
#include "ptx/wgmma.cuh"
#include "tile/ring.cuh"

namespace mla {
struct WaitRecord {
    u32 end;    // clock
    u32 begin;  // clock
    u32 site;   // `Site`
    u32 unused;
};

// Two of them relate the clock of an SM to the time of all.
struct Moment {
    u64 nanoseconds;
    u32 clock;
    u32 sm;
};

// Destination of the records. The host writes it into the loaded module. Each row is a warp: block * warps + warp.
struct TraceTarget {
    WaitRecord* records;  // [capacity][rows]: one limit holds for all warps
    Moment* moments;      // [rows][2], when a warp began, and when it ended
    u32* ends;            // [rows], index of the record that would have been the next one, had there been room
    u32 rows;             // blocks that are traced * warps
    u32 slots;            // capacity * rows
    u32 warps;            // of a block
};
extern "C" __constant__ TraceTarget mla_trace_target = {};

constexpr u32 kNoSlot = 0x7fffffff;  // index of lanes that leave no records, and the highest one of all

// Place of a call in the sources: a hash of file and line, which the host computes of all lines that there are.
struct Site {
    u32 value;

    MLA_DEVICE constexpr Site(const char* file = __builtin_FILE(), i32 line = __builtin_LINE()) : value(2166136261u) {
        for (; *file; ++file) value = (value ^ (u8)*file) * 16777619u;
        value = (value ^ (u32)line) * 16777619u;
    }
};

#ifdef MLA_TRACE_ONLY
template <u32... kSites>
MLA_DEVICE constexpr bool is_among(Site site) {
    return ((site.value == kSites) || ...);
}
MLA_DEVICE constexpr bool is_traced(Site site) { return is_among<MLA_TRACE_ONLY>(site); }
#else
MLA_DEVICE constexpr bool is_traced(Site) { return true; }
#endif

MLA_DEVICE u32 trace_row() { return own_block() * mla_trace_target.warps + own_thread() / kWarpThreads; }

// Lane 0 of a warp in the first blocks leaves records. A wait that this lane does not come to leaves none: where one
// lane works for its warp, it is this one, also as hardware elects it.
MLA_DEVICE bool leaves_records(u32 row) { return row < mla_trace_target.rows && own_lane() == 0; }

enum MomentOf : u32 { kBegins, kEnds, kMoments };

// Stands for the nanoseconds of a block's warps but the last one, which reads them for all: their clock is the same.
constexpr u64 kTimeOfLastWarp = 1;

MLA_DEVICE void record_moment(u32 row, MomentOf which) {
    const bool last = own_thread() / kWarpThreads + 1 == mla_trace_target.warps;
    const u64 nanoseconds = last ? global_timer() : kTimeOfLastWarp;
    mla_trace_target.moments[row * kMoments + which] = Moment{nanoseconds, sm_clock(), sm_id()};
}

// Stands first in an entry, and so lives as long as the warp does.
struct TracedWarp {
    MLA_DEVICE TracedWarp() {
        const u32 row = trace_row();
        const bool leaves = leaves_records(row);
        declare_next_record(leaves ? row : kNoSlot);
        if (leaves) record_moment(row, kBegins);
    }

    MLA_DEVICE ~TracedWarp() {
        const u32 row = trace_row();
        if (!leaves_records(row)) return;
        mla_trace_target.ends[row] = next_record();
        record_moment(row, kEnds);
    }
};

// The clock before a wait. Which sites are traced is known when they are compiled.
MLA_DEVICE u32 wait_begins(Site site) {
    if (!is_traced(site)) return 0;
#ifdef MLA_TRACE_LEAN
    store_begin(mla_trace_target.records, site.value, mla_trace_target.slots);
    return 0;
#else
    return sm_clock();
#endif
}

MLA_DEVICE void wait_ends(u32 begin, Site site) {
    static_assert(sizeof(WaitRecord) == 16, "the step of what is stored");
    if (!is_traced(site)) return;
    const TraceTarget& target = mla_trace_target;
#ifdef MLA_TRACE_LEAN
    store_end<kNoSlot>(target.records, target.slots, target.rows);
#else
    store_record<kNoSlot>(target.records, begin, site.value, target.slots, target.rows);
#endif
}

// ---- What waits, under the same names with "traced_" before them ------------------------------------------------
MLA_DEVICE void traced_griddepcontrol_wait(Site site = Site()) {
    const u32 begin = wait_begins(site);
    griddepcontrol_wait();
    wait_ends(begin, site);
}

MLA_DEVICE void traced_mbarrier_wait(MBarrier& barrier, u32 parity, Site site = Site()) {
    const u32 begin = wait_begins(site);
    mbarrier_wait(barrier, parity);
    wait_ends(begin, site);
}

MLA_DEVICE void traced_bar_sync(i32 id, i32 threads, Site site = Site()) {
    const u32 begin = wait_begins(site);
    bar_sync(id, threads);
    wait_ends(begin, site);
}

#define MLA_TRACED(name)                                \
    MLA_DEVICE void traced_##name(Site site = Site()) { \
        const u32 begin = wait_begins(site);            \
        name();                                         \
        wait_ends(begin, site);                         \
    }
MLA_TRACED(__syncthreads)
MLA_TRACED(cluster_wait)
MLA_TRACED(cluster_sync)
MLA_TRACED(cp_async_wait_all)
MLA_TRACED(cp_async_bulk_wait_group)
MLA_TRACED(cp_async_bulk_wait_read)
MLA_TRACED(tcgen05_wait_ld)
MLA_TRACED(tcgen05_wait_st)
#undef MLA_TRACED

template <i32 kGroups>
MLA_DEVICE void traced_cp_async_wait_group(Site site = Site()) {
    const u32 begin = wait_begins(site);
    cp_async_wait_group<kGroups>();
    wait_ends(begin, site);
}

template <i32 kGroups>
MLA_DEVICE void traced_wgmma_wait_group(Site site = Site()) {
    const u32 begin = wait_begins(site);
    wgmma_wait_group<kGroups>();
    wait_ends(begin, site);
}
// Rings wait themselves.
template <i32 kStages>
struct TracedRingPosition : RingPosition<kStages> {
    MLA_DEVICE void wait_full(MBarrier (&full)[kStages], Site site = Site()) const {
        traced_mbarrier_wait(full[this->stage], this->ring.full_parity(this->stage), site);
    }
    MLA_DEVICE void wait_empty(MBarrier (&empty)[kStages], Site site = Site()) const {
        traced_mbarrier_wait(empty[this->stage], this->ring.empty_parity(this->stage), site);
    }
};

template <i32 kStages>
struct TracedRingCount : RingCount<kStages> {
    MLA_DEVICE void wait_full(MBarrier (&full)[kStages], Site site = Site()) const {
        traced_mbarrier_wait(full[this->stage()], this->full_parity(), site);
    }
    MLA_DEVICE void wait_empty(MBarrier (&empty)[kStages], Site site = Site()) const {
        traced_mbarrier_wait(empty[this->stage()], this->full_parity() ^ 1u, site);
    }
};
}  // namespace mla

#define RingPosition TracedRingPosition
#define RingCount TracedRingCount
#define griddepcontrol_wait traced_griddepcontrol_wait
#define mbarrier_wait traced_mbarrier_wait
#define bar_sync traced_bar_sync
#define __syncthreads traced___syncthreads
#define cluster_wait traced_cluster_wait
#define cluster_sync traced_cluster_sync
#define cp_async_wait_all traced_cp_async_wait_all
#define cp_async_bulk_wait_group traced_cp_async_bulk_wait_group
#define cp_async_bulk_wait_read traced_cp_async_bulk_wait_read
#define tcgen05_wait_ld traced_tcgen05_wait_ld
#define tcgen05_wait_st traced_tcgen05_wait_st
#define cp_async_wait_group traced_cp_async_wait_group
#define wgmma_wait_group traced_wgmma_wait_group
