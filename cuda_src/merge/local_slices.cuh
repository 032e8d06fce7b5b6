// This rank's own result for a slice of a row: the decode's result where there is one, else its pieces, merged here.
//
// A team of 128 threads merges a slice. Groups of threads, each as wide as the slice, divide the pieces among
// themselves and read all theirs at once, up to 9 per thread; then the groups' sums are added. The order of the sums
// depends on the number of pieces and on the width of a slice only.
#pragma once
#include "merge/exchange_params.cuh"
#include "merge/state.cuh"
#include "ptx/barrier.cuh"
#include "ptx/control.cuh"
#include "tile/warp.cuh"

namespace mla::merge {
constexpr i32 kTeamThreads = 128;
constexpr i32 kTeamWarps = kTeamThreads / kWarpThreads;
constexpr i32 kLoads = 9;  // pieces that a thread reads at once
constexpr i32 kLsesPerThread = kMaxSplits / kTeamThreads;

struct Team {
    float weights[kMaxSplits];  // per piece
    float warp_max[kTeamWarps], warp_sum[kTeamWarps];
    Floats4 sums[kTeamThreads];
};

// Some columns of a row of one rank's heads.
struct SlicePlace {
    i32 row, slice;  // of the rank's share
    i32 b, s, head;  // of the batch; the head counts over all ranks
    i32 first_column, columns;

    MLA_DEVICE SlicePlace(const MergeExchangeParams& p, i32 unit, i32 owner)
        : row(unit / p.slices),
          slice(unit % p.slices),
          b(row / p.heads / p.s_q),
          s(row / p.heads % p.s_q),
          head(owner * p.heads + row % p.heads),
          first_column(slice * p.slice_columns),
          columns(min(p.slice_columns, p.d - first_column)) {}

    // The column of this thread; whether there is one.
    MLA_DEVICE i32 column() const { return first_column + 4 * (i32)(threadIdx.x % kTeamThreads); }
    MLA_DEVICE bool has_column() const { return 4 * (i32)(threadIdx.x % kTeamThreads) < columns; }
};

// Asked anew for each slice: products with it would be kept in registers over the loop.
MLA_DEVICE i64 rank_in_grid() {
    i32 y = blockIdx.y;
    opaque(y);
    return y;
}

// A result over the tokens of one rank: 4 columns in each thread that has any, the log-sum-exp (base 2) in all.
struct Slice {
    Floats4 x;
    float lse2;
};

// The pieces of a request: the first one ended `split`, each other one began its split, see attention/split_work.cuh.
struct SplitPieces {
    i32 split, count;  // fewer than two: the request was not split
};

// `schedule` is in shared memory.
MLA_DEVICE SplitPieces pieces_of(const SchedulePoint* schedule, i32 num_splits, i32 request) {
    // The first cut within the request or behind it, then the first one behind it. The last point is the batch's end.
    const auto first_cut = [&](i32 low, auto is_reached) {
        i32 high = num_splits;
        while (low < high) {
            const i32 middle = (low + high) / 2;
            if (is_reached(schedule[middle])) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        return low;
    };
    const i32 begin =
        first_cut(1, [&](SchedulePoint x) { return x.request > request || (x.request == request && x.tile > 0); });
    const i32 end = first_cut(begin, [&](SchedulePoint x) { return x.request > request; });
    return SplitPieces{begin - 1, end - begin + 1};
}

// Location of a row's pieces among the rows of all partial results, fewer than 2^31.
struct PieceRows {
    i32 rows;   // of a partial result
    i32 first;  // row of piece 0, if it began its split as the others did
    i32 shift;  // but it ended the split before

    MLA_DEVICE PieceRows(const MergeExchangeParams& p, const SlicePlace& at, i32 split) {
        const i32 group = p.heads * p.world / p.h_kv, kv_head = at.head / group;
        rows = p.s_q * p.heads * p.world;
        first = split * rows + (kv_head * p.s_q + at.s) * group + at.head % group;
        shift = p.continued_index * rows;
    }
    MLA_DEVICE i64 operator[](i32 piece) const { return first + piece * rows + (piece == 0 ? shift : 0); }
};

MLA_DEVICE void add_weighted(Floats4& sum, const Floats4& x, float weight) {
#pragma unroll
    for (i32 i = 0; i < 4; ++i) sum.x[i] = fmaf(weight, x.x[i], sum.x[i]);
}

// Called by a team: each piece's weight, in shared memory, and the log-sum-exp. Returns 1 / the sum of the weights.
struct Weights {
    float factor, lse2;
};

MLA_DEVICE Weights weigh_pieces(Team& team, const float (&lses)[kLsesPerThread], i32 barrier) {
    const i32 thread = threadIdx.x % kTeamThreads, lane = thread % kWarpThreads, warp = thread / kWarpThreads;
    float max_lse = negative_infinity();
#pragma unroll
    for (float x : lses) max_lse = fmaxf(max_lse, x);
    max_lse = warp_max(max_lse);
    if (lane == 0) team.warp_max[warp] = max_lse;
    bar_sync(barrier, kTeamThreads);
#pragma unroll
    for (float x : team.warp_max) max_lse = fmaxf(max_lse, x);
    float sum = 0.f;
#pragma unroll
    for (i32 i = 0; i < kLsesPerThread; ++i) {
        const float weight = lses[i] == negative_infinity() ? 0.f : exp2f(lses[i] - max_lse);
        team.weights[thread + i * kTeamThreads] = weight;
        sum += weight;
    }
    sum = warp_sum(sum);
    if (lane == 0) team.warp_sum[warp] = sum;
    bar_sync(barrier, kTeamThreads);
    sum = 0.f;
#pragma unroll
    for (float x : team.warp_sum) sum += x;
    return Weights{sum == 0.f ? 0.f : 1.f / sum, total_lse2(max_lse, sum)};
}

MLA_DEVICE Slice merge_pieces(const MergeExchangeParams& p, Team& team, const SlicePlace& at,
                              const SplitPieces& pieces) {
    const i32 thread = threadIdx.x % kTeamThreads, barrier = 1 + threadIdx.x / kTeamThreads;
    const i32 width = p.slice_columns / 4, groups = kTeamThreads / width;
    const i32 column = at.first_column + thread % width * 4;
    const PieceRows rows(p, at, pieces.split);
    const i64 rank_row = rank_in_grid() * p.partial_stride_r_rows;
    const float* partial_lse = p.partial_lse + rank_row;
    const float* partial_out = p.partial_out + rank_row * attention::kHeadDimV + column;
    float lses[kLsesPerThread];
#pragma unroll
    for (i32 i = 0; i < kLsesPerThread; ++i) {
        const i32 j = thread + i * kTeamThreads;
        lses[i] = j < pieces.count ? partial_lse[rows[j]] : negative_infinity();
    }
    Floats4 loaded[kLoads];
    i32 first = thread / width;
    const auto load = [&] {
#pragma unroll
        for (i32 i = 0; i < kLoads; ++i) {
            const i32 j = first + i * groups;
            const float* from = partial_out + rows[j] * attention::kHeadDimV;
            loaded[i] = j < pieces.count ? *reinterpret_cast<const Floats4*>(from) : Floats4{};
        }
    };
    load();
    const Weights weights = weigh_pieces(team, lses, barrier);
    Floats4 sum{};
#pragma unroll 1
    while (true) {
#pragma unroll
        for (i32 i = 0; i < kLoads; ++i) {
            if (first + i * groups < pieces.count) add_weighted(sum, loaded[i], team.weights[first + i * groups]);
        }
        first += kLoads * groups;
        if (first >= pieces.count) break;
        load();
    }
    team.sums[thread] = sum;
    bar_sync(barrier, kTeamThreads);  // all sums are stored; the next slice's barriers come before its own sums
    Slice merged{{}, weights.lse2};
    if (thread < width) {
#pragma unroll 1
        for (i32 i = thread; i < kTeamThreads; i += width) add_weighted(merged.x, team.sums[i], weights.factor);
    }
    return merged;
}

// Reads a row that was not split; an empty state is not read.
template <class Element>
MLA_DEVICE Slice read_slice(const MergeExchangeParams& p, const SlicePlace& at) {
    const i64 y = rank_in_grid();
    const i64 lse_at = y * p.lses_stride_r_elems + at.b * p.lses_stride_b_elems + at.head * p.lses_stride_h_elems +
                       at.s * p.lses_stride_s_elems;
    const i64 out_at = y * p.outs_stride_r_elems + at.b * p.outs_stride_b_elems + at.s * p.outs_stride_s_elems +
                       at.head * p.outs_stride_h_elems;
    Slice found{{}, state_lse2(p.lses[lse_at], p.to_log2)};
    if (at.has_column() && found.lse2 != negative_infinity()) {
        found.x = read_elements4<Element>(p.outs, out_at + at.column(), p.outs_are_fp32);
    }
    return found;
}

// Called by a team, with the decode's `schedule` in shared memory.
template <class Element>
MLA_DEVICE Slice local_slice(const MergeExchangeParams& p, Team& team, const SchedulePoint* schedule,
                             const SlicePlace& at) {
    const SplitPieces pieces = p.schedule ? pieces_of(schedule, p.num_splits, at.b) : SplitPieces{0, 0};
    return pieces.count < 2 ? read_slice<Element>(p, at) : merge_pieces(p, team, at, pieces);
}
}  // namespace mla::merge
