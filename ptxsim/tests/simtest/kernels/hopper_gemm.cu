// C[M, N] (bf16) = A[M, K] B[N, K]^T (bf16): one 64x64 tile a block, TMA loads in a ring of kStages, WGMMA, TMA store.
// Warps 0..3 multiply, warp 4 loads.
#include "ptx.cuh"
constexpr int kStages = 3, kTile = 64 * 64 * 2;

extern "C" __global__ void __launch_bounds__(160, 1)
    hopper_gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_c,
                int k_tiles) {
    extern __shared__ __align__(1024) u8 smem[];
    const u32 base = smem_u32(smem), sA = base, sB = base + kStages * kTile, sC = sB + kStages * kTile, full = sC + kTile,
              empty = full + 8 * kStages;
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; s++) {
            mbar_init(full + 8 * s, 1);
            mbar_init(empty + 8 * s, 4);
        }
        fence_mbar_init();
    }
    __syncthreads();
    if (warp == 4) {
        if (elect()) {
            for (int i = 0; i < k_tiles; i++) {
                const int s = i % kStages, round = i / kStages;
                mbar_wait(empty + 8 * s, (round & 1) ^ 1);
                mbar_expect(full + 8 * s, 2 * kTile);
                tma_load(sA + s * kTile, &map_a, full + 8 * s, i * 64, blockIdx.y * 64);
                tma_load(sB + s * kTile, &map_b, full + 8 * s, i * 64, blockIdx.x * 64);
            }
        }
        return;
    }
    float d[32];
    for (int i = 0; i < 32; i++)
        d[i] = 0;
    for (int i = 0; i < k_tiles; i++) {
        const int s = i % kStages, round = i / kStages;
        mbar_wait(full + 8 * s, round & 1);
        wgmma_fence();
        for (int k = 0; k < 4; k++)
            wgmma_m64n64k16(d, wgmma_desc(sA + s * kTile + k * 32, 16, 1024), wgmma_desc(sB + s * kTile + k * 32, 16, 1024), 1);
        wgmma_commit();
        wgmma_wait<0>();
        if (threadIdx.x % 32 == 0)
            mbar_arrive(empty + 8 * s);
    }
    const int lane = threadIdx.x % 32, row = warp * 16 + lane % 16;
    for (int k = 0; k < 4; k++) {
        const u32 col = k * 32 + lane / 16 * 16;
        stmatrix4(sC + row * 128 + (col ^ ((row & 7) << 4)), pack_bf16(d[8 * k], d[8 * k + 1]), pack_bf16(d[8 * k + 2], d[8 * k + 3]),
                  pack_bf16(d[8 * k + 4], d[8 * k + 5]), pack_bf16(d[8 * k + 6], d[8 * k + 7]));
    }
    fence_async();
    bar_sync(1, 128);
    if (threadIdx.x == 0) {
        tma_store(&map_c, sC, blockIdx.x * 64, blockIdx.y * 64);
        bulk_commit();
        bulk_wait();
    }
}
