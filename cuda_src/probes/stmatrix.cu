// Self-test: scores in the fragments of 16x256b (and of WGMMA) to an SW128 tile with a row per key, transposed, in 16
// bits, as the sparse backward stores P and dS.
//
// One block of four warps, 16 heads each; a thread has two heads, eight apart, and two keys of every eight.
#include "common/facts.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/matrix.cuh"
#include "tile/fragment.cuh"
#include "tile/sw128.cuh"

namespace mla::probes {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kKeys = MLA_KEYS;
static_assert(kKeys == 32 || kKeys == 64, "a tile of keys");

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = kWarpgroupThreads;
constexpr i32 kScores = kKeys / 2;
constexpr i32 kSwTileChunks = kSw128Bytes / 16;

// ---- Params ----------------------------------------------------------------------------------------------------
struct ProbeStmatrixParams {
    const float* scores;  // (64 heads, kKeys)
    const uint4* in;      // the SW128 tile at first, of 64 rows
    uint4* out;           // and at last
};
MLA_FACT_LIST(params_layout, (int)sizeof(ProbeStmatrixParams));
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, kSw128Bytes);

MLA_DEVICE void store_scores(u8* sw_tile, const float (&x)[kScores], i32 thread) {
    const i32 matrix = thread % kWarpThreads / 8, chunk = thread / kWarpThreads * 2 + matrix % 2;
#pragma unroll
    for (i32 i = 0; i < kScores; i += 8) {
        const u32 words[4] = {cvt_x2(Element{}, x[i], x[i + 1]), cvt_x2(Element{}, x[i + 2], x[i + 3]),
                              cvt_x2(Element{}, x[i + 4], x[i + 5]), cvt_x2(Element{}, x[i + 6], x[i + 7])};
        const i32 row = 2 * i + matrix / 2 * 8 + thread % 8;
        stmatrix_x4_trans(smem_addr(sw_tile) + sw128_offset(row, chunk), words);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_probes_stmatrix(const __grid_constant__ ProbeStmatrixParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    uint4* chunks = reinterpret_cast<uint4*>(smem);
    griddepcontrol_wait();
    const i32 thread = threadIdx.x;
    for (i32 i = thread; i < kSwTileChunks; i += kThreads) chunks[i] = p.in[i];
    __syncthreads();
    float x[kScores];
#pragma unroll
    for (i32 i = 0; i < kScores; ++i) {
        const i32 head = fragment_row(thread, i);
        x[i] = p.scores[head * kKeys + fragment_column(thread, i)];
    }
    store_scores(smem, x, thread);
    __syncthreads();
    for (i32 i = thread; i < kSwTileChunks; i += kThreads) p.out[i] = chunks[i];
}
}  // namespace mla::probes
