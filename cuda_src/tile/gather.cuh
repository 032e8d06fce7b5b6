// Gathers scattered rows into the SW128 tiles of a tile, by one warpgroup with cp.async. Absent rows become zeros.
//
// Eight lanes fetch the 128 bytes of a row within an SW128 tile, and a thread copies four neighbouring rows, so that
// their indices come as one 16-byte word. The copies are generic-proxy writes: see fence_proxy_async.
#pragma once
#include "ptx/copy.cuh"
#include "tile/sw128.cuh"

namespace mla {
constexpr i32 kGatherThreads = kWarpgroupThreads;
constexpr i32 kRowsPerThread = 4;
static_assert(kGatherThreads / kSw128Chunks * kRowsPerThread == kSw128Rows, "each row has its eight lanes");

// Tuning parameters of the copies. Rows of kv are selected many times, a query's row is read once.
constexpr i32 kFetchBytes = 256;
constexpr u64 kKvPolicy = kEvictLast;
constexpr u64 kQueryPolicy = kEvictFirst;

struct alignas(16) RowNumbers {
    i32 of[kRowsPerThread];
};

MLA_DEVICE i32 first_row_of(i32 thread) { return thread / kSw128Chunks * kRowsPerThread; }

// `list` points to the tile's rows in a list.
MLA_DEVICE RowNumbers read_row_numbers(const i32* list, i32 thread) {
    return *reinterpret_cast<const RowNumbers*>(list + first_row_of(thread));
}

// Addresses of a thread's chunk of its four rows, in their first SW128 tile.
struct RowSources {
    const u16* from[kRowsPerThread];
    bool present[kRowsPerThread];
};

// Rows of a matrix by index; those outside [0, count) are absent.
MLA_DEVICE RowSources rows_by_number(const u16* matrix, i64 stride_elems, i32 count, const RowNumbers& numbers,
                                     i32 thread) {
    RowSources rows;
#pragma unroll
    for (i32 i = 0; i < kRowsPerThread; ++i) {
        rows.present[i] = (u32)numbers.of[i] < (u32)count;
        rows.from[i] = matrix + (rows.present[i] ? numbers.of[i] * stride_elems : 0) + thread % kSw128Chunks * 8;
    }
    return rows;
}

// Starts the copy of one SW128 tile of all 64 rows.
MLA_DEVICE void gather_sw_tile(SmemAddr tile, const RowSources& rows, i32 sw_tile, u64 l2_policy, i32 thread) {
#pragma unroll
    for (i32 i = 0; i < kRowsPerThread; ++i) {
        const u32 to = sw_tile * kSw128Bytes + sw128_offset(first_row_of(thread) + i, thread % kSw128Chunks);
        cp_async_16<kFetchBytes>(tile + to, rows.from[i] + sw_tile * kSw128Columns, rows.present[i], l2_policy);
    }
}

// Arrives on `full` when the copies that this warpgroup has started are done. Those arrivals are ordered after the
// copies only; thread 0 adds a plain arrive so that its earlier waits are released, too.
constexpr i32 kGatherArrivals = kGatherThreads + 1;

MLA_DEVICE void arrive_when_gathered(MBarrier& full, i32 thread) {
    cp_async_mbarrier_arrive_noinc(full);
    if (thread == 0) mbarrier_arrive(full);
}

// Brings the rows into L2.
MLA_DEVICE void prefetch_rows(const RowSources& rows, i32 sw_tiles, i32 thread) {
    const i32 chunk = thread % kSw128Chunks;
#pragma unroll
    for (i32 i = 0; i < kRowsPerThread; ++i) {
        if (!rows.present[i]) continue;
        for (i32 sw_tile = chunk; sw_tile < sw_tiles; sw_tile += kSw128Chunks) {
            prefetch_global_l2(rows.from[i] + (sw_tile * kSw128Columns - chunk * 8));
        }
    }
}
}  // namespace mla
