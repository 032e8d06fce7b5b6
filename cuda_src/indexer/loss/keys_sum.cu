// The gradient of the warm-up loss by index keys, from the partial sums of all splits, added in their order.
//
// Grid: one thread per element, 256 per block; blocks take turns.
#include "indexer/loss/params.cuh"
#include "ptx/control.cuh"

namespace mla::indexer::loss {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(block_elems, kThreads);

extern "C" __global__ void __launch_bounds__(kThreads) mla_indexer_loss_keys_sum(const __grid_constant__ LossParams p) {
    griddepcontrol_wait();
    const i64 count = (i64)p.s_kv * p.index_dim;
    for (i64 i = (i64)blockIdx.x * kThreads + threadIdx.x; i < count; i += (i64)gridDim.x * kThreads) {
        float sum = 0.f;
        for (i32 split = 0; split < p.key_splits; ++split) sum += p.key_sums[split * count + i];
        const i64 to = i / p.index_dim * p.d_index_k_stride_elems + i % p.index_dim;
        store_gradient(p.d_index_k, p.d_index_k_fp32, to, sum);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
