// Copies of 16 bytes from global to shared memory: asynchronous, or by the thread itself before compute capability 8.0.
#pragma once
#include "common/types.cuh"
#include "ptx/copy.cuh"

namespace mla {
MLA_DEVICE void copy_16(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    cp_async_16(smem_addr(to), from, true);
#else
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#endif
}

MLA_DEVICE void commit_copies() {
#if __CUDA_ARCH__ >= 800
    cp_async_commit_group();
#endif
}

// Waits for the thread's own copies, except for the last kPending commits.
template <i32 kPending>
MLA_DEVICE void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    cp_async_wait_group<kPending>();
#endif
}

// Also for those that are not committed.
MLA_DEVICE void wait_for_all_copies() {
#if __CUDA_ARCH__ >= 800
    cp_async_wait_all();
#endif
}
}  // namespace mla
