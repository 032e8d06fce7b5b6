// Split-KV: how a batch is cut into splits, one per thread block (per row block), and how a block reads the schedule.
//
// The tiles of all requests form one line; split i covers schedule[i] up to schedule[i + 1]. What a split holds of one
// request is a work item. A request that a boundary cuts has several: each writes a partial result to the workspace,
// and decode_combine merges them. A split has at most two such items, so two partial results: one that continues the
// last request of the previous split (partial index `split`), one that the next split continues (`num_splits + split`).
//
// A batch-invariant schedule (decode/schedule_pieces.cu) cuts every request alone, into pieces of one length, and each
// piece is a split. Since no split has two items then, the partial index is always `split` (continued_index is 0).
#pragma once
#include "attention/decode_params.cuh"

namespace mla::attention {
struct WorkItem {
    i32 request;
    i32 tokens;       // of the whole request
    i32 behind_last;  // see RequestLength
    i32 seen_by_all;  // first token that not every row of the block sees (a division per tile would cost more)
    i32 tile_begin;   // tiles [tile_begin, tile_end) of the request; may be empty
    i32 tile_end;
    i32 partial_index;  // of its partial result in the workspace, or kNotSplit: the result is final
};

constexpr i32 kNotSplit = -1;

// Iterates over a split's work items in order; every role of a block sees the same ones. Only the roles
// that mask pass `hidden`.
struct WorkIterator {
    SchedulePoint begin, end;
    i32 split, request;
    i32 hidden;  // tokens at a sequence's end that the block's first row does not see

    MLA_DEVICE WorkIterator(const DecodeParams& p, i32 split, i32 hidden = 0)
        : begin(p.schedule[split]), end(p.schedule[split + 1]), split(split), request(begin.request), hidden(hidden) {}

    MLA_DEVICE bool next(const DecodeParams& p, WorkItem& item) {
        if (request >= p.b || request > end.request || (request == end.request && end.tile == 0)) return false;
        const bool continues_previous = request == begin.request && begin.tile > 0;
        const bool continued_by_next = request == end.request;
        item.request = request;
        const RequestLength length = request_length(p, request);
        item.tokens = length.tokens;
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

// The first of an item's tokens that row `row` does not see.
MLA_DEVICE i32 visible_tokens(const DecodeParams& p, const WorkItem& item, i32 row) {
    return item.tokens - hidden_here(p, hidden_from(p, row), item.behind_last);
}
}  // namespace mla::attention
