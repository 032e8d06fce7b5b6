// Targets and scores of the indexer's losses before normalisation, on any GPU, in fp32.
//
//   one row per token:   target[s] = sum_h exp(scale * q_h . k_s - lse_h),   score[s] = sum_j W_j max(iq_j . ik_s, 0)
//   one row per head:    target[s] = target_scale * q_h . k_s,               score[s] = W_h max(iq_h . ik_s, 0)
//
// with W = score_unit * weights; scores of codes are also multiplied by the key's scale. Grid: x = groups of four keys,
// y = tokens of the chunk; both wrap around. A warp handles one token and key, one head after the other. Heads with an
// infinite lse do not contribute. Without heads of one kind (attention or index), nothing of that kind is stored.
#include "indexer/loss/generic_rows.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"

namespace mla::indexer::loss {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kBlockKeys = kThreads / kWarpThreads;
constexpr i32 kMaxHeadDim = 576, kMaxIndexDim = 128;

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(block_keys, kBlockKeys);
MLA_FACT(max_head_dim, kMaxHeadDim);
MLA_FACT(max_index_dim, kMaxIndexDim);

using KeyRow = LaneRow<kMaxHeadDim>;
using IndexRow = LaneRow<kMaxIndexDim>;

// A head's contribution to its token's target, or its own target.
MLA_DEVICE float target_of(const LossParams& p, i32 token, i32 head, float product) {
    if (p.per_head) return p.target_scale * product;
    const float lse = p.lse[token * p.lse_stride_token_elems + head * p.lse_stride_head_elems];
    const float part = ex2_approx((p.scale * product - lse) * kLog2E);
    return has_weights(lse) ? part : 0.f;
}

// Stores each value for itself, or the sum of all, times `scale`: value(head).
template <class Value>
MLA_DEVICE void store_heads(const LossParams& p, float* to, i32 heads, i32 lane, float scale, Value value) {
    const i64 step = p.per_head ? p.row_stride_elems : 0;
    float sum = 0.f;
#pragma unroll 1
    for (i32 head = 0; head < heads; ++head) {
        const float x = value(head);
        sum = p.per_head ? x : sum + x;
        if (lane == 0) to[head * step] = scale * sum;
    }
}

MLA_DEVICE void make_target(const LossParams& p, i32 token, i32 at, i32 lane) {
    KeyRow q, key;
    const i64 row = key_row(p, token, at);
    store_heads(p, p.target + target_offset(p, token, 0) + at, p.heads, lane, 1.f, [&](i32 head) {
        load_key(key, p, row, head, lane);
        load_query(q, p, token, head, lane);
        return target_of(p, token, head, q.dot(key));
    });
}

MLA_DEVICE void make_score(const LossParams& p, i32 token, i32 at, i32 lane) {
    IndexRow q, key;
    const i64 row = key_row(p, token, at);
    load_index_key(key, p, row, lane);
    store_heads(p, p.scores + row_offset(p, token, 0) + at, p.index_heads, lane, key_scale(p, row), [&](i32 head) {
        load_index_query(q, p, token, head, lane);
        return index_weight(p, token, head) * fmaxf(q.dot(key), 0.f);
    });
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_indexer_loss_generic_scores(const __grid_constant__ LossParams p) {
    griddepcontrol_wait();
    const i32 lane = threadIdx.x % kWarpThreads, warp = uniform_warp();
    for (i32 at = blockIdx.y; at < p.num_tokens; at += gridDim.y) {
        const i32 token = p.first_token + at;
        const KeyRange range = p.ranges[token];
        const i32 first = range.begin + blockIdx.x * kBlockKeys + warp;
        for (i32 key = first; key < range.end; key += gridDim.x * kBlockKeys) {
            make_target(p, token, key, lane);
            make_score(p, token, key, lane);
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
