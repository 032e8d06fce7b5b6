// Words in global memory that other blocks, other GPUs or the host write while a kernel runs, and the clock that bounds
// the wait for them.
#pragma once
#include "common/types.cuh"

namespace mla {
// The writer's stores before its release are visible after a load that returns the released value.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
MLA_DEVICE u64 load_acquire_system(const u64* from) {
    u64 x;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
    return x;
}

MLA_DEVICE u32 load_relaxed_system(const u32* from) {
    u32 x;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

// Publishes everything that this thread wrote, or observed through a barrier, before it.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
MLA_DEVICE void store_release_system(u64* to, u64 x) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}

MLA_DEVICE void store_relaxed_system(u64* to, u64 x) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-atom
MLA_DEVICE u32 atom_add_acq_rel(u32* to, u32 x) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(x) : "memory");
    return before;
}

MLA_DEVICE u32 atom_exchange_relaxed(u32* at, u32 x) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(x) : "memory");
    return before;
}

// Nanoseconds; its resolution is about a microsecond.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-globaltimer
MLA_DEVICE u64 globaltimer() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}
}  // namespace mla
