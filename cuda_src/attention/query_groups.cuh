// Optional inputs of dense decode, for builds with MLA_FORMS: a varying number of queries per request, a sliding
// window, queries whose RoPE columns are a separate array, and results that RoPE turns back.
//
// The schedule sees groups of queries instead of requests. A group is at most as many queries of one request as fill a
// thread block, and the tokens inside their window. decode/schedule_groups.cu writes the list of groups; without a list
// each request is a group.
#pragma once
#include "attention/split_queries.cuh"
#include "ptx/control.cuh"

namespace mla::attention {
// ---- Params ----------------------------------------------------------------------------------------------------
struct QueryGroup {
    i32 request;      // row of the block table
    i32 first_query;  // along the axis s_q of q and out: in packed arrays of all queries, or of the request's
    i32 queries;
    i32 later_queries;  // queries of the request after these
    i32 tokens;         // tokens of the request
    i32 first_token;    // first token that any of the queries sees
};

struct FormAddresses {
    const QueryGroup* groups;  // (b,), or null: each request is a group, and sees all tokens
    const float* out_cos;      // (out_max_position, 32), or null: results are not turned, see attention/output_rope.cuh
    const float* out_sin;      // the same
    const u8* out_positions;   // of the queries, i32 or i64
};

// `b` are the groups that there may be, `s_q` the queries of a full one.
struct DecodeFormParams : FormAddresses, DecodeRopeParams {
    i64 out_cos_stride_elems, out_sin_stride_elems;
    i64 out_positions_stride_b_bytes, out_positions_stride_s_bytes;
    i32 window;  // most recent tokens a query sees, itself included; 0: all
    i32 out_max_position, out_positions_are_64;
    i32 padding;
};

MLA_DEVICE const DecodeFormParams& forms_of(const DecodeParams& p) { return static_cast<const DecodeFormParams&>(p); }

// ---- Work ------------------------------------------------------------------------------------------------------
// Share of a group in a split.
struct GroupItem : WorkItem {
    i32 first_query;
    i32 more_hidden;   // hidden tokens at the end, in addition to the parameters' number; may be negative
    i32 lacking_rows;  // missing rows, compared with the parameters
    i32 first_token;   // first token that any row sees
    i32 seen_from;     // first token that no row's window leaves out
};

struct GroupedWork {
    enum : bool { kForms = true };
    using HeldItem = GroupItem;

    // Roles pass an item on as a WorkItem.
    MLA_DEVICE static const GroupItem& of(const WorkItem& item) { return static_cast<const GroupItem&>(item); }

    // Same interface as ScheduledWork.
    MLA_DEVICE static bool windows_reach(const WorkItem& item, i32 end) { return end > of(item).first_token; }
    MLA_DEVICE static i32 first_query(const WorkItem& item) { return of(item).first_query; }
    MLA_DEVICE static i32 lacking_rows(const WorkItem& item) { return of(item).lacking_rows; }
    MLA_DEVICE static i32 hidden(const DecodeParams& p, i32 row0) { return hidden_from(p, row0); }
    MLA_DEVICE static i32 visible(const DecodeParams& p, const WorkItem& item, i32 row) {
        return item.tokens - hidden_here(p, hidden_from(p, row) + of(item).more_hidden, item.behind_last);
    }
    // The first token that row `row` sees.
    MLA_DEVICE static i32 window_begin(const DecodeParams& p, const WorkItem& item, i32 row) {
        const i32 window = forms_of(p).window;
        return window == 0 ? 0 : max(0, visible(p, item, row) - window);
    }
    MLA_DEVICE static bool sees(const DecodeParams& p, const WorkItem& item, i32 row, i32 token) {
        return window_begin(p, item, row) <= token && token < visible(p, item, row);
    }
    // Every row sees the tokens [seen_from, seen_by_all).
    MLA_DEVICE static bool all_rows_see(const WorkItem& item, i32 tile) {
        return of(item).seen_from <= tile * kTileTokens && (tile + 1) * kTileTokens <= item.seen_by_all;
    }
    MLA_DEVICE static i32 first_hidden(const WorkItem& item) { return min(item.seen_by_all, of(item).first_token); }
    MLA_DEVICE static i32 next_hidden(const WorkItem& item, i32 token) {
        return of(item).seen_from <= token && token < item.seen_by_all ? item.seen_by_all : token;
    }

    // To a group `request` of the schedule: the request that its queries are of, the first one of them, and how many of
    // the rows from `first_row` on it has. (There is one KV head then, so that those it lacks are the last ones.)
    MLA_DEVICE static void take_group(const DecodeParams& p, i32& request, i32& first_query, i32& num_rows,
                                      i32 first_row) {
        const QueryGroup* const groups = forms_of(p).groups;
        if (groups == nullptr) return;
        const QueryGroup& of = groups[request];
        num_rows = min(num_rows, of.queries * p.h_q - first_row);
        first_query = of.first_query;
        request = of.request;
    }
};

template <>
struct WorkIteratorOf<GroupedWork> {
    SchedulePoint begin, end;
    i32 split, group;
    i32 hidden;  // as in ScheduledWork, for a full group

    MLA_DEVICE WorkIteratorOf(const DecodeParams& p, i32 split, i32 hidden = 0)
        : begin(p.schedule[split]), end(p.schedule[split + 1]), split(split), group(begin.request), hidden(hidden) {}

    MLA_DEVICE bool next(const DecodeParams& p, GroupItem& item) {
        if (group >= p.b || group > end.request || (group == end.request && end.tile == 0)) return false;
        const bool continues_previous = group == begin.request && begin.tile > 0;
        const bool continued_by_next = group == end.request;
        item.tokens_in_first = 0;
        describe(p, group, item);
        item.seen_by_all = item.tokens - hidden_here(p, max(hidden + item.more_hidden, 0), item.behind_last);
        const i32 first_tile = item.first_token / kTileTokens, tiles = ceil_div(item.tokens, kTileTokens);
        item.tile_begin = first_tile + (group == begin.request ? begin.tile : 0);
        item.tile_end = continued_by_next ? min(first_tile + end.tile, tiles) : tiles;
        item.partial_index = continues_previous ? split : continued_by_next ? p.continued_index + split : kNotSplit;
        ++group;
        return true;
    }

    // Reads the item's queries a second time, so that they need not stay in registers while its tiles are processed.
    MLA_DEVICE void describe_again(const DecodeParams& p, GroupItem& item) const {
        i32 of = group - 1;
        opaque(of);
        describe(p, of, item);
    }

    MLA_DEVICE static void describe(const DecodeParams& p, i32 group, GroupItem& item) {
        if (forms_of(p).groups == nullptr) {
            const RequestLength length = request_length(p, group);
            item.request = group;
            item.tokens = length.tokens;
            item.behind_last = length.behind_last;
            item.first_query = item.more_hidden = item.lacking_rows = item.first_token = item.seen_from = 0;
        } else {
            take(p, forms_of(p).groups[group], item);
        }
    }

    MLA_DEVICE static void take(const DecodeParams& p, const QueryGroup& of, GroupItem& item) {
        const i32 window = forms_of(p).window;
        item.request = of.request;
        item.tokens = of.tokens;
        item.behind_last = 0;
        item.first_query = of.first_query;
        item.more_hidden = p.causal ? of.later_queries + of.queries - p.s_q : 0;
        item.lacking_rows = (p.s_q - of.queries) * (p.h_q / p.h_kv);
        item.first_token = of.first_token;
        item.seen_from = window == 0 ? 0 : max(0, of.tokens - of.later_queries - window);
    }
};

// ---- Queries ---------------------------------------------------------------------------------------------------
MLA_DEVICE SplitRow split_query_row(const DecodeParams& p, const GroupItem& item, i32 kv_head, i32 row) {
    return split_query_row(p, item.request, item.first_query, kv_head, row);
}
}  // namespace mla::attention

// Facts that the host reads from the cubin, see MLA_DECODE_FACTS.
#define MLA_DECODE_FORM_FACTS()                                                                                      \
    MLA_FACT_LIST(params_layout, MLA_FORM_OFFSET(q_stride_b_elems), MLA_FORM_OFFSET(b), MLA_FORM_OFFSET(scale_log2), \
                  MLA_FORM_OFFSET(q_rope_stride_b_elems), MLA_FORM_OFFSET(window),                                   \
                  (int)sizeof(mla::attention::DecodeFormParams));                                                    \
    MLA_FACT(tile_tokens, mla::attention::kTileTokens)
#define MLA_FORM_OFFSET(field) MLA_OFFSET(mla::attention::DecodeFormParams, field)
