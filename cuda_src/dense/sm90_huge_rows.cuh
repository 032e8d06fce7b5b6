// Rows with huge scores in prefill on Hopper (see kHugeMax): the loops over tiles have no instruction to spare for
// them, and run as if there were none. A math warp does not store such a row, but notes it in its work item. Once all
// math warps are done with the item, the warps that clean or turn values attend to its huge rows again, in plain code.
//
//   math    | ... item n | notes, stores | item n + 1 ...
//   clean   | values of item n + 1       | huge rows of item n
#pragma once
#include "attention/online_softmax.cuh"
#include "dense/result.cuh"
#include "ptx/control.cuh"
#include "tile/warp.cuh"

namespace mla::dense {
// A row's maximum begins here, and not at the lowest number: scores below it then have no weight, so no tile leaves
// sums behind that are infinite, and could not be scaled by 0 once an ordinary score comes.
constexpr float kFirstMax = -attention::kHugeMax;

// Returns true if a row's sums are wrong because its scores are huge. `sum` is the row's sum of weights. A row whose
// maximum has not moved saw no score above kFirstMax, or NaN.
MLA_DEVICE bool has_huge_scores(float max, float sum, const QueryTile& tile, i32 row) {
    if (max == kFirstMax) return tile.seen(row) > 0 && sum == sum;
    return max >= attention::kHugeMax && max <= kMaxFloat;
}

constexpr i32 kWordBits = 32;

// A bit for each row of a work item.
struct alignas(16) HugeRows {
    u32 words[kTileQueries / kWordBits];

    MLA_DEVICE void clear() { *reinterpret_cast<uint4*>(words) = make_uint4(0, 0, 0, 0); }
    MLA_DEVICE void note(i32 row) { atomicOr(&words[row / kWordBits], 1u << row % kWordBits); }
    MLA_DEVICE bool has(i32 row) const { return words[row / kWordBits] >> row % kWordBits & 1; }
    MLA_DEVICE bool any() const {
        const uint4 all = *reinterpret_cast<const uint4*>(words);
        return (all.x | all.y | all.z | all.w) != 0;
    }
};

// The lowest `count` bits of a word, or all of them.
MLA_DEVICE u32 low_bits(i32 count) { return count <= 0 ? 0 : count < kWordBits ? (1u << count) - 1 : ~0u; }

// A warp's online softmax of one row: a lane has the score of one key, then two columns of each 64 of the values.
template <i32 kColumns>
struct PlainSums {
    static constexpr i32 kPairs = kColumns / 2 / kWarpThreads;
    float max = attention::kLowestMax, sum = 0.f;
    float2 out[kPairs] = {};

    // Takes one score per lane; returns the lane's weight. Every product with the scale is rounded before.
    MLA_DEVICE float add(float score) {
        const float top = fmaxf(max, warp_max(score)), decay = ex2_approx(max - top), weight = ex2_approx(score - top);
        max = top, sum = fmaf(sum, decay, warp_sum(weight));
#pragma unroll
        for (float2& x : out) x = make_float2(x.x * decay, x.y * decay);
        return weight;
    }
};

// Called by a warp. `Operands` reads the work item's arrays: see dense/sm90.cu. A warp has one lane per bit of a word.
template <class Operands>
MLA_DEVICE void redo_row(Operands operands, const QueryTile& tile, i32 row, i32 lane) {
    constexpr i32 kKeysAtOnce = kWarpThreads * kWordBits;  // a bit each, in one register of the warp
    i32 query = tile.first_query + row;
    const i32 seen = tile.seen(row);
    PlainSums<Operands::kColumns> sums;
#pragma unroll 1
    for (i32 first = 0; first < seen; first += kKeysAtOnce) {
        const i32 of_lane = first + lane * kWordBits;
        const u32 words = low_bits(seen - of_lane) & operands.visible(query, of_lane, of_lane < seen);
#pragma unroll 1
        for (i32 i = 0; i < kWarpThreads; ++i) {
            const u32 word = __shfl_sync(kFullWarp, words, i);
            if (word == 0) continue;
            opaque(query), opaque(operands.head);  // values derived from them are not worth registers
            const i32 key = tile.first_key + first + i * kWordBits;
            const float weight = sums.add(word >> lane & 1 ? operands.score(query, key + lane) : negative_infinity());
#pragma unroll 1
            for (i32 j = 0; j < kWarpThreads; ++j) {
                const float of_key = __shfl_sync(kFullWarp, weight, j);
                if (word >> j & 1) operands.add_values(sums, of_key, key + j, lane);
            }
        }
    }
    operands.store(sums, query, lane);
}

// Called by warp `warp` of kWarps.
template <i32 kWarps, class Operands>
MLA_DEVICE void redo_huge_rows(const Operands& operands, const QueryTile& tile, const HugeRows& rows, i32 warp,
                               i32 lane) {
    if (!rows.any()) return;
#pragma unroll 1
    for (i32 row = warp; row < tile.queries; row += kWarps) {
        if (rows.has(row)) redo_row(operands, tile, row, lane);
    }
}
}  // namespace mla::dense
