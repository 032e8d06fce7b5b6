// A copy of the attention's values for the tensor cores, with zeros for elements that are not finite; and which tiles
// of keys have such elements.
//
// A key that a token does not see is multiplied by its probability all the same, which is 0: 0 * NaN would be NaN. The
// tokens that do see it get what is not finite afterwards.
//
// Grid: one block per tile of keys.
#include "indexer/loss_params.cuh"
#include "ptx/control.cuh"

namespace mla::indexer {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kTileKeys = 128;

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(block_keys, kTileKeys);

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_indexer_loss_finite_values(const __grid_constant__ LossParams p) {
    griddepcontrol_wait();
    const i32 first = blockIdx.x * kTileKeys, count = min(kTileKeys, p.s_kv - first) * p.value_dim;
    bool found = false;
    for (i32 i = threadIdx.x; i < count; i += kThreads) {
        const i64 key = first + i / p.value_dim;
        const u16 x = p.v[key * p.v_stride_elems + i % p.value_dim];
        const bool finite = (x & bfloat16::kExponentMask) != bfloat16::kExponentMask;
        p.finite_values[key * finite_value_stride(p) + i % p.value_dim] = finite ? x : (u16)0;
        found |= !finite;
    }
    found = __syncthreads_or(found);
    if (threadIdx.x == 0) p.nonfinite_tiles[blockIdx.x] = found;
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer
