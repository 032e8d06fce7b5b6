// Copies of scattered rows into the panels of a tile, by one warpgroup with cp.async. Rows that are not there become
// zeros.
//
// Eight lanes fetch the 128 bytes of a row within a panel, and a thread looks after four neighbouring rows, so that
// their numbers come as one 16-byte word. The copies are ordinary writes: see fence_proxy_async.
#pragma once
#include "attention/sparse_params.cuh"
#include "ptx/copy.cuh"
#include "tile/panel.cuh"

constexpr i32 kGatherThreads = kWarpgroupThreads;
constexpr i32 kRowsPerThread = 4;
static_assert(kGatherThreads / kPanelChunks * kRowsPerThread == kPanelRows, "each row has its eight lanes");

// PERF knobs of the copies. Rows of kv are selected again and again, a query's row is read once.
constexpr i32 kFetchBytes = 256;
constexpr u64 kKvPolicy = kEvictLast;
constexpr u64 kQueryPolicy = kEvictFirst;

struct alignas(16) RowNumbers {
    i32 of[kRowsPerThread];
};

MLA_DEVICE i32 first_row_of(i32 thread) { return thread / kPanelChunks * kRowsPerThread; }

// `list` is the tile's part of a list of rows.
MLA_DEVICE RowNumbers read_row_numbers(const i32* list, i32 thread) {
    return *reinterpret_cast<const RowNumbers*>(list + first_row_of(thread));
}

// Where a thread's share of its four rows stands, in their first panel.
struct RowSources {
    const u16* from[kRowsPerThread];
    bool present[kRowsPerThread];
};

// Rows of a matrix by their numbers; those outside [0, count) are not there.
MLA_DEVICE RowSources rows_by_number(const u16* matrix, i64 stride_elems, i32 count, const RowNumbers& numbers,
                                     i32 thread) {
    RowSources rows;
#pragma unroll
    for (i32 i = 0; i < kRowsPerThread; ++i) {
        rows.present[i] = (u32)numbers.of[i] < (u32)count;
        rows.from[i] = matrix + (rows.present[i] ? numbers.of[i] * stride_elems : 0) + thread % kPanelChunks * 8;
    }
    return rows;
}

// Starts the copy of one panel of all 64 rows.
MLA_DEVICE void gather_panel(SmemAddr tile, const RowSources& rows, i32 panel, u64 l2_policy, i32 thread) {
#pragma unroll
    for (i32 i = 0; i < kRowsPerThread; ++i) {
        const u32 to = panel * kPanelBytes + panel_offset(first_row_of(thread) + i, thread % kPanelChunks);
        cp_async_16<kFetchBytes>(tile + to, rows.from[i] + panel * kPanelColumns, rows.present[i], l2_policy);
    }
}

// Announces the copies that this warpgroup has started. They arrive by themselves, and only for themselves: one thread
// also arrives in person, which passes on what it has waited for.
constexpr i32 kGatherArrivals = kGatherThreads + 1;

MLA_DEVICE void arrive_when_gathered(MBarrier& full, i32 thread) {
    cp_async_mbarrier_arrive_noinc(full);
    if (thread == 0) mbarrier_arrive(full);
}

// Brings the rows into L2.
MLA_DEVICE void prefetch_rows(const RowSources& rows, i32 panels, i32 thread) {
    const i32 chunk = thread % kPanelChunks;
#pragma unroll
    for (i32 i = 0; i < kRowsPerThread; ++i) {
        if (!rows.present[i]) continue;
        for (i32 panel = chunk; panel < panels; panel += kPanelChunks) {
            prefetch_global_l2(rows.from[i] + (panel * kPanelColumns - chunk * 8));
        }
    }
}
