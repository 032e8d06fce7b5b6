// Merges the partial results of all ranks of a context-parallel decode, in one launch per rank.
//
// Every rank has attended with all heads to its share of the tokens, and needs the result of its share of the heads. So
// rank r sends each other rank p its results of p's heads, and merges what it receives for its own heads, in the order
// of the ranks. Where the decode has split a request, this kernel also merges the pieces: it replaces the decode's
// combine and sends the results to the other ranks' memory at once.
//
// Grid: x = blocks, the same number on every rank; block i moves and merges the same slices of rows on all of them, so
// it waits for the blocks i of the other ranks alone. y = ranks that run in this launch: 1; more only where one GPU
// plays several, which requires all blocks to be resident. A block is two teams, each working on a slice.
//
//   push          slices of the other ranks' heads, merged from their pieces, into these ranks' slabs (over NVLink)
//   signal        one flag per rank, released at system scope: pushed data is visible to whoever acquires the flag
//   own slice     merged from its pieces, while flags and slices travel
//   wait          until the flags of all ranks have arrived, or the time is over
//   merge         the own slices and those in this rank's slabs
//
// There are two halves of slabs and flags. Calls alternate between them by an epoch in device memory, so that replays
// of a graph alternate as well. A rank pushes its call n + 2 only after its call n + 1 has heard from everyone, and no
// rank signals call n + 1 before having merged call n: no further message is needed to know that the half is free.
//
// Stores into peers' memory followed by flags are the idea of one-shot all-reduce kernels.
#include "common/facts.cuh"
#include "merge/exchange_flags.cuh"
#include "merge/local_slices.cuh"
#include "ptx/control.cuh"
#include "ptx/element.cuh"

namespace mla::merge {
using Element = MLA_DTYPE;
#ifdef MLA_DEBUG
constexpr bool kDebug = true;
#else
constexpr bool kDebug = false;
#endif

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kTeams = kThreads / kTeamThreads;
constexpr i32 kBlocksPerSm = 2;
constexpr i32 kMaxWorld = 128;  // one thread signals, and waits for, one rank
static_assert(kMaxWorld < kThreads, "a thread for each rank, and one that ends the call");

MLA_FACT_LIST(params_layout, MLA_OFFSET(MergeExchangeParams, outs_stride_r_elems),
              MLA_OFFSET(MergeExchangeParams, world), MLA_OFFSET(MergeExchangeParams, to_log2),
              (int)sizeof(MergeExchangeParams));
MLA_FACT(threads, kThreads);
MLA_FACT(teams, kTeams);
MLA_FACT(blocks_per_sm, kBlocksPerSm);
MLA_FACT(max_blocks, kMaxBlocks);
MLA_FACT(max_splits, kMaxSplits);
MLA_FACT(max_world, kMaxWorld);
MLA_FACT(chunk_bytes, kChunkBytes);
MLA_FACT(state_bytes, sizeof(State));
MLA_FACT(report_bytes, sizeof(Report));

struct Storage {
    Mailbox mailboxes[kMaxWorld];
    SchedulePoint schedule[kMaxSplits + 1];
    Team teams[kTeams];
};

// ---- Functions -------------------------------------------------------------------------------------------------
// Reads only data older than the preceding kernels: addresses, and the schedule, for which the attention kernel waited
// before it let this kernel start.
MLA_DEVICE void prepare(const MergeExchangeParams& p, Storage& s) {
    if (threadIdx.x < p.world) s.mailboxes[threadIdx.x] = p.mailboxes[threadIdx.x];
    if (p.schedule == nullptr) return;
#pragma unroll 1
    for (i32 i = threadIdx.x; i <= p.num_splits; i += kThreads) {
        s.schedule[i] = p.schedule[blockIdx.y * p.schedule_stride_r + i];
    }
}

MLA_DEVICE i32 element_bytes(const MergeExchangeParams& p) { return p.outs_are_fp32 ? 4 : 2; }

// `owner`'s copy of a slice sent by `source`.
MLA_DEVICE u8* record(const MergeExchangeParams& p, const Member& m, i32 owner, i32 source, const SlicePlace& at) {
    const i32 row_bytes = p.d * element_bytes(p) + p.slices * kChunkBytes;
    return m.mailboxes[owner].slabs + (m.half() * p.world + source) * p.slab_bytes + (i64)at.row * row_bytes +
           at.slice * (p.slice_columns * element_bytes(p) + kChunkBytes);
}

// The log-sum-exp lies behind the slice.
MLA_DEVICE float* lse_of(const MergeExchangeParams& p, const SlicePlace& at, u8* record) {
    return reinterpret_cast<float*>(record + at.columns * element_bytes(p));
}

MLA_DEVICE void push_slice(const MergeExchangeParams& p, const Member& m, i32 owner, const SlicePlace& at,
                           const Slice& mine) {
    const i32 thread = threadIdx.x % kTeamThreads;
    u8* to = record(p, m, owner, m.rank, at);
    if (at.has_column()) write_elements4<Element>(to, 4 * thread, mine.x, p.outs_are_fp32);
    if (thread == 0) *lse_of(p, at, to) = mine.lse2;
}

// A sum of states that goes on.
struct Total {
    Floats4 x{};
    float max_lse = negative_infinity(), sum = 0.f;

    MLA_DEVICE void add(const Slice& state) {
        if (state.lse2 == negative_infinity()) return;  // an empty state's output has no meaning
        const float before = max_lse;
        max_lse = fmaxf(max_lse, state.lse2);
        const float shrink = exp2f(before - max_lse), weight = exp2f(state.lse2 - max_lse);
        sum = fmaf(sum, shrink, weight);
#pragma unroll
        for (float& element : x.x) element *= shrink;
        add_weighted(x, state.x, weight);
    }
};

// A slice of each rank, in the order of the ranks; NaN where not all have come.
MLA_DEVICE Total total_of(const MergeExchangeParams& p, const Member& m, const SlicePlace& at, const Slice& mine,
                          bool complete) {
    Total total;
    total.sum = complete ? 0.f : __int_as_float(0x7fffffff);
#pragma unroll 1
    for (i32 source = 0; complete && source < p.world; ++source) {
        Slice state = mine;
        if (source != m.rank) {
            u8* from = record(p, m, m.rank, source, at);
            state.lse2 = *lse_of(p, at, from);
            state.x = read_elements4<Element>(from, 4 * (threadIdx.x % kTeamThreads), p.outs_are_fp32);
        }
        total.add(state);
    }
    return total;
}

MLA_DEVICE void finish_slice(const MergeExchangeParams& p, const Member& m, const SlicePlace& at, const Slice& mine,
                             bool complete) {
    if (!at.has_column()) return;
    const Total total = total_of(p, m, at, mine, complete);
    const float factor = total.sum == 0.f ? 0.f : 1.f / total.sum;
    const i32 head = at.row % p.heads;
    const i64 y = rank_in_grid();
    const i64 to = y * p.out_stride_r_elems + at.b * p.out_stride_b_elems + at.s * p.out_stride_s_elems +
                   head * p.out_stride_h_elems + at.column();
#pragma unroll
    for (i32 i = 0; i < 4; ++i) write_element<Element>(p.out, to + i, total.x.x[i] * factor, p.out_is_fp32);
    if (at.column() != 0) return;
    p.lse[y * p.lse_stride_r_elems + at.b * p.lse_stride_b_elems + head * p.lse_stride_h_elems +
          at.s * p.lse_stride_s_elems] = callers_lse(p.lse_convention, total_lse2(total.max_lse, total.sum));
}

// All slices of this block, first the other ranks' heads, beginning with the next rank, so that not all ranks send to
// the same one.
MLA_DEVICE void exchange(const MergeExchangeParams& p, const Member& m, Storage& s) {
    const i32 team = threadIdx.x / kTeamThreads, units = p.b * p.s_q * p.heads * p.slices;
    bool sent = false, complete = false, heard = false;
#pragma unroll 1
    for (i32 step = 1; step <= p.world; ++step) {
        const i32 owner = (m.rank + step) % p.world;
        if (owner == m.rank) sent = signal(p, m);
#pragma unroll 1
        for (i32 base = blockIdx.x * kTeams; base < units; base += gridDim.x * kTeams) {
            const bool active = base + team < units;  // else the team keeps the others company, at the barriers
            i32 unit = active ? base + team : base;
            const Slice mine = local_slice<Element>(p, s.teams[team], s.schedule, SlicePlace(p, unit, owner));
            opaque(unit);
            const SlicePlace at(p, unit, owner);  // anew, to save registers
            if (owner != m.rank) {
                if (active && !m.failed) push_slice(p, m, owner, at, mine);
                continue;
            }
            if (!heard) {
                if (threadIdx.x == kThreads - 1) end_call(p, m);  // while others wait
                complete = sent && hear<kDebug>(p, m);
            }
            heard = true;
            if (active) finish_slice(p, m, at, mine, complete);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    mla_merge_exchange(const __grid_constant__ MergeExchangeParams p) {
    __shared__ Storage s;
    prepare(p, s);
    __syncthreads();
    griddepcontrol_wait();
    const Member m = member(p, s.mailboxes);
    exchange(p, m, s);
}
}  // namespace mla::merge
