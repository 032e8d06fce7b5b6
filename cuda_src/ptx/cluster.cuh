// Distributed shared memory: the shared memory and barriers of other blocks of the cluster.
#pragma once
#include "ptx/barrier.cuh"

namespace mla {
// A byte address in the shared memory of any block of the cluster, the operand type of PTX.
struct ClusterAddr {
    u32 value;
    MLA_DEVICE ClusterAddr operator+(u32 bytes) const { return ClusterAddr{value + bytes}; }
};

// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-cluster-ctarank
MLA_DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The address `here` in the block of that rank.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-mapa
MLA_DEVICE ClusterAddr map_to_rank(SmemAddr here, u32 rank) {
    ClusterAddr remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote.value) : "r"(here.value), "r"(rank));
    return remote;
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
MLA_DEVICE u32 ld_shared_cluster(ClusterAddr from) {
    u32 x;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(from.value) : "memory");
    return x;
}

MLA_DEVICE u64 ld_shared_cluster_u64(ClusterAddr from) {
    u64 x;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(x) : "r"(from.value) : "memory");
    return x;
}

MLA_DEVICE float ld_shared_cluster_f32(ClusterAddr from) {
    float x;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(from.value) : "memory");
    return x;
}

MLA_DEVICE float4 ld_shared_cluster_v4(ClusterAddr from) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(from.value)
                 : "memory");
    return x;
}

// Stores 8 bytes, visible to threads that have waited for a later barrier of the cluster.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
MLA_DEVICE void st_shared_cluster_v2(ClusterAddr to, uint2 x) {
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(to.value), "r"(x.x), "r"(x.y) : "memory");
}

// The two halves of cluster_sync, called by all threads of all blocks: a thread's accesses before its arrival are
// complete for every thread that has waited.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster
MLA_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// Orders no accesses: it only shows that the block runs. (The other form waits for all of the thread's accesses.)
MLA_DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
MLA_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// All threads of all blocks of the cluster.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster
MLA_DEVICE void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

// Remote arrive, used to release buffers that this thread has read; data for the peer goes by st_async or a bulk copy,
// which complete on a barrier there. (With an explicit cluster scope, the compiler would also wait for all of the
// thread's accesses to global memory.)
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-arrive
MLA_DEVICE void mbarrier_arrive(ClusterAddr barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier.value) : "memory");
}

// Stores 16 bytes to another block; they complete on a barrier of that block.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st-async
MLA_DEVICE void st_async_v4(ClusterAddr to, float x, float y, float z, float w, ClusterAddr barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            to.value),
        "f"(x), "f"(y), "f"(z), "f"(w), "r"(barrier.value)
        : "memory");
}

MLA_DEVICE void st_async_v4(ClusterAddr to, uint4 x, ClusterAddr barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            to.value),
        "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(barrier.value)
        : "memory");
}

// Copies `bytes`, a multiple of 16, to another block; they complete on a barrier of that block.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk
MLA_DEVICE void cp_async_bulk_to_cluster(ClusterAddr to, SmemAddr from, u32 bytes, ClusterAddr barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to.value),
        "r"(from.value), "r"(bytes), "r"(barrier.value)
        : "memory");
}
}  // namespace mla
