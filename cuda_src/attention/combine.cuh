// The merge of the partial results of split requests, for the kernels that differ in where results go:
// attention/combine.cu, which explains it, and attention/combine_forms.cu.
#pragma once
#include "attention/merge_partials.cuh"
#include "ptx/control.cuh"

namespace mla::attention {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kCombineThreads = 256;
constexpr i32 kCombineWarps = kCombineThreads / kWarpThreads;
constexpr i32 kCombineTeams = kCombineThreads / kTeamThreads;
// PERF(H200, 2026-11-22, -1 % to -6 %): up to so many rows, the next kernel may start at once; with 128 it loses 2 %.
// PERF(H200, 2026-11-27, -3 %): and up to so many of all requests; 16 requests of 128 rows lose 2 %.
constexpr i32 kEarlyRows = 32, kEarlyRowsOfAll = 512;
static_assert(kCombineThreads >= kMaxSplits, "one thread looks at one split");
static_assert(kMaxSplits <= kMaxPartials, "a request may have a piece in every split");

// A unit of a request: its number among those of the request, whose first piece ends `split`.
struct FoundUnit {
    i32 split, num_partials, number;
};

struct CombineStorage {
    SchedulePoint schedule[kMaxSplits + 1];
    // Per split, for the request whose first piece ends it: the request's pieces, and the units of those before it. If
    // all requests have as many, this number, negative.
    i32 num_partials[kMaxSplits], units_before[kMaxSplits + 1];
    i32 warp_units[kCombineWarps];
    FoundUnit found[kCombineTeams];
    Team teams[kCombineTeams];
};

// ---- The list of split requests --------------------------------------------------------------------------------
// Pieces of the request whose first one ends `split`; 0 if there is none.
MLA_DEVICE i32 partials_from(const DecodeParams& p, const CombineStorage& s, i32 split) {
    if (split >= p.num_splits) return 0;
    const SchedulePoint begin = s.schedule[split], end = s.schedule[split + 1];
    if (end.tile == 0 || (begin.request == end.request && begin.tile > 0)) return 0;
    // The request goes on until the first later split that begins beyond it.
    i32 low = split + 1, high = p.num_splits;
    while (low < high) {
        const i32 middle = (low + high) / 2;
        if (s.schedule[middle].request <= end.request) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low - split;
}

// By the block, which has the schedule in shared memory then: the pieces of each request if all are cut into as many;
// else 0. Points of a schedule never go back, so it is enough to know which of them are within a request.
MLA_DEVICE i32 even_pieces(const DecodeParams& p, CombineStorage& s) {
    const i32 split = threadIdx.x;
    SchedulePoint begin{p.b, 0};
    if (split < p.num_splits) s.schedule[split] = begin = split_begin(p, split);
    if (split == 0) s.schedule[p.num_splits] = split_begin(p, p.num_splits);
    const i32 pieces = __syncthreads_count(begin.request == 0), cuts = pieces * p.b;
    const bool within = split < cuts && split % pieces != 0;
    return __syncthreads_and((begin.tile > 0) == within) && pieces > 1 && cuts <= p.num_splits ? pieces : 0;
}

// Fills the list, one thread per split, and returns the number of units.
MLA_DEVICE i32 list_split_requests(const DecodeParams& p, CombineStorage& s) {
    const i32 thread = threadIdx.x, lane = thread % kWarpThreads, warp = thread / kWarpThreads;
    const i32 pieces = partials_from(p, s, thread);
    const i32 units = pieces == 0 ? 0 : UnitShape::of(pieces).units(p.s_q * p.h_q);
    i32 through = units;
#pragma unroll
    for (i32 step = 1; step < kWarpThreads; step *= 2) {
        const i32 before = __shfl_up_sync(kFullWarp, through, step);
        if (lane >= step) through += before;
    }
    if (lane == kWarpThreads - 1) s.warp_units[warp] = through;
    __syncthreads();
    i32 total = 0;
#pragma unroll
    for (i32 i = 0; i < kCombineWarps; ++i) {
        if (i == warp) through += total;
        total += s.warp_units[i];
    }
    s.num_partials[thread] = pieces;
    s.units_before[thread + 1] = through;
    if (thread == 0) s.units_before[0] = 0;
    __syncthreads();
    return total;
}

// By the block: lists the split requests, if they differ, and returns the number of units.
MLA_DEVICE i32 count_units(const DecodeParams& p, CombineStorage& s) {
    // PERF(H200, 2026-11-27, -0.4 % to -1.4 % of dense decode of up to 32 sequences): equal pieces, which batches of
    // one length have, need no list.
    const i32 even = even_pieces(p, s);
    if (even == 0) return list_split_requests(p, s);
    s.num_partials[threadIdx.x] = -even;  // each thread reads its own
    return p.b * UnitShape::of(even).units(p.s_q * p.h_q);
}

// By the block: finds the units from `first` on, one per team. Each thread looks whether its split has one of them.
MLA_DEVICE FoundUnit find_unit(CombineStorage& s, i32 first) {
    __syncthreads();  // those before have been read
    const i32 split = threadIdx.x, before = s.units_before[split], through = s.units_before[split + 1];
#pragma unroll
    for (i32 i = 0; i < kCombineTeams; ++i) {
        if (before <= first + i && first + i < through) {
            s.found[i] = FoundUnit{split, s.num_partials[split], first + i - before};
        }
    }
    __syncthreads();
    return s.found[threadIdx.x / kTeamThreads];
}

// By the block: prepares the units from `first` on, one per team; of equal pieces without a list.
template <class Work>
MLA_DEVICE void prepare_units(const DecodeParams& p, CombineStorage& s, i32 first, i32 units) {
    const i32 team = threadIdx.x / kTeamThreads, even = -s.num_partials[threadIdx.x];
    FoundUnit found;
    if (even > 0) {
        const i32 of_request = UnitShape::of(even).units(p.s_q * p.h_q), request = (first + team) / of_request;
        found = FoundUnit{request * even, even, first + team - request * of_request};
    } else {
        found = find_unit(s, first);
    }
    if (first + team >= units) return;
    const UnitShape shape = UnitShape::of(found.num_partials);
    prepare_unit<Work>(p, s.teams[team], shape, found.split, found.num_partials, s.schedule[found.split + 1].request,
                       found.number >> shape.group_shift << shape.row_shift, found.number & (shape.groups() - 1));
}

// PERF(H200, 2026-11-27, -2 % of a layer of 64 sequences): what multiplies by W_UV may start at once whatever the rows
// are, as it asks for its weights first.
MLA_DEVICE bool next_may_start(const DecodeParams& p) {
    const i32 rows = query_rows(p);
    const bool projects = p.schedule != nullptr && p.unit_tiles > 0;
    return rows <= kEarlyRows || (i64)rows * p.b <= kEarlyRowsOfAll || projects;
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
template <class Element, class Work, i32 kColumns = kHeadDimV, class Partial = float>
MLA_DEVICE void run_combine(const DecodeParams& p, CombineStorage& s) {
    // What follows may start before this kernel has waited, but waits itself for the end of this kernel, and so of the
    // attention kernel, before it reads or writes anything in memory: every kernel of the package that is launched as a
    // programmatic dependent begins with griddepcontrol.wait (the next call's schedule and attention, a merge of
    // states, an update of the cache), and lets its own successor start only then; other launches and memsets are not
    // dependents. Those that read before they wait are this one and what multiplies by W_UV, and what they read is
    // older. With many rows, blocks of the next attention kernel would take this one's place.
    if (next_may_start(p)) griddepcontrol_launch_dependents();
    // The attention kernel waited for the schedule before it let this kernel start.
    const i32 team = threadIdx.x / kTeamThreads, units = count_units(p, s);
    bool waited = false;
#pragma unroll 1
    for (i32 first = blockIdx.x * kCombineTeams;; first += gridDim.x * kCombineTeams) {
        if (first < units) prepare_units<Work>(p, s, first, units);
        if (!waited) griddepcontrol_wait();
        waited = true;
        if (first >= units) break;
        if (first + team < units) merge_unit<Element, kColumns, Partial>(p, s.teams[team]);
    }
}
}  // namespace mla::attention
