// The variant of decode/sm90_seesaw.cu with optional inputs (attention/query_groups.cuh): a varying number of queries
// per request, a sliding window, results that RoPE turns back.
#pragma once
#include "attention/sm90/turned_result.cuh"
#include "attention/sm90/window_values.cuh"
#include "decode/sm90_seesaw_sw_tiles.cuh"
#include "decode/split_rows.cuh"
#include "tile/elements.cuh"

namespace mla::decode {
// Masks the columns of row r of a thread that are before `first`.
template <i32 kCount>
MLA_DEVICE void mask_before(float (&scores)[kCount], i32 r, i32 first, i32 thread) {
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
        if (fragment_half(i) == r && fragment_column(thread, i) < first) scores[i] = negative_infinity();
    }
}

// A split holds groups of queries instead of requests.
struct FormsCall {
    using Work = GroupedWork;
    using Hidden = HiddenOfWindows;
    using Layout = HalfLayout</*kRowsInTurn=*/false>;
    template <class Tile>
    using Keys = SwTileKeys<Tile>;
    struct Extra {};

    template <class Block>
    MLA_DEVICE static void load(Block&, const WorkItem&, i32) {}

    // Rows see the tokens of their windows.
    template <class Block>
    MLA_DEVICE static void mask(float (&scores)[kScoresPerThread], const Block& block, const WorkItem& item, i32 tile,
                                i32 row, u64 present, i32 thread) {
        mask_hidden_rows<Work>(scores, block.p, item, tile, row, present, thread);
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            mask_before(scores, r, Work::window_begin(block.p, item, row + 8 * r) - tile * kTileTokens, thread);
        }
    }

    template <class Block>
    MLA_DEVICE static void store(const Block& block, const WorkItem& item, Math& math, i32 thread) {
        turn_back(block, Work::of(item), math, thread);
    }

    template <class Tile>
    MLA_DEVICE static float score(const DecodeParams& p, const WorkItem& item, i32 kv_head, i32 row, const u16* key) {
        return split_score<Tile>(p, split_query_row(p, Work::of(item), kv_head, row), key);
    }

    MLA_DEVICE static void turn(const DecodeParams& p, const WorkItem& item, i32 row, i32 column, float2& x) {
        if (!turns_back(p) || column < kFirstTurnedColumn) return;
        turn_pair(angles_of_row(p, Work::of(item), row), column, x.x, x.y);
    }
};
}  // namespace mla::decode
