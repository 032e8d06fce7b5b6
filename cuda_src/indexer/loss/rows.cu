// The divergence of each row of the warm-up loss, and the gradient by its scores.
//
//   p = target / mass                              mass = sum(target)
//   p = exp(target - mass), if per head            mass = logsumexp(target)
//   index_lse = logsumexp(scores),   KL = sum p (log p - scores) + index_lse
//   G = row_weight * (exp(scores - index_lse) - p)
//
// Grid: x = rows of a token, y = tokens of the chunk, which take turns beyond the limit of the grid. A block reads its
// row three times: maxima; sums; terms and gradient. Sums are made in a fixed order.
#include "indexer/loss/params.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::loss {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 512;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kTileKeys = 128;  // gradients in bf16 are zero up to the end of a tile

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(padded_keys, kTileKeys);

struct Storage {
    float2 partial[kWarps];
};

// ---- Reductions over the block ---------------------------------------------------------------------------------
MLA_DEVICE float2 block_max(Storage& s, float2 x) {
    x = make_float2(warp_max(x.x), warp_max(x.y));
    __syncthreads();
    if (threadIdx.x % kWarpThreads == 0) s.partial[threadIdx.x / kWarpThreads] = x;
    __syncthreads();
    x = s.partial[0];
#pragma unroll
    for (i32 i = 1; i < kWarps; ++i) x = make_float2(fmaxf(x.x, s.partial[i].x), fmaxf(x.y, s.partial[i].y));
    return x;
}

MLA_DEVICE float2 block_sum(Storage& s, float2 x) {
    x = make_float2(warp_sum(x.x), warp_sum(x.y));
    __syncthreads();
    if (threadIdx.x % kWarpThreads == 0) s.partial[threadIdx.x / kWarpThreads] = x;
    __syncthreads();
    x = s.partial[0];
#pragma unroll
    for (i32 i = 1; i < kWarps; ++i) x = make_float2(x.x + s.partial[i].x, x.y + s.partial[i].y);
    return x;
}

// ---- One row ---------------------------------------------------------------------------------------------------
struct Row {
    KeyRange range;
    const float* target;
    float* scores;
    u16* gradient;  // times the scales of the keys; or null: over the scores
};

// Normalisation of a row: target and scores.
struct Norms {
    float max_target, sum_target;  // a maximum only if per head
    float max_score, sum_score;

    MLA_DEVICE bool empty(bool per_head) const {
        if (per_head) return !is_live(mass(true), index_lse());
        return !(sum_target > 0.f) || !(fabsf(index_lse()) <= kMaxFloat);
    }
    MLA_DEVICE float index_lse() const {
        return sum_score == 0.f ? negative_infinity() : max_score + lg2_approx(sum_score) * kLn2;
    }
    MLA_DEVICE float mass(bool per_head) const {
        if (!per_head) return sum_target;
        return sum_target == 0.f ? negative_infinity() : max_target + lg2_approx(sum_target) * kLn2;
    }
};

MLA_DEVICE float exp_from(float x, float shift) { return ex2_approx((x - shift) * kLog2E); }

MLA_DEVICE Norms normalise(const LossParams& p, Storage& s, const Row& row) {
    const float lowest = negative_infinity();
    float2 most = make_float2(lowest, lowest), sums = make_float2(0.f, 0.f);
    for (i32 key = row.range.begin + threadIdx.x; key < row.range.end; key += kThreads) {
        most = make_float2(fmaxf(most.x, row.target[key]), fmaxf(most.y, row.scores[key]));
    }
    most = block_max(s, most);
    const float shift = most.x == lowest ? 0.f : most.x, score_shift = most.y == lowest ? 0.f : most.y;
    for (i32 key = row.range.begin + threadIdx.x; key < row.range.end; key += kThreads) {
        const float target = row.target[key];
        sums.x += p.per_head ? exp_from(target, shift) : target;
        sums.y += exp_from(row.scores[key], score_shift);
    }
    sums = block_sum(s, sums);
    return Norms{shift, sums.x, score_shift, sums.y};
}

MLA_DEVICE void store_row_gradient(const LossParams& p, const Row& row, i32 key, float x) {
    if (row.gradient == nullptr) {
        row.scores[key] = x;
    } else {
        row.gradient[key] = bfloat16::from_float(x == 0.f ? 0.f : x * key_scale(p, key));
    }
}

// The terms of the divergence; writes the gradient.
//
// log p is the difference of two logarithms with large parts that cancel against the score: maxima are subtracted
// first.
MLA_DEVICE float2 add_terms(const LossParams& p, const Row& row, const Norms& norms, float row_weight) {
    const float inverse = 1.f / norms.sum_target, inverse_score = 1.f / norms.sum_score;
    float2 sums = make_float2(0.f, 0.f);
    for (i32 key = row.range.begin + threadIdx.x; key < row.range.end; key += kThreads) {
        const float target = row.target[key], score = row.scores[key] - norms.max_score;
        const float part = p.per_head ? exp_from(target, norms.max_target) * inverse : target * inverse;
        const float log_part = p.per_head ? target - norms.max_target : lg2_approx(part) * kLn2;
        if (part > 0.f || part != part) {
            sums.x += part * (log_part - score);
            sums.y += part;
        }
        if (p.d_weights != nullptr) {
            const float softmax = ex2_approx(score * kLog2E) * inverse_score;
            store_row_gradient(p, row, key, norms.empty(p.per_head) ? 0.f : row_weight * (softmax - part));
        }
    }
    return sums;
}

// Up to the borders of the tiles of keys that the range touches.
MLA_DEVICE void clear_edges(const LossParams& p, const Row& row) {
    if (row.gradient == nullptr || p.d_weights == nullptr) return;
    const i32 begin = row.range.begin / kTileKeys * kTileKeys, end = ceil_div(row.range.end, kTileKeys) * kTileKeys;
    for (i32 key = begin + threadIdx.x; key < row.range.begin; key += kThreads) row.gradient[key] = 0;
    for (i32 key = row.range.end + threadIdx.x; key < end; key += kThreads) row.gradient[key] = 0;
}

MLA_DEVICE void run_row(const LossParams& p, Storage& s, i32 token, i32 at) {
    const i64 offset = row_offset(p, token, at);
    const Row row{p.ranges[token], p.target + target_offset(p, token, at), p.scores + offset,
                  p.gradient == nullptr ? nullptr : p.gradient + offset};
    const Norms norms = normalise(p, s, row);
    clear_edges(p, row);
    const float2 terms = block_sum(s, add_terms(p, row, norms, row_weight(p, token)));
    if (threadIdx.x != 0) return;
    const float log_target = p.per_head ? lg2_approx(norms.sum_target) * kLn2 : 0.f;
    const float kl = terms.x + (lg2_approx(norms.sum_score) * kLn2 - log_target) * terms.y;
    p.kl[token * p.kl_stride_token_elems + at * p.kl_stride_head_elems] = norms.empty(p.per_head) ? 0.f : kl;
    p.mass[token * p.mass_stride_token_elems + at * p.mass_stride_head_elems] = norms.mass(p.per_head);
    p.index_lse[token * p.index_lse_stride_token_elems + at * p.index_lse_stride_head_elems] = norms.index_lse();
}

extern "C" __global__ void __launch_bounds__(kThreads) mla_indexer_loss_rows(const __grid_constant__ LossParams p) {
    __shared__ Storage s;
    griddepcontrol_wait();
    for (i32 at = blockIdx.y; at < p.num_tokens; at += gridDim.y) run_row(p, s, p.first_token + at, blockIdx.x);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
