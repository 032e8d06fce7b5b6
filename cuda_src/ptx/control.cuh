// Launch and register control.
#pragma once
#include "common/types.cuh"

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

// True in one lane of a converged warp, the same one each time.
MLA_DEVICE bool elect_one() {
    u32 elected;
    asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(elected)::"memory");
    return elected != 0;
}

// The compiler may not assume to know `x` from here on: what is computed from it is computed here, and not kept in
// registers across a loop.
MLA_DEVICE void opaque(u64& x) { asm volatile("" : "+l"(x)); }
MLA_DEVICE void opaque(i32& x) { asm volatile("" : "+r"(x)); }
