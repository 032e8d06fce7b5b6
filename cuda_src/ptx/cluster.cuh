// Blocks of a cluster: each other's shared memory and barriers.
#pragma once
#include "ptx/barrier.cuh"

// A byte address in the shared memory of any block of the cluster, as PTX takes it.
struct ClusterAddr {
    u32 value;
    MLA_DEVICE ClusterAddr operator+(u32 bytes) const { return ClusterAddr{value + bytes}; }
};

MLA_DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The same place in the block of that rank.
MLA_DEVICE ClusterAddr map_to_rank(SmemAddr here, u32 rank) {
    ClusterAddr there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there.value) : "r"(here.value), "r"(rank));
    return there;
}

// All threads of all blocks of the cluster.
MLA_DEVICE void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

// Says that this thread has read something; data for the other block travels with st_async or a bulk copy, and is
// counted when it is there. (With cluster scope, the compiler would wait for all of the thread's accesses to global
// memory, too.)
MLA_DEVICE void mbarrier_arrive(ClusterAddr barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier.value) : "memory");
}

// Stores 16 bytes and counts them on a barrier of the same block.
MLA_DEVICE void st_async_v4(ClusterAddr to, float x, float y, float z, float w, ClusterAddr barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            to.value),
        "f"(x), "f"(y), "f"(z), "f"(w), "r"(barrier.value)
        : "memory");
}

// Copies `bytes`, a multiple of 16, and counts them on a barrier of the block that gets them.
MLA_DEVICE void cp_async_bulk_to_cluster(ClusterAddr to, SmemAddr from, u32 bytes, ClusterAddr barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to.value),
        "r"(from.value), "r"(bytes), "r"(barrier.value)
        : "memory");
}
