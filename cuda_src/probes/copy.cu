// Self-test: the placement of TMA copies. Slabs are 64 rows of 64 columns in the 128-byte swizzle (tile/sw128.cuh).
//
//   gather   rows of a matrix by index, four at a time and 512 bytes apart, into an SW128 tile (sm_100a)
//   load     a box of 64 columns x 64 heads of one query into an SW128 tile
//   store    an SW128 tile to such a box
//
// One block. Bytes outside the copies have known contents, so that an excess byte shows.
#include "common/facts.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/gather4.cuh"
#include "tile/ring.cuh"
#include "tile/sw128.cuh"

namespace mla::probes {
// ---- Variant ---------------------------------------------------------------------------------------------------
enum class Copy { gather, load, store };
constexpr Copy kCopy = Copy::MLA_COPY;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = kWarpgroupThreads;
constexpr u32 kGatherBytes = 4 * kSw128RowBytes;
constexpr i32 kSwTileChunks = kSw128Bytes / 16;

// ---- Params ----------------------------------------------------------------------------------------------------
struct ProbeCopyParams {
    const int4* rows;  // of each gather
    const uint4* in;   // the SW128 tile at first
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
    alignas(kSwizzleAtomBytes) uint4 sw_tile[kSwTileChunks];
    MBarrier full;
};
MLA_FACT(smem_bytes, sizeof(Storage));

MLA_DEVICE void start(Storage& s, const ProbeCopyParams& p, const TensorMap& map) {
    const SmemAddr sw_tile = smem_addr(s.sw_tile);
    if (kCopy == Copy::gather) {
        mbarrier_arrive_expect_tx(s.full, p.gathers * kGatherBytes);
        for (i32 i = 0; i < p.gathers; ++i) {
            cp_async_bulk_tensor_gather4(sw_tile + i * kGatherBytes, map, s.full, p.c0, p.rows[i], kEvictLast);
        }
    } else if (kCopy == Copy::load) {
        mbarrier_arrive_expect_tx(s.full, kSw128Bytes);
        cp_async_bulk_tensor_3d(sw_tile, map, s.full, p.c0, p.c1, p.c2, kEvictFirst);
    } else {
        cp_async_bulk_tensor_3d_store(map, sw_tile, p.c0, p.c1, p.c2);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_read();
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_probes_copy(const __grid_constant__ ProbeCopyParams p, const __grid_constant__ TensorMap map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    griddepcontrol_wait();
    if (threadIdx.x == 0) {
        prefetch_tensormap(map);
        mbarrier_init(s.full, 1);
        fence_mbarrier_init();
    }
    for (i32 i = threadIdx.x; i < kSwTileChunks; i += kThreads) s.sw_tile[i] = p.in[i];
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) start(s, p, map);
    if (kCopy != Copy::store) mbarrier_wait(s.full, 0);
    for (i32 i = threadIdx.x; i < kSwTileChunks; i += kThreads) p.out[i] = s.sw_tile[i];
}
}  // namespace mla::probes
