// The variant of decode/sm90_seesaw.cu with a mask over the last tokens, which are drafts of a tree.
#pragma once
#include "attention/sm90/nonfinite_values.cuh"
#include "attention/sm90/two_warpgroups.cuh"
#include "attention/tree_mask.cuh"
#include "decode/sm90_huge_rows.cuh"
#include "decode/sm90_seesaw_sw_tiles.cuh"

namespace mla::decode {
using namespace attention;
using namespace attention::sm90;

struct TreeCall : PlainRows {
    using Work = TreeWork;
    using Hidden = HiddenTokens;
    using Layout = HalfLayout</*kRowsInTurn=*/false>;
    template <class Tile>
    using Keys = SwTileKeys<Tile>;
    // Masks of the two tiles that may contain drafts arrive with Q: the math warpgroups have no registers to compute
    // them.
    struct Extra {
        u64 of_tile[2][kBlockM];  // bit t: the row sees token t; the first tile contains the first draft
    };

    // Called by one thread per row.
    template <class Block>
    MLA_DEVICE static void load(Block& block, const WorkItem& item, i32 thread) {
        if (thread >= kBlockM) return;
        const SeenTokens seen = seen_of_tree(block.p, item, block.row0 + thread);
        const i32 first_tile = first_tile_of_drafts(seen.first);
#pragma unroll
        for (i32 i = 0; i < 2; ++i) block.s.extra.of_tile[i][thread] = seen.of_tile((first_tile + i) * kTileTokens);
    }

    template <class Block>
    MLA_DEVICE static void mask(float (&scores)[kScoresPerThread], const Block& block, const WorkItem& item, i32 tile,
                                i32 row, u64 present, i32 thread) {
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            const i32 place = tile - first_tile_of_drafts(item.seen_by_all);
            const u64 seen = place < 0 ? ~0ull : block.s.extra.of_tile[place][row - block.row0 + 8 * r];
            mask_row(scores, r, seen & present, thread);
        }
    }

    template <class Block>
    MLA_DEVICE static void store(const Block&, const WorkItem&, Math&, i32) {}
};
}  // namespace mla::decode
