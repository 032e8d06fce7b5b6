// The slots of tokens that lie one after another in their sequences: of a chunk of each, packed.
//
//   sequence n has the positions starts[n] to starts[n] + lengths[n];   first[n] = lengths[0] + ... + lengths[n - 1]
//   slots[first[n] + i] = page * page_size + (starts[n] + i) % page_size,   cu_seqlens[n] = first[n]
//
// Grid: x = blocks of 1024 slots. Each sums the lengths up, 256 sequences at a time, keeps where they end in shared
// memory, and finds the sequence of each of its slots there by bisection: so work is cut evenly, however ragged the
// lengths are. The first block writes `cu_seqlens`.
//
// Everything is read on the device and may be anything: lengths below 0 are 0, sums end at the number of slots, and a
// position without a page in the table or a page outside of the cache has the slot -1.
#include "common/facts.cuh"
#include "ptx/control.cuh"
#include "tile/warp.cuh"

namespace mla::cache {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kTokens = 4;  // of a thread

// ---- Params ----------------------------------------------------------------------------------------------------
struct CacheSlotsParams {
    const i32* block_table;  // (b, max_pages)
    const i32* starts;       // (b,)
    const i32* lengths;      // (b,)
    i32* slots;              // (max_tokens,)
    i32* cu_seqlens;         // (b + 1,)
    i64 block_table_stride_b_elems, block_table_stride_page_elems;
    i64 starts_stride_elems, lengths_stride_elems, slots_stride_elems, cu_seqlens_stride_elems;
    i32 b, max_pages, page_size, num_pages, max_tokens;
};

// ---- Storage ---------------------------------------------------------------------------------------------------
struct Storage {
    i32 ends[kThreads];  // ends of the current sequences
    i64 warp_sums[kWarps];
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(CacheSlotsParams, block_table_stride_b_elems), MLA_OFFSET(CacheSlotsParams, b),
              (int)sizeof(CacheSlotsParams));
MLA_FACT(threads, kThreads);
MLA_FACT(slots_per_block, kThreads* kTokens);

// ---- Parts -----------------------------------------------------------------------------------------------------
// `ends` of the sequences from `first` on, if those before end at `before`; where the last one ends.
MLA_DEVICE i32 find_ends(const CacheSlotsParams& p, Storage& s, i32 first, i32 before) {
    const i32 thread = threadIdx.x, lane = thread % kWarpThreads, warp = thread / kWarpThreads;
    const i32 length = first + thread < p.b ? p.lengths[(i64)(first + thread) * p.lengths_stride_elems] : 0;
    const i64 up_to = warp_inclusive_sum((i64)max(0, length));
    if (lane == kWarpThreads - 1) s.warp_sums[warp] = up_to;
    __syncthreads();
    i64 end = before + up_to;
    for (i32 i = 0; i < warp; ++i) end += s.warp_sums[i];
    s.ends[thread] = (i32)min(end, (i64)p.max_tokens);
    __syncthreads();
    return s.ends[kThreads - 1];
}

// The first of the current sequences that ends after a token.
MLA_DEVICE i32 sequence_of(const Storage& s, i32 token) {
    i32 low = 0, high = kThreads - 1;
    while (low < high) {
        const i32 middle = (low + high) / 2;
        if (s.ends[middle] > token) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

MLA_DEVICE i32 slot_of(const CacheSlotsParams& p, i32 sequence, i32 token) {
    const i64 position = (i64)p.starts[sequence * p.starts_stride_elems] + token;
    const i64 column = position / p.page_size;
    if (position < 0 || column >= p.max_pages) return -1;
    const i64 entry = sequence * p.block_table_stride_b_elems + column * p.block_table_stride_page_elems;
    const i32 page = p.block_table[entry];
    return (u32)page < (u32)p.num_pages ? page * p.page_size + (i32)(position % p.page_size) : -1;
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) mla_cache_slots(const __grid_constant__ CacheSlotsParams p) {
    __shared__ Storage s;
    griddepcontrol_wait();
    const i32 thread = threadIdx.x;
    const i64 block = (i64)blockIdx.x * (kThreads * kTokens) + thread;
    i32 slots[kTokens], before = 0;
#pragma unroll
    for (i32& slot : slots) slot = -1;
    if (block == 0) p.cu_seqlens[0] = 0;
    for (i32 first = 0; first < p.b; first += kThreads) {
        const i32 end = find_ends(p, s, first, before);
#pragma unroll
        for (i32 i = 0; i < kTokens; ++i) {
            const i64 token = block + i * kThreads;
            if (token < before || token >= end) continue;
            const i32 n = sequence_of(s, (i32)token), begin = n == 0 ? before : s.ends[n - 1];
            slots[i] = slot_of(p, first + n, (i32)token - begin);
        }
        if (blockIdx.x == 0 && first + thread < p.b) {
            p.cu_seqlens[(i64)(first + thread + 1) * p.cu_seqlens_stride_elems] = s.ends[thread];
        }
        before = end;
    }
#pragma unroll
    for (i32 i = 0; i < kTokens; ++i) {
        const i64 token = block + i * kThreads;
        if (token < p.max_tokens) p.slots[token * p.slots_stride_elems] = slots[i];
    }
}
}  // namespace mla::cache
