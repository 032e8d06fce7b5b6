// Merges the partial results of all ranks of a context-parallel decode, in one launch per rank.
//
// Every rank has attended with all heads to its share of the tokens, and needs the result of its share of the heads.
// So rank r sends each other rank p the partial outputs and log-sum-exps of p's heads, and merges what it receives for
// its own, in the order of the ranks, as merge/states.cu does.
//
// Grid: x = blocks, the same number on every rank; block i moves and merges the same rows on all of them, so it waits
// for the blocks i of the other ranks alone. y = ranks that run in this launch: 1; more only where one GPU plays
// several, which needs all blocks to be resident.
//
//   push          rows of the other ranks' heads, from the local partial result into their slabs (stores over NVLink)
//   signal        one flag per rank, released at system scope: what was pushed is visible to whom acquires it
//   wait          until the flags of all ranks have come, or the time is over
//   merge         the local rows and those in this rank's slabs
//
// Slabs and flags are there twice. Calls take the two in turn, by an epoch that lives on the device, so that replays of
// a graph do as well. A rank pushes its call n + 2 only after its call n + 1 has heard from everyone, and nobody
// signals call n + 1 before having merged call n: that the half is free needs no further message.
//
// The idea of stores into peers' memory with flags behind them is that of one-shot all-reduce kernels.
#include "common/facts.cuh"
#include "merge/state.cuh"
#include "ptx/control.cuh"
#include "ptx/element.cuh"
#include "ptx/system.cuh"

namespace mla::merge {
using Element = MLA_DTYPE;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kMaxBlocks = 128;      // resident at once on any GPU that has peers
constexpr i32 kMaxWorld = kThreads;  // one thread signals, and waits for, one rank
constexpr i32 kChunkBytes = 16;      // what a lane copies at a time; also the room for the log-sum-exp behind a row

// ---- Params ----------------------------------------------------------------------------------------------------
// A rank's memory that the others write to, at its address on this GPU.
struct Mailbox {
    u8* slabs;   // [2][world] slabs of slab_bytes: rows, each followed by its log-sum-exp
    u64* flags;  // [2][world][kMaxBlocks]: call << 32 | epoch
};

// A rank's own; zero before the first call.
struct State {
    u32 epoch;    // calls that have ended
    u32 tickets;  // blocks of this call that have ended
    u32 failed;   // set for good by the first wait that fails
    u32 unused;
};

// In the host's memory.
struct Report {
    u64 failure;  // written by the kernel: Failure | rank << 8 | block << 16 | epoch << 32
    u32 abort;    // written by the host: give up waiting
    u32 unused;
};

enum Failure : u32 { kNone = 0, kTimeout = 1, kMismatch = 2, kAborted = 3 };

struct MergeExchangeParams {
    const void* outs;   // (b, s_q, h_q, d), Element or fp32: partial results of all heads
    const float* lses;  // (b, h_q, s_q)
    void* out;          // (b, s_q, h_q / world, d), Element or fp32
    float* lse;         // (b, h_q / world, s_q)
    const Mailbox* mailboxes;
    State* states;
    Report* reports;
    // The first stride of each is that of the ranks in the grid.
    i64 outs_stride_r_elems, outs_stride_b_elems, outs_stride_s_elems, outs_stride_h_elems;
    i64 lses_stride_r_elems, lses_stride_b_elems, lses_stride_h_elems, lses_stride_s_elems;
    i64 out_stride_r_elems, out_stride_b_elems, out_stride_s_elems, out_stride_h_elems;
    i64 lse_stride_r_elems, lse_stride_b_elems, lse_stride_h_elems, lse_stride_s_elems;
    i64 slab_bytes;
    i64 timeout_ns;
    i32 world, rank;
    i32 b, s_q, heads, d;  // heads of one rank
    i32 call;              // a digest of all that must be equal on all ranks
    i32 outs_are_fp32, out_is_fp32;
    float to_log2;     // from the caller's base to base 2
    float lse_factor;  // and back
    float empty_lse;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(MergeExchangeParams, outs_stride_r_elems),
              MLA_OFFSET(MergeExchangeParams, world), MLA_OFFSET(MergeExchangeParams, to_log2),
              (int)sizeof(MergeExchangeParams));
MLA_FACT(threads, kThreads);
MLA_FACT(rows_per_block, kWarps);
MLA_FACT(max_blocks, kMaxBlocks);
MLA_FACT(max_world, kMaxWorld);
MLA_FACT(chunk_bytes, kChunkBytes);
MLA_FACT(state_bytes, sizeof(State));
MLA_FACT(report_bytes, sizeof(Report));

// ---- Functions -------------------------------------------------------------------------------------------------
// One rank of the grid, as its blocks see it.
struct Member {
    i32 rank;
    const u8* outs;
    const float* lses;
    State* state;
    Report* report;
    u32 epoch;
    i32 half;  // of the slabs and flags
};

MLA_DEVICE Member member(const MergeExchangeParams& p) {
    const i32 y = blockIdx.y;
    Member m;
    m.rank = p.rank + y;
    m.outs = static_cast<const u8*>(p.outs) + y * p.outs_stride_r_elems * (p.outs_are_fp32 ? 4 : 2);
    m.lses = p.lses + y * p.lses_stride_r_elems;
    m.state = p.states + y;
    m.report = p.reports + y;
    m.epoch = m.state->epoch + 1;
    m.half = m.epoch & 1;
    return m;
}

MLA_DEVICE i32 row_bytes(const MergeExchangeParams& p) { return p.d * (p.outs_are_fp32 ? 4 : 2); }

// Where `owner` keeps what `source` has sent it of a row.
MLA_DEVICE u8* record(const MergeExchangeParams& p, i32 half, i32 owner, i32 source, i32 row) {
    return p.mailboxes[owner].slabs + (half * p.world + source) * p.slab_bytes +
           (i64)row * (row_bytes(p) + kChunkBytes);
}

MLA_DEVICE u64* flag(const MergeExchangeParams& p, i32 half, i32 owner, i32 source) {
    return p.mailboxes[owner].flags + (half * p.world + source) * kMaxBlocks + blockIdx.x;
}

// A row of a rank's share: b, s and h of it, with h among the rank's heads.
struct Row {
    i32 b, s, h;
};

MLA_DEVICE Row row_of(const MergeExchangeParams& p, i32 row) {
    return {row / p.heads / p.s_q, row / p.heads % p.s_q, row % p.heads};
}

MLA_DEVICE const u8* local_row(const MergeExchangeParams& p, const Member& m, Row at, i32 owner) {
    const i32 h = owner * p.heads + at.h;
    const i64 index = at.b * p.outs_stride_b_elems + at.s * p.outs_stride_s_elems + h * p.outs_stride_h_elems;
    return m.outs + index * (p.outs_are_fp32 ? 4 : 2);
}

MLA_DEVICE float local_lse(const MergeExchangeParams& p, const Member& m, Row at, i32 owner) {
    const i32 h = owner * p.heads + at.h;
    return m.lses[at.b * p.lses_stride_b_elems + h * p.lses_stride_h_elems + at.s * p.lses_stride_s_elems];
}

struct alignas(kChunkBytes) Chunk {
    u32 words[4];
};

// One warp: a row to each of the other ranks, the next one first, so that not all send to the same.
MLA_DEVICE void push_row(const MergeExchangeParams& p, const Member& m, i32 row, i32 lane) {
    const Row at = row_of(p, row);
    const i32 bytes = row_bytes(p);
    for (i32 step = 1; step < p.world; ++step) {
        const i32 owner = (m.rank + step) % p.world;
        const u8* from = local_row(p, m, at, owner);
        u8* to = record(p, m.half, owner, m.rank, row);
        for (i32 offset = lane * kChunkBytes; offset < bytes; offset += kWarpThreads * kChunkBytes) {
            *reinterpret_cast<Chunk*>(to + offset) = *reinterpret_cast<const Chunk*>(from + offset);
        }
        if (lane == 0) *reinterpret_cast<float*>(to + bytes) = local_lse(p, m, at, owner);
    }
}

MLA_DEVICE u64 signal_of(const MergeExchangeParams& p, const Member& m) { return (u64)(u32)p.call << 32 | m.epoch; }

// One thread: until block `blockIdx.x` of `source` has pushed its rows of this call.
MLA_DEVICE Failure wait_for(const MergeExchangeParams& p, const Member& m, i32 source) {
    const u64* from = flag(p, m.half, m.rank, source);
    const u64 start = globaltimer();
    for (u32 polls = 1;; ++polls) {
        const u64 seen = load_acquire_system(from);
        if ((u32)seen == m.epoch) return seen == signal_of(p, m) ? kNone : kMismatch;
        if (polls % 64) continue;
        if (load_relaxed_system(&m.state->failed)) return kAborted;
        if (load_relaxed_system(&m.report->abort)) return kAborted;
        if (globaltimer() - start >= (u64)p.timeout_ns) return kTimeout;
    }
}

// Tells the blocks that still wait and, if nobody has, the host.
MLA_DEVICE void report(const Member& m, Failure failure, i32 source) {
    if (atom_exchange_relaxed(&m.state->failed, 1) != 0) return;
    store_relaxed_system(&m.report->failure,
                         (u64)m.epoch << 32 | (u64)blockIdx.x << 16 | (u64)source << 8 | (u64)failure);
}

// Signals every other rank, and waits for it. Whether all rows have come, the same in all threads.
MLA_DEVICE bool exchange(const MergeExchangeParams& p, const Member& m) {
    const i32 other = threadIdx.x;
    const bool speaks = other < p.world && other != m.rank;
    __syncthreads();  // the block's rows have been written; each release below covers them all
    if (speaks) store_release_system(flag(p, m.half, other, m.rank), signal_of(p, m));
    const Failure failure = speaks ? wait_for(p, m, other) : kNone;
    if (failure != kNone) report(m, failure, other);
    return !__syncthreads_or(failure != kNone);  // each acquire covers the whole block
}

// A row of each rank, in the order of the ranks.
struct Sources {
    const MergeExchangeParams& p;
    const Member& m;
    Row at;
    i32 row;

    MLA_DEVICE const u8* operator[](i32 source) const {
        return source == m.rank ? local_row(p, m, at, m.rank) : record(p, m.half, m.rank, source, row);
    }
    MLA_DEVICE float lse2(i32 source) const {
        const float lse = source == m.rank ? local_lse(p, m, at, m.rank)
                                           : *reinterpret_cast<const float*>((*this)[source] + row_bytes(p));
        return state_lse2(lse, p.to_log2);
    }
};

// One warp.
MLA_DEVICE void merge_row(const MergeExchangeParams& p, const Member& m, i32 row, i32 lane, bool complete) {
    const Row at = row_of(p, row);
    const Sources sources{p, m, at, row};
    float total = __int_as_float(0x7fffffff);  // NaN, for a row that has not come
    if (complete) {
        float max_lse = negative_infinity(), sum = 0.f;
        for (i32 j = 0; j < p.world; ++j) max_lse = fmaxf(max_lse, sources.lse2(j));
        for (i32 j = 0; j < p.world; ++j) {
            const float lse = sources.lse2(j);
            if (lse != negative_infinity()) sum += exp2f(lse - max_lse);
        }
        total = total_lse2(max_lse, sum);
    }
    const i32 y = blockIdx.y;
    const i64 to = y * p.out_stride_r_elems + at.b * p.out_stride_b_elems + at.s * p.out_stride_s_elems +
                   at.h * p.out_stride_h_elems;
    for (i32 column = lane * 4; column < p.d; column += kWarpThreads * 4) {
        const float start = complete ? 0.f : total;
        Floats4 merged{{start, start, start, start}};
#pragma unroll 2
        for (i32 j = 0; j < (complete ? p.world : 0); ++j) {
            const float lse = sources.lse2(j);
            if (lse == negative_infinity()) continue;  // an empty state's output is never read
            const float weight = exp2f(lse - total);
            const Floats4 x = read_elements4<Element>(sources[j], column, p.outs_are_fp32);
#pragma unroll
            for (i32 i = 0; i < 4; ++i) merged.x[i] = fmaf(weight, x.x[i], merged.x[i]);
        }
#pragma unroll
        for (i32 i = 0; i < 4; ++i) write_element<Element>(p.out, to + column + i, merged.x[i], p.out_is_fp32);
    }
    if (lane == 0) {
        p.lse[y * p.lse_stride_r_elems + at.b * p.lse_stride_b_elems + at.h * p.lse_stride_h_elems +
              at.s * p.lse_stride_s_elems] = total == negative_infinity() ? p.empty_lse : total * p.lse_factor;
    }
}

// The last block of a rank ends the call: all of them have read the epoch.
MLA_DEVICE void end_call(const Member& m) {
    __syncthreads();
    if (threadIdx.x != 0 || atom_add_acq_rel(&m.state->tickets, 1) != gridDim.x - 1) return;
    m.state->tickets = 0;
    m.state->epoch = m.epoch;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_merge_exchange(const __grid_constant__ MergeExchangeParams p) {
    griddepcontrol_wait();
    const Member m = member(p);
    const i32 lane = threadIdx.x % kWarpThreads;
    const i32 rows = p.b * p.s_q * p.heads, first = blockIdx.x * kWarps + threadIdx.x / kWarpThreads;
    const i32 step = gridDim.x * kWarps;
    bool complete = false;
    if (!__syncthreads_or(load_relaxed_system(&m.state->failed))) {
        for (i32 row = first; row < rows; row += step) push_row(p, m, row, lane);
        complete = exchange(p, m);
    }
    for (i32 row = first; row < rows; row += step) merge_row(p, m, row, lane, complete);
    end_call(m);
}
}  // namespace mla::merge
