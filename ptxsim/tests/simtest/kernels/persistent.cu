// Each running block processes its own index, then the index of each block it cancels: out[i] counts visits of block i.
#include "ptx.cuh"

extern "C" __global__ void persistent(int *visits, int *taken) {
    __shared__ __align__(16) u32 answer[4];
    __shared__ __align__(8) u64 bar;
    const u32 b = smem_u32(&bar), a = smem_u32(answer);
    if (threadIdx.x == 0) {
        mbar_init(b, 1);
        fence_mbar_init();
    }
    __syncthreads();
    u32 block = blockIdx.x;
    for (int round = 0;; round++) {
        if (threadIdx.x == 0) {
            atomicAdd(&visits[block], 1);
            if (round)
                atomicAdd(taken, 1);
            mbar_expect(b, 16);
            asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];" ::"r"(a), "r"(b)
                         : "memory");
        }
        mbar_wait(b, round & 1);
        u32 ok, x;
        asm volatile("{\n .reg .b128 h;\n .reg .pred p;\n ld.shared.b128 h, [%2];\n"
                     " clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, h;\n selp.u32 %0, 1, 0, p;\n mov.u32 %1, 0;\n"
                     " @p clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %1, h;\n}"
                     : "=r"(ok), "=r"(x)
                     : "r"(a)
                     : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (!ok)
            return;
        block = x;
    }
}
