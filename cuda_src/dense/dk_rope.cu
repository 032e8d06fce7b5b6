// The gradient of the keys' last columns that all heads share (dense/dk_rope.cuh).
//
// Grid: x = keys, 16 lanes each.
#include "dense/dk_rope.cuh"
#include "ptx/control.cuh"

namespace mla::dense {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;

MLA_PREFILL_BACKWARD_FACTS();
MLA_FACT(threads, kDkRopeThreads);
MLA_FACT(keys_per_block, kDkRopeBlockKeys);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kDkRopeThreads)
    mla_dense_dk_rope(const __grid_constant__ PrefillBackwardParams p) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    convert_dk_rope<Element>(p, blockIdx.x, threadIdx.x);
}
}  // namespace mla::dense
