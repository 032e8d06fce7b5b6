// Targets of a chunk of tokens, from the workspace to the caller's array: 0 for keys that a token does not see.
//
//   head_sums[t, s] = range of t contains s ? target[t, s] : 0
//
// Grid: x = groups of 256 keys, y = tokens of the chunk, which take turns beyond the limit of the grid. A thread has a
// key.
#include "indexer/loss/params.cuh"
#include "ptx/control.cuh"

namespace mla::indexer::loss {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(block_keys, kThreads);

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_indexer_loss_head_sums(const __grid_constant__ LossParams p) {
    griddepcontrol_wait();
    const i32 key = blockIdx.x * kThreads + threadIdx.x;
    const i32 last = key < p.num_keys ? p.num_tokens : 0;
    for (i32 at = blockIdx.y; at < last; at += gridDim.y) {
        const i32 token = p.first_token + at;
        const bool seen = p.ranges[token].contains(key);
        p.head_sums[token * p.head_sums_stride_elems + key] = seen ? p.target[target_offset(p, token, 0) + key] : 0.f;
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
