// The gradients of the indexer's losses by index queries and weights, on any GPU, in fp32.
//
//   dq' = sum_s G[s] [iq . ik_s > 0] ik_s,   d_index_q = W dq',   d_weights = score_unit * iq . dq'
//
// with W = score_unit * weights; for codes, ik in the sum is k_scale ik, and d_index_q = W / q_scale dq'. Grid: x =
// groups of four index heads, y = tokens of the chunk, which wrap around. A warp handles one token and head, one key
// after the other.
#include "indexer/loss/generic_rows.cuh"
#include "ptx/control.cuh"

namespace mla::indexer::loss {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kBlockHeads = kThreads / kWarpThreads;
constexpr i32 kMaxIndexDim = 128;

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(block_heads, kBlockHeads);
MLA_FACT(max_index_dim, kMaxIndexDim);

using IndexRow = LaneRow<kMaxIndexDim>;

MLA_DEVICE void run_head(const LossParams& p, i32 token, i32 head, i32 lane) {
    IndexRow q, key, sum;
    load_index_query(q, p, token, head, lane);
    sum.clear();
    const KeyRange range = p.ranges[token];
    const float* gradient = p.scores + head_offset(p, token, head);
    for (i32 s = range.begin; s < range.end; ++s) {
        const i64 row = key_row(p, token, s);
        load_index_key(key, p, row, lane);
        if (q.dot(key) > 0.f) sum.add(gradient[s] * key_scale(p, row), key);
    }
    // A token that sees no key has no gradient, whatever its queries hold.
    const bool seen = range.begin < range.end;
    const float by_weight = seen ? p.score_unit * q.dot(sum) : 0.f;
    const float factor = seen ? query_factor(p, token, head) : 0.f;
    if (lane == 0) {
        p.d_weights[token * p.d_weights_stride_token_elems + head * p.d_weights_stride_head_elems] = by_weight;
    }
    const i64 to = token * p.d_index_q_stride_token_elems + head * p.d_index_q_stride_head_elems;
    sum.for_each(p.index_dim, lane,
                 [&](i32 at, float x) { store_gradient(p.d_index_q, p.d_index_q_fp32, to + at, factor * x); });
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_indexer_loss_generic_queries(const __grid_constant__ LossParams p) {
    griddepcontrol_wait();
    const i32 lane = threadIdx.x % kWarpThreads, head = blockIdx.x * kBlockHeads + uniform_warp();
    for (i32 at = blockIdx.y; head < p.index_heads && at < p.num_tokens; at += gridDim.y) {
        run_head(p, p.first_token + at, head, lane);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
