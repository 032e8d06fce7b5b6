// tcgen05: the tensor cores and the tensor memory of Blackwell (sm_100a, sm_103a). One block, no pair
// (`cta_group::1`).
//
// Tensor memory has 128 lanes x 512 columns of 32 bits. Everything here is asynchronous except alloc, commit, the waits
// and the fences. A product is issued by one thread, which must also commit it; loads are issued by whole warps, and
// warp w reaches only lanes 32 (w % 4) to 32 (w % 4) + 31.
#pragma once
#include "ptx/barrier.cuh"
#include "ptx/control.cuh"
#include "ptx/element.cuh"

namespace mla {
// A cell of tensor memory: lane << 16 | column.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tensor-memory
struct TmemAddr {
    u32 value;
    MLA_DEVICE TmemAddr lane(u32 lanes) const { return TmemAddr{value + (lanes << 16)}; }
    MLA_DEVICE TmemAddr column(u32 columns) const { return TmemAddr{value + columns}; }
};

// Descriptors of an operand in shared memory and of a product (tile/matrix_desc.cuh builds them).
struct MatrixDesc {
    u64 bits;
};
struct InstructionDesc {
    u32 bits;
};

// ---- Allocation: one whole warp, the same for all three ----------------------------------------------------------
// Writes the address to shared memory. Blocks until the columns, a power of two from 32 on, are free on the SM.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-memory-alloc-manage-instructions
template <u32 kColumns>
MLA_DEVICE void tcgen05_alloc(TmemAddr& address) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(smem_addr(&address).value),
                 "n"(kColumns)
                 : "memory");
}
MLA_DEVICE void tcgen05_relinquish_alloc_permit() {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}
template <u32 kColumns>
MLA_DEVICE void tcgen05_dealloc(TmemAddr base) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(base.value), "n"(kColumns) : "memory");
}

// ---- Ordering -------------------------------------------------------------------------------------------------------
// Before a thread signals, by a barrier, that its loads or stores of tensor memory are done ...
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-special-sync-operations
MLA_DEVICE void tcgen05_fence_before_thread_sync() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
// ... and after a thread has waited for such a signal.
MLA_DEVICE void tcgen05_fence_after_thread_sync() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// Arrives once all products that this thread has issued are done.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen-async-sync-operations
MLA_DEVICE void tcgen05_commit(MBarrier& barrier) {
    asm volatile(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(smem_addr(&barrier).value)
        : "memory");
}

// Waits for this thread's loads: their registers may be used (see pin_loaded).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-tensor-memory-ld-st
MLA_DEVICE void tcgen05_wait_ld() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
MLA_DEVICE void tcgen05_wait_st() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

// True in the thread of a converged warp that is to issue products, and to commit them.
MLA_DEVICE bool elect_issuer() { return elect_one(); }

// ---- Products ----------------------------------------------------------------------------------------------------
// D[M x N] (+)= A[M x 16] B[16 x N], 16-bit operands in shared memory, fp32 in tensor memory. `accumulate` false
// overwrites D. M = 128 uses all lanes; M = 64 lanes 0 to 15 of every 32, or 16 to 31 if that is D's lane.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-mma-instructions
MLA_DEVICE void tcgen05_mma_f16(TmemAddr d, MatrixDesc a, MatrixDesc b, InstructionDesc shape, bool accumulate) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %4, 0;\n"
        " tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(d.value),
        "l"(a.bits), "l"(b.bits), "r"(shape.bits), "r"((i32)accumulate)
        : "memory");
}

// 8-bit operands: K = 32.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-mma-instructions
MLA_DEVICE void tcgen05_mma_f8f6f4(TmemAddr d, MatrixDesc a, MatrixDesc b, InstructionDesc shape, bool accumulate) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %4, 0;\n"
        " tcgen05.mma.cta_group::1.kind::f8f6f4 [%0], %1, %2, %3, p;\n}" ::"r"(d.value),
        "l"(a.bits), "l"(b.bits), "r"(shape.bits), "r"((i32)accumulate)
        : "memory");
}

// The weight-stationary form. Row r of D is lane r mod M of 128 / M groups of lanes; each group has N M / 128 columns.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-mma-instructions
MLA_DEVICE void tcgen05_mma_ws_f16(TmemAddr d, MatrixDesc a, MatrixDesc b, InstructionDesc shape, bool accumulate) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %4, 0;\n"
        " tcgen05.mma.ws.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(d.value),
        "l"(a.bits), "l"(b.bits), "r"(shape.bits), "r"((i32)accumulate)
        : "memory");
}

// ---- Loads -------------------------------------------------------------------------------------------------------
// 16 lanes x 8 columns per repetition, distributed like wgmma's accumulators (tile/fragment.cuh): r[4 i ...] of lane l
// are lane l / 4, columns 8 i + 2 (l % 4) and the next, then lane l / 4 + 8, the same columns.
// clang-format off
#define MLA_OUT4(r, i) "=f"(r[i]), "=f"(r[i + 1]), "=f"(r[i + 2]), "=f"(r[i + 3])
#define MLA_OUT16(r, i) MLA_OUT4(r, i), MLA_OUT4(r, i + 4), MLA_OUT4(r, i + 8), MLA_OUT4(r, i + 12)
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-tensor-memory-ld-st
MLA_DEVICE void tcgen05_ld_16x256b(float (&r)[4], TmemAddr from) {
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x1.b32 {%0, %1, %2, %3}, [%4];" : MLA_OUT4(r, 0) : "r"(from.value));
}
MLA_DEVICE void tcgen05_ld_16x256b(float (&r)[8], TmemAddr from) {
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x2.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : MLA_OUT4(r, 0), MLA_OUT4(r, 4) : "r"(from.value));
}
MLA_DEVICE void tcgen05_ld_16x256b(float (&r)[16], TmemAddr from) {
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x4.b32 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, [%16];"
                 : MLA_OUT16(r, 0) : "r"(from.value));
}
MLA_DEVICE void tcgen05_ld_16x256b(float (&r)[32], TmemAddr from) {
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x8.b32 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
                 : MLA_OUT16(r, 0), MLA_OUT16(r, 16) : "r"(from.value));
}
// 32 lanes, one per thread: r[i] is column i.
MLA_DEVICE void tcgen05_ld_32x32b(float (&r)[16], TmemAddr from) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x16.b32 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, [%16];"
                 : MLA_OUT16(r, 0) : "r"(from.value));
}
MLA_DEVICE void tcgen05_ld_32x32b(float (&r)[32], TmemAddr from) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
                 : MLA_OUT16(r, 0), MLA_OUT16(r, 16) : "r"(from.value));
}
#undef MLA_OUT4
#undef MLA_OUT16

// ---- Stores: the same shapes ---------------------------------------------------------------------------------------
#define MLA_IN4(r, i) "f"(r[i]), "f"(r[i + 1]), "f"(r[i + 2]), "f"(r[i + 3])
#define MLA_IN16(r, i) MLA_IN4(r, i), MLA_IN4(r, i + 4), MLA_IN4(r, i + 8), MLA_IN4(r, i + 12)
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-tensor-memory-ld-st
MLA_DEVICE void tcgen05_st_16x256b(TmemAddr to, const float (&r)[4]) {
    asm volatile("tcgen05.st.sync.aligned.16x256b.x1.b32 [%0], {%1, %2, %3, %4};" ::"r"(to.value), MLA_IN4(r, 0)
                 : "memory");
}
MLA_DEVICE void tcgen05_st_16x256b(TmemAddr to, const float (&r)[8]) {
    asm volatile("tcgen05.st.sync.aligned.16x256b.x2.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};"
                 ::"r"(to.value), MLA_IN4(r, 0), MLA_IN4(r, 4) : "memory");
}
MLA_DEVICE void tcgen05_st_16x256b(TmemAddr to, const float (&r)[16]) {
    asm volatile("tcgen05.st.sync.aligned.16x256b.x4.b32 [%0], "
                 "{%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16};"
                 ::"r"(to.value), MLA_IN16(r, 0) : "memory");
}
MLA_DEVICE void tcgen05_st_16x256b(TmemAddr to, const float (&r)[32]) {
    asm volatile("tcgen05.st.sync.aligned.16x256b.x8.b32 [%0], "
                 "{%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
                 "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32};"
                 ::"r"(to.value), MLA_IN16(r, 0), MLA_IN16(r, 16) : "memory");
}
MLA_DEVICE void tcgen05_st_32x32b(TmemAddr to, const float (&r)[16]) {
    asm volatile("tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], "
                 "{%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16};"
                 ::"r"(to.value), MLA_IN16(r, 0) : "memory");
}
MLA_DEVICE void tcgen05_st_32x32b(TmemAddr to, const float (&r)[32]) {
    asm volatile("tcgen05.st.sync.aligned.32x32b.x32.b32 [%0], "
                 "{%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
                 "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32};"
                 ::"r"(to.value), MLA_IN16(r, 0), MLA_IN16(r, 16) : "memory");
}
#undef MLA_IN4
#undef MLA_IN16
// clang-format on

// Keeps the compiler from using loaded registers before this point: it cannot know that they arrive with the wait.
template <i32 kCount>
MLA_DEVICE void pin_loaded(float (&r)[kCount]) {
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
}  // namespace mla
