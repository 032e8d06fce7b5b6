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

// ---- Equal pieces ----------------------------------------------------------------------------------------------
constexpr i32 kMaxEvenPieces = 2 * kSlots;

// By the block: the pieces of each request if all are cut into as many, 2 to kMaxEvenPieces, request after request;
// else 0. A schedule in memory may do so, too, whatever the lengths of the pieces: what matters here is whose they are.
MLA_DEVICE i32 even_pieces(const DecodeParams& p) {
    if (p.s_q > 1 || p.max_logits != nullptr) return 0;
    const i32 pieces = p.num_splits / p.b, cuts = pieces * p.b;
    if (pieces < 2 || pieces > kMaxEvenPieces) return 0;
    if (p.schedule == nullptr) return cuts == p.num_splits ? pieces : 0;
    bool even = true;
#pragma unroll 1
    for (i32 i = threadIdx.x; i <= p.num_splits; i += kCombineThreads) {
        const SchedulePoint at = p.schedule[i];
        const i32 request = min(i, cuts) / pieces;
        const bool cut = i < cuts && request * pieces != i;
        even = even && at.request == request && (at.tile > 0) == cut;
    }
    return __syncthreads_and(even) ? pieces : 0;
}

// Merges these: the same bits as merge_unit, without a list, and so with half of the instructions, which are what short
// calls wait for.
template <class Element, i32 kRowShift, i32 kGroupShift>
MLA_DEVICE void merge_even_pieces(const DecodeParams& p, Team& team, i32 pieces) {
    constexpr UnitShape kShape{kRowShift, kGroupShift};
    const i32 thread = threadIdx.x % kTeamThreads, lane = thread % kWarpThreads;
    const i32 share = (pieces + kShape.groups() - 1) >> kGroupShift, first_piece = kShape.group_of(thread) * share;
    const i32 count = min(share, pieces - first_piece);  // of this thread's group
    const i32 units = kShape.units(p.h_q);               // of a request
    bool waited = false;
#pragma unroll 1
    for (i32 unit = blockIdx.x * kCombineTeams + threadIdx.x / kTeamThreads; unit < p.b * units;
         unit += gridDim.x * kCombineTeams) {
        const i32 request = unit / units, number = unit - request * units;
        const i32 first_row = number >> kGroupShift << kRowShift, column = number & (kShape.groups() - 1);
        // A request's first piece ended a split, every other one began one.
        const i32 first_index = request * pieces + first_piece, continued = first_piece == 0 ? p.continued_index : 0;
        const auto row_of = [&](i32 slot) {
            const i32 row = first_row + kShape.row(slot), piece = kShape.piece(slot);
            const i32 index = first_index + piece + (piece == 0 ? continued : 0);
            return row < p.h_q && piece < count ? index * p.h_q + row : kAbsent;
        };
        if (!waited) griddepcontrol_wait();
        if (waited && kGroupShift > 0) Team::sync();  // the sums of the unit before have been read
        waited = true;
        const auto lse_of = [&](i32 slot) {
            const i32 at = row_of(slot);
            return at == kAbsent ? negative_infinity() : p.partial_lse[at];
        };
        const SlotValues lse{lse_of(lane % kSlotLanes), lse_of(lane % kSlotLanes + kSlotLanes)};
        const i32 vector = column * kShape.threads() + kShape.in_group(thread);
        const float4* const from = reinterpret_cast<const float4*>(p.partial_out) + vector;
        float4 loaded[kSlots];
#pragma unroll
        for (i32 i = 0; i < kSlots; ++i) {
            const i32 at = row_of(i);
            loaded[i] = ld_global_16_once(from + (i64)at * kRowVectors, at != kAbsent, kEvictFirst);
        }
        SlotValues max = lse.over_row(kShape, [](float x, float y) { return fmaxf(x, y); });
        const SlotValues weights{weight(lse.low, max.low), weight(lse.high, max.high)};
        SlotValues sum = weights.over_row(kShape, [](float x, float y) { return x + y; });
        float4 totals[kMaxRows];
#pragma unroll
        for (i32 i = 0; i < kMaxRows; ++i) {
            totals[i] = make_float4(0.f, 0.f, 0.f, 0.f);
            add_weighted(totals[i], loaded[2 * i], weights.of(2 * i));
            add_weighted(totals[i], loaded[2 * i + 1], weights.of(2 * i + 1));
        }
        if constexpr (kRowShift < 2) {
            add_weighted(totals[0], totals[1], 1.f);
            add_weighted(totals[2], totals[3], 1.f);
        }
        if constexpr (kRowShift < 1) add_weighted(totals[0], totals[2], 1.f);
        if constexpr (kGroupShift > 0) {
            merge_groups(team, kShape, thread, totals[0], max.low, sum.low);
            max.high = max.low;
            sum.high = sum.low;
            if ((thread & -kWarpThreads) >= kShape.threads()) continue;
        }
        // Lane i knows the factor of row i.
        const i32 my_row = lane & (kShape.rows() - 1), my_head = min(first_row + my_row, p.h_q - 1);
        const float row_max = kRowShift == 0 ? max.low : max.any(my_row << kShape.slot_shift());
        const float row_sum = kRowShift == 0 ? sum.low : sum.any(my_row << kShape.slot_shift());
        const float my_factor = final_factor(p, my_head, row_max, row_sum);
#pragma unroll
        for (i32 row = 0; row < kShape.rows(); ++row) {
            const float factor = __shfl_sync(kFullWarp, my_factor, row);
            if (first_row + row >= p.h_q) continue;
            const float4& x = totals[row << (2 - kRowShift)];
            store_vector<Element>(
                p, request * p.out_stride_b_elems + (first_row + row) * p.out_stride_h_elems + 4 * vector,
                make_float4(factor * x.x, factor * x.y, factor * x.z, factor * x.w));
        }
        if (column > 0 || thread >= kShape.rows() || first_row + thread >= p.h_q) continue;
        const float lse2 = row_sum == 0.f ? negative_infinity() : row_max + log2f(row_sum);
        p.lse[request * p.lse_stride_b_elems + my_head * p.lse_stride_h_elems] = final_lse(p, lse2);
    }
    if (!waited) griddepcontrol_wait();
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
// Four blocks per SM: left to itself, the compiler takes more registers than it needs.
extern "C" __global__ void __launch_bounds__(kCombineThreads, 4)
    mla_attention_combine(const __grid_constant__ DecodeParams p) {
    __shared__ CombineStorage s;
    if constexpr (MLA_HEAD_DIM_V == kHeadDimV) {
        if (query_rows(p) <= kEarlyRows) griddepcontrol_launch_dependents();  // as run_combine
        if (const i32 pieces = even_pieces(p)) {
            Team& team = s.teams[threadIdx.x / kTeamThreads];
            if (pieces > kSlots) return merge_even_pieces<MLA_DTYPE, 0, 1>(p, team, pieces);
            if (pieces > kSlots / 2) return merge_even_pieces<MLA_DTYPE, 0, 0>(p, team, pieces);
            if (pieces > kSlots / 4) return merge_even_pieces<MLA_DTYPE, 1, 0>(p, team, pieces);
            return merge_even_pieces<MLA_DTYPE, 2, 0>(p, team, pieces);
        }
    }
    run_combine<MLA_DTYPE, ScheduledWork, MLA_HEAD_DIM_V>(p, s);
}
}  // namespace mla::attention
