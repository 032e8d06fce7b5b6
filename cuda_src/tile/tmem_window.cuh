// A window of tensor memory, all lanes x 128 columns, written and read unchanged: for kernels that test products and
// loads.
#pragma once
#include "ptx/tcgen05.cuh"

namespace mla {
constexpr i32 kWindow = 128;
constexpr i32 kPiece = 32;  // columns that a thread moves at a time

// All threads: orders earlier accesses to tensor memory before later ones.
MLA_DEVICE void sync_tensor_memory() {
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    tcgen05_fence_after_thread_sync();
}

// A thread's lane of the window, by the warps of one warpgroup.
MLA_DEVICE void fill(TmemAddr window, const float* row) {
    for (i32 column = 0; column < kWindow; column += kPiece) {
        float r[kPiece];
#pragma unroll
        for (i32 i = 0; i < kPiece; ++i) r[i] = row[column + i];
        tcgen05_st_32x32b(window.column(column), r);
    }
    tcgen05_wait_st();
}

MLA_DEVICE void dump(float* row, TmemAddr window) {
    for (i32 column = 0; column < kWindow; column += kPiece) {
        float r[kPiece];
        tcgen05_ld_32x32b(r, window.column(column));
        tcgen05_wait_ld();
        pin_loaded(r);
#pragma unroll
        for (i32 i = 0; i < kPiece; ++i) row[column + i] = r[i];
    }
}
}  // namespace mla
