// An upper bound of a token's contribution to an element of the gradient by index keys, for the binned sums of a
// deterministic call of the sparse stage's loss.
//
//   c_t = |row_weight_t| sum_j |W_tj| max|iq_tj|,   largest = max_t c_t
//
// since both the softmax and the target are at most 1. Non-finite numbers are ignored: their contribution is non-finite
// in any order.
//
// Grid: one warp per token.
#include "indexer/loss/params.cuh"
#include "ptx/control.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::loss {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kBlockTokens = kThreads / kWarpThreads;
// Both are made by approximate exponentials, and sums over heads are rounded.
constexpr float kSlack = 1.01f;

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(block_tokens, kBlockTokens);

MLA_DEVICE float finite_or_0(float x) { return fabsf(x) <= kMaxFloat ? fabsf(x) : 0.f; }

MLA_DEVICE float head_bound(const LossParams& p, i32 token, i32 head, i32 lane) {
    const i64 first = index_query_at(p, token, head);
    float largest = 0.f;
    for (i32 i = lane; i < p.index_dim; i += kWarpThreads) {
        largest = fmaxf(largest, finite_or_0(index_element(p, p.index_q, first + i)));
    }
    return fminf(finite_or_0(index_weight(p, token, head)) * warp_max(largest), kMaxFloat);
}

extern "C" __global__ void __launch_bounds__(kThreads) mla_indexer_loss_bounds(const __grid_constant__ LossParams p) {
    griddepcontrol_wait();
    const i32 lane = threadIdx.x % kWarpThreads, token = blockIdx.x * kBlockTokens + uniform_warp();
    if (token < p.s_q && p.counts[token] > 0) {
        float bound = 0.f;
        for (i32 head = 0; head < p.index_heads; ++head) bound += head_bound(p, token, head, lane);
        bound = fminf(kSlack * finite_or_0(row_weight(p, token)) * fminf(bound, kMaxFloat), kMaxFloat);
        if (lane == 0) atomicMax(p.largest, __float_as_uint(bound));
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
