// Merges the partial results of groups of queries that were split (attention/query_groups.cuh); see
// attention/combine.cu.
#include "attention/combine.cuh"
#include "attention/query_groups.cuh"

namespace mla::attention {
MLA_DECODE_FORM_FACTS();
MLA_FACT(threads, kCombineThreads);
MLA_FACT(max_splits, kMaxSplits);

extern "C" __global__ void __launch_bounds__(kCombineThreads, 4)
    mla_attention_combine_forms(const __grid_constant__ DecodeFormParams p) {
    __shared__ CombineStorage s;
    run_combine<MLA_DTYPE, GroupedWork>(p, s);
}
}  // namespace mla::attention
