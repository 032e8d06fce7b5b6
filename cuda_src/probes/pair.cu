// Self-test: the result of a product that a pair of blocks makes together (`cta_group::2`, M = 128), and the cells of
// both blocks' tensor memory that hold it.
//
//   D[128 x N] (+)= A[128 x 64] B[N x 64]^T, or B[64 x N]
//
// Clusters of two blocks. Each stores its 64 rows of A, and gathers its half of B by TMA: 64 rows of a matrix (N =
// 128), or half of the columns of 64 rows (N = 256). The first block's barriers count the bytes and the arrivals of
// both, and one thread of it issues. `read` (warps 0..3) fills a window of tensor memory first, and dumps it at last.
//
//   all     |        | A to shared memory |
//   read    | fill   |                    |             | dump
//   issue   |        | gather B           | mma, commit |
#include "common/facts.cuh"
#include "common/limits.cuh"
#include "ptx/control.cuh"
#include "ptx/tcgen05_pair.cuh"
#include "tile/matrix_desc.cuh"
#include "tile/ring.cuh"
#include "tile/tmem_window.cuh"

namespace mla::probes {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kIssueWarp = 4, kWarps = 5, kThreads = kWarps * kWarpThreads;
constexpr i32 kRows = 64;        // of A and D in each block; of B's gathers
constexpr i32 kMaxSwTilesB = 2;  // of each block
constexpr u32 kGatherBytes = 4 * kSw128RowBytes;

// ---- Params ----------------------------------------------------------------------------------------------------
struct ProbePairParams {
    const uint4* a;      // (128, 64)
    const int4* rows;    // of B's matrix, four at a time: 128 if N = 128, else 64
    const float* cells;  // (128, 128): initial contents of each block's window
    float* dump;         // (2, 128, 128): and at last
    i32 n;               // 128: B is K-major; 256: N-major
    i32 accumulate;      // from the first step on
    i32 window;          // its first column
};
MLA_FACT_LIST(params_layout, MLA_OFFSET(ProbePairParams, n), (int)sizeof(ProbePairParams));
MLA_FACT(threads, kThreads);
MLA_FACT(window, kWindow);
MLA_FACT(cluster, kPairBlocks);

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier   arrives (count)              carries          waits         first phase
// full      issue of the first (1)       B of both        issue, first  blocked
// ready     warps of both (2 x 5)        A of both        issue, first  blocked
// done      commit (1)                   -                read          blocked
struct Storage {
    alignas(kSwizzleAtomBytes) u8 a[kSw128Bytes];
    u8 b[kMaxSwTilesB][kSw128Bytes];
    MBarrier full, ready, done;
    TmemAddr tmem;
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");
MLA_FACT(smem_bytes, sizeof(Storage));

MLA_DEVICE void store_a(Storage& s, const ProbePairParams& p, i32 rank) {
    for (i32 i = threadIdx.x; i < kRows * kSw128Chunks; i += kThreads) {
        const i32 row = i / kSw128Chunks, chunk = i % kSw128Chunks;
        *reinterpret_cast<uint4*>(s.a + sw128_offset(row, chunk)) = p.a[rank * kRows * kSw128Chunks + i];
    }
    fence_proxy_async();
    tcgen05_fence_before_thread_sync();
    __syncwarp();
    if (threadIdx.x % kWarpThreads == 0) mbarrier_arrive_cluster(map_to_rank(smem_addr(&s.ready), kPairLeader));
}

MLA_DEVICE void gather_b(Storage& s, const ProbePairParams& p, const TensorMap& map, i32 rank) {
    const bool wide = p.n > kPairBlocks * kRows;
    const i32 sw_tiles = p.n / (i32)kPairBlocks / kSw128Columns, gathers = kRows / 4;
    const i32 first = wide ? 0 : rank * gathers, column = wide ? rank * sw_tiles * kSw128Columns : 0;
    const ClusterAddr full = map_to_rank(smem_addr(&s.full), kPairLeader);
    if (rank == kPairLeader) mbarrier_arrive_expect_tx(s.full, kPairBlocks * sw_tiles * kSw128Bytes);
    for (i32 sw_tile = 0; sw_tile < sw_tiles; ++sw_tile) {
        for (i32 i = 0; i < gathers; ++i) {
            cp_async_bulk_tensor_pair_gather4(smem_addr(s.b[sw_tile]) + i * kGatherBytes, map, full,
                                              column + sw_tile * kSw128Columns, p.rows[first + i], kEvictLast);
        }
    }
}

MLA_DEVICE void issue(Storage& s, const ProbePairParams& p, TmemAddr window) {
    const bool wide = p.n > kPairBlocks * kRows;
    mbarrier_wait_cluster(s.ready, 0);
    mbarrier_wait(s.full, 0);
    tcgen05_fence_after_thread_sync();
    const InstructionDesc shape =
        make_instruction_desc<Element>(kPairBlocks * kRows, p.n, Major::K, wide ? Major::MN : Major::K);
    const MatrixDesc a = k_major_matrix(smem_addr(s.a));
    const MatrixDesc b = wide ? mn_major_matrix(smem_addr(s.b), kSw128Bytes) : k_major_matrix(smem_addr(s.b));
    for (i32 step = 0; step < kSw128MmaSteps; ++step) {
        tcgen05_pair_mma_f16(window, advance(a, step * kKMajorStepBytes),
                             advance(b, step * (wide ? kMnMajorStepBytes : kKMajorStepBytes)), shape,
                             p.accumulate || step > 0);
    }
    tcgen05_pair_commit(s.done);
}

MLA_DEVICE void sync_pair() {
    tcgen05_fence_before_thread_sync();
    cluster_sync();
    tcgen05_fence_after_thread_sync();
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_probes_pair(const __grid_constant__ ProbePairParams p, const __grid_constant__ TensorMap map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    griddepcontrol_wait();
    const i32 thread = threadIdx.x, warp = thread / kWarpThreads, rank = (i32)cluster_rank();
    if (thread == 0) {
        mbarrier_init(s.full, 1);
        mbarrier_init(s.ready, kPairBlocks * kWarps);
        mbarrier_init(s.done, 1);
        fence_mbarrier_init();
    }
    if (warp == kIssueWarp) tcgen05_pair_alloc<kTmemColumns>(s.tmem);
    sync_pair();
    const TmemAddr tmem = s.tmem, window = tmem.column(p.window);
    const TmemAddr mine = window.lane(warp % 4 * kWarpThreads);
    if (warp < kIssueWarp) {
        fill(mine, p.cells + thread * kWindow);
        store_a(s, p, rank);
        mbarrier_wait(s.done, 0);
        tcgen05_fence_after_thread_sync();
        dump(p.dump + (rank * kWarpgroupThreads + thread) * kWindow, mine);
    } else {
        store_a(s, p, rank);
        if (elect_one()) {
            gather_b(s, p, map, rank);
            if (rank == kPairLeader) issue(s, p, window);
        }
        __syncwarp();
    }
    sync_pair();
    if (warp == kIssueWarp) {
        tcgen05_pair_relinquish_alloc_permit();
        tcgen05_pair_dealloc<kTmemColumns>(tmem);
    }
}
}  // namespace mla::probes
