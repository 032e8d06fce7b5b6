// Merges partial results, for attention_combine and decode_combine_pieces.
//
//   out = sum_j w_j out_j / sum_j w_j,   w_j = exp2(lse_j - max lse),   lse = max lse + log2 sum_j w_j
//
// With an attention sink, exp2(sink - max lse) is added to the denominator of `out`.
//
// A team of 128 threads works on one unit. Each thread reads 16 bytes of at most 8 pieces, its slots, all at once. A
// unit is several rows of up to 4 pieces each, or some columns of one row with more than 8 pieces, which groups of
// threads divide among themselves. The order of the sums depends on the number of pieces only, not on their place in
// the workspace.
//
// All units together are about as many as are resident at once, so every instruction of a warp costs time. One thread
// each computes a unit's shared quantities into shared memory (`prepare_unit`) before the partial results arrive. With
// up to 8 pieces no thread waits for another after that: every four lanes weigh the pieces of their slots.
#pragma once
#include "attention/decode_output.cuh"
#include "attention/split_work.cuh"
#include "ptx/barrier.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/load.cuh"
#include "tile/warp.cuh"

namespace mla::attention {

constexpr i32 kTeamThreads = 128;  // work at a unit
constexpr i32 kTeamShift = 7;
constexpr i32 kMaxPartials = 256;           // of a request
constexpr i32 kRowVectors = kHeadDimV / 4;  // 16 bytes of fp32 each
constexpr i32 kSlotShift = 3;
constexpr i32 kSlots = 1 << kSlotShift;  // of a group
constexpr i32 kSlotLanes = kSlots / 2;   // lanes that hold them all, two each
constexpr i32 kMaxRows = kSlots / 2;     // rows of a unit: a split request has at least two pieces
constexpr i32 kMaxGroups = kMaxPartials / kSlots;
static_assert(kRowVectors == kTeamThreads, "one group covers a row");
static_assert(kTeamThreads == 1 << kTeamShift && kTeamThreads / kMaxGroups >= kSlotLanes, "lanes for a group's slots");
static_assert(kMaxGroups <= kWarpThreads, "a lane knows a group");

// A unit is 2^row_shift rows, or 2^group_shift groups of threads. Each group covers one vector of a row per thread.
struct UnitShape {
    i32 row_shift, group_shift;

    MLA_DEVICE static UnitShape of(i32 num_partials) {
        const i32 row_shift = (num_partials <= kSlots / 2) + (num_partials <= kSlots / 4);
        return UnitShape{row_shift, 32 - __clz((num_partials - 1) >> kSlotShift)};
    }
    MLA_DEVICE i32 rows() const { return 1 << row_shift; }
    MLA_DEVICE i32 groups() const { return 1 << group_shift; }
    MLA_DEVICE i32 threads() const { return kTeamThreads >> group_shift; }
    MLA_DEVICE i32 group_of(i32 thread) const { return thread >> (kTeamShift - group_shift); }
    MLA_DEVICE i32 in_group(i32 thread) const { return thread & (threads() - 1); }
    MLA_DEVICE i32 units(i32 total_rows) const { return ((total_rows << group_shift) + rows() - 1) >> row_shift; }
    // Slots are pieces of the first row, then of the second one, ...
    MLA_DEVICE i32 slot_shift() const { return kSlotShift - row_shift; }
    MLA_DEVICE i32 row(i32 slot) const { return slot >> slot_shift(); }
    MLA_DEVICE i32 piece(i32 slot) const { return slot & ((1 << slot_shift()) - 1); }
};

constexpr i32 kAbsent = -1;

// State of a team.
struct Team {
    alignas(16) i32 slots[kMaxPartials];  // of each group: rows of the workspace, or kAbsent
    UnitShape shape;
    i32 column;  // column of the unit, of groups() columns
    i32 num_rows;
    i32 heads[kMaxRows];  // of the rows
    i64 out_offsets[kMaxRows], lse_offsets[kMaxRows], max_offsets[kMaxRows];
    float4 sums[kTeamThreads];
    float max[kMaxGroups], sum[kMaxGroups];

    MLA_DEVICE static void sync() { bar_sync(1 + threadIdx.x / kTeamThreads, kTeamThreads); }
};

// Called by a team: prepares one column of the rows from `first_row` on (kv_head * rows + row of that head). The
// request's first piece ends `split`.
template <class Work = ScheduledWork>
MLA_DEVICE void prepare_unit(const DecodeParams& p, Team& team, const UnitShape& shape, i32 split, i32 num_partials,
                             i32 request, i32 first_row, i32 column) {
    i32 thread = threadIdx.x % kTeamThreads, s_q = p.s_q, h_kv = p.h_kv;
    opaque(thread);  // values derived from these must not stay in registers while units are merged
    opaque(s_q);
    opaque(h_kv);
    const i32 total_rows = s_q * p.h_q;
    Team::sync();  // the unit before is done
    i32 num_rows = min(shape.rows(), total_rows - first_row), first_query = 0;
    if constexpr (Work::kForms) Work::take_group(p, request, first_query, num_rows, first_row);
    const i32 share = (num_partials + shape.groups() - 1) >> shape.group_shift;
#pragma unroll 1
    for (i32 i = thread; i < kSlots << shape.group_shift; i += kTeamThreads) {
        const i32 slot = i & (kSlots - 1), row = shape.row(slot), in_share = shape.piece(slot);
        const i32 piece = (i >> kSlotShift) * share + in_share;
        // The first piece ended its split, every other one began its split. 32 bits do: 2^31 rows are 4 TB.
        const i32 index = split + (piece == 0 ? p.continued_index : piece);
        const bool present = row < num_rows && in_share < share && piece < num_partials;
        team.slots[i] = present ? index * total_rows + first_row + row : kAbsent;
    }
    const i32 row = kTeamThreads - 1 - thread;  // the last warp's business: the first one has the slots
    if (row < kMaxRows) {                       // past the last one, the last one
        const i32 at = min(first_row + row, total_rows - 1), group = p.h_q / h_kv, rows = s_q * group;
        const i32 kv_head = at / rows, token = at % rows / group, head = kv_head * group + at % group;
        team.heads[row] = head;
        team.out_offsets[row] =
            request * p.out_stride_b_elems + token * p.out_stride_s_elems + head * p.out_stride_h_elems;
        team.lse_offsets[row] =
            request * p.lse_stride_b_elems + token * p.lse_stride_s_elems + head * p.lse_stride_h_elems;
        team.max_offsets[row] =
            request * p.max_stride_b_elems + token * p.max_stride_s_elems + head * p.max_stride_h_elems;
        if constexpr (Work::kForms) {
            team.out_offsets[row] += first_query * p.out_stride_s_elems;
            team.lse_offsets[row] += first_query * p.lse_stride_s_elems;
        }
    }
    if (thread == 0) {
        team.shape = shape;
        team.column = column;
        team.num_rows = num_rows;
    }
    Team::sync();
}

// A value per slot: of lane i, slots i % 4 and i % 4 + 4.
struct SlotValues {
    float low, high;

    MLA_DEVICE float of(i32 slot) const {  // known at compile time
        return __shfl_sync(kFullWarp, slot < kSlotLanes ? low : high, slot % kSlotLanes, kSlotLanes);
    }
    MLA_DEVICE float any(i32 slot) const {
        const float from_low = __shfl_sync(kFullWarp, low, slot % kSlotLanes, kSlotLanes);
        const float from_high = __shfl_sync(kFullWarp, high, slot % kSlotLanes, kSlotLanes);
        return slot < kSlotLanes ? from_low : from_high;
    }

    // Over the slots of each row.
    template <class Op>
    MLA_DEVICE SlotValues over_row(const UnitShape& shape, Op op) const {
        SlotValues x = *this;
#pragma unroll
        for (i32 step = 1; step < kSlotLanes; step *= 2) {
            const float below = __shfl_xor_sync(kFullWarp, x.low, step);
            const float above = __shfl_xor_sync(kFullWarp, x.high, step);
            if (step < 1 << shape.slot_shift()) x = SlotValues{op(x.low, below), op(x.high, above)};
        }
        if (shape.row_shift == 0) x.low = x.high = op(x.low, x.high);
        return x;
    }
};

// exp2(lse - max), where no piece (both -Inf) weighs nothing. A NaN stays one.
MLA_DEVICE float weight(float lse, float max_lse) { return lse == negative_infinity() ? 0.f : exp2f(lse - max_lse); }

// Partial results as they lie in the workspace: four numbers of a thread are 16 bytes of float32, or 8 of bfloat16.
template <class Partial>
struct PartialVector {
    using Stored = float4;
    MLA_DEVICE static float4 load(const Stored* from, bool present) {
        return ld_global_16_once(from, present, kEvictFirst);
    }
};
template <>
struct PartialVector<bfloat16> {
    using Stored = uint2;
    MLA_DEVICE static float4 load(const Stored* from, bool present) {
        const uint2 x = ld_global_8(from, present);
        return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u), __uint_as_float(x.y << 16),
                           __uint_as_float(x.y & 0xffff0000u));
    }
};

MLA_DEVICE void add_weighted(float4& sum, const float4& x, float weight) {
    sum.x += weight * x.x;
    sum.y += weight * x.y;
    sum.z += weight * x.z;
    sum.w += weight * x.w;
}

template <class Element>
MLA_DEVICE void store_vector(const DecodeParams& p, i64 at, const float4& x) {
    if (p.out_is_fp32) {
        *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = x;
    } else {
        *reinterpret_cast<ushort4*>(static_cast<u16*>(p.out) + at) = make_ushort4(
            Element::from_float(x.x), Element::from_float(x.y), Element::from_float(x.z), Element::from_float(x.w));
    }
}

// Called by a warp: the largest score of all pieces of a row; `sum` is the sum of their weights.
MLA_DEVICE float largest_score(const DecodeParams& p, const Team& team, i32 row, float sum) {
    const UnitShape shape = team.shape;
    float row_max = negative_infinity();
#pragma unroll 1
    for (i32 i = threadIdx.x % kWarpThreads; i < kSlots << shape.group_shift; i += kWarpThreads) {
        const i32 at = team.slots[i];
        if (at != kAbsent && shape.row(i & (kSlots - 1)) == row) row_max = fmaxf(row_max, p.partial_max[at]);
    }
    return with_nan_of(sum, warp_max(row_max)) * kLn2;
}

// Sums of all groups: `total`, relative to `max`, and the sum of the weights in `sum`.
MLA_DEVICE void merge_groups(Team& team, const UnitShape& shape, i32 thread, float4& total, float& max, float& sum) {
    const i32 lane = thread % kWarpThreads, vector = shape.in_group(thread);
    team.sums[thread] = total;
    if (vector == 0) {
        team.max[shape.group_of(thread)] = max;
        team.sum[shape.group_of(thread)] = sum;
    }
    Team::sync();
    if ((thread & -kWarpThreads) >= shape.threads()) return;
    // Lane i reads group i; higher lanes repeat the lower groups.
    const i32 group = lane & (shape.groups() - 1);
    const float group_max = team.max[group];
    max = group_max;
#pragma unroll 1
    for (i32 step = shape.groups() / 2; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, step));
    const float group_weight = weight(group_max, max);
    sum = group_weight * team.sum[group];
#pragma unroll 1
    for (i32 step = shape.groups() / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (i32 g = 0; g < shape.groups(); g += 2) {
        const float4* const sums = team.sums + g * shape.threads() + vector;
        const float4 even = sums[0], odd = sums[shape.threads()];
        add_weighted(total, even, __shfl_sync(kFullWarp, group_weight, g));
        add_weighted(total, odd, __shfl_sync(kFullWarp, group_weight, g + 1));
    }
}

// Merges the unit that the team has prepared: the first kColumns of its rows.
template <class Element, i32 kColumns = kHeadDimV, class Partial = float>
MLA_DEVICE void merge_unit(const DecodeParams& p, Team& team) {
    const i32 thread = threadIdx.x % kTeamThreads, lane = thread % kWarpThreads;
    const UnitShape shape = team.shape;
    const i32* const slots = team.slots + (shape.group_of(thread) << kSlotShift);
    const auto lse_of = [&](i32 slot) {
        const i32 at = slots[slot];
        return at == kAbsent ? negative_infinity() : p.partial_lse[at];
    };
    const SlotValues lse{lse_of(lane % kSlotLanes), lse_of(lane % kSlotLanes + kSlotLanes)};
    const i32 vector = team.column * shape.threads() + shape.in_group(thread);
    using Vector = PartialVector<Partial>;
    const auto* const from = reinterpret_cast<const typename Vector::Stored*>(p.partial_out) + vector;
    // PERF(H200, 2026-11-22, -1.4 % to -1.9 % of a decode of 4 to 16 sequences, 128 heads): no piece is read twice.
    float4 loaded[kSlots];
#pragma unroll
    for (i32 i = 0; i < kSlots; ++i) {
        const i32 at = slots[i];
        const bool present = at != kAbsent && (kColumns == kHeadDimV || 4 * vector < kColumns);
        loaded[i] = Vector::load(from + (i64)at * kRowVectors, present);
    }

    SlotValues max = lse.over_row(shape, [](float x, float y) { return fmaxf(x, y); });
    const SlotValues weights{weight(lse.low, max.low), weight(lse.high, max.high)};
    SlotValues sum = weights.over_row(shape, [](float x, float y) { return x + y; });
    // Absent pieces are zeros of weight 0.
    float4 totals[kMaxRows];
#pragma unroll
    for (i32 i = 0; i < kMaxRows; ++i) {
        totals[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        add_weighted(totals[i], loaded[2 * i], weights.of(2 * i));
        add_weighted(totals[i], loaded[2 * i + 1], weights.of(2 * i + 1));
    }
    if (shape.row_shift < 2) {
        add_weighted(totals[0], totals[1], 1.f);
        add_weighted(totals[2], totals[3], 1.f);
    }
    if (shape.row_shift < 1) add_weighted(totals[0], totals[2], 1.f);
    if (shape.group_shift > 0) {
        merge_groups(team, shape, thread, totals[0], max.low, sum.low);
        max.high = max.low;
        sum.high = sum.low;
    }
    if ((thread & -kWarpThreads) >= shape.threads()) return;

    // Lane i holds the factor of row i.
    const i32 my_row = lane & (shape.rows() - 1);
    const float row_max = max.any(my_row << shape.slot_shift()), row_sum = sum.any(my_row << shape.slot_shift());
    const float my_factor = final_factor(p, team.heads[my_row], row_max, row_sum);
#pragma unroll
    for (i32 i = 0; i < kMaxRows; ++i) {
        const i32 row = i >> (2 - shape.row_shift);
        if (row << (2 - shape.row_shift) != i) continue;
        const float factor = __shfl_sync(kFullWarp, my_factor, row);
        if (thread >= shape.threads() || row >= team.num_rows) continue;
        if (kColumns < kHeadDimV && 4 * vector >= kColumns) continue;
        const float4& x = totals[i];
        store_vector<Element>(p, team.out_offsets[row] + 4 * vector,
                              make_float4(factor * x.x, factor * x.y, factor * x.z, factor * x.w));
    }
    if (team.column > 0 || thread >= kWarpThreads) return;
    const float lse2 = row_sum == 0.f ? negative_infinity() : row_max + log2f(row_sum);
    if (lane < team.num_rows) p.lse[team.lse_offsets[lane]] = final_lse(p, lse2);
    if (p.max_logits == nullptr) return;
#pragma unroll 1
    for (i32 i = 0; i < team.num_rows; ++i) {
        const float score = largest_score(p, team, i, __shfl_sync(kFullWarp, row_sum, i));
        if (lane == i) p.max_logits[team.max_offsets[lane]] = score;
    }
}

}  // namespace mla::attention
