// Merges the partial results of split requests.
//
// Grid: at most as many blocks as fit on the GPU. Each block lists the split requests, one per split that ends with a
// request's first piece. The schedule (attention/split_work.cuh) is written before the attention kernel starts, so the
// list is built while that kernel still runs. attention/merge_partials.cuh does the merge.
//
// The kernel runs for a few microseconds, so its time is the number of dependent loads plus the length of the code,
// because instructions come from memory too. One merge loop therefore handles every number of pieces, and loops are
// unrolled only where they must be.
//
// Source: the log-sum-exp merge of flash-decoding. Unlike FlashMLA's, no single warp walks over all splits.
#include "attention/merge_partials.cuh"
#include "attention/query_groups.cuh"
#include "ptx/control.cuh"

// Most results are as wide as DeepSeek's values.
#ifndef MLA_HEAD_DIM_V
#define MLA_HEAD_DIM_V 512
#endif
// Partial results of products in FP8 may be bfloat16: half of the bytes that the attention kernel writes and this one
// reads.
#ifndef MLA_PARTIALS
#define MLA_PARTIALS float
#endif

namespace mla::attention {
// ---- Variant ---------------------------------------------------------------------------------------------------
// With optional inputs, pieces of groups of queries are merged.
#ifdef MLA_FORMS
using Params = DecodeFormParams;
using Work = GroupedWork;
MLA_DECODE_FORM_FACTS();
#else
using Params = DecodeParams;
using Work = ScheduledWork;
MLA_DECODE_FACTS();
#endif

using Element = MLA_DTYPE;
using Partial = MLA_PARTIALS;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kCombineThreads = 256;
constexpr i32 kCombineWarps = kCombineThreads / kWarpThreads;
constexpr i32 kCombineTeams = kCombineThreads / kTeamThreads;
// PERF(H200, 2026-11-22, -1 % to -6 %): with at most 32 rows the next kernel may start at once; 128 rows lose 2 %.
// PERF(H200, 2026-11-27, -3 %): the rows of all requests are limited too; 16 requests of 128 rows lose 2 %.
constexpr i32 kEarlyRows = 32, kEarlyRowsOfAll = 512;
static_assert(kCombineThreads >= kMaxSplits, "one thread looks at one split");
static_assert(kMaxSplits <= kMaxPartials, "a request may have a piece in every split");

// Work unit `number` of the request whose first piece ends `split`.
struct FoundUnit {
    i32 split, num_partials, number;
};

struct CombineStorage {
    SchedulePoint schedule[kMaxSplits + 1];
    // Per split, for the request whose first piece ends it: its pieces, and the units of earlier requests. If every
    // request has the same number of pieces, this number negated.
    i32 num_partials[kMaxSplits], units_before[kMaxSplits + 1];
    i32 warp_units[kCombineWarps];
    FoundUnit found[kCombineTeams];
    Team teams[kCombineTeams];
};

MLA_FACT(threads, kCombineThreads);
MLA_FACT(max_splits, kMaxSplits);

// ---- The list of split requests --------------------------------------------------------------------------------
// Number of pieces of the request whose first piece ends `split`; 0 if there is none.
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

// Called by the block once the schedule is in shared memory. Returns the number of pieces if all requests have the same
// number, else 0. Schedule points never go back, so it is enough to know which of them lie inside a request.
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

// Called by the block: lists the split requests if they differ, and returns the number of units.
MLA_DEVICE i32 count_units(const DecodeParams& p, CombineStorage& s) {
    // PERF(H200, 2026-11-27, -0.4 % to -1.4 % of dense decode of up to 32 sequences): equal pieces, which batches of
    // one length have, need no list.
    const i32 even = even_pieces(p, s);
    if (even == 0) return list_split_requests(p, s);
    s.num_partials[threadIdx.x] = -even;  // each thread reads its own
    return p.b * UnitShape::of(even).units(p.s_q * p.h_q);
}

// Called by the block: finds the units from `first` on, one per team. Each thread checks whether its split has one.
MLA_DEVICE FoundUnit find_unit(CombineStorage& s, i32 first) {
    __syncthreads();  // the last units have been read
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

// Called by the block: prepares the units from `first` on, one per team. Equal pieces need no list.
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

// PERF(H200, 2026-11-27, -2 % of a layer of 64 sequences): a W_UV projection may start at once whatever the rows are,
// since it first requests its weights.
MLA_DEVICE bool next_may_start(const DecodeParams& p) {
    const i32 rows = query_rows(p);
    const bool projects = p.schedule != nullptr && p.unit_tiles > 0;
    return rows <= kEarlyRows || (i64)rows * p.b <= kEarlyRowsOfAll || projects;
}

// ---- Equal pieces ----------------------------------------------------------------------------------------------
// Pieces of each request if nothing but arithmetic cuts the requests, and all alike, in 2 to kSlots pieces; else 0.
MLA_DEVICE i32 even_pieces(const DecodeParams& p) {
    if (p.schedule != nullptr || p.s_q > 1 || p.max_logits != nullptr) return 0;
    const i32 pieces = p.num_splits / p.b;
    return pieces > 1 && pieces <= kSlots && pieces * p.b == p.num_splits ? pieces : 0;
}

// Merges these, a row per team: the same bits as merge_unit, without a list, and so with half of the instructions,
// which are what short calls wait for.
MLA_DEVICE void merge_even_pieces(const DecodeParams& p, i32 pieces) {
    const i32 thread = threadIdx.x % kTeamThreads, lane = thread % kWarpThreads;
    // PERF(H200, 2026-11-27, -1 % to -5 % of sparse decode of up to 16 queries): the next kernel may start at once, as
    // with up to kEarlyRows rows elsewhere (see next_may_start). At the beginning of the kernel, the request makes
    // dense decode of 16 heads 1 % to 2 % slower, although that never comes by here.
    griddepcontrol_launch_dependents();
    bool waited = false;
#pragma unroll 1
    for (i32 row = blockIdx.x * kCombineTeams + threadIdx.x / kTeamThreads; row < p.b * p.h_q;
         row += gridDim.x * kCombineTeams) {
        const i32 request = row / p.h_q, head = row - request * p.h_q;
        // A request's first piece ended a split, every other one began one.
        const auto row_of = [&](i32 piece) {
            return (request * pieces + piece + (piece == 0 ? p.continued_index : 0)) * p.h_q + head;
        };
        if (!waited) griddepcontrol_wait();
        waited = true;
        const auto lse_of = [&](i32 piece) {
            return piece < pieces ? p.partial_lse[row_of(piece)] : negative_infinity();
        };
        const SlotValues lse{lse_of(lane % kSlotLanes), lse_of(lane % kSlotLanes + kSlotLanes)};
        using Vector = PartialVector<Partial>;
        const auto* const from = reinterpret_cast<const Vector::Stored*>(p.partial_out) + thread;
        float4 loaded[kSlots];
#pragma unroll
        for (i32 i = 0; i < kSlots; ++i) {
            loaded[i] = Vector::load(from + (i64)row_of(i) * kRowVectors, i < pieces);
        }
        constexpr UnitShape kRow{0, 0};
        const SlotValues max = lse.over_row(kRow, [](float x, float y) { return fmaxf(x, y); });
        const SlotValues weights{weight(lse.low, max.low), weight(lse.high, max.high)};
        const SlotValues sum = weights.over_row(kRow, [](float x, float y) { return x + y; });
        float4 totals[kSlots / 2];
#pragma unroll
        for (i32 i = 0; i < kSlots / 2; ++i) {
            totals[i] = make_float4(0.f, 0.f, 0.f, 0.f);
            add_weighted(totals[i], loaded[2 * i], weights.of(2 * i));
            add_weighted(totals[i], loaded[2 * i + 1], weights.of(2 * i + 1));
        }
        add_weighted(totals[0], totals[1], 1.f);
        add_weighted(totals[2], totals[3], 1.f);
        add_weighted(totals[0], totals[2], 1.f);
        const float factor = final_factor(p, head, max.low, sum.low);
        const float4& x = totals[0];
        store_vector<Element>(p, request * p.out_stride_b_elems + head * p.out_stride_h_elems + 4 * thread,
                              make_float4(factor * x.x, factor * x.y, factor * x.z, factor * x.w));
        const float lse2 = sum.low == 0.f ? negative_infinity() : max.low + log2f(sum.low);
        if (thread == 0) p.lse[request * p.lse_stride_b_elems + head * p.lse_stride_h_elems] = final_lse(p, lse2);
    }
    if (!waited) griddepcontrol_wait();
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
// Four blocks per SM: left to itself, the compiler takes more registers than it needs.
extern "C" __global__ void __launch_bounds__(kCombineThreads, 4)
    mla_attention_combine(const __grid_constant__ Params p) {
    __shared__ CombineStorage s;
    if constexpr (MLA_HEAD_DIM_V == kHeadDimV && !Work::kForms) {
        if (const i32 pieces = even_pieces(p)) return merge_even_pieces(p, pieces);
    }
    // Later kernels may start before this one has waited. They wait for the end of this kernel, and so of the attention
    // kernel, before they touch memory: every kernel of the package that is launched as a programmatic dependent (the
    // next call's schedule and attention, a merge of states, a cache update) begins with griddepcontrol.wait and only
    // then lets its own successor start. Other launches and memsets are not dependents. Only this kernel and the W_UV
    // projections read before they wait, and they read older data, as do calls with a promise. With many rows, blocks
    // of the next attention kernel would take this kernel's place.
    if (next_may_start(p)) griddepcontrol_launch_dependents();
    // The attention kernel waited for the schedule before it let this kernel start.
    const i32 team = threadIdx.x / kTeamThreads, units = count_units(p, s);
    bool waited = false;
#pragma unroll 1
    for (i32 first = blockIdx.x * kCombineTeams;; first += gridDim.x * kCombineTeams) {
        if (first < units) prepare_units(p, s, first, units);
        if (!waited) griddepcontrol_wait();
        waited = true;
        if (first >= units) break;
        if (first + team < units) merge_unit<Element, MLA_HEAD_DIM_V, Partial>(p, s.teams[team]);
    }
}
}  // namespace mla::attention
