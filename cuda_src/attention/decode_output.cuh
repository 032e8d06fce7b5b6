// Where the result of a query row goes: the caller's arrays, or a slot of the workspace.
#pragma once
#include "attention/split_work.cuh"
#include "ptx/convert.cuh"

// Base-2 logarithm of the sum of exponentials of a row: running maximum `m` (base 2) and sum `l` relative to it.
MLA_DEVICE float row_lse2(float m, float l) { return l == 0.f ? negative_infinity() : m + lg2_approx(l); }

MLA_DEVICE float final_lse(const DenseDecodeParams& p, float lse2) {
    return lse2 == negative_infinity() ? p.empty_lse : lse2 * p.lse_factor;
}

// Index of a row within a slot of the workspace.
MLA_DEVICE i64 workspace_row(const DenseDecodeParams& p, i32 slot, i32 kv_head, i32 row) {
    return (i64)slot * p.s_q * p.h_q + (i64)kv_head * query_rows(p) + row;
}

// Offset of a row in `out`, in elements.
MLA_DEVICE i64 out_offset(const DenseDecodeParams& p, i32 request, i32 kv_head, i32 row) {
    const i32 group = p.h_q / p.h_kv;
    return request * p.out_stride_b_elems + (row / group) * p.out_stride_s_elems +
           (i64)(kv_head * group + row % group) * p.out_stride_h_elems;
}

MLA_DEVICE i64 lse_offset(const DenseDecodeParams& p, i32 request, i32 kv_head, i32 row) {
    const i32 group = p.h_q / p.h_kv;
    return request * p.lse_stride_b_elems + (i64)(kv_head * group + row % group) * p.lse_stride_h_elems +
           (row / group) * p.lse_stride_s_elems;
}

// Writes the row's log-sum-exp, final or partial.
MLA_DEVICE void store_row_lse(const DenseDecodeParams& p, const Fragment& fragment, i32 kv_head, i32 row, float lse2) {
    if (fragment.slot == kWholeRequest) {
        p.lse[lse_offset(p, fragment.request, kv_head, row)] = final_lse(p, lse2);
    } else {
        p.partial_lse[workspace_row(p, fragment.slot, kv_head, row)] = lse2;
    }
}

// Adds to one stored element of a row's result.
template <class Element>
MLA_DEVICE void add_to_output(const DenseDecodeParams& p, const Fragment& fragment, i32 kv_head, i32 row, i32 column,
                              float value) {
    if (fragment.slot != kWholeRequest) {
        p.partial_out[workspace_row(p, fragment.slot, kv_head, row) * kHeadDimV + column] += value;
        return;
    }
    const i64 at = out_offset(p, fragment.request, kv_head, row) + column;
    if (p.out_is_fp32) {
        static_cast<float*>(p.out)[at] += value;
    } else {
        u16& element = static_cast<u16*>(p.out)[at];
        element = Element::from_float(Element::to_float(element) + value);
    }
}
