// Launch and register control.
#pragma once
#include "common/types.cuh"

namespace mla {
// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg
template <i32 kRegisters>
MLA_DEVICE void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <i32 kRegisters>
MLA_DEVICE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Programmatic dependent launch. Both do nothing when the kernel was launched without it, or before sm_90.
// Waits until the preceding kernels of the stream have completed and their writes are visible.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
MLA_DEVICE void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start its own prologue.
MLA_DEVICE void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// True in blocks that may start before the preceding kernels are done. Prefetches of later blocks come too late.
MLA_DEVICE bool may_be_early() { return __CUDA_ARCH__ >= 900 && blockIdx.x < 512; }

// True in one lane of a converged warp, the same one each time.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-elect-sync
MLA_DEVICE bool elect_one() {
    u32 elected;
    asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(elected)::"memory");
    return elected != 0;
}

// The lane, reread at each call: values derived from it need no register across a loop.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-laneid
MLA_DEVICE i32 own_lane() {
    i32 lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    __builtin_assume(lane >= 0 && lane < kWarpThreads);
    return lane;
}

// The blocks along the grid's first dimension, read anew at each call, too.
MLA_DEVICE i32 num_blocks() {
    i32 blocks;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
    return blocks;
}

// Hides the value of `x` from the compiler: values derived from it are recomputed after this point instead of being
// kept in registers across a loop.
MLA_DEVICE void opaque(u64& x) { asm volatile("" : "+l"(x)); }
MLA_DEVICE void opaque(i32& x) { asm volatile("" : "+r"(x)); }

// An address in shared memory that is not to be computed again.
MLA_DEVICE SmemAddr held(SmemAddr address) {
    i32 value = (i32)address.value;
    opaque(value);
    return SmemAddr{(u32)value};
}

// Shared memory with its address pinned in a register. Otherwise the compiler rereads the start of the block's window
// from a special register, in the loops, too, and waits for it.
MLA_DEVICE void* held_shared(void* memory) {
    i32 address = (i32)__cvta_generic_to_shared(memory);
    opaque(address);
    return __cvta_shared_to_generic((u32)address);
}
}  // namespace mla
