// A copy of the index keys for the tensor cores in bf16, of codes without their scales, with zeros for elements that
// are not finite.
//
// A key that a token does not see is multiplied by its gradient all the same, which is 0: 0 * NaN would be NaN.
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

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_indexer_loss_finite_keys(const __grid_constant__ LossParams p) {
    griddepcontrol_wait();
    const i64 count = (i64)p.s_kv * p.index_dim;
    for (i64 i = (i64)blockIdx.x * kThreads + threadIdx.x; i < count; i += (i64)gridDim.x * kThreads) {
        const i64 row = i / p.index_dim;
        const float element = index_element(p, p.index_k, row * p.index_k_stride_elems + i % p.index_dim);
        const u16 x = bfloat16::from_float(element);
        const bool finite = (x & bfloat16::kExponentMask) != bfloat16::kExponentMask;
        p.finite_keys[i] = finite ? x : (u16)0;
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
