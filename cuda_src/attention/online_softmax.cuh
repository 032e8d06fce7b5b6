// Online softmax of a 64 x 64 tile of scores in WGMMA fragments, in base 2: P = exp2(S * scale_log2 - max).
#pragma once
#include "ptx/convert.cuh"
#include "tile/fragment.cuh"

namespace mla::attention {
// The running maximum starts at a finite value, so that no infinities are subtracted, and at the lowest one, so that no
// score is below it.
constexpr float kLowestMax = -kMaxFloat;
// It follows the true maximum only when that is more than 2^8 larger. After normalisation the result is the same,
// accumulators are rarely rescaled, and P is at most 256, well within fp16.
constexpr float kLazyMaxLog2 = 8.f;

// Returns true if the running maximum has to move to the tile's. Compares a difference, because max + 8 is rounded
// where max is large.
MLA_DEVICE bool is_far_above(float tile, float max, float log2 = kLazyMaxLog2) { return tile - max > log2; }

// ---- Exponents -------------------------------------------------------------------------------------------------
// fma(score, scale, -max) does not round the product, but max is a rounded product: all exponents of a row are off by
// the rounding error of max. It cancels in the result, but grows with max, until P overflows or vanishes. So a huge
// exponent is the score times a power of two, which is exact. The power is not below the scale, so exponents keep their
// order. Distinct huge scores are at least 16 apart and come to lie further apart: no weight that counts changes.
//
// Maxima hold such exponents until a work item ends; `in_base_2` turns them into what leaves the block.
//
// Kernels with few scores in a thread round every product instead: then no exponent of a row is above 0 either.
constexpr float kHugeExponent = 0x1p28f;

MLA_DEVICE bool is_huge(float exponent) { return fabsf(exponent) >= kHugeExponent; }

// The smallest power of two that is not below `scale`.
MLA_DEVICE float power_from(float scale) { return __uint_as_float((__float_as_uint(scale) + 0x7fffff) & 0xff800000); }

// The exponent of a row's largest score. Rounded up, so that no exponent relative to it is above 0: P is in [2^-16, 1]
// there. Nor can the compiler fuse the product with what follows.
MLA_DEVICE float max_exponent(float score, float scale_log2) {
    const float exponent = __fmul_ru(score, scale_log2);
    return is_huge(exponent) ? score * power_from(scale_log2) : exponent;
}

// By what the scores of a row with this maximum are multiplied.
MLA_DEVICE float scale_of(float max, float scale_log2) { return is_huge(max) ? power_from(scale_log2) : scale_log2; }

// A maximum as the rounded product. The difference of the bits is the quotient of the scale and its power.
MLA_DEVICE float in_base_2(float max, float scale_log2) {
    const u32 quotient = __float_as_uint(scale_log2) - __float_as_uint(power_from(scale_log2)) + __float_as_uint(1.f);
    return is_huge(max) ? max * __uint_as_float(quotient) : max;
}

// The factor by which a new running maximum rescales what was accumulated under the old one.
struct RowScale {
    float by[kFragmentRows];

    // Uniform over the warp.
    MLA_DEVICE bool any() const { return __any_sync(kFullWarp, by[0] != 1.f || by[1] != 1.f); }
};

// A thread's two rows. `sum` is this thread's share: the four lanes of a quad hold a row. `row_max` is the true maximum
// of what this warpgroup has scored; it is computed only where it is read.
struct RowState {
    float max[kFragmentRows], sum[kFragmentRows], row_max[kFragmentRows];

    MLA_DEVICE void reset() {
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            max[r] = kLowestMax;
            sum[r] = 0.f;
            row_max[r] = negative_infinity();
        }
    }

    MLA_DEVICE RowScale move_max(const float (&to)[kFragmentRows]) {
        RowScale scale;
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            scale.by[r] = ex2_approx(max[r] - to[r]);
            sum[r] *= scale.by[r];
            max[r] = to[r];
        }
        return scale;
    }

    // At the end of a work item.
    MLA_DEVICE void to_base_2(const float (&scale_log2)[kFragmentRows]) {
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            max[r] = in_base_2(max[r], scale_log2[r]);
            row_max[r] = in_base_2(row_max[r], scale_log2[r]);
        }
    }
};

// Which scores of a tile count: columns below `visible[r]` for row r, on pages that are present (bit = column).
struct TileMask {
    i32 visible[kFragmentRows];
    u64 present;
};

template <i32 kCount>
MLA_DEVICE void mask_scores(float (&scores)[kCount], const TileMask& mask, i32 thread) {
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
        const i32 column = fragment_column(thread, i);
        const bool counts = column < mask.visible[fragment_half(i)] && ((mask.present >> column) & 1);
        if (!counts) scores[i] = negative_infinity();
    }
}

// Masks what is not in `seen` of row r of a thread (bit = column).
template <i32 kCount>
MLA_DEVICE void mask_row(float (&scores)[kCount], i32 r, u64 seen, i32 thread) {
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
        if (fragment_half(i) == r && !(seen >> fragment_column(thread, i) & 1)) scores[i] = negative_infinity();
    }
}

// Masks the columns of row r of a thread that are before `first`.
template <i32 kCount>
MLA_DEVICE void mask_before(float (&scores)[kCount], i32 r, i32 first, i32 thread) {
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
        if (fragment_half(i) == r && fragment_column(thread, i) < first) scores[i] = negative_infinity();
    }
}

// The exponents of the rows' largest scores in the tile; equal in the four lanes of a quad.
template <i32 kCount>
MLA_DEVICE void tile_max(float (&to)[kFragmentRows], const float (&scores)[kCount],
                         const float (&scale_log2)[kFragmentRows]) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) to[r] = negative_infinity();
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) to[fragment_half(i)] = fmaxf(to[fragment_half(i)], scores[i]);
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) to[r] = max_exponent(quad_max(to[r]), scale_log2[r]);
}

// The running maximum after a tile.
MLA_DEVICE void lazy_max(float (&to)[kFragmentRows], RowState& rows, const float (&tile)[kFragmentRows]) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        to[r] = is_far_above(tile[r], rows.max[r]) ? tile[r] : rows.max[r];
        rows.row_max[r] = fmaxf(rows.row_max[r], tile[r]);
    }
}

// P in 16 bits, as the A fragments of the product with V; adds the unrounded values to the rows' sums.
template <class Element, i32 kCount>
MLA_DEVICE void exponentiate(u32 (&p_fragment)[kCount / 8][4], RowState& rows, const float (&scores)[kCount],
                             const float (&scale_log2)[kFragmentRows]) {
    const float scale[] = {scale_of(rows.max[0], scale_log2[0]), scale_of(rows.max[1], scale_log2[1])};
#pragma unroll
    for (i32 i = 0; i < kCount; i += 2) {
        const i32 r = fragment_half(i);
        const float p0 = ex2_approx(fmaf(scores[i], scale[r], -rows.max[r]));
        const float p1 = ex2_approx(fmaf(scores[i + 1], scale[r], -rows.max[r]));
        rows.sum[r] += p0 + p1;
        p_fragment[i / 8][(i % 8) / 2] = cvt_x2(Element{}, p0, p1);
    }
}

template <i32 kCount>
MLA_DEVICE void rescale(float (&accumulator)[kCount], const RowScale& scale) {
    if (!scale.any()) return;
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) accumulator[i] *= scale.by[fragment_half(i)];
}

// The rows' values to and from shared memory, one float per row of the tile.
MLA_DEVICE void store_rows(float* rows, const float (&values)[kFragmentRows], i32 thread) {
    if (thread % 4 != 0) return;
    rows[fragment_row(thread)] = values[0];
    rows[fragment_row(thread) + 8] = values[1];
}

MLA_DEVICE void load_rows(float (&values)[kFragmentRows], const float* rows, i32 thread) {
    values[0] = rows[fragment_row(thread)];
    values[1] = rows[fragment_row(thread) + 8];
}
}  // namespace mla::attention
