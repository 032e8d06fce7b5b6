// Locates a request's tokens, stored as FP8 records: at the slots of one or two lists, at listed rows, or in the pages
// of a block table.
//
// `place` only loads, and is called a tile ahead; `bytes` turns the loaded place into addresses. An item has the
// members `request`, `tokens` and `tokens_in_first` of WorkItem.
#pragma once
#include "attention/query_groups.cuh"
#include "attention/row_list.cuh"
#include "attention/split_work.cuh"
#include "attention/token_record.cuh"
#include "ptx/control.cuh"
#include "ptx/load.cuh"

namespace mla::attention {
// Sparse decode: every query is a request whose tokens are the entries of its lists, the first list before the second.
// DecodeParams describes the first cache in bytes (kv, num_pages, page_size, kv_stride_page_elems,
// kv_stride_token_elems) and its lists (block_table, table_stride_b_elems, table_stride_page_elems; max_pages entries;
// the first seqlens count).
struct ExtraAddresses {
    const u8* extra_cache;         // of the same record, or of its compact one; or null
    const i32* extra_indices;      // or null
    const i32* extra_topk_length;  // or null: every entry counts
};
struct SparseDecodeParams : ExtraAddresses, DecodeParams {
    i64 indices_stride_s_elems;
    i64 extra_page_stride_bytes, extra_token_stride_bytes;
    i64 extra_stride_b_elems, extra_stride_s_elems, extra_stride_k_elems, extra_length_stride_elems;
    i32 queries_of_length;  // s_q: number of consecutive queries that share one `topk_length`
    i32 extra_num_pages, extra_page_size, extra_topk;
};

// x / by for a `by` that is a power of two, mostly: then without a division, which is a long chain.
MLA_DEVICE u32 divided(u32 x, u32 by) { return (by & (by - 1)) == 0 ? x >> (31 - __clz((i32)by)) : x / by; }

MLA_DEVICE i32 clamped_length(const i32* lengths, i64 at, i32 topk) {
    return lengths == nullptr ? topk : max(0, min(lengths[at], topk));
}

struct SelectedWork : ScheduledWork {
    MLA_DEVICE static const SparseDecodeParams& params(const DecodeParams& p) {
        return static_cast<const SparseDecodeParams&>(p);
    }
    MLA_DEVICE static SchedulePoint begin(const DecodeParams& p, i32 split) { return split_begin(p, split); }
    MLA_DEVICE static i32 tokens_in_first(const DecodeParams& p, i32 query) {
        return clamped_length(p.seqlens, query / params(p).queries_of_length * p.seqlens_stride_elems, p.max_pages);
    }
    MLA_DEVICE static RequestLength length(const DecodeParams& p, i32 query) {
        const SparseDecodeParams& all = params(p);
        const i64 at = query / all.queries_of_length * all.extra_length_stride_elems;
        return {tokens_in_first(p, query) + clamped_length(all.extra_topk_length, at, all.extra_topk), 0};
    }
};

// Slots outside their cache are skipped. Every row sees all others.
struct SelectedTokens {
    using Work = SelectedWork;
    static constexpr bool kMasked = false, kWithRowMax = false, kStaged = true, kQueriesAnywhere = false;
    using Place = i32;  // a slot as in its list, or kNoSlot
    static constexpr i32 kNoSlot = -1;

    MLA_DEVICE static Place nowhere() { return kNoSlot; }

    template <class Item>
    MLA_DEVICE static Place place(const DecodeParams& p, const Item& item, i32 token) {
        const i32* entry = entry_of(p, item, token);
        return entry == nullptr ? nowhere() : *entry;
    }

    // Address of a token's slot; null past the end of the lists.
    template <class Item>
    MLA_DEVICE static const i32* entry_of(const DecodeParams& p, const Item& item, i32 token) {
        if (token >= item.tokens) return nullptr;
        const SparseDecodeParams& all = SelectedWork::params(p);
        const i64 b = divided(item.request, all.queries_of_length), s = item.request - b * all.queries_of_length;
        if (token < item.tokens_in_first) {
            return p.block_table + b * p.table_stride_b_elems + s * all.indices_stride_s_elems +
                   token * p.table_stride_page_elems;
        }
        return all.extra_indices + b * all.extra_stride_b_elems + s * all.extra_stride_s_elems +
               (token - item.tokens_in_first) * all.extra_stride_k_elems;
    }

    // A slot is not negative as an i32 if it is one: its page and token are found without 64-bit divisions.
    template <class Record, class Item>
    MLA_DEVICE static TokenBytes bytes(const DecodeParams& p, const Item& item, i32 token, Place slot) {
        opaque(slot);  // is waited for here, not where it was loaded
        const SparseDecodeParams& all = SelectedWork::params(p);
        const bool extra = token >= item.tokens_in_first;
        const i32 page_size = extra ? all.extra_page_size : p.page_size;
        const u32 page = divided(slot, page_size), in_page = (u32)slot - page * page_size;
        if (slot < 0 || page >= (u32)(extra ? all.extra_num_pages : p.num_pages)) return {nullptr, nullptr};
        const u8* cache = extra ? all.extra_cache : reinterpret_cast<const u8*>(p.kv);
        u8* from = const_cast<u8*>(cache) + page * (extra ? all.extra_page_stride_bytes : p.kv_stride_page_elems);
        u8* data = from + in_page * (extra ? all.extra_token_stride_bytes : p.kv_stride_token_elems);
        if (is_compact<Record>(p, item, token)) return {data, Record::Compact::scales(from, data, page_size, in_page)};
        return {data, Record::scales(from, data, page_size, in_page)};
    }

    // Returns true if a token has the compact record: the strides of its cache match that record's first plane.
    template <class Record, class Item>
    MLA_DEVICE static bool is_compact(const DecodeParams& p, const Item& item, i32 token) {
        if constexpr (kHasCompact<Record>) {
            const i64 apart = SelectedWork::params(p).extra_token_stride_bytes;
            return token >= item.tokens_in_first && apart == Record::Compact::kPlaneBytes;
        }
        return false;
    }

    MLA_DEVICE static const u16* query_row(const DecodeParams& p, i32 request, i32, i32 row) {
        return p.q + request * p.q_stride_b_elems + row * p.q_stride_h_elems;
    }
};

// The lists of attention/row_lists.cu, where row r is token r % page_size of page r / page_size. A list ends in kNoRow
// up to the end of its last tile. Every row sees all of a list; the largest score is wanted, too. Strides of the cache
// are in bytes.
struct ListedRows {
    using Work = ScheduledWork;
    static constexpr bool kMasked = false, kWithRowMax = true, kStaged = false;
    using Place = i32;

    MLA_DEVICE static Place nowhere() { return kNoRow; }

    template <class Item>
    MLA_DEVICE static Place place(const DecodeParams& p, const Item& item, i32 token) {
        return p.block_table[item.request * p.table_stride_b_elems + token];
    }

    template <class Record, class Item>
    MLA_DEVICE static TokenBytes bytes(const DecodeParams& p, const Item&, i32, Place row) {
        opaque(row);  // is waited for here, not where it was loaded
        if (row < 0) return {nullptr, nullptr};
        const u32 page = (u32)row / (u32)p.page_size, token = (u32)row - page * p.page_size;
        u8* from = const_cast<u8*>(reinterpret_cast<const u8*>(p.kv)) + page * p.kv_stride_page_elems;
        u8* data = from + token * p.kv_stride_token_elems;
        return {data, Record::scales(from, data, p.page_size, token)};
    }

    template <class Record, class Item>
    MLA_DEVICE static bool is_compact(const DecodeParams&, const Item&, i32) {
        return false;
    }

    MLA_DEVICE static const u16* query_row(const DecodeParams& p, i32 request, i32, i32 row) {
        return p.q + request * p.q_stride_b_elems + row * p.q_stride_h_elems;
    }
};

// Pages may be missing, and of the last tokens some rows see fewer than others. Strides of the cache are in bytes.
struct PagedTokens {
    using Work = ScheduledWork;
    static constexpr bool kMasked = true, kWithRowMax = false, kStaged = false, kQueriesAnywhere = true;
    struct Place {
        i32 page;  // as in the block table, or kNoPage
        i32 token;
    };
    static constexpr i32 kNoPage = -1;

    MLA_DEVICE static Place nowhere() { return {kNoPage, 0}; }

    template <class Item>
    MLA_DEVICE static Place place(const DecodeParams& p, const Item& item, i32 token) {
        if (token >= item.tokens) return nowhere();
        const i32 index = token / p.page_size;
        return {p.block_table[item.request * p.table_stride_b_elems + index * p.table_stride_page_elems],
                token - index * p.page_size};
    }

    template <class Record, class Item>
    MLA_DEVICE static TokenBytes bytes(const DecodeParams& p, const Item&, i32, Place place) {
        opaque(place.page);  // is waited for here, not where it was loaded
        if ((u32)place.page >= (u32)p.num_pages) return {nullptr, nullptr};
        u8* page = const_cast<u8*>(reinterpret_cast<const u8*>(p.kv)) + place.page * p.kv_stride_page_elems;
        u8* data = page + place.token * p.kv_stride_token_elems;
        return {data, Record::scales(page, data, p.page_size, place.token)};
    }

    template <class Record, class Item>
    MLA_DEVICE static bool is_compact(const DecodeParams&, const Item&, i32) {
        return false;
    }

    MLA_DEVICE static const u16* query_row(const DecodeParams& p, i32 request, i32 kv_head, i32 row) {
        const i32 group = p.h_q / p.h_kv;
        return p.q + request * p.q_stride_b_elems + row / group * p.q_stride_s_elems +
               (i64)(kv_head * group + row % group) * p.q_stride_h_elems;
    }
};
// Paged tokens with optional inputs (attention/query_groups.cuh): a split holds groups of queries, indexed by their
// place in the list of groups. Tokens before all windows of a group are not read.
struct GroupedTokens : PagedTokens {
    using Work = GroupedWork;

    template <class Item>
    MLA_DEVICE static Place place(const DecodeParams& p, const Item& item, i32 token) {
        return token < item.first_token ? nowhere() : PagedTokens::place(p, item, token);
    }

    // Null where the group has no such row.
    MLA_DEVICE static SplitRow query_row(const DecodeParams& p, i32 group, i32 kv_head, i32 row) {
        const QueryGroup* const groups = forms_of(p).groups;
        GroupItem item;
        item.request = group;
        item.first_query = 0;
        if (groups != nullptr) {
            if (row / (p.h_q / p.h_kv) >= groups[group].queries) return {nullptr, nullptr};
            item.request = groups[group].request;
            item.first_query = groups[group].first_query;
        }
        return split_query_row(p, item, kv_head, row);
    }
};

// Fewer registers between `place` and `bytes`: the token's place in its page is recomputed by a division.
struct SlimGroupedTokens : GroupedTokens {
    using Place = i32;

    MLA_DEVICE static Place nowhere() { return kNoPage; }

    template <class Item>
    MLA_DEVICE static Place place(const DecodeParams& p, const Item& item, i32 token) {
        return GroupedTokens::place(p, item, token).page;
    }

    template <class Record, class Item>
    MLA_DEVICE static TokenBytes bytes(const DecodeParams& p, const Item& item, i32 token, Place page) {
        return GroupedTokens::bytes<Record>(p, item, token, {page, (i32)((u32)token % (u32)p.page_size)});
    }
};

// ---- Query rows ------------------------------------------------------------------------------------------------
// A row as `query_row` of Tokens returns it: where column 0 would be, of the part with column `column`; null if there
// is no such row.
MLA_DEVICE const u16* part_of_row(const u16* row, i32) { return row; }
MLA_DEVICE const u16* part_of_row(const SplitRow& row, i32 column) {
    if (column < kHeadDimV || row.latent == nullptr) return row.latent;
    return row.rope - kHeadDimV;
}

template <class Tokens>
struct NoRow {
    static constexpr const u16* value = nullptr;
};
template <>
struct NoRow<GroupedTokens> {
    static constexpr SplitRow value{nullptr, nullptr};
};
template <>
struct NoRow<SlimGroupedTokens> : NoRow<GroupedTokens> {};
}  // namespace mla::attention

// Facts that the host reads from the cubin, see MLA_DECODE_FACTS.
#define MLA_SPARSE_DECODE_FACTS()                                                                         \
    MLA_FACT_LIST(params_layout, MLA_SPARSE_OFFSET(q_stride_b_elems), MLA_SPARSE_OFFSET(b),               \
                  MLA_SPARSE_OFFSET(scale_log2), MLA_SPARSE_OFFSET(indices_stride_s_elems),               \
                  MLA_SPARSE_OFFSET(queries_of_length), (int)sizeof(mla::attention::SparseDecodeParams)); \
    MLA_FACT(tile_tokens, mla::attention::kTileTokens)
#define MLA_SPARSE_OFFSET(field) MLA_OFFSET(mla::attention::SparseDecodeParams, field)
