// Rows with huge scores in the kernels for Hopper, whose loops have no instruction to spare for them: a loop runs as if
// there were none, and a row whose maximum turns out to be huge is attended to once more, in plain code.
#pragma once
#include "attention/online_softmax.cuh"

namespace mla::dense {
// One row over its first `seen` keys: its maximum, and the sum of its weights, 1 for the maximum. `score_of(key)` is in
// base 2, rounded, and negative_infinity() for a hidden key; `add(key, weight)` adds the key's values.
template <class ScoreOf, class Add>
MLA_DEVICE void attend_again(float& max, float& sum, i32 seen, ScoreOf score_of, Add add) {
    max = attention::kLowestMax, sum = 0.f;
#pragma unroll 1
    for (i32 key = 0; key < seen; ++key) max = fmaxf(max, score_of(key));
#pragma unroll 1
    for (i32 key = 0; key < seen; ++key) {
        const float weight = exp2f(score_of(key) - max);
        if (weight == 0.f) continue;  // 0 * NaN is not 0
        sum += weight;
        add(key, weight);
    }
}
}  // namespace mla::dense
