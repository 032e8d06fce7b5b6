// The results of a row: its log-sum-exp, and the weights of its own and of the earlier result.
#pragma once
#include "common/types.cuh"
#include "dense/params.cuh"
#include "ptx/element.cuh"

namespace mla::dense {
// out = own * (sum of P V) + earlier * state_out
struct RowResult {
    float lse;  // natural
    float own, earlier;
};

// `max` is the maximum that the sum of exponentials, in base 2, is relative to.
MLA_DEVICE RowResult row_result(float max, float sum, float earlier_lse) {
    const float own_lse2 = sum == 0.f ? negative_infinity() : max + log2f(sum);
    const float earlier_lse2 = fabsf(earlier_lse) == -negative_infinity() ? negative_infinity() : earlier_lse * kLog2E;
    if (own_lse2 == negative_infinity() && earlier_lse2 == negative_infinity()) {
        return RowResult{negative_infinity(), 0.f, 0.f};
    }
    const float top = fmaxf(own_lse2, earlier_lse2);
    const float own = exp2f(own_lse2 - top), earlier = exp2f(earlier_lse2 - top), total = own + earlier;
    return RowResult{(top + log2f(total)) * kLn2, sum == 0.f ? 0.f : own / (total * sum),
                     earlier_lse2 == negative_infinity() ? 0.f : earlier / total};  // not NaN: nothing is read
}

MLA_DEVICE float earlier_lse(const PrefillParams& p, i64 query, i32 head) {
    if (p.state_lse == nullptr) return negative_infinity();
    return p.state_lse[query * p.state_lse_stride_s_elems + head * p.state_lse_stride_h_elems];
}

MLA_DEVICE void store_lse(const PrefillParams& p, i64 query, i32 head, float lse) {
    p.lse[query * p.lse_stride_s_elems + head * p.lse_stride_h_elems] = lse;
}

// Two neighbouring columns of the earlier state; `at` counts elements.
template <class Element>
MLA_DEVICE float2 state_pair(const PrefillParams& p, i64 at) {
    if (p.state_is_fp32) return *reinterpret_cast<const float2*>(static_cast<const float*>(p.state_out) + at);
    const u32 words = *reinterpret_cast<const u32*>(static_cast<const u16*>(p.state_out) + at);
    return make_float2(Element::to_float((u16)(words & 0xffff)), Element::to_float((u16)(words >> 16)));
}
}  // namespace mla::dense
