// Merging of partial results: the part that decode_combine and decode_combine_pieces share.
//
//   out = sum_j w_j out_j / sum_j w_j,   w_j = exp2(lse_j - max lse),   lse = max lse + log2 sum_j w_j
//
// With an attention sink, exp2(sink - max lse) is added to the denominator of `out`.
//
// A unit of work is some columns of one row, for a team of 128 threads: groups of them divide the pieces among
// themselves, the more groups the more pieces, so that all pieces are read at once, with at most 8 loads per thread.
// The order of the sums depends on the number of pieces only, not on where in the workspace they are.
#pragma once
#include "attention/decode_output.cuh"
#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"
#include "ptx/load.cuh"
#include "tile/warp.cuh"

namespace mla::decode {
using namespace attention;

constexpr i32 kTeamThreads = 128;  // work at a unit
constexpr i32 kTeamWarps = kTeamThreads / kWarpThreads;
constexpr i32 kMaxPartials = 256;           // of a request
constexpr i32 kRowVectors = kHeadDimV / 4;  // 16 bytes of fp32 each
constexpr i32 kLoads = 8;                   // pieces that a thread reads at once
constexpr i32 kLsesPerThread = kMaxPartials / kTeamThreads;
static_assert(kRowVectors == kTeamThreads, "one group covers a row");
static_assert(kMaxPartials <= kTeamThreads * kLoads, "more pieces than threads can read at once");

struct Team {
    float weights[kMaxPartials];  // per piece
    float warp_max[kTeamWarps], warp_sum[kTeamWarps];
    float4 sums[kTeamThreads];
};

// 2^shift groups of threads, each of which covers as many vectors of a row as it has threads.
struct Groups {
    i32 shift;

    MLA_DEVICE explicit Groups(i32 num_partials) : shift(0) {
        while (num_partials > kLoads << shift) ++shift;
    }
    MLA_DEVICE i32 count() const { return 1 << shift; }
    MLA_DEVICE i32 threads() const { return kTeamThreads >> shift; }
    MLA_DEVICE i32 units_per_row() const { return count(); }
};

// One row of the partial results of a request.
struct PartialRow {
    const DecodeParams& p;
    i32 split;  // which the first piece ends
    i32 row;    // of a partial result: kv_head * rows + row of that head

    // The first piece ended its split, every other one began its split.
    MLA_DEVICE i64 at(i32 piece) const {
        return (i64)(piece == 0 ? p.continued_index + split : split + piece) * p.s_q * p.h_q + row;
    }
    MLA_DEVICE float lse(i32 piece) const { return p.partial_lse[at(piece)]; }
    MLA_DEVICE float row_max(i32 piece) const { return p.partial_max[at(piece)]; }
    MLA_DEVICE const float4* vectors(i32 piece) const {
        return reinterpret_cast<const float4*>(p.partial_out) + at(piece) * kRowVectors;
    }
};

// exp2(lse - max), where no piece (both -Inf) weighs nothing. A NaN stays one.
MLA_DEVICE float weight(float lse, float max_lse) { return lse == negative_infinity() ? 0.f : exp2f(lse - max_lse); }

MLA_DEVICE void add_weighted(float4& sum, const float4& x, float weight) {
    sum.x += weight * x.x;
    sum.y += weight * x.y;
    sum.z += weight * x.z;
    sum.w += weight * x.w;
}

template <class Element>
MLA_DEVICE void store_vector(const DecodeParams& p, i64 at, const float4& x) {
    if (p.out_is_fp32) {
        *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = x;
    } else {
        *reinterpret_cast<ushort4*>(static_cast<u16*>(p.out) + at) = make_ushort4(
            Element::from_float(x.x), Element::from_float(x.y), Element::from_float(x.z), Element::from_float(x.w));
    }
}

// By a warp: the log-sum-exp of a row, and the largest score of all pieces.
MLA_DEVICE void store_statistics(const PartialRow& partials, i32 num_partials, i32 request, i32 kv_head, i32 row,
                                 float max_lse, float sum) {
    const DecodeParams& p = partials.p;
    const i32 lane = threadIdx.x % kWarpThreads;
    const float lse2 = sum == 0.f ? negative_infinity() : max_lse + log2f(sum);
    if (lane == 0) p.lse[lse_offset(p, request, kv_head, row)] = final_lse(p, lse2);
    if (p.max_logits == nullptr) return;
    float row_max = negative_infinity();
#pragma unroll 1
    for (i32 j = lane; j < num_partials; j += kWarpThreads) row_max = fmaxf(row_max, partials.row_max(j));
    row_max = with_nan_of(sum, warp_max(row_max)) * kLn2;
    if (lane == 0) p.max_logits[max_offset(p, request, kv_head, row)] = row_max;
}

// Merges one of `groups.count()` columns of a row, by a team. `request()` is the request that they belong to; it is
// asked late, to save a register.
template <class Element, class RequestOf>
MLA_DEVICE void merge_unit(Team& team, const PartialRow& partials, i32 num_partials, const Groups& groups, i32 column,
                           RequestOf request_of) {
    const DecodeParams& p = partials.p;
    const i32 team_number = threadIdx.x / kTeamThreads, thread = threadIdx.x % kTeamThreads;
    const i32 lane = thread % kWarpThreads, warp = thread / kWarpThreads;
    const auto sync_team = [&] { bar_sync(1 + team_number, kTeamThreads); };

    const i32 vector = column * groups.threads() + (thread & (groups.threads() - 1));
    const i32 share = (num_partials + groups.count() - 1) >> groups.shift;
    const i32 first = thread / groups.threads() * share, last = min(first + share, num_partials);

    float lse[kLsesPerThread];
#pragma unroll
    for (i32 i = 0; i < kLsesPerThread; ++i) {
        const i32 j = thread + i * kTeamThreads;
        lse[i] = j < num_partials ? partials.lse(j) : negative_infinity();
    }
    // PERF(H200, 2026-11-22, -1.4 % to -1.9 % of a decode of 4 to 16 sequences, 128 heads): no piece is read twice.
    float4 loaded[kLoads];
    const float4* from = partials.vectors(first) + vector;
    const i64 stride = (i64)p.s_q * p.h_q * kRowVectors;
#pragma unroll
    for (i32 i = 0; i < kLoads; ++i) {
        loaded[i] = ld_global_16_once(from, first + i < last, kEvictFirst);
        from += first + i == 0 ? (1 - p.continued_index) * stride : stride;
    }

    float max_lse = negative_infinity();
#pragma unroll
    for (float x : lse) max_lse = fmaxf(max_lse, x);
    max_lse = warp_max(max_lse);
    if (lane == 0) team.warp_max[warp] = max_lse;
    sync_team();
#pragma unroll
    for (float x : team.warp_max) max_lse = fmaxf(max_lse, x);
    float sum = 0.f;
#pragma unroll
    for (i32 i = 0; i < kLsesPerThread; ++i) {
        const float w = weight(lse[i], max_lse);
        team.weights[thread + i * kTeamThreads] = w;
        sum += w;
    }
    sum = warp_sum(sum);
    if (lane == 0) team.warp_sum[warp] = sum;
    sync_team();
    float4 partial = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (i32 i = 0; i < kLoads; ++i) {
        if (first + i < last) add_weighted(partial, loaded[i], team.weights[first + i]);
    }
    team.sums[thread] = partial;
    sync_team();
    sum = 0.f;
#pragma unroll
    for (float x : team.warp_sum) sum += x;

    const i32 rows = query_rows(p), kv_head = partials.row / rows, row = partials.row % rows;
    const i32 request = request_of();
    if (thread < groups.threads()) {
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
        const float factor = final_factor(p, kv_head, row, max_lse, sum);
#pragma unroll 1
        for (i32 i = thread; i < kTeamThreads; i += groups.threads()) add_weighted(total, team.sums[i], factor);
        store_vector<Element>(p, out_offset(p, request, kv_head, row) + 4 * vector, total);
    }
    if (column == 0 && warp == 0) store_statistics(partials, num_partials, request, kv_head, row, max_lse, sum);
    sync_team();  // all is read
}

}  // namespace mla::decode
