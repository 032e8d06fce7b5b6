// Split-KV: how a batch is cut into splits, one per thread block (per row block), and how a block reads the schedule.
//
// The tiles of all requests form one line; split i covers schedule[i] up to schedule[i + 1]. What a split holds of one
// request is a work item. A request that a boundary cuts has several: each writes a partial result to the workspace,
// and attention_combine merges them. A split has at most two such items, so two partial results: one that continues the
// last request of the previous split (partial index `split`), one that the next split continues (`num_splits + split`).
//
// A batch-invariant schedule (decode/schedule_pieces.cu) cuts every request alone, into pieces of one length, and each
// piece is a split. Since no split has two items then, the partial index is always `split` (continued_index is 0).
//
// Requests of one length need no schedule in memory: their units of work are cut evenly (see `split_begin`).
#pragma once
#include "attention/decode_params.cuh"

namespace mla::attention {
struct WorkItem {
    i32 request;
    i32 tokens;           // of the whole request
    i32 behind_last;      // see RequestLength
    i32 tokens_in_first;  // for a request in two places: tokens in the first one
    i32 seen_by_all;      // first token that not every row of the block sees (a division per tile would cost more)
    i32 tile_begin;       // tiles [tile_begin, tile_end) of the request; may be empty
    i32 tile_end;
    i32 partial_index;  // of its partial result in the workspace, or kNotSplit: the result is final
};

constexpr i32 kNotSplit = -1;

// Start of split `split`. Without a schedule, `split` / num_splits of all units, laid out in one line, come before it.
MLA_DEVICE SchedulePoint split_begin(const DecodeParams& p, i32 split) {
    if (p.schedule != nullptr) return p.schedule[split];
    const i32 total = p.b * p.request_units, rest = total % p.num_splits;
    const i32 unit = total / p.num_splits * split + rest * split / p.num_splits;
    return {unit / p.request_units, unit % p.request_units * p.unit_tiles};
}

// The first of an item's tokens that row `row` does not see.
MLA_DEVICE i32 visible_tokens(const DecodeParams& p, const WorkItem& item, i32 row) {
    return item.tokens - hidden_here(p, hidden_from(p, row), item.behind_last);
}

// The work of a plain call: a schedule in memory divides the batch, and `seqlens` give the length of each request.
// Other calls bring their own: TreeWork (attention/tree_mask.cuh), GroupedWork (attention/query_groups.cuh).
struct ScheduledWork {
    enum : bool { kForms = false };  // see attention/query_groups.cuh
    using HeldItem = WorkItem;

    MLA_DEVICE static SchedulePoint begin(const DecodeParams& p, i32 split) { return p.schedule[split]; }
    MLA_DEVICE static RequestLength length(const DecodeParams& p, i32 request) { return request_length(p, request); }
    MLA_DEVICE static i32 tokens_in_first(const DecodeParams&, i32) { return 0; }

    // Load: whether any row sees tokens before `end`. Store: which of its queries come first, and
    // how many of the block's rows it lacks.
    MLA_DEVICE static bool windows_reach(const WorkItem&, i32) { return true; }
    MLA_DEVICE static i32 first_query(const WorkItem&) { return 0; }
    MLA_DEVICE static i32 lacking_rows(const WorkItem&) { return 0; }

    // Mask: the tokens at a sequence's end hidden from the block's first row, and the tokens that a row sees.
    MLA_DEVICE static i32 hidden(const DecodeParams& p, i32 row0) { return hidden_from(p, row0); }
    MLA_DEVICE static i32 visible(const DecodeParams& p, const WorkItem& item, i32 row) {
        return visible_tokens(p, item, row);
    }
    MLA_DEVICE static bool sees(const DecodeParams& p, const WorkItem& item, i32 row, i32 token) {
        return token < visible_tokens(p, item, row);
    }
    MLA_DEVICE static bool all_rows_see(const WorkItem& item, i32 tile) {
        return (tile + 1) * kTileTokens <= item.seen_by_all;
    }
    // The first token that some row may not see, and the next one from `token` on.
    MLA_DEVICE static i32 first_hidden(const WorkItem& item) { return item.seen_by_all; }
    MLA_DEVICE static i32 next_hidden(const WorkItem&, i32 token) { return token; }
};

// Iterates over a split's work items in order; every role of a block sees the same ones. Only the roles
// that mask pass `hidden`.
template <class Work>
struct WorkIteratorOf {
    SchedulePoint begin, end;
    i32 split, request;
    i32 hidden;  // tokens at a sequence's end that the block's first row does not see

    MLA_DEVICE WorkIteratorOf(const DecodeParams& p, i32 split, i32 hidden = 0)
        : begin(Work::begin(p, split)),
          end(Work::begin(p, split + 1)),
          split(split),
          request(begin.request),
          hidden(hidden) {}

    MLA_DEVICE bool next(const DecodeParams& p, WorkItem& item) {
        if (request >= p.b || request > end.request || (request == end.request && end.tile == 0)) return false;
        const bool continues_previous = request == begin.request && begin.tile > 0;
        const bool continued_by_next = request == end.request;
        item.request = request;
        const RequestLength length = Work::length(p, request);
        item.tokens = length.tokens;
        item.tokens_in_first = Work::tokens_in_first(p, request);
        item.behind_last = length.behind_last;
        item.seen_by_all = length.tokens - hidden_here(p, hidden, length.behind_last);
        const i32 tiles = ceil_div(item.tokens, kTileTokens);
        item.tile_begin = request == begin.request ? begin.tile : 0;
        item.tile_end = continued_by_next ? min(end.tile, tiles) : tiles;
        item.partial_index = continues_previous ? split : continued_by_next ? p.continued_index + split : kNotSplit;
        ++request;
        return true;
    }
};

using WorkIterator = WorkIteratorOf<ScheduledWork>;

// ---- Rows ------------------------------------------------------------------------------------------------------
// The work of a thread block: up to kRows query rows of one KV head, in one split of the schedule. Grid: x = row blocks
// of all KV heads, y = splits; a kernel with another grid passes its row block.
template <i32 kRows_, class Work_ = ScheduledWork>
struct RowBlock {
    using Work = Work_;
    static constexpr i32 kRows = kRows_;
    static constexpr bool kStartsEarly = false;  // true: roles wait for the launch before, each as late as it can
    const DecodeParams& p;
    i32 split, kv_head;
    i32 row0, rows;  // first row of the KV head in this block; rows of the KV head
    i32 hidden;      // tokens at a sequence's end that the block's first row may not see

    MLA_DEVICE explicit RowBlock(const DecodeParams& p) : RowBlock(p, blockIdx.x) {}

    MLA_DEVICE RowBlock(const DecodeParams& p, i32 index) : p(p), split(blockIdx.y), rows(query_rows(p)) {
        const i32 row_blocks = ceil_div(rows, kRows);
        kv_head = index / row_blocks;
        row0 = index % row_blocks * kRows;
        hidden = Work::hidden(p, row0);
    }

    // Work items for roles that do not mask.
    MLA_DEVICE WorkIteratorOf<Work> items() const { return WorkIteratorOf<Work>(p, split); }

    // Rows of an item: at most the rows of the KV head.
    MLA_DEVICE i32 rows_of(const WorkItem& item) const { return rows - Work::lacking_rows(item); }
};
}  // namespace mla::attention
