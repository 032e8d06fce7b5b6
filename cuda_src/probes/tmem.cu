// Self-test: which cells of tensor memory one tcgen05.ld and one tcgen05.st access for each register of a warp.
//
// One block. Warps 0..3 fill a window of tensor memory, one lane per thread; warps 0..3 or 4..7 store registers with
// the shape under test, or do not, and load with it; then warps 0..3 read the window. The host compares both with the
// formulas of the shapes.
//
//   warps 0..3   | fill |             | dump
//   group        |      | (st,) ld    |
#include "common/facts.cuh"
#include "common/limits.cuh"
#include "ptx/control.cuh"
#include "tile/tmem_window.cuh"

namespace mla::probes {
// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr i32 kShape = MLA_SHAPE;
constexpr i32 kRegisters = MLA_REGISTERS;
static_assert(kShape == 256 || (kShape == 32 && kRegisters >= 16), "a shape with functions in ptx/tcgen05.cuh");

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 2 * kWarpgroupThreads;

// ---- Params ----------------------------------------------------------------------------------------------------
struct ProbeTmemParams {
    const float* cells;      // (128, 128): initial contents of the window
    const float* registers;  // (4, kRegisters, 32): registers to store
    float* loaded;           // (4, kRegisters, 32): loaded registers
    float* dump;             // (128, 128): final contents of the window
    i32 window;              // its first column
    i32 lane, column;        // start of the shape: in each 32 lanes, and in the window
    i32 group;               // of warps; they use the shape
    i32 store;
    i32 padding;
};
MLA_FACT_LIST(params_layout, MLA_OFFSET(ProbeTmemParams, window), (int)sizeof(ProbeTmemParams));
MLA_FACT(threads, kThreads);
MLA_FACT(window, kWindow);

MLA_DEVICE void store(TmemAddr to, const float (&r)[kRegisters]) {
#if MLA_SHAPE == 256
    tcgen05_st_16x256b(to, r);
#else
    tcgen05_st_32x32b(to, r);
#endif
    tcgen05_wait_st();
}

MLA_DEVICE void load(float (&r)[kRegisters], TmemAddr from) {
#if MLA_SHAPE == 256
    tcgen05_ld_16x256b(r, from);
#else
    tcgen05_ld_32x32b(r, from);
#endif
    tcgen05_wait_ld();
    pin_loaded(r);
}

MLA_DEVICE void use_shape(const ProbeTmemParams& p, TmemAddr at, i32 thread) {
    const i32 first = thread / kWarpThreads * kRegisters * kWarpThreads + thread % kWarpThreads;
    float r[kRegisters];
    if (p.store) {
#pragma unroll
        for (i32 i = 0; i < kRegisters; ++i) r[i] = p.registers[first + i * kWarpThreads];
        store(at, r);
    }
    load(r, at);
#pragma unroll
    for (i32 i = 0; i < kRegisters; ++i) p.loaded[first + i * kWarpThreads] = r[i];
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1) mla_probes_tmem(const __grid_constant__ ProbeTmemParams p) {
    __shared__ TmemAddr address;
    griddepcontrol_wait();
    const i32 thread = threadIdx.x % kWarpgroupThreads, group = threadIdx.x / kWarpgroupThreads;
    const bool allocates = threadIdx.x < kWarpThreads;
    if (allocates) tcgen05_alloc<kTmemColumns>(address);
    sync_tensor_memory();
    const TmemAddr tmem = address;
    const TmemAddr window = tmem.lane(thread / kWarpThreads * kWarpThreads).column(p.window);
    if (group == 0) fill(window, p.cells + thread * kWindow);
    sync_tensor_memory();
    if (group == p.group) use_shape(p, window.lane(p.lane).column(p.column), thread);
    sync_tensor_memory();
    if (group == 0) dump(p.dump + thread * kWindow, window);
    sync_tensor_memory();
    if (allocates) {
        tcgen05_relinquish_alloc_permit();
        tcgen05_dealloc<kTmemColumns>(tmem);
    }
}
}  // namespace mla::probes
