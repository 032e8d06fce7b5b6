// The beginning of a kernel that has barriers in shared memory.
#pragma once
#include "ptx/control.cuh"
#include "ptx/copy.cuh"

namespace mla {
// Thread 0 initialises the barriers (the kernel's own `init_storage`) and fetches tensor maps. Afterwards all threads
// may use the barriers, and read what earlier kernels have written.
template <class Storage, class... Maps>
MLA_DEVICE void start_block(Storage& s, const Maps&... maps) {
    if (threadIdx.x == 0) {
        init_storage(s);
        (prefetch_tensormap(maps), ...);
    }
    __syncthreads();
    griddepcontrol_wait();
}
}  // namespace mla
