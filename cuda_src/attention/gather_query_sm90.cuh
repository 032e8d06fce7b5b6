// The query rows of a sparse forward block of 64 heads on Hopper.
#pragma once
#include "attention/decode_block_sm90.cuh"
#include "attention/sparse_gather.cuh"

// The block's heads of a query are gathered like a tile of keys; those past the last one become zeros.
struct QueryGather {
    const Block& block;

    MLA_DEVICE RowSources heads(i32 query, i32 thread) const {
        const DenseDecodeParams& p = block.p;
        RowNumbers numbers;
#pragma unroll
        for (i32 i = 0; i < kRowsPerThread; ++i) numbers.of[i] = block.row0 + first_row_of(thread) + i;
        return rows_by_number(p.q + query * p.q_stride_b_elems, p.q_stride_h_elems, p.h_q, numbers, thread);
    }

    MLA_DEVICE void prefetch(i32 query, i32 thread) const { prefetch_rows(heads(query, thread), kPanelsQk, thread); }

    MLA_DEVICE void gather(i32 query, i32 thread) const {
        const RowSources rows = heads(query, thread);
#pragma unroll
        for (i32 i = 0; i < kPanelsQk; ++i) {
            gather_panel(smem_addr(block.s.q), rows, panel_in_order(i), kQueryPolicy, thread);
        }
    }
};
