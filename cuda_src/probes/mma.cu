// Self-test: the result of tcgen05.mma on two operands in shared memory, and the cells of tensor memory that hold it.
//
//   D[M x N] (+)= A[M x K] B[N x K]^T, K = 16 steps (32 of e4m3), once or twice (a second product from operands of its
//   own)
//
// One block, two warpgroups. `read` (warps 0..3) fills a window of tensor memory, so that cells that no product writes
// are known; one thread of `issue` (warp 4) issues the products; `read` dumps all 128 lanes of the window.
//
//   all     | operands to shared memory |
//   read    |                           | fill |             | dump
//   issue   |                           |      | mma, commit |
//
// Shapes, majors and positions are parameters, since they are operands of the instruction; its descriptors are built by
// the functions that the kernels use.
#include "common/facts.cuh"
#include "common/limits.cuh"
#include "ptx/control.cuh"
#include "ptx/fp8.cuh"
#include "tile/matrix_desc.cuh"
#include "tile/ring.cuh"
#include "tile/tmem_window.cuh"

namespace mla::probes {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr bool kWeightStationary = MLA_WEIGHT_STATIONARY;
MLA_DEVICE constexpr i32 element_bytes(float8_e4m3fn) { return 1; }
template <class Wide>
MLA_DEVICE constexpr i32 element_bytes(Wide) {
    return 2;
}
constexpr i32 kElementBytes = element_bytes(Element{});
constexpr i32 kStepK = kMmaK * 2 / kElementBytes;
static_assert(!kWeightStationary || kElementBytes == 2, "no kernel multiplies e4m3 in the weight-stationary form");

// ---- Budget ----------------------------------------------------------------------------------------------------
// role    warps   regs   does
// read    0..3    152    fills and dumps tensor memory
// issue   4..7     40    warp 4: allocates; one thread of it multiplies
constexpr i32 kThreads = 2 * kWarpgroupThreads;
constexpr i32 kRegistersAtLaunch = 128;
// Enough blocks per SM for setmaxnreg to have an effect.
constexpr i32 kBlocksForRegisters = kRegsOfSm / kRegistersAtLaunch / kThreads;
constexpr i32 kIssueWarp = 4;
constexpr i32 kRegsRead = 152, kRegsIssue = 40;
static_assert(kRegsRead + kRegsIssue <= 2 * kRegistersAtLaunch, "registers of the block");
constexpr i32 kProducts = 2;
constexpr i32 kOperandBytes = 32768;  // 256 rows of 64, or 128 of 128
constexpr i32 kChunkBytes = 16;

// ---- Params ----------------------------------------------------------------------------------------------------
struct Product {
    i32 m, n;
    i32 a_mn_major, b_mn_major;
    i32 lane, column;  // of D, in the window
    i32 steps;         // of kStepK
    i32 accumulate;    // from the first step on
};
struct ProbeMmaParams {
    const uint4* a[kProducts];  // row-major: (M, K) if K-major, (K, M) if not
    const uint4* b[kProducts];  // (N, K) or (K, N)
    const float* cells;         // (128, 128): initial contents of the window
    float* dump;                // (128, 128): and at last
    Product product[kProducts];
    i32 products;
    i32 window;  // its first column
};
MLA_FACT_LIST(params_layout, MLA_OFFSET(ProbeMmaParams, product), (int)sizeof(ProbeMmaParams));
MLA_FACT(threads, kThreads);
MLA_FACT(window, kWindow);
MLA_FACT_LIST(setmaxnreg, kRegsRead, kRegsIssue);

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier   arrives (count)    carries   waits        first phase
// done      issue (1 commit)   -         all          blocked
struct Storage {
    alignas(kSwizzleAtomBytes) u8 a[kProducts][kOperandBytes];
    u8 b[kProducts][kOperandBytes];
    MBarrier done;
    TmemAddr tmem;
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");
MLA_FACT(smem_bytes, sizeof(Storage));

// A matrix of `columns` columns (whole chunks of 16 bytes) into SW128 tiles.
MLA_DEVICE void copy_to_sw_tiles(u8* sw_tiles, const uint4* from, i32 rows, i32 columns) {
    const i32 chunks = columns * kElementBytes / kChunkBytes;
    for (i32 i = threadIdx.x; i < rows * chunks; i += kThreads) {
        const i32 row = i / chunks, chunk = i % chunks;
        const u32 sw_tile = (u32)(chunk / kSw128Chunks) * rows * kSw128RowBytes;
        *reinterpret_cast<uint4*>(sw_tiles + sw_tile + sw128_offset(row, chunk % kSw128Chunks)) = from[i];
    }
}

MLA_DEVICE void copy_operand(u8* sw_tiles, const uint4* from, i32 mn, i32 k, bool mn_major) {
    copy_to_sw_tiles(sw_tiles, from, mn_major ? k : mn, mn_major ? mn : k);
}

MLA_DEVICE void copy_operands(Storage& s, const ProbeMmaParams& p) {
    for (i32 i = 0; i < p.products; ++i) {
        const Product& x = p.product[i];
        copy_operand(s.a[i], p.a[i], x.m, x.steps * kStepK, x.a_mn_major);
        copy_operand(s.b[i], p.b[i], x.n, x.steps * kStepK, x.b_mn_major);
    }
    fence_proxy_async();
}

// The operand of one step: 32 further bytes of the rows of an SW128 tile, or 16 further rows of all SW128 tiles.
MLA_DEVICE MatrixDesc step_of(const u8* sw_tiles, i32 mn, i32 step, i32 steps, bool mn_major) {
    const SmemAddr start = smem_addr(sw_tiles);
    if (mn_major) {
        const u32 sw_tile_bytes = steps * kMmaK * kSw128RowBytes;
        return advance(mn_major_matrix(start, sw_tile_bytes), step * kMnMajorStepBytes);
    }
    const u32 sw_tile = (u32)(step / kSw128MmaSteps) * mn * kSw128RowBytes;
    return advance(k_major_matrix(start), sw_tile + step % kSw128MmaSteps * kKMajorStepBytes);
}

MLA_DEVICE InstructionDesc shape_of(const Product& x) {
    if constexpr (kElementBytes == 1) {
        return make_e4m3_instruction_desc(x.m, x.n);
    } else {
        return make_instruction_desc<Element>(x.m, x.n, x.a_mn_major ? Major::MN : Major::K,
                                              x.b_mn_major ? Major::MN : Major::K);
    }
}

MLA_DEVICE void multiply(TmemAddr d, MatrixDesc a, MatrixDesc b, InstructionDesc shape, bool accumulate) {
    if constexpr (kElementBytes == 1) {
        tcgen05_mma_f8f6f4(d, a, b, shape, accumulate);
    } else if constexpr (kWeightStationary) {
        tcgen05_mma_ws_f16(d, a, b, shape, accumulate);
    } else {
        tcgen05_mma_f16(d, a, b, shape, accumulate);
    }
}

MLA_DEVICE void issue(Storage& s, const ProbeMmaParams& p, TmemAddr window) {
    for (i32 i = 0; i < p.products; ++i) {
        const Product& x = p.product[i];
        const InstructionDesc shape = shape_of(x);
        const TmemAddr d = window.lane(x.lane).column(x.column);
        for (i32 step = 0; step < x.steps; ++step) {
            const MatrixDesc a = step_of(s.a[i], x.m, step, x.steps, x.a_mn_major);
            const MatrixDesc b = step_of(s.b[i], x.n, step, x.steps, x.b_mn_major);
            multiply(d, a, b, shape, x.accumulate || step > 0);
        }
    }
    tcgen05_commit(s.done);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksForRegisters)
    mla_probes_mma(const __grid_constant__ ProbeMmaParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    griddepcontrol_wait();
    const i32 thread = threadIdx.x, warp = thread / kWarpThreads;
    if (thread == 0) {
        mbarrier_init(s.done, 1);
        fence_mbarrier_init();
    }
    if (warp == kIssueWarp) tcgen05_alloc<kTmemColumns>(s.tmem);
    copy_operands(s, p);
    sync_tensor_memory();

    const TmemAddr tmem = s.tmem, window = tmem.column(p.window);
    const TmemAddr mine = window.lane(warp % 4 * kWarpThreads);
    if (thread < kWarpgroupThreads) {
        setmaxnreg_inc<kRegsRead>();
        fill(mine, p.cells + thread * kWindow);
        sync_tensor_memory();
        mbarrier_wait(s.done, 0);
        tcgen05_fence_after_thread_sync();
        dump(p.dump + thread * kWindow, mine);
    } else {
        setmaxnreg_dec<kRegsIssue>();
        sync_tensor_memory();
        if (warp == kIssueWarp && elect_one()) issue(s, p, window);
        __syncwarp();
    }
    sync_tensor_memory();
    if (warp == kIssueWarp) {
        tcgen05_relinquish_alloc_permit();
        tcgen05_dealloc<kTmemColumns>(tmem);
    }
}
}  // namespace mla::probes
