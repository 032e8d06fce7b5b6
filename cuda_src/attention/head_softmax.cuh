// Online softmax of a tile of scores with swapped operands: S^T in WGMMA fragments, 64 rows of keys x heads, in base 2:
// P^T = exp2(S^T * scale_log2 - max). Heads are the columns, so statistics go down the fragments. A thread has two
// scores of a head, so rounding each product (see kHugeMax) costs no more than a test for a huge maximum.
#pragma once
#include "attention/online_softmax.cuh"
#include "attention/shapes.cuh"

namespace mla::attention {
// A thread holds two of every eight heads, in two rows eight apart.
template <i32 kHeads>
constexpr i32 kHeadsOfThread = kHeads / 4;

// Index among a thread's heads of d[i]'s; the k-th of its heads; the head of d[i].
MLA_DEVICE constexpr i32 head_number(i32 i) { return i / 4 * 2 + i % 2; }
MLA_DEVICE i32 kth_head(i32 k, i32 thread) { return k / 2 * 8 + fragment_column(thread) + k % 2; }
MLA_DEVICE i32 head_of(i32 i, i32 thread) { return kth_head(head_number(i), thread); }

// One value per head of a thread.
template <i32 kHeads>
struct HeadValues {
    float value[kHeadsOfThread<kHeads>];

    MLA_DEVICE void fill(float x) {
#pragma unroll
        for (float& v : value) v = x;
    }

    // For element i of a fragment.
    MLA_DEVICE float of(i32 i) const { return value[head_number(i)]; }

    // Uniform over the warp.
    MLA_DEVICE bool any_but_one() const {
        bool found = false;
#pragma unroll
        for (const float& v : value) found |= v != 1.f;
        return __any_sync(kFullWarp, found);
    }

    template <i32 kCount>
    MLA_DEVICE void multiply(float (&fragment)[kCount]) const {
#pragma unroll
        for (i32 i = 0; i < kCount; ++i) fragment[i] *= of(i);
    }
};

// Masks the rows of the tile from `visible` on.
template <i32 kCount>
MLA_DEVICE void mask_rows(float (&scores)[kCount], i32 visible, i32 thread) {
    if (visible >= kTileTokens) return;
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
        if (fragment_row(thread, i) >= visible) scores[i] = negative_infinity();
    }
}

// Masks absent rows of the tile (bit = key).
template <i32 kCount>
MLA_DEVICE void mask_absent(float (&scores)[kCount], u64 present, i32 thread) {
    if (present == ~0ull) return;
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
        if (!(present >> fragment_row(thread, i) & 1)) scores[i] = negative_infinity();
    }
}

// Which scores of a tile count: for the k-th of a thread's heads the keys below visible[k], on pages that are present
// (bit = key).
template <i32 kHeads>
struct KeyMask {
    i32 visible[kHeadsOfThread<kHeads>];
    u64 present;
};

template <i32 kHeads>
MLA_DEVICE void mask_keys(float (&scores)[kHeads / 2], const KeyMask<kHeads>& mask, i32 thread) {
#pragma unroll
    for (i32 i = 0; i < kHeads / 2; ++i) {
        const i32 key = fragment_row(thread, i);
        const bool counts = key < mask.visible[head_number(i)] && ((mask.present >> key) & 1);
        if (!counts) scores[i] = negative_infinity();
    }
}

// Masks the keys of the k-th of a thread's heads that are before `first`.
template <i32 kCount>
MLA_DEVICE void mask_keys_before(float (&scores)[kCount], i32 k, i32 first, i32 thread) {
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
        if (head_number(i) == k && fragment_row(thread, i) < first) scores[i] = negative_infinity();
    }
}

// Masks the keys outside `seen` for the k-th of a thread's heads (bit = key).
template <i32 kCount>
MLA_DEVICE void mask_head(float (&scores)[kCount], i32 k, u64 seen, i32 thread) {
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
        if (head_number(i) == k && !(seen >> fragment_row(thread, i) & 1)) scores[i] = negative_infinity();
    }
}

// Maxima, from the k-th on, over the lanes that differ in the bits kStep down to 4; these lanes hold values of the same
// heads. While the values can be halved, each of two lanes keeps one half and gives the other away, so that each
// shuffle moves half as many values.
template <i32 kStep, class To, i32 kCount>
MLA_DEVICE void store_lane_maxima(To& to, const float (&values)[kCount], i32 k, i32 thread) {
    if constexpr (kStep < 4) {
#pragma unroll
        for (i32 i = 0; i < kCount; ++i) to[kth_head(k + i, thread)] = values[i];
    } else {
        constexpr i32 kKept = kCount % 2 == 0 ? kCount / 2 : kCount, kGiven = kCount - kKept;
        const bool upper = kGiven > 0 && thread & kStep;
        float kept[kKept];
#pragma unroll
        for (i32 i = 0; i < kKept; ++i) {
            const float low = values[i], high = values[kGiven + i];
            kept[i] = fmaxf(upper ? high : low, __shfl_xor_sync(kFullWarp, upper ? low : high, kStep));
        }
        store_lane_maxima<kStep / 2>(to, kept, upper ? k + kGiven : k, thread);
    }
}

// The maxima of a warp's 16 rows, unscaled, one float per head.
template <i32 kHeads>
MLA_DEVICE void store_warp_maxima(float (&to)[kHeads], const float (&scores)[kHeads / 2], i32 thread) {
#pragma unroll
    for (i32 k = 0; k < kHeadsOfThread<kHeads>; ++k) {
        const i32 i = k / 2 * 4 + k % 2;
        float x = fmaxf(scores[i], scores[i + 2]);
#pragma unroll
        for (i32 step = 4; step < kWarpThreads; step *= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, step));
        if (thread % kWarpThreads < 4) to[kth_head(k, thread)] = x;
    }
}

// Stores the maxima with fewer shuffles, which compete with the block's other accesses to shared memory: four instead
// of twelve for 16 heads, seven instead of 24 for 32. The total number of instructions is slightly higher.
template <i32 kHeads, class To>
MLA_DEVICE void store_warp_maxima_by_halves(To& to, const float (&scores)[kHeads / 2], i32 thread) {
    float values[kHeadsOfThread<kHeads>];
#pragma unroll
    for (i32 k = 0; k < kHeadsOfThread<kHeads>; ++k) {
        const i32 i = k / 2 * 4 + k % 2;
        values[k] = fmaxf(scores[i], scores[i + 2]);
    }
    store_lane_maxima<kWarpThreads / 2>(to, values, 0, thread);
}

template <i32 kHeads>
MLA_DEVICE void store_warp_sums(float (&to)[kHeads], const HeadValues<kHeads>& sums, i32 thread) {
#pragma unroll
    for (i32 k = 0; k < kHeadsOfThread<kHeads>; ++k) {
        float x = sums.value[k];
#pragma unroll
        for (i32 step = 4; step < kWarpThreads; step *= 2) x += __shfl_xor_sync(kFullWarp, x, step);
        if (thread % kWarpThreads < 4) to[kth_head(k, thread)] = x;
    }
}

// Largest value that the warps stored for a head, each warp in an array of its own ...
template <i32 kHeads>
MLA_DEVICE float max_of_warps(const float (&warps)[kWarpgroupWarps][kHeads], i32 head) {
    return fmaxf(fmaxf(warps[0][head], warps[1][head]), fmaxf(warps[2][head], warps[3][head]));
}
// ... or side by side, which takes one load.
template <i32 kHeads>
struct SharedMaxima {
    float4 of[kHeads];

    // Destination of one warp's maxima.
    struct OfWarp {
        float* first;
        MLA_DEVICE float& operator[](i32 head) const { return first[head * kWarpgroupWarps]; }
    };
    MLA_DEVICE OfWarp of_warp(i32 warp) { return OfWarp{&of[0].x + warp}; }
};
template <i32 kHeads>
MLA_DEVICE float max_of_warps(const SharedMaxima<kHeads>& maxima, i32 head) {
    const float4 x = maxima.of[head];
    return fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
}

// A thread's heads. `sum` is this thread's share: its rows only. `max` follows the true maximum, `row_max`, lazily.
template <i32 kHeads>
struct HeadState {
    HeadValues<kHeads> max, sum, row_max;

    MLA_DEVICE void reset() {
        max.fill(kLowestMax);
        sum.fill(0.f);
        row_max.fill(negative_infinity());
    }

    // Takes the maxima of a tile as stored by the warps; returns the factors by which to rescale the accumulators.
    template <class Maxima>
    MLA_DEVICE HeadValues<kHeads> move_max(const Maxima& warps, float scale_log2, i32 thread) {
        HeadValues<kHeads> scale;
#pragma unroll
        for (i32 k = 0; k < kHeadsOfThread<kHeads>; ++k) {
            const float tile = max_of_warps(warps, kth_head(k, thread)) * scale_log2;
            row_max.value[k] = fmaxf(row_max.value[k], tile);
            const float to = is_far_above(tile, max.value[k]) ? tile : max.value[k];
            scale.value[k] = ex2_approx(max.value[k] - to);
            sum.value[k] *= scale.value[k];
            max.value[k] = to;
        }
        return scale;
    }

    // P in 16 bits, two heads a word; adds the unrounded values to the sums.
    template <class Element, i32 kCount>
    MLA_DEVICE void exponentiate(Element, u32 (&p_fragment)[kCount / 2], const float (&scores)[kCount],
                                 float scale_log2) {
#pragma unroll
        for (i32 i = 0; i < kCount; i += 2) {
            const float p0 = ex2_approx(__fmul_rn(scores[i], scale_log2) - max.of(i));
            const float p1 = ex2_approx(__fmul_rn(scores[i + 1], scale_log2) - max.of(i + 1));
            sum.value[head_number(i)] += p0;
            sum.value[head_number(i + 1)] += p1;
            p_fragment[i / 2] = cvt_x2(Element{}, p0, p1);
        }
    }
};
}  // namespace mla::attention
