// Self-test: what TMA puts where. Slabs are 64 rows of 64 columns in the 128-byte swizzle (tile/panel.cuh).
//
//   gather   rows of a matrix by their numbers, four at a time and 512 bytes apart, into a slab (sm_100a)
//   load     a box of 64 columns x 64 heads of one query into a slab
//   store    a slab to such a box
//
// One block. What no copy writes is known before, so that a byte too many shows.
#ifndef MLA_COPY
#error "MLA_COPY must be gather, load or store"
#endif
#include "common/facts.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/gather4.cuh"
#include "tile/panel.cuh"
#include "tile/ring.cuh"

// ---- Variant ---------------------------------------------------------------------------------------------------
enum class Copy { gather, load, store };
constexpr Copy kCopy = Copy::MLA_COPY;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = kWarpgroupThreads;
constexpr u32 kGatherBytes = 4 * kPanelRowBytes;
constexpr i32 kSlabChunks = kPanelBytes / 16;

// ---- Params ----------------------------------------------------------------------------------------------------
struct ProbeCopyParams {
    const int4* rows;  // of each gather
    const uint4* in;   // the slab at first
    uint4* out;        // and at last
    i32 gathers;
    i32 c0, c1, c2;  // of the box; a gather uses c0
};
MLA_FACT_LIST(params_layout, MLA_OFFSET(ProbeCopyParams, gathers), (int)sizeof(ProbeCopyParams));
MLA_FACT(threads, kThreads);

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier   arrives (count)   carries               waits   first phase
// full      thread 0 (1)      what a copy loads     all     blocked
struct Storage {
    alignas(kSwizzleAtomBytes) uint4 slab[kSlabChunks];
    MBarrier full;
};
MLA_FACT(smem_bytes, sizeof(Storage));

MLA_DEVICE void start(Storage& s, const ProbeCopyParams& p, const TensorMap& map) {
    const SmemAddr slab = smem_addr(s.slab);
    if (kCopy == Copy::gather) {
        mbarrier_arrive_expect_tx(s.full, p.gathers * kGatherBytes);
        for (i32 i = 0; i < p.gathers; ++i) {
            cp_async_bulk_tensor_gather4(slab + i * kGatherBytes, map, s.full, p.c0, p.rows[i], kEvictLast);
        }
    } else if (kCopy == Copy::load) {
        mbarrier_arrive_expect_tx(s.full, kPanelBytes);
        cp_async_bulk_tensor_3d(slab, map, s.full, p.c0, p.c1, p.c2, kEvictFirst);
    } else {
        cp_async_bulk_tensor_3d_store(map, slab, p.c0, p.c1, p.c2);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_read();
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_probe_copy_sm100(const __grid_constant__ ProbeCopyParams p, const __grid_constant__ TensorMap map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    griddepcontrol_wait();
    if (threadIdx.x == 0) {
        prefetch_tensormap(map);
        mbarrier_init(s.full, 1);
        fence_mbarrier_init();
    }
    for (i32 i = threadIdx.x; i < kSlabChunks; i += kThreads) s.slab[i] = p.in[i];
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) start(s, p, map);
    if (kCopy != Copy::store) mbarrier_wait(s.full, 0);
    for (i32 i = threadIdx.x; i < kSlabChunks; i += kThreads) p.out[i] = s.slab[i];
}
