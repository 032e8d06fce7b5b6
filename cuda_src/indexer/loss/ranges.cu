// The keys that each query token of the warm-up loss sees: all of its sequence, or, if causal, those up to its own
// position, the queries being the last of their sequence. In the sparse stage it sees its whole list.
//
// Grid: one warp per token. Lanes look for the first sequence that has the token.
#include "indexer/loss/params.cuh"
#include "ptx/control.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::loss {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kBlockTokens = kThreads / kWarpThreads;

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(block_tokens, kBlockTokens);

// Returns p.b if there is none.
MLA_DEVICE i32 find_sequence(const LossParams& p, i32 token, i32 lane) {
    i32 found = p.b;
    for (i32 n = lane; n < p.b && found == p.b; n += kWarpThreads) {
        const i32* bounds = p.cu_seqlens_q + n * p.cu_seqlens_q_stride_elems;
        if (bounds[0] <= token && token < bounds[p.cu_seqlens_q_stride_elems]) found = n;
    }
#pragma unroll
    for (i32 step = kWarpThreads / 2; step > 0; step /= 2) {
        found = min(found, __shfl_xor_sync(kFullWarp, found, step));
    }
    return found;
}

// Called by a warp. Every number is hostile: 64 bits, and clamped where it becomes a key.
MLA_DEVICE KeyRange range_of(const LossParams& p, i32 token, i32 lane) {
    if (p.counts != nullptr) return KeyRange{0, p.counts[token]};
    i64 start = 0, end = p.s_kv, end_q = p.s_q;
    if (p.cu_seqlens_q != nullptr) {
        const i32 n = find_sequence(p, token, lane);
        if (n == p.b) return KeyRange{0, 0};
        const i32* bounds = p.cu_seqlens_kv + n * p.cu_seqlens_kv_stride_elems;
        start = max(0, min(bounds[0], p.s_kv));
        end = max(0, min(bounds[p.cu_seqlens_kv_stride_elems], p.s_kv));
        end_q = p.cu_seqlens_q[(n + 1) * p.cu_seqlens_q_stride_elems];
    }
    end -= p.causal ? end_q - 1 - token : 0;
    return start < end ? KeyRange{(i32)start, (i32)end} : KeyRange{0, 0};
}

extern "C" __global__ void __launch_bounds__(kThreads) mla_indexer_loss_ranges(const __grid_constant__ LossParams p) {
    griddepcontrol_wait();
    const i32 lane = threadIdx.x % kWarpThreads;
    const i32 token = blockIdx.x * kBlockTokens + uniform_warp();
    if (token < p.s_q) {
        const KeyRange range = range_of(p, token, lane);
        if (lane == 0) p.ranges[token] = range;
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
