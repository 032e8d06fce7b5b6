// Shared by the CUDA-core fallbacks of dense attention: rows of any strides, in pieces, multiplied on CUDA cores.
#pragma once
#include "common/types.cuh"
#include "dense/tiles.cuh"

namespace mla::dense {
// A query or key of kColumns columns: the first ones, and the last kRopeColumns.
template <class Element, i32 kColumns>
struct Row {
    static constexpr i32 kFirstColumns = kColumns - kRopeColumns;
    const u16 *first, *last;

    MLA_DEVICE float operator[](i32 column) const {
        return Element::to_float(column < kFirstColumns ? first[column] : last[column - kFirstColumns]);
    }

    // Called by a warp.
    MLA_DEVICE void copy(float* to, i32 lane) const {
#pragma unroll 1
        for (i32 i = lane; i < kColumns; i += kWarpThreads) to[i] = (*this)[i];
    }

    MLA_DEVICE float dot(const float* other) const {
        float sum = 0.f;
#pragma unroll 4
        for (i32 i = 0; i < kFirstColumns; ++i) sum = fmaf(other[i], Element::to_float(first[i]), sum);
#pragma unroll 4
        for (i32 i = 0; i < kRopeColumns; ++i) sum = fmaf(other[kFirstColumns + i], Element::to_float(last[i]), sum);
        return sum;
    }
};

template <class Element, i32 kColumns, class Params>
MLA_DEVICE Row<Element, kColumns> query_row(const Params& p, i64 query, i32 head) {
    return {p.q + query * p.q_stride_s_elems + head * p.q_stride_h_elems,
            p.q_rope + query * p.q_rope_stride_s_elems + head * p.q_rope_stride_h_elems + p.q_rope_column};
}

template <class Element, i32 kColumns, class Params>
MLA_DEVICE Row<Element, kColumns> key_row(const Params& p, i64 key, i32 kv_head) {
    return {p.k + key * p.k_stride_s_elems + kv_head * p.k_stride_h_elems,
            p.k_rope + key * p.k_rope_stride_s_elems + kv_head * p.k_rope_stride_h_elems + p.k_rope_column};
}

// A value, or a gradient of an output.
template <class Element, i32 kColumns>
struct WholeRow {
    const u16* at;

    MLA_DEVICE float operator[](i32 column) const { return Element::to_float(at[column]); }

    MLA_DEVICE void copy(float* to, i32 lane) const {
#pragma unroll 1
        for (i32 i = lane; i < kColumns; i += kWarpThreads) to[i] = (*this)[i];
    }

    MLA_DEVICE float dot(const float* other) const {
        float sum = 0.f;
#pragma unroll 4
        for (i32 i = 0; i < kColumns; ++i) sum = fmaf(other[i], Element::to_float(at[i]), sum);
        return sum;
    }
};

// One row's columns over the lanes of a warp: lane, lane + 32, ...
template <i32 kColumns>
struct LaneColumns {
    float x[kColumns / kWarpThreads] = {};

    template <class AnyRow>
    MLA_DEVICE void add(float factor, const AnyRow& row, i32 lane) {
#pragma unroll
        for (i32 i = 0; i < kColumns / kWarpThreads; ++i) x[i] = fmaf(factor, row[lane + i * kWarpThreads], x[i]);
    }
};
}  // namespace mla::dense
