// The tokens of decode/sm90_records_seesaw.cu with optional inputs (attention/query_groups.cuh): queries whose number
// varies from request to request, a window, queries in two arrays, results that are turned back.
//
// A split holds groups of one query each instead of requests, and query rows are two pieces. What a window leaves out
// is not read.
#pragma once
#include "attention/record_tokens.cuh"

namespace mla::decode {
using namespace attention;

// Without a division where pages are powers of two: a scout finds a tile's rows in less time than the tile takes.
// PERF(H200, 2026-11-27, v32, 64 heads, q_rope: 165.7 to 163.6 us)
struct ShiftedTokens : SlimGroupedTokens {
    template <class Item>
    MLA_DEVICE static Place place(const DecodeParams& p, const Item& item, i32 token) {
        if (token < item.first_token || token >= item.tokens) return nowhere();
        const i32 index = (i32)divided(token, p.page_size);
        return p.block_table[item.request * p.table_stride_b_elems + index * p.table_stride_page_elems];
    }

    template <class Record, class Item>
    MLA_DEVICE static TokenBytes bytes(const DecodeParams& p, const Item& item, i32 token, Place page) {
        const u32 in_page = (u32)token - divided(token, p.page_size) * (u32)p.page_size;
        return GroupedTokens::bytes<Record>(p, item, token, {page, (i32)in_page});
    }
};
}  // namespace mla::decode
