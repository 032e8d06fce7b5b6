// Divides the queries of a batch into groups, and cuts the tiles that these see into splits: the schedule of the
// kernels in `*_forms.cu` (attention/query_groups.cuh).
//
// One block. A thread counts the groups of some consecutive sequences; sums over the threads before it say where in the
// list they go. Where queries are packed, those of no sequence come in groups, too, that see no token: as if there were
// a sequence without tokens before the first one, and one after the last one. Then attention/split_schedule.cuh cuts
// the groups, of which the kernel knows how many there are, while the host knows only how many there may be.
#include "attention/query_groups.cuh"
#include "attention/split_schedule.cuh"
#include "ptx/control.cuh"

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
// largest of those so far. With packed queries sequence 0 is what comes before the first one of the batch, and sequence
// b + 1 what comes after the last one.
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

// Calls `visit(range, request)` for the sequences [first, last) of `Sequences::count`, where the largest begin before
// them is `reached`; the request of packed queries that are none's is outside [0, b). Returns the end that was reached.
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
struct GroupStorage {
    i32 warp_values[kScheduleWarps];
    i32 num_groups;
};

// Over the threads before this one: the sum of `value`, or its maximum.
template <bool kMax>
MLA_DEVICE i32 over_threads_before(i32 (&warps)[kScheduleWarps], i32 value) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const auto join = [](i32 a, i32 b) { return kMax ? max(a, b) : a + b; };
    i32 through = value;
#pragma unroll
    for (i32 step = 1; step < kWarpThreads; step *= 2) {
        const i32 before = __shfl_up_sync(kFullWarp, through, step);
        if (lane >= step) through = join(through, before);
    }
    __syncthreads();  // the values before have been read
    if (lane == kWarpThreads - 1) warps[warp] = through;
    __syncthreads();
    i32 result = __shfl_up_sync(kFullWarp, through, 1);
    if (lane == 0) result = 0;
    for (i32 i = 0; i < warp; ++i) result = join(result, warps[i]);
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

// Writes the list, and returns how many groups there are.
MLA_DEVICE i32 write_groups(const DecodeScheduleGroupsParams& p, GroupStorage& s) {
    const Sequences all{p};
    const i32 count = all.count(), share = ceil_div(count, kScheduleThreads);
    const i32 first = min((i32)threadIdx.x * share, count), last = min(first + share, count);
    const i32 end = visit_sequences(all, first, last, 0, [](const QueryRange&, i32) {});
    const i32 reached = over_threads_before</*kMax=*/true>(s.warp_values, end);
    i32 mine = 0;
    visit_sequences(all, first, last, reached, [&](const QueryRange& range, i32) { mine += all.groups(range); });
    i32 at = over_threads_before</*kMax=*/false>(s.warp_values, mine);
    visit_sequences(all, first, last, reached, [&](const QueryRange& range, i32 request) {
        for (i32 query = range.begin; query < range.end; query += p.group_queries) {
            write_group(all, range, query, request, at++);
        }
    });
    if (threadIdx.x == kScheduleThreads - 1) s.num_groups = min(at, p.max_groups);
    __syncthreads();  // the groups are visible to the block
    return s.num_groups;
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
// To the schedule a group is a request of as many tokens as are in its tiles.
struct Groups {
    const DecodeScheduleGroupsParams& p;
    SchedulePoint* schedule;
    i64 max_tokens;
    i32 b, num_splits, merge_cost, piece_cost;

    MLA_DEVICE Groups(const DecodeScheduleGroupsParams& p, i32 num_groups)
        : p(p),
          schedule(p.schedule),
          max_tokens(p.max_tokens),
          b(num_groups),
          num_splits(p.num_splits),
          merge_cost(p.merge_cost),
          piece_cost(p.piece_cost) {}
    MLA_DEVICE u32 tokens(i32 group) const {
        const QueryGroup& of = p.groups[group];
        return of.tokens - of.first_token / kTileTokens * kTileTokens;
    }
};

extern "C" __global__ void __launch_bounds__(kScheduleThreads, 1)
    mla_decode_schedule_groups(const __grid_constant__ DecodeScheduleGroupsParams p) {
    __shared__ ScheduleStorage s;
    __shared__ GroupStorage groups;
    griddepcontrol_wait();
    write_schedule(Groups(p, write_groups(p, groups)), s);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::decode
