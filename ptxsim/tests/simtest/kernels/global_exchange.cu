// Blocks exchange sums through global memory. Each weighs and sums four rows of 64 floats that cp.async brought; a bulk
// store and a counter hand the sums to the last block, flags and bulk loads hand running sums from block to block.
#include "ptx.cuh"

DI void cp_async(u32 dst, const float *src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
DI void cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DI void cp_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
DI int load_acquire(const int *p) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DI void store_release(int *p, int v) { asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DI void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
DI void bulk_store(float *dst, u32 src, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}
DI void bulk_load(u32 dst, const float *src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src),
                 "r"(bytes), "r"(bar)
                 : "memory");
}

extern "C" __global__ void __launch_bounds__(64, 1)
    global_exchange(const float *in, const float *weights, float *parts, float *chain, float *out, int *counter, int *flags) {
    __shared__ __align__(128) float rows[4][64], weight[64], part[64], before[64];
    __shared__ __align__(8) u64 arrived;
    __shared__ int is_last;
    const int t = threadIdx.x, block = blockIdx.x, blocks = gridDim.x;
    if (t == 0) {
        mbar_init(smem_u32(&arrived), 1);
        fence_mbar_init();
    }
    cp_async(smem_u32(&rows[t / 16][t % 16 * 4]), in + block * 256 + t * 4);
    cp_commit();
    if (t < 16) {
        cp_async(smem_u32(&weight[t * 4]), weights + t * 4);
        cp_commit();
    }
    cp_wait();
    __syncthreads();
    const float mine = (rows[0][t] + rows[1][t] + rows[2][t] + rows[3][t]) * weight[t];
    part[t] = mine;
    fence_async();
    __syncthreads();
    if (t == 0) {
        bulk_store(parts + block * 64, smem_u32(part), 256);
        bulk_commit();
        bulk_wait();
        __threadfence();
        is_last = atomicAdd(counter, 1) == blocks - 1;
        __threadfence();
    }
    __syncthreads();
    if (is_last) {
        float sum = 0;
        for (int i = 0; i < blocks; i++)
            sum += parts[i * 64 + t];
        out[t] = sum;
        if (t == 0)
            *counter = 0;
    }
    float running = mine;
    if (block > 0) {
        if (t == 0) {
            while (load_acquire(flags + block - 1) == 0)
                ;
            fence_async_global();
            mbar_expect(smem_u32(&arrived), 256);
            bulk_load(smem_u32(before), chain + (block - 1) * 64, 256, smem_u32(&arrived));
        }
        mbar_wait(smem_u32(&arrived), 0);
        running += before[t];
    }
    chain[block * 64 + t] = running;
    __syncthreads();
    if (t == 0)
        store_release(flags + block, 1);
}
