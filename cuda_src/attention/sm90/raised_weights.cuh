// Weights in float16 that are larger than their maximum would have them, so that small ones are not 0.
//
// What the running maximum follows is 7 below the true one, in base 2, so P, its sum and what is accumulated are 2^7
// times as large: the quotient is the same, the log-sum-exp, too, and a P in float16 is 0 below 2^-32 of the maximum
// instead of 2^-25. The largest P is 2^15 (kLazyMaxLog2).
#pragma once
#include "attention/sm90/record_query.cuh"

namespace mla::attention::sm90 {
constexpr i32 kRaisedWeightsLog2 = 7;
// log2 of the factor for weights of this format; bf16 needs none.
template <class Weights>
constexpr i32 kRaisedWeights = kSameFormat<Weights, float16> ? kRaisedWeightsLog2 : 0;
}  // namespace mla::attention::sm90
