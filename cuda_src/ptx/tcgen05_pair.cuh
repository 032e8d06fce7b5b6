// tcgen05 by a pair of blocks (`cta_group::2`): the first block of a two-block cluster issues products over both. A
// kernel that uses these uses none of ptx/tcgen05.cuh's products, commits and allocations.
//
// In a product with M = 128 each block has half of the rows of A and of D, and half of the columns of B, at the same
// places in its shared memory and in its tensor memory. D's row r of a block is lane r in the first half of the
// columns, and lane 64 + r in the second, in N / 2 columns of tensor memory.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/copy.cuh"
#include "ptx/tcgen05.cuh"

namespace mla {
constexpr u32 kPairBlocks = 2;
constexpr u32 kPairLeader = 0;  // the rank of the block that issues products

// ---- Allocation: one whole warp of each block --------------------------------------------------------------------
// Returns once both blocks' warps have called it.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-memory-alloc-manage-instructions
template <u32 kColumns>
MLA_DEVICE void tcgen05_pair_alloc(TmemAddr& address) {
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(smem_addr(&address).value),
                 "n"(kColumns)
                 : "memory");
}
MLA_DEVICE void tcgen05_pair_relinquish_alloc_permit() {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
}
template <u32 kColumns>
MLA_DEVICE void tcgen05_pair_dealloc(TmemAddr base) {
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(base.value), "n"(kColumns) : "memory");
}

// ---- Products: one thread of the first block -----------------------------------------------------------------------
// D[M x N] (+)= A[M x 16] B[16 x N], 16-bit operands in the shared memory of both blocks, fp32 in their tensor memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-mma-instructions
MLA_DEVICE void tcgen05_pair_mma_f16(TmemAddr d, MatrixDesc a, MatrixDesc b, InstructionDesc shape, bool accumulate) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %4, 0;\n"
        " tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(d.value),
        "l"(a.bits), "l"(b.bits), "r"(shape.bits), "r"((i32)accumulate)
        : "memory");
}

// Arrives at this place in both blocks once all products that this thread has issued are done.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen-async-sync-operations
MLA_DEVICE void tcgen05_pair_commit(MBarrier& barrier) {
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
            smem_addr(&barrier).value),
        "h"((u16)((1 << kPairBlocks) - 1))
        : "memory");
}

// ---- Signals to the first block ------------------------------------------------------------------------------------
// Arrives at a barrier of any block of the cluster; the thread's accesses before it are done for whoever waits for it
// there by mbarrier_wait_cluster.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-arrive
MLA_DEVICE void mbarrier_arrive_cluster(ClusterAddr barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier.value) : "memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait
MLA_DEVICE void mbarrier_wait_cluster(MBarrier& barrier, u32 parity) {
    u32 done = 0;
    while (done == 0) {
        asm volatile(
            "{\n .reg .pred complete;\n"
            " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%1], %2;\n"
            " selp.u32 %0, 1, 0, complete;\n}"
            : "=r"(done)
            : "r"(smem_addr(&barrier).value), "r"(parity)
            : "memory");
    }
}

// ---- Copies into this block, whose bytes a barrier of either block of the pair counts ------------------------------
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
MLA_DEVICE void cp_async_bulk_tensor_pair_3d(SmemAddr to, const TensorMap& map, ClusterAddr full, i32 c0, i32 c1,
                                             i32 c2, u64 l2_policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to.value),
        "l"(&map), "r"(full.value), "r"(c0), "r"(c1), "r"(c2), "l"(l2_policy)
        : "memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
MLA_DEVICE void cp_async_bulk_tensor_pair_4d(SmemAddr to, const TensorMap& map, ClusterAddr full, i32 c0, i32 c1,
                                             i32 c2, i32 c3, u64 l2_policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to.value),
        "l"(&map), "r"(full.value), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(l2_policy)
        : "memory");
}

// Four rows of a matrix: see cp_async_bulk_tensor_gather4.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
MLA_DEVICE void cp_async_bulk_tensor_pair_gather4(SmemAddr to, const TensorMap& map, ClusterAddr full, i32 column,
                                                  const int4& rows, u64 l2_policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes.cta_group::2"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to.value),
        "l"(&map), "r"(full.value), "r"(column), "r"(rows.x), "r"(rows.y), "r"(rows.z), "r"(rows.w), "l"(l2_policy)
        : "memory");
}
}  // namespace mla
