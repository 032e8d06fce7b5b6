// The main attention next to the warm-up loss, on any GPU, in fp32: its log-sum-exps and its output.
//
//   lse = log(sum_s exp(scale * q . k_s)),   out = sum_s exp(scale * q . k_s - lse) v_s
//
// Grid: x = groups of four heads, y = tokens, which wrap around beyond the limit of the grid. A warp handles one token
// and head, one key after the other, with a running maximum.
#include "indexer/loss/generic_rows.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"

namespace mla::indexer::loss {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kBlockHeads = kThreads / kWarpThreads;
constexpr i32 kMaxHeadDim = 576, kMaxValueDim = 512;

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(block_heads, kBlockHeads);
MLA_FACT(max_head_dim, kMaxHeadDim);
MLA_FACT(max_value_dim, kMaxValueDim);

using KeyRow = LaneRow<kMaxHeadDim>;
using ValueRow = LaneRow<kMaxValueDim>;

struct Attention {
    float max_score, sum;  // of exp(score - max_score)
    ValueRow out;
};

MLA_DEVICE void attend(const LossParams& p, i32 token, i32 head, i32 lane, Attention& a) {
    KeyRow q, key;
    ValueRow value;
    load_query(q, p, token, head, lane);
    a.max_score = negative_infinity();
    a.sum = 0.f;
    a.out.clear();
    const KeyRange range = p.ranges[token];
    const i32 value_dim = p.out == nullptr ? 0 : p.value_dim;  // values of no width are not loaded
    const u16* values = p.v + head / p.kv_head_heads * p.v_stride_head_elems;
#pragma unroll 1
    for (i32 s = range.begin; s < range.end; ++s) {
        const i64 row = key_row(p, token, s);
        load_key(key, p, row, head, lane);
        const float score = p.scale * q.dot(key);
        const float next_max = fmaxf(a.max_score, score);
        const float shift = fmaxf(next_max, -kMaxFloat);  // -inf less itself were NaN
        const float decay = ex2_approx((a.max_score - shift) * kLog2E);
        const float weight = ex2_approx((score - shift) * kLog2E);
        a.sum = fmaf(a.sum, decay, weight);
        a.max_score = next_max;
        value.load(values + row * p.v_stride_token_elems, value_dim, lane);
        a.out.scale(decay);
        a.out.add(weight, value);
    }
}

MLA_DEVICE void store(const LossParams& p, i32 token, i32 head, i32 lane, Attention& a) {
    if (lane == 0 && p.attention_lse != nullptr) {
        const float lse = a.sum == 0.f ? negative_infinity() : a.max_score + lg2_approx(a.sum) * kLn2;
        p.attention_lse[token * p.attention_lse_stride_token_elems + head * p.attention_lse_stride_head_elems] = lse;
    }
    if (p.out == nullptr) return;
    a.out.scale(a.sum == 0.f ? 0.f : 1.f / a.sum);
    u16* to = p.out + token * p.out_stride_token_elems + head * p.out_stride_head_elems;
    a.out.for_each(p.value_dim, lane, [&](i32 at, float x) { to[at] = bfloat16::from_float(x); });
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    mla_indexer_loss_generic_attention(const __grid_constant__ LossParams p) {
    griddepcontrol_wait();
    const i32 lane = threadIdx.x % kWarpThreads, head = blockIdx.x * kBlockHeads + uniform_warp();
    const i32 last = head < p.heads ? p.s_q : 0;
    for (i32 token = blockIdx.y; token < last; token += gridDim.y) {
        Attention a;
        attend(p, token, head, lane, a);
        store(p, token, head, lane, a);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
