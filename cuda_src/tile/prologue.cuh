// The beginning of a kernel that has barriers in shared memory.
#pragma once
#include "ptx/control.cuh"
#include "ptx/copy.cuh"

namespace mla {
// Thread 0 calls `init`, which initialises the barriers, and fetches the tensor maps. Afterwards all threads may use
// the barriers, and read what earlier kernels have written.
template <class Init, class... TensorMaps>
MLA_DEVICE void start_block(Init init, const TensorMaps&... maps) {
    if (threadIdx.x == 0) {
        init();
        (prefetch_tensormap(maps), ...);
    }
    __syncthreads();
    griddepcontrol_wait();
}
}  // namespace mla
