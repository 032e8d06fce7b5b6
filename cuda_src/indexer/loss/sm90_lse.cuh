// Shared by the Hopper kernels that compute missing log-sum-exps: 128 queries stay in shared memory, tiles of 128 keys
// pass as pieces of 64 columns, and each thread keeps a running maximum and sum of its share of two rows. The lanes of
// a quad merge their shares once, at the end.
//
// `Storage` has `q`, the pieces of the queries, and `k`, `k_full` and `k_empty`, the ring of pieces of keys.
#pragma once
#include "ptx/convert.cuh"
#include "tile/fragment.cuh"
#include "tile/product.cuh"
#include "tile/ring.cuh"
#include "tile/sw128.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::loss {
constexpr i32 kLseTileKeys = 128;
constexpr i32 kLseProducts = kLseTileKeys / 2;  // of a thread

// The running sum of a thread's share of a row, in base 2.
struct RunningSum {
    float max_score = negative_infinity(), sum = 0.f;

    MLA_DEVICE float shift() const { return fmaxf(max_score, -kMaxFloat); }  // -inf less itself were NaN
    MLA_DEVICE void rescale(float next_max) {
        const float before = max_score;
        max_score = next_max;
        sum *= ex2_approx(before - shift());
    }
    // Called by all lanes of a quad: the natural logarithm of the row's sum.
    MLA_DEVICE float merge() {
        rescale(quad_max(max_score));
        const float total = quad_sum(sum);
        return total == 0.f ? negative_infinity() : (max_score + lg2_approx(total)) * kLn2;
    }
};

// The products of the warpgroup's 64 queries with a tile of keys. What cp.async has copied needs a fence.
template <i32 kPieces, bool kGathered, class Storage, class Pieces>
MLA_DEVICE void multiply_rows(Storage& s, Pieces& pieces, i32 warpgroup, i32 thread, float (&d)[kLseProducts]) {
    pin(d);
#pragma unroll
    for (i32 piece = 0; piece < kPieces; ++piece) {
        pieces.wait_full(s.k_full);
        if constexpr (kGathered) fence_proxy_async();
        SmemDesc q = k_major_desc(smem_addr(s.q[piece]) + warpgroup * kSw128Bytes);
        SmemDesc k = k_major_desc(smem_addr(s.k[pieces.stage]));
        opaque(q.bits), opaque(k.bits);
        wgmma_fence();
        multiply_abt<kSw128MmaSteps>(bfloat16{}, d, q, k, piece > 0);
        wgmma_commit_group();
        if (piece > 0) {
            wgmma_wait_group<1>();
            release(s.k_empty[pieces.before()], thread);
        }
        pieces.advance();
    }
    wgmma_wait_group<0>();
    release(s.k_empty[pieces.before()], thread);
    pin(d);
}

// Adds scores in base 2. Keys that a row does not see have the score -inf.
MLA_DEVICE void add_scores(RunningSum (&rows)[kFragmentRows], const float (&d)[kLseProducts]) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        float next_max = rows[r].max_score;
#pragma unroll
        for (i32 i = 2 * r; i < kLseProducts; i += 4) next_max = fmaxf(next_max, fmaxf(d[i], d[i + 1]));
        rows[r].rescale(next_max);
        const float shift = rows[r].shift();
#pragma unroll
        for (i32 i = 2 * r; i < kLseProducts; i += 4) {
            rows[r].sum += ex2_approx(d[i] - shift) + ex2_approx(d[i + 1] - shift);
        }
    }
}
}  // namespace mla::indexer::loss
