// Producer warp copies rows with cp.async into a ring of two stages, consumer warp sums them; named barriers and
// cp.async mbarrier arrivals. out[col] = sum over rows; n is a multiple of 8 rows of 128 floats.
#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(64, 1) cp_async_ring(const float *in, float *out, int tiles) {
    __shared__ __align__(128) float stage[2][8][128];
    __shared__ __align__(8) u64 full[2];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        mbar_init(smem_u32(&full[0]), 32);
        mbar_init(smem_u32(&full[1]), 32);
    }
    __syncthreads();
    if (warp == 0) {
        for (int t = 0; t < tiles; t++) {
            const int s = t & 1;
            if (t >= 2)
                bar_sync(1 + s, 64);
            for (int r = 0; r < 8; r++)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_u32(&stage[s][r][lane * 4])),
                             "l"(in + (t * 8 + r) * 128 + lane * 4)
                             : "memory");
            asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem_u32(&full[s])) : "memory");
        }
    } else {
        float sum[4] = {0, 0, 0, 0};
        for (int t = 0; t < tiles; t++) {
            const int s = t & 1;
            mbar_wait(smem_u32(&full[s]), (t >> 1) & 1);
            for (int r = 0; r < 8; r++) {
                const float4 v = *(const float4 *)&stage[s][r][lane * 4];
                sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
            }
            if (t + 2 < tiles)
                bar_arrive(1 + s, 64);
        }
        *(float4 *)(out + lane * 4) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
}
