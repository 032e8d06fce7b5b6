// Divides the queries of a batch into groups and cuts the groups' tiles into splits: the schedule of builds with
// optional inputs (attention/query_groups.cuh).
//
// One block. A thread counts the groups of some consecutive sequences; prefix sums over the threads give their places
// in the list. Packed queries outside all sequences form groups as well, which see no token: it is as if a sequence
// without tokens stood before the first one and after the last one. Then attention/split_schedule.cuh cuts the groups.
// The kernel knows their number; the host only knows its maximum.
//
// The groups of a sequence read the same keys, and should do so at the same time, so that the second one finds them in
// L2: one after another in a split, each would read them from memory. Sequences with an equal number of groups, from 2
// to 4, therefore form a section of the list: the first groups of all of them, then the second ones, and so on.
// Equidistant cuts then fall into the same places of each of these rows. Where the distance between rows is not a
// multiple of the distance between cuts, rows start with another sequence.
//
// A variant cuts each group alone, batch-invariant: attention/pieces.cuh.
#include "attention/pieces.cuh"
#include "attention/query_groups.cuh"
#include "attention/split_schedule.cuh"
#include "ptx/control.cuh"

#ifndef MLA_PIECES
#define MLA_PIECES 0
#endif

namespace mla::decode {
using namespace attention;

// ---- Params ----------------------------------------------------------------------------------------------------
struct DecodeScheduleGroupsParams {
    const i32* seqlens;       // (b,)
    const i32* cu_seqlens_q;  // (b + 1,), where the queries of each sequence begin, or null: each has s_q
    QueryGroup* groups;       // (max_groups,)
    SchedulePoint* schedule;  // (num_splits + 1,)
    i64 seqlens_stride_elems, cu_seqlens_q_stride_elems;
    i64 max_tokens;  // max_pages * page_size
    i32 b, s_q;      // s_q: of each sequence, or all packed ones
    i32 max_groups, group_queries;
    i32 window, num_splits;
    i32 merge_cost, piece_cost;  // see attention/split_schedule.cuh
    i32 piece_tiles = 0;         // see attention/pieces.cuh
    i32 padding;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(DecodeScheduleGroupsParams, seqlens_stride_elems),
              MLA_OFFSET(DecodeScheduleGroupsParams, b), (int)sizeof(DecodeScheduleGroupsParams));
MLA_FACT(threads, kScheduleThreads);
MLA_FACT(max_splits, kMaxSplits);
MLA_FACT(group_bytes, (int)sizeof(QueryGroup));

// ---- Sequences -------------------------------------------------------------------------------------------------
struct QueryRange {
    i32 begin, end;
};

// Whatever `cu_seqlens_q` claims, the ranges of all sequences follow one another within [0, s_q]: each begin is the
// largest one so far. With packed queries sequence 0 holds the queries before the batch's first sequence, and sequence
// b + 1 the queries after the last.
struct Sequences {
    const DecodeScheduleGroupsParams& p;

    MLA_DEVICE bool packed() const { return p.cu_seqlens_q != nullptr; }
    MLA_DEVICE i32 count() const { return packed() ? p.b + 2 : p.b; }
    MLA_DEVICE i32 claimed(i32 i) const { return max(0, min(p.cu_seqlens_q[i * p.cu_seqlens_q_stride_elems], p.s_q)); }
    MLA_DEVICE i32 groups(const QueryRange& range) const { return ceil_div(range.end - range.begin, p.group_queries); }
    MLA_DEVICE i32 tokens(i32 request) const {
        if (request < 0 || request >= p.b) return 0;
        return request_length(p.seqlens[request * p.seqlens_stride_elems], p.max_tokens, 1, 0).tokens;
    }
};

// Calls `visit(range, request)` for the sequences [first, last) of `Sequences::count`; `reached` is the largest start
// before them. Packed queries of no sequence get a request outside [0, b). Returns the end that was reached.
template <class Visit>
MLA_DEVICE i32 visit_sequences(const Sequences& all, i32 first, i32 last, i32 reached, Visit visit) {
    const DecodeScheduleGroupsParams& p = all.p;
    for (i32 i = first; i < last; ++i) {
        if (!all.packed()) {
            visit(QueryRange{0, p.s_q}, i);
            continue;
        }
        const i32 begin = reached;
        reached = i > p.b ? p.s_q : max(reached, all.claimed(i));
        visit(QueryRange{begin, reached}, i - 1);
    }
    return reached;
}

// ---- Steps -----------------------------------------------------------------------------------------------------
constexpr i32 kMostRows = 4;  // rows of groups: sequences with more groups, or with one, are listed one after another

// Numbers of sequences with 2, 3 and 4 groups, 21 bits each.
constexpr i32 kCountBits = 21, kMostCounted = (1 << kCountBits) - 1;
struct Counts {
    u64 packed;

    MLA_DEVICE static i32 shift(i32 groups) { return kCountBits * (groups - 2); }
    MLA_DEVICE void add(i32 groups) { packed += 1ull << shift(groups); }
    MLA_DEVICE i32 of(i32 groups) const { return (i32)(packed >> shift(groups)) & kMostCounted; }
    // All groups of sequences with fewer than `end`.
    MLA_DEVICE i32 below(i32 end) const {
        i32 sum = 0;
        for (i32 groups = 2; groups < end; ++groups) sum += groups * of(groups);
        return sum;
    }
};

struct GroupStorage {
    u64 warp_values[kScheduleWarps];
    u64 in_rows;  // Counts
    i32 num_groups;
};

// Over the threads before this one: the sum of `value`, or its maximum.
template <bool kMax, class Value>
MLA_DEVICE Value over_threads_before(u64 (&warps)[kScheduleWarps], Value value) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const auto join = [](Value a, Value b) { return kMax ? max(a, b) : a + b; };
    Value through = value;
#pragma unroll
    for (i32 step = 1; step < kWarpThreads; step *= 2) {
        const Value before = __shfl_up_sync(kFullWarp, through, step);
        if (lane >= step) through = join(through, before);
    }
    __syncthreads();  // the values before have been read
    if (lane == kWarpThreads - 1) warps[warp] = (u64)through;
    __syncthreads();
    Value result = __shfl_up_sync(kFullWarp, through, 1);
    if (lane == 0) result = 0;
    for (i32 i = 0; i < warp; ++i) result = join(result, (Value)warps[i]);
    return result;
}

MLA_DEVICE void write_group(const Sequences& all, const QueryRange& range, i32 first, i32 request, i32 at) {
    const DecodeScheduleGroupsParams& p = all.p;
    if (at >= p.max_groups) return;  // there are no more
    const i32 end = min(first + p.group_queries, range.end), tokens = all.tokens(request);
    const bool exists = 0 <= request && request < p.b;
    // The position of the first query is tokens - (range.end - first).
    const i32 first_token = p.window == 0 ? 0 : max(0, tokens - (range.end - first) + 1 - p.window);
    p.groups[at] =
        QueryGroup{exists ? request : 0, first, end - first, range.end - end, tokens, min(first_token, tokens)};
}

// How far row `row` of `size` groups is turned, so that its sequences are as far behind a cut as in the first row: to
// half a group, if all groups are as long as each other.
MLA_DEVICE i32 turned_by(const DecodeScheduleGroupsParams& p, i32 num_groups, i32 row, i32 size) {
    const i64 distance = (i64)row * size, splits = max(1, p.num_splits);
    const i64 next_cut = (distance * splits + num_groups - 1) / num_groups;
    return (i32)((next_cut * num_groups + splits / 2) / splits - distance) % size;
}

// Totals before a sequence: sequences in rows, and groups of all others.
struct Before {
    Counts in_rows;
    i32 others;
};

// Writes the list, and returns how many groups there are: rows of sequences with 2, 3 and 4 groups, then all others.
MLA_DEVICE i32 write_groups(const DecodeScheduleGroupsParams& p, GroupStorage& s) {
    const Sequences all{p};
    const i32 count = all.count(), share = ceil_div(count, kScheduleThreads);
    const i32 first = min((i32)threadIdx.x * share, count), last = min(first + share, count);
    const auto is_in_rows = [&](i32 groups) { return 2 <= groups && groups <= kMostRows && p.b < kMostCounted - 1; };
    const i32 end = visit_sequences(all, first, last, 0, [](const QueryRange&, i32) {});
    const i32 reached = over_threads_before</*kMax=*/true>(s.warp_values, end);
    Before mine{{0}, 0};
    const auto pass = [&](Before& before, i32 groups) {
        if (is_in_rows(groups)) {
            before.in_rows.add(groups);
        } else {
            before.others += groups;
        }
    };
    visit_sequences(all, first, last, reached, [&](const QueryRange& range, i32) { pass(mine, all.groups(range)); });
    Before before{{over_threads_before</*kMax=*/false>(s.warp_values, mine.in_rows.packed)},
                  over_threads_before</*kMax=*/false>(s.warp_values, mine.others)};
    if (threadIdx.x == kScheduleThreads - 1) {
        const Counts in_rows{before.in_rows.packed + mine.in_rows.packed};
        s.in_rows = in_rows.packed;
        s.num_groups = in_rows.below(kMostRows + 1) + before.others + mine.others;
    }
    __syncthreads();
    const Counts in_rows{s.in_rows};
    visit_sequences(all, first, last, reached, [&](const QueryRange& range, i32 request) {
        const i32 groups = all.groups(range), size = is_in_rows(groups) ? in_rows.of(groups) : 0;
        for (i32 i = 0; i < groups; ++i) {
            i32 at = in_rows.below(kMostRows + 1) + before.others + i;
            if (size > 0) {
                const i32 place = before.in_rows.of(groups) + turned_by(p, s.num_groups, i, size);
                at = in_rows.below(groups) + i * size + (place < size ? place : place - size);
            }
            write_group(all, range, range.begin + i * p.group_queries, request, at);
        }
        pass(before, groups);
    });
    __syncthreads();  // the groups are visible to the block
    return min(s.num_groups, p.max_groups);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
// To the schedule a group is a request with the tokens of its tiles.
struct Groups {
    const DecodeScheduleGroupsParams& p;
    SchedulePoint* schedule;
    i64 max_tokens;
    i32 b, num_splits, merge_cost, piece_cost, piece_tiles;

    MLA_DEVICE Groups(const DecodeScheduleGroupsParams& p, i32 num_groups)
        : p(p),
          schedule(p.schedule),
          max_tokens(p.max_tokens),
          b(num_groups),
          num_splits(p.num_splits),
          merge_cost(p.merge_cost),
          piece_cost(p.piece_cost),
          piece_tiles(p.piece_tiles) {}
    MLA_DEVICE i32 merged() const { return p.max_groups; }
    MLA_DEVICE u32 tokens(i32 group) const {
        const QueryGroup& of = p.groups[group];
        return of.tokens - of.first_token / kTileTokens * kTileTokens;
    }
};

extern "C" __global__ void __launch_bounds__(kScheduleThreads, 1)
    mla_decode_schedule_groups(const __grid_constant__ DecodeScheduleGroupsParams p) {
    __shared__ GroupStorage groups;
#if MLA_PIECES
    __shared__ i32 warp_sums[kPieceWarps];
    griddepcontrol_wait();
    write_pieces(Groups(p, write_groups(p, groups)), warp_sums);
#else
    __shared__ ScheduleStorage s;
    griddepcontrol_wait();
    write_schedule(Groups(p, write_groups(p, groups)), s);
#endif
    griddepcontrol_launch_dependents();
}
}  // namespace mla::decode
