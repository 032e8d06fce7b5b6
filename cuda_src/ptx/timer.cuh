// Clocks, and where a block runs.
#pragma once
#include "common/types.cuh"

namespace mla {
// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-clock
// Cycles of the SM, modulo 2^32. Not moved across other volatile instructions.
MLA_DEVICE u32 sm_clock() {
    u32 cycles;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
    return cycles;
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-globaltimer
// Nanoseconds, the same on all SMs, in steps of 32 or more.
MLA_DEVICE u64 global_timer() {
    u64 nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds)::"memory");
    return nanoseconds;
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-smid
MLA_DEVICE u32 sm_id() {
    u32 id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}
}  // namespace mla
