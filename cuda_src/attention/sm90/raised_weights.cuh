// float16 weights raised above the usual scale, so that small ones do not become 0.
//
// The running maximum is kept 7 below the true one, in base 2, so P, its sum and the accumulators are 2^7 times as
// large. The quotient and the log-sum-exp stay the same, and a float16 P underflows below 2^-32 of the maximum instead
// of 2^-25. The largest P is 2^15 (kLazyMaxLog2).
#pragma once
#include "attention/sm90/record_query.cuh"

namespace mla::attention::sm90 {
constexpr i32 kRaisedWeightsLog2 = 7;
// log2 of the factor for weights of this format; bf16 needs none.
template <class Weights>
constexpr i32 kRaisedWeights = kSameFormat<Weights, float16> ? kRaisedWeightsLog2 : 0;
}  // namespace mla::attention::sm90
