// Online softmax of a 64 x 64 tile of scores in WGMMA fragments, in base 2: P = exp2(S * scale_log2 - max).
#pragma once
#include "ptx/convert.cuh"
#include "tile/fragment.cuh"

namespace mla::attention {
// The running maximum starts at a finite value, so that no infinities are subtracted, and at the lowest one, so that no
// score is below it.
constexpr float kLowestMax = -kMaxFloat;
// It follows the true maximum only when that is more than 8 larger. After normalisation the result is the same,
// accumulators are rarely rescaled, and P is at most 256, well within fp16.
constexpr float kLazyMaxLog2 = 8.f;

// Returns true if the running maximum has to move to the tile's. Compares a difference, because max + 8 is rounded
// where max is large.
MLA_DEVICE bool is_far_above(float tile, float max, float log2 = kLazyMaxLog2) { return tile - max > log2; }

// fma(score, scale, -max) does not round the product, but the maximum is a rounded product. So all exponents of a row
// are off by the same rounding error, which cancels in the result while it is small. Above this maximum the error
// exceeds one half, and above 2^31 P overflows or vanishes. Such rows round every product: their largest exponent is
// exactly 0.
constexpr float kHugeMax = 0x1p24f;

// A row that saw no token is not huge, although its maximum is the lowest float; where maxima begin at -kHugeMax, it
// counts as one that may be.
MLA_DEVICE bool is_huge(float max) { return fabsf(max) >= kHugeMax && max != kLowestMax; }

// Returns true for the whole warp if a maximum of any lane is huge.
MLA_DEVICE bool any_huge(float a, float b) {
    return __any_sync(kFullWarp, fabsf(a) >= kHugeMax || fabsf(b) >= kHugeMax);
}
MLA_DEVICE bool any_huge(float max) { return __any_sync(kFullWarp, fabsf(max) >= kHugeMax); }

// Factor of sums accumulated under the old running maximum.
struct RowScale {
    float by[kFragmentRows];

    // Uniform over the warp.
    MLA_DEVICE bool any() const { return __any_sync(kFullWarp, by[0] != 1.f || by[1] != 1.f); }
};

// A thread's two rows. `sum` is this thread's share: the four lanes of a quad hold a row. `row_max` is the true maximum
// of this warpgroup's scores; it is computed only where it is read.
struct RowState {
    float max[kFragmentRows], sum[kFragmentRows], row_max[kFragmentRows];

    MLA_DEVICE void reset(float first_max = kLowestMax) {
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            max[r] = first_max;
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

// The rows' maxima over the tile, in base 2 after `scale_log2` of each row; equal in the four lanes of a quad.
template <i32 kCount>
MLA_DEVICE void tile_max(float (&to)[kFragmentRows], const float (&scores)[kCount],
                         const float (&scale_log2)[kFragmentRows]) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) to[r] = negative_infinity();
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) to[fragment_half(i)] = fmaxf(to[fragment_half(i)], scores[i]);
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) to[r] = quad_max(to[r]) * scale_log2[r];
}

// The running maximum after a tile.
MLA_DEVICE void lazy_max(float (&to)[kFragmentRows], RowState& rows, const float (&tile)[kFragmentRows]) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        to[r] = is_far_above(tile[r], rows.max[r]) ? tile[r] : rows.max[r];
        rows.row_max[r] = fmaxf(rows.row_max[r], tile[r]);
    }
}

// Scales the scores to base 2 if a maximum is huge, and sets the scales that are still to be applied to 1.
template <i32 kCount>
MLA_DEVICE void round_huge(float (&scores)[kCount], float (&scale_log2)[kFragmentRows],
                           const float (&max)[kFragmentRows]) {
    if (!any_huge(max[0], max[1])) return;
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) scores[i] = __fmul_rn(scores[i], scale_log2[fragment_half(i)]);
    scale_log2[0] = scale_log2[1] = 1.f;
}

// P in 16 bits, as the A fragments of the product with V; adds the unrounded values to the rows' sums. The branch of
// `kRoundsHuge` makes kernels that are bound by tensor cores 3 to 6 % slower (decode of 128 heads on an H200). Decode
// recomputes huge rows afterwards instead, see decode/sm90_huge_rows.cuh.
template <class Element, bool kRoundsHuge = true, i32 kCount>
MLA_DEVICE void exponentiate(u32 (&p_fragment)[kCount / 8][4], RowState& rows, float (&scores)[kCount],
                             const float (&scale_log2)[kFragmentRows]) {
    float scale[kFragmentRows] = {scale_log2[0], scale_log2[1]};
    if constexpr (kRoundsHuge) round_huge(scores, scale, rows.max);
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
