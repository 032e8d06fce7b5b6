// Where the tokens of a request lie, as FP8 records: in a list of addresses or of rows, or in the pages of a block
// table.
//
// `place` only loads, and is called a tile ahead; `bytes` computes on what has been loaded.
#pragma once
#include "attention/row_list.cuh"
#include "attention/split_work.cuh"
#include "attention/token_record.cuh"
#include "ptx/control.cuh"
#include "ptx/load.cuh"

namespace mla::attention {
// The lists of sparse_decode/lists.cu. Every row sees all of a list, and all of it is there. A request is a query.
struct ListedTokens {
    static constexpr bool kMasked = false, kWithRowMax = false;
    using Place = TokenBytes;

    MLA_DEVICE static Place nowhere() { return {nullptr, nullptr}; }

    // None past the list's end.
    MLA_DEVICE static Place place(const DecodeParams& p, const WorkItem& item, i32 token) {
        const TokenBytes* list = reinterpret_cast<const TokenBytes*>(p.block_table);
        const uint4 words = ld_global_16(list + item.request * p.table_stride_b_elems + token, token < item.tokens);
        return TokenBytes{reinterpret_cast<u8*>((u64)words.y << 32 | words.x),
                          reinterpret_cast<u8*>((u64)words.w << 32 | words.z)};
    }

    template <class Record>
    MLA_DEVICE static TokenBytes bytes(const DecodeParams&, const Place& place) {
        return place;
    }

    MLA_DEVICE static const u16* query_row(const DecodeParams& p, i32 request, i32, i32 row) {
        return p.q + request * p.q_stride_b_elems + row * p.q_stride_h_elems;
    }
};

// The lists of sparse/rows.cu, where row r is token r % page_size of page r / page_size. A list ends in kNoRow up to
// the end of its last tile. Every row sees all of a list; the largest score is wanted, too. Strides of the cache are in
// bytes.
struct ListedRows {
    static constexpr bool kMasked = false, kWithRowMax = true;
    using Place = i32;

    MLA_DEVICE static Place nowhere() { return kNoRow; }

    MLA_DEVICE static Place place(const DecodeParams& p, const WorkItem& item, i32 token) {
        return p.block_table[item.request * p.table_stride_b_elems + token];
    }

    template <class Record>
    MLA_DEVICE static TokenBytes bytes(const DecodeParams& p, Place row) {
        opaque(row);  // is waited for here, not where it was loaded
        if (row < 0) return {nullptr, nullptr};
        const u32 page = (u32)row / (u32)p.page_size, token = (u32)row - page * p.page_size;
        u8* from = const_cast<u8*>(reinterpret_cast<const u8*>(p.kv)) + page * p.kv_stride_page_elems;
        u8* data = from + token * p.kv_stride_token_elems;
        return {data, Record::scales(from, data, p.page_size, token)};
    }

    MLA_DEVICE static const u16* query_row(const DecodeParams& p, i32 request, i32, i32 row) {
        return p.q + request * p.q_stride_b_elems + row * p.q_stride_h_elems;
    }
};

// Pages may be missing, and of the last tokens some rows see fewer than others. Strides of the cache are in bytes.
struct PagedTokens {
    static constexpr bool kMasked = true, kWithRowMax = false;
    struct Place {
        i32 page;  // as in the block table, or kNoPage
        i32 token;
    };
    static constexpr i32 kNoPage = -1;

    MLA_DEVICE static Place nowhere() { return {kNoPage, 0}; }

    MLA_DEVICE static Place place(const DecodeParams& p, const WorkItem& item, i32 token) {
        if (token >= item.tokens) return nowhere();
        const i32 index = token / p.page_size;
        return {p.block_table[item.request * p.table_stride_b_elems + index * p.table_stride_page_elems],
                token - index * p.page_size};
    }

    template <class Record>
    MLA_DEVICE static TokenBytes bytes(const DecodeParams& p, Place place) {
        opaque(place.page);  // is waited for here, not where it was loaded
        if ((u32)place.page >= (u32)p.num_pages) return {nullptr, nullptr};
        u8* page = const_cast<u8*>(reinterpret_cast<const u8*>(p.kv)) + place.page * p.kv_stride_page_elems;
        u8* data = page + place.token * p.kv_stride_token_elems;
        return {data, Record::scales(page, data, p.page_size, place.token)};
    }

    MLA_DEVICE static const u16* query_row(const DecodeParams& p, i32 request, i32 kv_head, i32 row) {
        const i32 group = p.h_q / p.h_kv;
        return p.q + request * p.q_stride_b_elems + row / group * p.q_stride_s_elems +
               (i64)(kv_head * group + row % group) * p.q_stride_h_elems;
    }
};
}  // namespace mla::attention
