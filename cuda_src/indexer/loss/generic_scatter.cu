// The gradient of the sparse stage's loss by index keys, on any GPU, in fp32: each token's contributions to the keys of
// its list.
//
//   sums[row(s)] += sum_j G[t, s] W[t, j] [iq_tj . ik_row(s) > 0] iq_tj
//
// with W = score_unit * weights. Grid: x = groups of four places of a list, y = tokens of the chunk; both wrap around.
// A warp handles one token and place, sums over the heads in registers, and adds to memory once, atomically; in a
// deterministic call to the number's bin.
#include "indexer/loss/generic_rows.cuh"
#include "ptx/control.cuh"
#include "tile/binned_sum.cuh"

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

MLA_DEVICE IndexRow contribution(const LossParams& p, i32 token, i64 row, float gradient, i32 lane) {
    IndexRow q, key, sum;
    load_index_key(key, p, row, lane);
    sum.clear();
    for (i32 head = 0; head < p.index_heads; ++head) {
        load_index_query(q, p, token, head, lane);
        if (q.dot(key) > 0.f) sum.add(gradient * index_weight(p, token, head), q);
    }
    return sum;
}

MLA_DEVICE void add_to_key(const LossParams& p, i64 row, const IndexRow& x, i32 lane) {
    float* to = p.key_sums + row * p.index_dim;
    if (p.extractors == nullptr) {
        x.for_each(p.index_dim, lane, [&](i32 at, float value) { atomicAdd(to + at, value); });
        return;
    }
    const Bins bins{__float_as_int(p.extractors[p.s_kv]), __float_as_int(p.extractors[row])};
    const i64 bin_elems = (i64)p.s_kv * p.index_dim;
    x.for_each(p.index_dim, lane, [&](i32 at, float value) {
        const i32 bin = bins.index(fabsf(value));
        atomicAdd(to + bin * bin_elems + at, bins.round(value, bin));
    });
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_indexer_loss_generic_scatter(const __grid_constant__ LossParams p) {
    griddepcontrol_wait();
    const i32 lane = threadIdx.x % kWarpThreads, warp = uniform_warp();
    for (i32 at = blockIdx.y; at < p.num_tokens; at += gridDim.y) {
        const i32 token = p.first_token + at;
        const KeyRange range = p.ranges[token];
        for (i32 key = blockIdx.x * kBlockKeys + warp; key < range.end; key += gridDim.x * kBlockKeys) {
            const i64 row = key_row(p, token, key);
            const float gradient = p.scores[row_offset(p, token, 0) + key];
            add_to_key(p, row, contribution(p, token, row, gradient, lane), lane);
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
