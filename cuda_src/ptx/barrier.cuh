// Barriers: mbarriers in shared memory, named barriers of the block, and the fences that go with them.
#pragma once
#include "common/types.cuh"

namespace mla {
// One arrival barrier. Declared in a kernel's Storage; used through its address.
struct alignas(8) MBarrier {
    u64 state;
};
constexpr u32 kMaxArrivals = (1u << 20) - 1;  // the largest count of a phase

// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-init
MLA_DEVICE void mbarrier_init(MBarrier& barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(&barrier).value), "r"(count) : "memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-arrive
MLA_DEVICE void mbarrier_arrive(MBarrier& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(&barrier).value) : "memory");
}

MLA_DEVICE void mbarrier_arrive_expect_tx(MBarrier& barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(&barrier).value), "r"(bytes)
                 : "memory");
}

// True once the phase of this parity has completed. A fresh barrier answers true for parity 1.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait
MLA_DEVICE bool mbarrier_try_wait_parity(MBarrier& barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n .reg .pred complete;\n"
#if __CUDA_ARCH__ >= 900
        " mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
#else  // does not suspend the thread
        " mbarrier.test_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
#endif
        " selp.u32 %0, 1, 0, complete;\n}"
        : "=r"(done)
        : "r"(smem_addr(&barrier).value), "r"(parity)
        : "memory");
    return done != 0;
}

// Makes freshly initialised mbarriers visible to the asynchronous units of the cluster.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-membar
MLA_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Orders this thread's ordinary shared-memory accesses before later ones of the tensor cores and bulk copies.
MLA_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
MLA_DEVICE void bar_sync(i32 id, i32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
MLA_DEVICE void bar_arrive(i32 id, i32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
}  // namespace mla
