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
// Partial results of products in FP8 may be bfloat16: half of the bytes that the attention kernel writes and this one
// reads.
#ifndef MLA_PARTIALS
#define MLA_PARTIALS float
#endif

namespace mla::attention {
MLA_DECODE_FACTS();
MLA_FACT(threads, kCombineThreads);
MLA_FACT(max_splits, kMaxSplits);

// ---- Equal pieces ----------------------------------------------------------------------------------------------
// Pieces of each request if nothing but arithmetic cuts the requests, and all alike, in 2 to kSlots pieces; else 0.
MLA_DEVICE i32 even_pieces(const DecodeParams& p) {
    if (p.schedule != nullptr || p.s_q > 1 || p.max_logits != nullptr) return 0;
    const i32 pieces = p.num_splits / p.b;
    return pieces > 1 && pieces <= kSlots && pieces * p.b == p.num_splits ? pieces : 0;
}

// Merges these, a row per team: the same bits as merge_unit, without a list, and so with half of the instructions,
// which are what short calls wait for.
template <class Element>
MLA_DEVICE void merge_even_pieces(const DecodeParams& p, i32 pieces) {
    const i32 thread = threadIdx.x % kTeamThreads, lane = thread % kWarpThreads;
    // PERF(H200, 2026-11-27, -1 % to -5 % of sparse decode of up to 16 queries): the next kernel may start at once, as
    // with up to kEarlyRows rows elsewhere (see run_combine). At the beginning of the kernel, the request makes dense
    // decode of 16 heads 1 % to 2 % slower, although that never comes by here.
    griddepcontrol_launch_dependents();
    bool waited = false;
#pragma unroll 1
    for (i32 row = blockIdx.x * kCombineTeams + threadIdx.x / kTeamThreads; row < p.b * p.h_q;
         row += gridDim.x * kCombineTeams) {
        const i32 request = row / p.h_q, head = row - request * p.h_q;
        // A request's first piece ended a split, every other one began one.
        const auto row_of = [&](i32 piece) {
            return (request * pieces + piece + (piece == 0 ? p.continued_index : 0)) * p.h_q + head;
        };
        if (!waited) griddepcontrol_wait();
        waited = true;
        const auto lse_of = [&](i32 piece) {
            return piece < pieces ? p.partial_lse[row_of(piece)] : negative_infinity();
        };
        const SlotValues lse{lse_of(lane % kSlotLanes), lse_of(lane % kSlotLanes + kSlotLanes)};
        using Vector = PartialVector<MLA_PARTIALS>;
        const auto* const from = reinterpret_cast<const Vector::Stored*>(p.partial_out) + thread;
        float4 loaded[kSlots];
#pragma unroll
        for (i32 i = 0; i < kSlots; ++i) {
            loaded[i] = Vector::load(from + (i64)row_of(i) * kRowVectors, i < pieces);
        }
        constexpr UnitShape kRow{0, 0};
        const SlotValues max = lse.over_row(kRow, [](float x, float y) { return fmaxf(x, y); });
        const SlotValues weights{weight(lse.low, max.low), weight(lse.high, max.high)};
        const SlotValues sum = weights.over_row(kRow, [](float x, float y) { return x + y; });
        float4 totals[kSlots / 2];
#pragma unroll
        for (i32 i = 0; i < kSlots / 2; ++i) {
            totals[i] = make_float4(0.f, 0.f, 0.f, 0.f);
            add_weighted(totals[i], loaded[2 * i], weights.of(2 * i));
            add_weighted(totals[i], loaded[2 * i + 1], weights.of(2 * i + 1));
        }
        add_weighted(totals[0], totals[1], 1.f);
        add_weighted(totals[2], totals[3], 1.f);
        add_weighted(totals[0], totals[2], 1.f);
        const float factor = final_factor(p, head, max.low, sum.low);
        const float4& x = totals[0];
        store_vector<Element>(p, request * p.out_stride_b_elems + head * p.out_stride_h_elems + 4 * thread,
                              make_float4(factor * x.x, factor * x.y, factor * x.z, factor * x.w));
        const float lse2 = sum.low == 0.f ? negative_infinity() : max.low + log2f(sum.low);
        if (thread == 0) p.lse[request * p.lse_stride_b_elems + head * p.lse_stride_h_elems] = final_lse(p, lse2);
    }
    if (!waited) griddepcontrol_wait();
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
// Four blocks per SM: left to itself, the compiler takes more registers than it needs.
extern "C" __global__ void __launch_bounds__(kCombineThreads, 4)
    mla_attention_combine(const __grid_constant__ DecodeParams p) {
    __shared__ CombineStorage s;
    if constexpr (MLA_HEAD_DIM_V == kHeadDimV) {
        if (const i32 pieces = even_pieces(p)) return merge_even_pieces<MLA_DTYPE>(p, pieces);
    }
    run_combine<MLA_DTYPE, ScheduledWork, MLA_HEAD_DIM_V, MLA_PARTIALS>(p, s);
}
}  // namespace mla::attention
