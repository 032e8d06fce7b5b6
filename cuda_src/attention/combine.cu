// Merges the partial results of split requests.
//
// Grid: at most as many blocks as fit on the GPU. Each lists the split requests: those whose first piece ends a split.
// The schedule (attention/split_work.cuh) is older than the attention kernel, so the list is made before that has
// ended. The merge itself is in attention/merge_partials.cuh.
//
// The kernel runs for a few microseconds, so what counts is the number of dependent loads and, as instructions come
// from memory too, the length of the code: one way to merge for every number of pieces, and no unrolled loop that need
// not be.
//
// Source: the log-sum-exp merge of flash-decoding. What differs from FlashMLA's: no walk over all splits by one warp.
#include "attention/combine.cuh"

// Most results are as wide as DeepSeek's values.
#ifndef MLA_HEAD_DIM_V
#define MLA_HEAD_DIM_V 512
#endif

namespace mla::attention {
MLA_DECODE_FACTS();
MLA_FACT(threads, kCombineThreads);
MLA_FACT(max_splits, kMaxSplits);

// Four blocks per SM: left to itself, the compiler takes more registers than it needs.
extern "C" __global__ void __launch_bounds__(kCombineThreads, 4)
    mla_attention_combine(const __grid_constant__ DecodeParams p) {
    __shared__ CombineStorage s;
    run_combine<MLA_DTYPE, ScheduledWork, MLA_HEAD_DIM_V>(p, s);
}
}  // namespace mla::attention
