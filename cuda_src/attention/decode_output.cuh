// Destination of a query row's result: the caller's arrays, or a partial result in the workspace.
#pragma once
#include "attention/split_work.cuh"
#include "ptx/convert.cuh"

namespace mla::attention {
// Base-2 logarithm of the sum of exponentials of a row: running maximum `m` (base 2) and sum `l` relative to it.
MLA_DEVICE float row_lse2(float m, float l) { return l == 0.f ? negative_infinity() : m + lg2_approx(l); }

MLA_DEVICE i32 query_head(const DecodeParams& p, i32 kv_head, i32 row) {
    const i32 group = p.h_q / p.h_kv;
    return kv_head * group + row % group;
}

// Factor from a row's sum of weighted values to its final output: 1 / (l + exp2(sink - m)).
MLA_DEVICE float final_factor(const DecodeParams& p, i32 head, float m, float l) {
    if (l == 0.f) return 0.f;
    if (p.attn_sink == nullptr) return 1.f / l;
    const float sink = p.attn_sink[head * p.sink_stride_elems];
    return 1.f / (l + exp2f(__fmul_rn(sink, kLog2E) - m));
}

MLA_DEVICE float final_factor(const DecodeParams& p, i32 kv_head, i32 row, float m, float l) {
    return final_factor(p, query_head(p, kv_head, row), m, l);
}

// The factor for a work item. A partial result leaves the sink to the merge.
MLA_DEVICE float output_factor(const DecodeParams& p, const WorkItem& item, i32 kv_head, i32 row, float m, float l) {
    if (item.partial_index == kNotSplit) return final_factor(p, kv_head, row, m, l);
    return l == 0.f ? 0.f : 1.f / l;
}

MLA_DEVICE float final_lse(const DecodeParams& p, float lse2) { return callers_lse(p.lse_convention, lse2); }

// Index of a row of a partial result in the workspace.
MLA_DEVICE i64 workspace_row(const DecodeParams& p, i32 partial_index, i32 kv_head, i32 row) {
    return (i64)partial_index * p.s_q * p.h_q + (i64)kv_head * query_rows(p) + row;
}

// Offset of a row in `out`, in elements.
MLA_DEVICE i64 out_offset(const DecodeParams& p, i32 request, i32 kv_head, i32 row) {
    return request * p.out_stride_b_elems + (row / (p.h_q / p.h_kv)) * p.out_stride_s_elems +
           query_head(p, kv_head, row) * p.out_stride_h_elems;
}

MLA_DEVICE i64 lse_offset(const DecodeParams& p, i32 request, i32 kv_head, i32 row) {
    return request * p.lse_stride_b_elems + query_head(p, kv_head, row) * p.lse_stride_h_elems +
           (row / (p.h_q / p.h_kv)) * p.lse_stride_s_elems;
}

MLA_DEVICE i64 max_offset(const DecodeParams& p, i32 request, i32 kv_head, i32 row) {
    return request * p.max_stride_b_elems + query_head(p, kv_head, row) * p.max_stride_h_elems +
           (row / (p.h_q / p.h_kv)) * p.max_stride_s_elems;
}

// Output offset of a work item's row. The item's queries need not be the request's first ones.
template <class Work>
MLA_DEVICE i64 item_out_offset(const DecodeParams& p, const WorkItem& item, i32 kv_head, i32 row) {
    return out_offset(p, item.request, kv_head, row) + Work::first_query(item) * p.out_stride_s_elems;
}

template <class Work>
MLA_DEVICE i64 item_lse_offset(const DecodeParams& p, const WorkItem& item, i32 kv_head, i32 row) {
    return lse_offset(p, item.request, kv_head, row) + Work::first_query(item) * p.lse_stride_s_elems;
}

// Writes the row's log-sum-exp, final or partial.
template <class Work = ScheduledWork>
MLA_DEVICE void store_row_lse(const DecodeParams& p, const WorkItem& item, i32 kv_head, i32 row, float lse2) {
    if (item.partial_index == kNotSplit) {
        p.lse[item_lse_offset<Work>(p, item, kv_head, row)] = final_lse(p, lse2);
    } else {
        p.partial_lse[workspace_row(p, item.partial_index, kv_head, row)] = lse2;
    }
}

// fmaxf drops NaN, the row's sum does not: a NaN in the sum becomes the maximum.
MLA_DEVICE float with_nan_of(float sum, float row_max) { return sum != sum && row_max <= kMaxFloat ? sum : row_max; }

// Writes the row's largest score (base 2), final or partial.
MLA_DEVICE void store_row_max(const DecodeParams& p, const WorkItem& item, i32 kv_head, i32 row, float row_max) {
    if (p.max_logits == nullptr) return;
    if (item.partial_index == kNotSplit) {
        p.max_logits[max_offset(p, item.request, kv_head, row)] = row_max * kLn2;
    } else {
        p.partial_max[workspace_row(p, item.partial_index, kv_head, row)] = row_max;
    }
}

// Writes two columns of a row's result.
template <class Element, class Work>
MLA_DEVICE void store_columns(const DecodeParams& p, const WorkItem& item, i32 kv_head, i32 row, i32 column, float2 x) {
    if (item.partial_index != kNotSplit) {
        float* to = p.partial_out + workspace_row(p, item.partial_index, kv_head, row) * kHeadDimV + column;
        *reinterpret_cast<float2*>(to) = x;
        return;
    }
    const i64 at = item_out_offset<Work>(p, item, kv_head, row) + column;
    if (p.out_is_fp32) {
        *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = x;
    } else {
        *reinterpret_cast<u32*>(static_cast<u16*>(p.out) + at) =
            (u32)Element::from_float(x.y) << 16 | Element::from_float(x.x);
    }
}

// Adds to one stored element of a row's result.
template <class Element, class Work>
MLA_DEVICE void add_to_output(const DecodeParams& p, const WorkItem& item, i32 kv_head, i32 row, i32 column,
                              float value) {
    if (item.partial_index != kNotSplit) {
        p.partial_out[workspace_row(p, item.partial_index, kv_head, row) * kHeadDimV + column] += value;
        return;
    }
    const i64 at = item_out_offset<Work>(p, item, kv_head, row) + column;
    if (p.out_is_fp32) {
        static_cast<float*>(p.out)[at] += value;
    } else {
        u16& element = static_cast<u16*>(p.out)[at];
        element = Element::from_float(Element::to_float(element) + value);
    }
}
}  // namespace mla::attention
