// How a batch's work is cut into parts, one for each block (of a row block): the device schedule, read.
//
// The tiles of all requests stand in one line; part i works from schedule[i] to schedule[i + 1]. A request that a
// boundary cuts is split: each of its pieces is a fragment, whose partial result goes into a slot of the workspace
// and is merged by split_combine. A part can hold at most two pieces of split requests: one that continues a request
// of the part before it (slot `part`), and one that the next part continues (slot `num_parts + part`).
#pragma once
#include "attention/decode_params.cuh"

struct Fragment {
    i32 request;
    i32 tokens;      // of the whole request
    i32 tile_begin;  // tiles [tile_begin, tile_end) of the request; may be empty
    i32 tile_end;
    i32 slot;  // of the workspace, or kWholeRequest: the result is final
};

constexpr i32 kWholeRequest = -1;

// Walks a part's fragments in order; every role of a block walks the same ones.
struct FragmentWalk {
    SchedulePoint begin, end;
    i32 part, request;

    MLA_DEVICE FragmentWalk(const DenseDecodeParams& p, i32 part)
        : begin(p.schedule[part]), end(p.schedule[part + 1]), part(part), request(begin.request) {}

    MLA_DEVICE bool next(const DenseDecodeParams& p, Fragment& fragment) {
        if (request >= p.b || request > end.request || (request == end.request && end.tile == 0)) return false;
        const bool continues_previous = request == begin.request && begin.tile > 0;
        const bool continued_by_next = request == end.request;
        fragment.request = request;
        fragment.tokens = request_tokens(p, request);
        const i32 tiles = ceil_div(fragment.tokens, kTileTokens);
        fragment.tile_begin = request == begin.request ? begin.tile : 0;
        fragment.tile_end = continued_by_next ? min(end.tile, tiles) : tiles;
        fragment.slot = continues_previous ? part : continued_by_next ? p.num_parts + part : kWholeRequest;
        ++request;
        return true;
    }
};
