// The work of a thread block: up to kRows query rows of one KV head, in one split of the schedule.
#pragma once
#include "attention/split_work.cuh"

namespace mla::attention {
// Grid: x = row blocks of all KV heads, y = splits; a kernel with another grid says which row block it is. With kTree_
// a mask says which of the last s_q tokens a row sees (attention/tree_mask.cuh).
template <i32 kRows_, bool kTree_ = false, class Work_ = ScheduledWork>
struct RowBlock {
    using Work = Work_;
    static constexpr i32 kRows = kRows_;
    static constexpr bool kTree = kTree_;
    const DecodeParams& p;
    i32 split, kv_head;
    i32 row0, rows;  // first row of the KV head in this block; rows of the KV head
    i32 hidden;      // tokens at a sequence's end that the block's first row may not see

    MLA_DEVICE explicit RowBlock(const DecodeParams& p) : RowBlock(p, blockIdx.x) {}

    MLA_DEVICE RowBlock(const DecodeParams& p, i32 index) : p(p), split(blockIdx.y), rows(query_rows(p)) {
        const i32 row_blocks = ceil_div(rows, kRows);
        kv_head = index / row_blocks;
        row0 = index % row_blocks * kRows;
        hidden = kTree ? p.s_q : hidden_from(p, row0);
    }

    // What a role that does not mask iterates over.
    MLA_DEVICE WorkIteratorOf<Work> items() const { return WorkIteratorOf<Work>(p, split); }

    // Rows of the KV head, of which an item may have fewer.
    MLA_DEVICE i32 rows_of(const WorkItem& item) const {
        if constexpr (Work::kForms) return rows - Work::of(item).lacking_rows;
        return rows;
    }
};
}  // namespace mla::attention
