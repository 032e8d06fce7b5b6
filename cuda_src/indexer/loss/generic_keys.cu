// The gradient of the warm-up loss by index keys, on any GPU, in fp32.
//
//   d_index_k[s] = sum_t sum_j G[t, s] W[t, j] [iq_tj . ik_s > 0] iq_tj
//
// with W = score_unit * weights. Grid: one warp per key. It processes the chunk's tokens and heads one after the other,
// and continues the sums of the previous chunk: they are made in one order, so their bits are always the same.
#include "indexer/loss/generic_rows.cuh"
#include "ptx/control.cuh"

namespace mla::indexer::loss {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kBlockKeys = kThreads / kWarpThreads;
constexpr i32 kMaxIndexDim = 128;

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(block_keys, kBlockKeys);
MLA_FACT(max_index_dim, kMaxIndexDim);

using IndexRow = LaneRow<kMaxIndexDim>;

MLA_DEVICE void add_token(const LossParams& p, i32 token, i32 key_at, const IndexRow& key, IndexRow& sum, i32 lane) {
    IndexRow q;
    for (i32 head = 0; head < p.index_heads; ++head) {
        load_index_query(q, p, token, head, lane);
        if (!(q.dot(key) > 0.f)) continue;
        const float gradient = p.scores[head_offset(p, token, head) + key_at];
        sum.add(gradient * index_weight(p, token, head), q);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_indexer_loss_generic_keys(const __grid_constant__ LossParams p) {
    griddepcontrol_wait();
    const i32 lane = threadIdx.x % kWarpThreads, key_at = blockIdx.x * kBlockKeys + uniform_warp();
    if (key_at < p.s_kv) {
        IndexRow key, sum;
        float* sums = p.key_sums + (i64)key_at * p.index_dim;
        load_index_key(key, p, key_at, lane);
        sum.clear();
        if (!p.first_chunk) sum.load(sums, p.index_dim, lane);
        for (i32 token = p.first_token; token < p.first_token + p.num_tokens; ++token) {
            if (p.ranges[token].contains(key_at)) add_token(p, token, key_at, key, sum, lane);
        }
        sum.for_each(p.index_dim, lane, [&](i32 at, float x) {
            if (p.last_chunk) {
                store_gradient(p.d_index_k, p.d_index_k_fp32, key_at * p.d_index_k_stride_elems + at, x);
            } else {
                sums[at] = x;
            }
        });
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
