// Shared by the attention kernels on CUDA cores: a warp's online softmax of a row, and its result.
#pragma once
#include "attention/decode_output.cuh"
#include "attention/online_softmax.cuh"
#include "attention/output_rope.cuh"
#include "attention/query_groups.cuh"
#include "attention/tree_mask.cuh"
#include "tile/warp.cuh"

namespace mla::attention {
// One row's online softmax, by its warp.
struct Row {
    float max = kLowestMax, sum = 0.f;

    // Takes one score per lane; returns the lane's probability, and in `scale` the factor for the earlier ones.
    MLA_DEVICE float add(float score, float& scale) {
        const float old_max = max;
        max = fmaxf(max, warp_max(score));
        scale = exp2f(old_max - max);
        const float p = exp2f(score - max);
        sum = sum * scale + warp_sum(p);
        return p;
    }
};

// Returns true if the warp's row sees the token. `seen` has the tokens that it sees where queries are not grouped.
template <class Work>
MLA_DEVICE bool sees(const DecodeParams& p, const WorkItem& item, const SeenTokens& seen, i32 row, i32 token) {
    if constexpr (Work::kForms) {
        if (forms_of(p).groups != nullptr) return Work::sees(p, item, row, token);
    }
    return seen.contain(token);
}

// Two columns of a row's result, turned back if the call requests it.
template <class Element, class Work>
MLA_DEVICE void store_turned_columns(const DecodeParams& p, const WorkItem& item, i32 kv_head, i32 row, i32 column,
                                     float2 x) {
    if constexpr (Work::kForms) {
        if (turns_back(p) && column >= kFirstTurnedColumn) {
            const RowAngles angles = angles_of_row(p, Work::of(item), row);
            x = make_float2(turned_element(angles, column, x.x, x.y), turned_element(angles, column + 1, x.y, x.x));
        }
    }
    store_columns<Element, Work>(p, item, kv_head, row, column, x);
}

// Called by all threads. Warp `warp` holds the softmax of its row, and each of the first threads two columns of all
// rows.
template <class Element, class Work = ScheduledWork, i32 kColumnThreads = kHeadDimV / 2, class Block, i32 kBlockM>
MLA_DEVICE void store_result(const Block& block, const WorkItem& item, const Row& row_state,
                             const float2 (&out)[kBlockM], i32 warp, i32 lane) {
    const i32 my_row = block.row0 + warp;
    const i32 rows = block.rows - Work::lacking_rows(item);
    if (lane == 0 && my_row < rows) {
        const float max = row_state.max, sum = row_state.sum;
        const float lse2 = sum == 0.f ? negative_infinity() : max + log2f(sum);
        const float row_max = sum == 0.f ? negative_infinity() : max;
        store_row_lse<Work>(block.p, item, block.kv_head, my_row, lse2);
        store_row_max(block.p, item, block.kv_head, my_row, with_nan_of(sum, row_max));
        block.s.factor[warp] = output_factor(block.p, item, block.kv_head, my_row, max, sum);
    }
    __syncthreads();
    if (threadIdx.x >= kColumnThreads) return;
    for (i32 row = 0; row < min(kBlockM, rows - block.row0); ++row) {
        const float factor = block.s.factor[row];
        float2 x = out[0];
#pragma unroll
        for (i32 i = 1; i < kBlockM; ++i) {
            if (row == i) x = out[i];
        }
        store_turned_columns<Element, Work>(block.p, item, block.kv_head, block.row0 + row, threadIdx.x * 2,
                                            make_float2(x.x * factor, x.y * factor));
    }
}
}  // namespace mla::attention
