// Prefetches a decode kernel's inputs into L2 before the previous kernel has ended.
#pragma once
#include "attention/query_groups.cuh"
#include "ptx/copy.cuh"

namespace mla::attention {
// Lines of memory into L2, one by each thread of the grid, as far as there are threads.
struct LinePrefetch {
    i32 thread;  // less those that have a line

    MLA_DEVICE LinePrefetch() : thread((blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x) {}

    // `address(i)` for i < count.
    template <class Address>
    MLA_DEVICE void lines(i32 count, Address address) {
        if ((u32)thread < (u32)count) prefetch_global_l2(address(thread));
        thread -= count;
    }
};

// Prefetches the data that a kernel reads one after another at its start: schedule, lengths, block table, the first
// kQueryLines lines of each query row, and with kRopeLine its RoPE columns, which may be apart. The previous kernel may
// not have written them yet; they will be in L2 all the same. PERF(H200, 2026-11-22, -0.5 % to -2 % of batches of up to
// 32 sequences with up to 32 rows): no gain with more rows.
template <class Work, i32 kQueryLines, bool kRopeLine = false>
MLA_DEVICE void prefetch_inputs(const DecodeParams& p) {
    constexpr i32 kLineBytes = 128, kWords = kLineBytes / sizeof(i32), kPoints = kLineBytes / sizeof(SchedulePoint);
    LinePrefetch prefetch;
    if (p.schedule != nullptr) {
        prefetch.lines(ceil_div(p.num_splits + 1, kPoints), [&](i32 i) { return p.schedule + i * kPoints; });
    }
    if constexpr (Work::kForms) {  // lengths and queries are where the groups say
        if (forms_of(p).groups != nullptr) return;
    }
    prefetch.lines(ceil_div(p.b, kWords), [&](i32 i) { return p.seqlens + i * kWords * p.seqlens_stride_elems; });
    const i32 table_lines = ceil_div(p.max_pages, kWords);
    prefetch.lines(p.b * table_lines, [&](i32 i) {
        const i32 request = i / table_lines, line = i - request * table_lines;
        return p.block_table + request * p.table_stride_b_elems + line * kWords * p.table_stride_page_elems;
    });
    prefetch.lines(p.b * p.s_q * p.h_q * kQueryLines, [&](i32 i) {
        const i32 row = i / kQueryLines, line = i - row * kQueryLines;
        const i32 token = row / p.h_q, head = row - token * p.h_q, request = token / p.s_q;
        return p.q + request * p.q_stride_b_elems + (token - request * p.s_q) * p.q_stride_s_elems +
               head * p.q_stride_h_elems + line * (kLineBytes / (i32)sizeof(u16));
    });
    if constexpr (kRopeLine) {
        prefetch.lines(p.b * p.s_q * p.h_q, [&](i32 row) {
            const i32 token = row / p.h_q, request = token / p.s_q;
            return split_query_row(p, request, token - request * p.s_q, 0, row - token * p.h_q).rope;
        });
    }
}
}  // namespace mla::attention
