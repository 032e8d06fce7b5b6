// Which tokens a query row sees where the last s_q tokens of a sequence are drafts that form a tree.
//
// Query token i sees draft j, the j-th of the last s_q tokens, where bit j of tree_mask[i] is set, and every token
// before the drafts.
#pragma once
#include "attention/split_work.cuh"
#include "tile/fragment.cuh"

namespace mla::attention {
constexpr i32 kWordBits = 64;

// A row sees the tokens before `first`, and the later ones that `seen` selects.
struct SeenTokens {
    i32 first;  // below 0 where the sequence is shorter than s_q
    u64 seen;   // bit k: token first + k

    MLA_DEVICE bool contain(i32 token) const {
        return token < first || (token - first < kWordBits && (seen >> (token - first) & 1));
    }

    // Tokens seen in the tile that begins with token `token`: bit t stands for token + t.
    MLA_DEVICE u64 of_tile(i32 token) const {
        const i32 shift = first - token;
        if (shift >= kWordBits) return ~0ull;
        if (shift <= -kWordBits) return 0;
        return shift >= 0 ? seen << shift | ((1ull << shift) - 1) : seen >> -shift;
    }
};

// The first of the two tiles that may have drafts; -1 where the sequence is shorter than s_q.
MLA_DEVICE i32 first_tile_of_drafts(i32 first) { return first >> 6; }
static_assert(kTileTokens == 1 << 6 && kTileTokens == kWordBits, "s_q drafts are in two tiles at most");

// Reads the row's word of the mask. Rows past the last one do not matter.
MLA_DEVICE SeenTokens seen_of_tree(const DecodeParams& p, const WorkItem& item, i32 row) {
    const i32 query = min(row / (p.h_q / p.h_kv), p.s_q - 1);
    const u64 word = p.tree_mask[item.request * p.tree_stride_b_elems + query * p.tree_stride_s_elems] &
                     ~0ull >> (kWordBits - p.s_q);
    const i32 here = hidden_here(p, p.s_q, item.behind_last);
    if (p.cp_world == 1) return {item.tokens - here, word};
    u64 seen = 0;  // of the drafts in this cache, every cp_world-th one
    i32 draft = p.s_q - 1 - item.behind_last;
#pragma unroll 1
    for (i32 k = here - 1; k >= 0; --k, draft -= p.cp_world) seen |= (word >> draft & 1) << k;
    return {item.tokens - here, seen};
}

// Masks the columns outside `seen` for row r of a thread (bit = column).
template <i32 kCount>
MLA_DEVICE void mask_row(float (&scores)[kCount], i32 r, u64 seen, i32 thread) {
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
        if (fragment_half(i) == r && !(seen >> fragment_column(thread, i) & 1)) scores[i] = negative_infinity();
    }
}

// For kernels that serve calls with and without a mask.
MLA_DEVICE SeenTokens seen_tokens(const DecodeParams& p, const WorkItem& item, i32 row) {
    return p.tree_mask == nullptr ? SeenTokens{visible_tokens(p, item, row), 0} : seen_of_tree(p, item, row);
}

// Work of a build whose calls have a mask: any draft may be hidden from any row.
struct TreeWork : ScheduledWork {
    MLA_DEVICE static i32 hidden(const DecodeParams& p, i32) { return p.s_q; }
    MLA_DEVICE static bool sees(const DecodeParams& p, const WorkItem& item, i32 row, i32 token) {
        return seen_of_tree(p, item, row).contain(token);
    }
};

// The work of a build, by whether its calls have a mask.
template <bool kTree, class Work>
struct MaskedWork {
    using Type = Work;
};
template <>
struct MaskedWork<true, ScheduledWork> {
    using Type = TreeWork;
};
}  // namespace mla::attention
