// Asynchronous copies into shared memory: tensor boxes (TMA) and 16-byte pieces (cp.async).
#pragma once
#include "ptx/barrier.cuh"

namespace mla {
// A tensor map as the driver encodes it; passed by value as a __grid_constant__ kernel parameter.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// L2 eviction policies. Evicted first: pages, which each block that needs them reads once ...
constexpr u64 kEvictFirst = 0x12F0000000000000ull;
constexpr u64 kEvictNormal = 0x1000000000000000ull;
// ... evicted last: rows that many queries select.
constexpr u64 kEvictLast = 0x14F0000000000000ull;

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prefetch-prefetchu
MLA_DEVICE void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
MLA_DEVICE void cp_async_bulk_tensor_4d(SmemAddr to, const TensorMap& map, MBarrier& full, i32 c0, i32 c1, i32 c2,
                                        i32 c3, u64 l2_policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to.value),
        "l"(&map), "r"(smem_addr(&full).value), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(l2_policy)
        : "memory");
}

MLA_DEVICE void cp_async_bulk_tensor_5d(SmemAddr to, const TensorMap& map, MBarrier& full, i32 c0, i32 c1, i32 c2,
                                        i32 c3, i32 c4, u64 l2_policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to.value),
        "l"(&map), "r"(smem_addr(&full).value), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(l2_policy)
        : "memory");
}

MLA_DEVICE void cp_async_bulk_tensor_3d(SmemAddr to, const TensorMap& map, MBarrier& full, i32 c0, i32 c1, i32 c2,
                                        u64 l2_policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to.value),
        "l"(&map), "r"(smem_addr(&full).value), "r"(c0), "r"(c1), "r"(c2), "l"(l2_policy)
        : "memory");
}

// `bytes`, a multiple of 16, from and to addresses that are.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk
MLA_DEVICE void cp_async_bulk(SmemAddr to, const void* from, u32 bytes, MBarrier& full) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to.value),
        "l"(from), "r"(bytes), "r"(smem_addr(&full).value)
        : "memory");
}

// A box to global memory; elements outside the tensor are not written.
MLA_DEVICE void cp_async_bulk_tensor_3d_store(const TensorMap& map, SmemAddr from, i32 c0, i32 c1, i32 c2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
                 "r"(from.value), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}

// Adds `bytes`, a multiple of 16, of fp32 numbers to those in global memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-reduce-async-bulk
MLA_DEVICE void cp_reduce_async_bulk_add(float* to, SmemAddr from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(from.value), "r"(bytes)
                 : "memory");
}

// Commits this thread's stores so far as a group; the waits return once all groups are done, or have read shared
// memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-bulk-tensor-copy-completion
MLA_DEVICE void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
MLA_DEVICE void cp_async_bulk_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
MLA_DEVICE void cp_async_bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Copies 16 bytes, or writes 16 zero bytes where `present` is false (the source is then not read).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
MLA_DEVICE void cp_async_16(SmemAddr to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to.value), "l"(from), "r"(present ? 16 : 0)
                 : "memory");
}

// Copies if `due`. Branch-free, so that the compiler can move products past it.
MLA_DEVICE void cp_async_16_if(bool due, SmemAddr to, const void* from, bool present) {
    asm volatile(
        "{\n .reg .pred due;\n"
        " setp.ne.u32 due, %3, 0;\n"
        " @due cp.async.cg.shared.global [%0], [%1], 16, %2;\n}" ::"r"(to.value),
        "l"(from), "r"(present ? 16 : 0), "r"((u32)due)
        : "memory");
}

// Copies 4, 8 or 16 bytes.
template <i32 kBytes>
MLA_DEVICE void cp_async(SmemAddr to, const void* from, bool present) {
    if constexpr (kBytes == 16) return cp_async_16(to, from, present);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to.value), "l"(from), "r"(present ? kBytes : 0),
                 "n"(kBytes)
                 : "memory");
}

// Copies with an L2 policy; an L2 miss fetches kFetchBytes.
template <i32 kFetchBytes>
MLA_DEVICE void cp_async_16(SmemAddr to, const void* from, bool present, u64 l2_policy) {
    static_assert(kFetchBytes == 128 || kFetchBytes == 256, "128 or 256 bytes");
    if (kFetchBytes == 128) {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to.value),
                     "l"(from), "r"(present ? 16 : 0), "l"(l2_policy)
                     : "memory");
    } else {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;" ::"r"(to.value),
                     "l"(from), "r"(present ? 16 : 0), "l"(l2_policy)
                     : "memory");
    }
}

// Arrives once all copies that this thread has started are done; the barrier's count includes each such thread.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-cp-async-mbarrier-arrive
MLA_DEVICE void cp_async_mbarrier_arrive_noinc(MBarrier& barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_addr(&barrier).value) : "memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-wait-group
MLA_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A thread's copies since its last call are a group.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-commit-group
MLA_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all of this thread's groups but the last kPending.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-wait-group
template <i32 kPending>
MLA_DEVICE void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Brings a line into L2.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prefetch-prefetchu
MLA_DEVICE void prefetch_global_l2(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

// Brings `bytes`, a multiple of 16, from an address that is one into L2.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-prefetch
MLA_DEVICE void cp_async_bulk_prefetch_l2(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
}  // namespace mla
