// Starts of packed sequences, from the segment ids of queries and keys, for dense/schedule.cu.
//
// Tokens of one id are contiguous; ids of 0 and below are padding. Segment n of the queries is sequence 3 n + 2, with
// the keys of the same id. The two sequences before it are the padding before its queries, without keys, and the keys
// before its own, without queries.
//
// Grid: one block. Ids are hostile: whatever they are, starts never decrease, and all writes stay inside the arrays.
#include "common/facts.cuh"
#include "ptx/control.cuh"
#include "tile/warp.cuh"

namespace mla::dense {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 512;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kParts = 3;  // sequences of a segment

// ---- Parameters ------------------------------------------------------------------------------------------------
struct Run {
    i32 id, begin, end;  // id 0: there is no such segment
};

struct SegmentsParams {
    const i32* segment_ids_q;   // (s_q,)
    const i32* segment_ids_kv;  // (s_kv,), if keys have separate ids
    i32* cu_seqlens_q;          // (3 * max_segments + 1,)
    i32* cu_seqlens_kv;
    Run* runs;  // runs of the queries; with ids of keys also the keys' runs, then the matching ones: 3 * max_segments
    i64 segment_ids_q_stride_elems, segment_ids_kv_stride_elems;
    i64 cu_seqlens_q_stride_elems, cu_seqlens_kv_stride_elems;
    i32 s_q, s_kv, max_segments;
    i32 keys_have_ids;
};

// ---- Storage ---------------------------------------------------------------------------------------------------
struct Storage {
    i32 warp_sums[kWarps];
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(SegmentsParams, segment_ids_q_stride_elems), MLA_OFFSET(SegmentsParams, s_q),
              (int)sizeof(SegmentsParams));
MLA_FACT(threads, kThreads);
MLA_FACT(parts, kParts);
MLA_FACT(run_bytes, sizeof(Run));

// ---- Runs ------------------------------------------------------------------------------------------------------
struct Ids {
    const i32* ids;
    i64 stride;
    i32 count;

    MLA_DEVICE i32 operator[](i32 i) const { return i < 0 || i >= count ? 0 : ids[i * stride]; }
};

// The sum over the threads before this one.
MLA_DEVICE i32 sum_before(Storage& s, i32 x, i32 thread) {
    const i32 lane = thread % kWarpThreads, warp = thread / kWarpThreads;
    const i32 up_to = warp_inclusive_sum(x);
    __syncthreads();  // somebody may still read the last call's data
    if (lane == kWarpThreads - 1) s.warp_sums[warp] = up_to;
    __syncthreads();
    i32 before = 0;
    for (i32 i = 0; i < warp; ++i) before += s.warp_sums[i];
    return before + up_to - x;
}

// A thread has neighbouring tokens: it counts the runs that begin there, then numbers them.
MLA_DEVICE void find_runs(const Ids& ids, Run* runs, i32 max_segments, Storage& s, i32 thread) {
    for (i32 i = thread; i < max_segments; i += kThreads) runs[i] = Run{0, 0, 0};
    const i32 each = ceil_div(ids.count, kThreads), first = min(ids.count, thread * each);
    const i32 last = min(ids.count, first + each);
    i32 begun = 0;
    for (i32 i = first; i < last; ++i) begun += ids[i] > 0 && ids[i] != ids[i - 1];
    i32 number = sum_before(s, begun, thread) - 1;  // number of the token's run
    for (i32 i = first; i < last; ++i) {
        const i32 id = ids[i];
        if (id <= 0) continue;
        if (id != ids[i - 1]) ++number;
        if (number >= max_segments) break;
        if (id != ids[i - 1]) runs[number].id = id, runs[number].begin = i;
        if (id != ids[i + 1]) runs[number].end = i + 1;
    }
    __syncthreads();
}

// The first of the runs that has this id; an empty one if none has.
MLA_DEVICE Run run_of(const Run* runs, i32 max_segments, i32 id) {
    for (i32 i = 0; i < max_segments && runs[i].id != 0; ++i) {
        if (runs[i].id == id) return runs[i];
    }
    return Run{0, 0, 0};
}

// ---- Starts ----------------------------------------------------------------------------------------------------
// The largest value over the lanes up to this one, and `before`.
MLA_DEVICE i32 inclusive_max(i32 x, i32 before, i32 lane) {
    x = max(x, before);
#pragma unroll
    for (i32 step = 1; step < kWarpThreads; step *= 2) {
        const i32 other = __shfl_up_sync(kFullWarp, x, step);
        if (lane >= step) x = max(x, other);
    }
    return x;
}

struct Starts {
    i32* starts;
    i64 stride;

    MLA_DEVICE void put(i32 at, i32 start) const { starts[at * stride] = start; }
};

// Start and end of a segment, at or after the end of every earlier one; by one warp, 32 segments at a time.
struct Side {
    i32 before, begin, end;

    MLA_DEVICE Side(const Run& run, i32 carried, i32 lane) {
        end = inclusive_max(run.end, carried, lane);
        const i32 left = __shfl_up_sync(kFullWarp, end, 1);
        before = lane == 0 ? carried : left;
        begin = run.id == 0 ? end : max(before, run.begin);
    }
};

MLA_DEVICE void write_starts(const SegmentsParams& p, const Run* keys, i32 lane) {
    const Starts of_queries{p.cu_seqlens_q, p.cu_seqlens_q_stride_elems};
    const Starts of_keys{p.cu_seqlens_kv, p.cu_seqlens_kv_stride_elems};
    i32 end = 0, key_end = 0;
    for (i32 first = 0; first < p.max_segments; first += kWarpThreads) {
        const i32 n = first + lane;
        const bool there = n < p.max_segments;
        const Side query(there ? p.runs[n] : Run{0, 0, 0}, end, lane);
        const Side key(there ? keys[n] : Run{0, 0, 0}, key_end, lane);
        if (there) {
            of_queries.put(kParts * n, query.before);
            of_queries.put(kParts * n + 1, query.begin);
            of_queries.put(kParts * n + 2, query.begin);
            of_keys.put(kParts * n, key.before);
            of_keys.put(kParts * n + 1, key.before);
            of_keys.put(kParts * n + 2, key.begin);
        }
        end = __shfl_sync(kFullWarp, query.end, kWarpThreads - 1);
        key_end = __shfl_sync(kFullWarp, key.end, kWarpThreads - 1);
    }
    if (lane != 0) return;
    of_queries.put(kParts * p.max_segments, end);
    of_keys.put(kParts * p.max_segments, key_end);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) mla_dense_segments(const __grid_constant__ SegmentsParams p) {
    __shared__ Storage s;
    const i32 thread = threadIdx.x;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    find_runs(Ids{p.segment_ids_q, p.segment_ids_q_stride_elems, p.s_q}, p.runs, p.max_segments, s, thread);
    Run* keys = p.runs;
    if (p.keys_have_ids) {
        const Run* all = p.runs + p.max_segments;
        find_runs(Ids{p.segment_ids_kv, p.segment_ids_kv_stride_elems, p.s_kv}, p.runs + p.max_segments, p.max_segments,
                  s, thread);
        keys = p.runs + 2 * p.max_segments;
        for (i32 i = thread; i < p.max_segments; i += kThreads) keys[i] = run_of(all, p.max_segments, p.runs[i].id);
        __syncthreads();
    }
    if (thread < kWarpThreads) write_starts(p, keys, thread);
}
}  // namespace mla::dense
