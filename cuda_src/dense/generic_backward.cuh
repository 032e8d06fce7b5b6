// Shared by the two CUDA-core fallbacks of dense attention's backward.
#pragma once
#include "dense/backward_params.cuh"
#include "dense/generic_rows.cuh"

namespace mla::dense {
template <class Element, i32 kColumns>
MLA_DEVICE WholeRow<Element, kColumns> value_row(const PrefillBackwardParams& p, i64 key, i32 kv_head) {
    return {p.v + key * p.v_stride_s_elems + kv_head * p.v_stride_h_elems};
}

template <class Element, i32 kColumns>
MLA_DEVICE WholeRow<Element, kColumns> dout_row(const PrefillBackwardParams& p, i64 query, i32 head) {
    return {p.dout + query * p.dout_stride_s_elems + head * p.dout_stride_h_elems};
}

// A query and a key that it sees.
struct Pair {
    float weight;    // P
    float gradient;  // dS, without the factor of the scores
};

MLA_DEVICE Pair pair_of(float score_log2, float dp, float lse2, float delta) {
    const float weight = exp2f(score_log2 - lse2);
    return Pair{weight, weight * (dp - delta)};
}

// The columns of a gradient of a query or key go to two arrays, or to one.
template <class Element, i32 kColumns>
MLA_DEVICE void store_pieces(u16* first, u16* last, const LaneColumns<kColumns>& sums, float factor, i32 lane) {
    constexpr i32 kFirstColumns = kColumns - kRopeColumns;
#pragma unroll
    for (i32 i = 0; i < kColumns / kWarpThreads; ++i) {
        const i32 column = lane + i * kWarpThreads;
        u16* to = column < kFirstColumns ? first + column : last + (column - kFirstColumns);
        *to = Element::from_float(sums.x[i] * factor);
    }
}
}  // namespace mla::dense
