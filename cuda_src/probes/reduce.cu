// Self-test: additions to global memory, by many threads of several blocks to the same words.
//
//   sums[group] += values[thread] for every thread that is wanted; group = thread % groups
//
// MLA_WIDTH 4 and 2 are the vectors of floats that the sparse backward adds, 1 an i32.
#include "common/facts.cuh"
#include "ptx/control.cuh"
#include "ptx/reduce.cuh"

namespace mla::probes {
// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr i32 kWidth = MLA_WIDTH;
static_assert(kWidth == 1 || kWidth == 2 || kWidth == 4, "a width of ptx/reduce.cuh");

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;

// ---- Params ----------------------------------------------------------------------------------------------------
struct ProbeReduceParams {
    const float* values;  // (threads of the grid, kWidth)
    const i32* wanted;    // (threads of the grid,)
    void* sums;           // (groups, kWidth) floats, or i32 if kWidth is 1
    i32 groups;
    i32 padding;
};
MLA_FACT_LIST(params_layout, MLA_OFFSET(ProbeReduceParams, groups), (int)sizeof(ProbeReduceParams));
MLA_FACT(threads, kThreads);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) mla_probes_reduce(const __grid_constant__ ProbeReduceParams p) {
    griddepcontrol_wait();
    const i32 thread = blockIdx.x * kThreads + threadIdx.x, wanted = p.wanted[thread];
    const float* x = p.values + thread * kWidth;
    float* to = reinterpret_cast<float*>(p.sums) + thread % p.groups * kWidth;
    if (kWidth == 4) {
        red_add_v4(to, x[0], x[1], x[2], x[3], wanted);
    } else if (kWidth == 2) {
        red_add_v2(to, x[0], x[1], wanted);
    } else if (wanted) {
        red_add(reinterpret_cast<i32*>(to), (i32)x[0]);
    }
}
}  // namespace mla::probes
