// Builds the mask of dense attention (dense/mask.cuh) in which each query sees the keys selected by its indices.
//
// Indices count from the first of all keys, or from the first of the query's sequence. They are hostile: an index that
// is not a key of the sequence, or has no bit in the mask, is skipped. Sequences are as in dense/schedule.cu: starts
// never decrease.
//
// Grid: x = queries, y = windows of the mask's rows. A block sets the bits in shared memory, four neighbouring indices
// per thread at a time: ascending ones often share a word.
#include "common/facts.cuh"
#include "ptx/control.cuh"

namespace mla::dense {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kWindowWords = 2048, kWindowKeys = 32 * kWindowWords;
constexpr i32 kEntries = 4;  // of a thread at a time

// ---- Parameters ------------------------------------------------------------------------------------------------
struct MaskParams {
    const i32* indices;        // (s_q, topk)
    const i32* cu_seqlens_q;   // (b + 1,), or null: one sequence
    const i32* cu_seqlens_kv;  // (b + 1,), or null
    u8* mask;                  // (s_q, mask_bytes); rows start at, and step by, multiples of 16 bytes
    i64 indices_stride_s_elems, indices_stride_k_elems;
    i64 cu_seqlens_q_stride_elems, cu_seqlens_kv_stride_elems;
    i64 mask_stride_bytes;
    i32 topk, b;
    i32 mask_bytes;  // a multiple of 16
    i32 relative;    // indices count from the first of the sequence
    i32 aligned;     // rows of indices start at, and step by, multiples of 16 bytes, without gaps
};

// ---- Storage ---------------------------------------------------------------------------------------------------
struct Storage {
    alignas(16) u32 words[kWindowWords];
    i32 next_sequence, start, end;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(MaskParams, indices_stride_s_elems), MLA_OFFSET(MaskParams, topk),
              (int)sizeof(MaskParams));
MLA_FACT(threads, kThreads);
MLA_FACT(window_bytes, 4 * kWindowWords);

// ---- Which keys count ------------------------------------------------------------------------------------------
// Keys of a query's sequence; empty for a query of no sequence.
struct Keys {
    i32 start, count;
};

// Called by all threads. A start is at most as large as a query if no start up to it is larger.
MLA_DEVICE Keys find_keys(const MaskParams& p, Storage& s, i32 query) {
    if (p.cu_seqlens_q == nullptr) return Keys{0, 8 * p.mask_bytes};
    if (threadIdx.x == 0) s.next_sequence = p.b + 1, s.start = 0, s.end = 0;
    __syncthreads();
    for (i32 n = threadIdx.x; n <= p.b; n += kThreads) {
        if (p.cu_seqlens_q[n * p.cu_seqlens_q_stride_elems] <= query) continue;
        atomicMin(&s.next_sequence, n);
        break;
    }
    __syncthreads();
    const i32 next = s.next_sequence;
    if (next == 0 || next > p.b) return Keys{0, 0};
    for (i32 n = threadIdx.x; n <= next; n += kThreads) {
        const i32 start = p.cu_seqlens_kv[n * p.cu_seqlens_kv_stride_elems];
        if (n < next) atomicMax(&s.start, start);
        atomicMax(&s.end, start);
    }
    __syncthreads();
    return Keys{s.start, s.end - s.start};
}

// ---- Setting bits ----------------------------------------------------------------------------------------------
// Entries from `first` on; -1 past the last.
MLA_DEVICE void load_entries(const MaskParams& p, const i32* row, i32 first, i32 (&entries)[kEntries]) {
    if (p.aligned && first + kEntries <= p.topk) {
        const int4 four = *reinterpret_cast<const int4*>(row + first);
        entries[0] = four.x, entries[1] = four.y, entries[2] = four.z, entries[3] = four.w;
        return;
    }
#pragma unroll
    for (i32 i = 0; i < kEntries; ++i) {
        entries[i] = first + i < p.topk ? row[(first + i) * p.indices_stride_k_elems] : -1;
    }
}

MLA_DEVICE void set_bits(const MaskParams& p, Storage& s, const Keys& keys, i32 window,
                         const i32 (&entries)[kEntries]) {
    i32 word = 0;
    u32 bits = 0;  // of that word
#pragma unroll
    for (i32 i = 0; i < kEntries; ++i) {
        const u32 key = entries[i] - (p.relative ? 0u : (u32)keys.start);
        const u32 at = key - (u32)window * kWindowKeys;
        if (entries[i] < 0 || key >= (u32)keys.count || at >= (u32)kWindowKeys) continue;
        if ((i32)(at / 32) != word) {
            if (bits != 0) atomicOr(&s.words[word], bits);
            word = at / 32;
            bits = 0;
        }
        bits |= 1u << at % 32;
    }
    if (bits != 0) atomicOr(&s.words[word], bits);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) mla_dense_mask(const __grid_constant__ MaskParams p) {
    __shared__ Storage s;
    const i32 query = blockIdx.x, window = blockIdx.y;
    const i32 chunks = min(kWindowWords, p.mask_bytes / 4 - window * kWindowWords) / 4;
    uint4* staged = reinterpret_cast<uint4*>(s.words);
    for (i32 i = threadIdx.x; i < chunks; i += kThreads) staged[i] = make_uint4(0, 0, 0, 0);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const Keys keys = find_keys(p, s, query);
    __syncthreads();
    const i32* row = p.indices + query * p.indices_stride_s_elems;
    for (i64 first = kEntries * threadIdx.x; first < p.topk; first += kEntries * kThreads) {
        i32 entries[kEntries];
        load_entries(p, row, (i32)first, entries);
        set_bits(p, s, keys, window, entries);
    }
    __syncthreads();
    uint4* to = reinterpret_cast<uint4*>(p.mask + query * p.mask_stride_bytes + (i64)window * 4 * kWindowWords);
    for (i32 i = threadIdx.x; i < chunks; i += kThreads) to[i] = staged[i];
}
}  // namespace mla::dense
