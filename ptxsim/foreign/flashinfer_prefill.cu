// Runs FlashInfer's prefill of one sequence (mma.sync), and compares with attention in double.
// See run.py for how it is compiled and run. Macros: HEAD (columns), CAUSAL (0 or 1).
#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/prefill.cuh>

#include "attention.h"

using namespace flashinfer;

int main(int, char** argv) {
    const Problem problem(argv, HEAD, HEAD, CAUSAL);
    const auto [queries, keys, heads, head, head_v, causal] = problem;
    const size_t count_q = size_t(queries) * heads * head, count_k = size_t(keys) * heads * head;
    const auto q = random_values<half>(count_q), k = random_values<half>(count_k), v = random_values<half>(count_k);
    const size_t rows = size_t(heads) * queries;
    half* out = allocate<half>(count_q);
    float* lse = allocate<float>(rows);

    using Params = SinglePrefillParams<half, half, half>;
    Params p(on_device(q), on_device(k), on_device(v), nullptr, out, lse, nullptr, heads, heads, queries, keys,
             heads * head, head, heads * head, head, head, -1, 0, problem.scale(), 1, 1e4);
    const auto status =
        SinglePrefillWithKVCacheDispatched<HEAD, HEAD, PosEncodingMode::kNone, false,
                                           CAUSAL ? MaskMode::kCausal : MaskMode::kNone,
                                           DefaultAttention<false, false, false, false>>(p, nullptr, nullptr);
    if (status != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) return 1;

    const auto want = forward(problem, to_double(q), to_double(k), to_double(v));
    Doubles log2_lse(rows);  // [row][head], in base 2
    for (size_t h = 0; h < heads; h++)
        for (size_t i = 0; i < queries; i++) log2_lse[i * heads + h] = want.lse[h * queries + i] * M_LOG2E;
    bool wrong = differs("out", from_device<half>(out, count_q), want.out, 0.02);
    wrong |= differs("lse", from_device<float>(lse, rows), log2_lse, 1e-3);
    return wrong ? 2 : 0;
}
