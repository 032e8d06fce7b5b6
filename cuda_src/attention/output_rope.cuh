// Turns results back: the inverse of RoPE, for values whose last 64 columns are the key's RoPE part.
//
//   (x, y) = columns (2i, 2i + 1)   ->   (x cos + y sin, y cos - x sin)      angles of the query's position
//
// The rotation is linear, so each piece of a split request is turned on its own, and the merge needs no change.
#pragma once
#include "attention/query_groups.cuh"
#include "attention/split_work.cuh"

namespace mla::attention {
constexpr i32 kFirstTurnedColumn = kHeadDimV - kHeadDimRope;

// The angles of a row's query, of pair i each: rows of the tables.
struct RowAngles {
    const float *cos, *sin;
};

MLA_DEVICE bool turns_back(const DecodeParams& p) { return forms_of(p).out_cos != nullptr; }

// Rows past the last one get the last row's angles.
MLA_DEVICE RowAngles angles_of_row(const DecodeParams& p, const GroupItem& item, i32 row) {
    const DecodeFormParams& forms = forms_of(p);
    const i32 last = query_rows(p) - item.lacking_rows - 1;
    const i32 query = item.first_query + min(row, last) / (p.h_q / p.h_kv);
    const u8* const at = forms.out_positions + item.request * forms.out_positions_stride_b_bytes +
                         query * forms.out_positions_stride_s_bytes;
    const i64 position =
        forms.out_positions_are_64 ? *reinterpret_cast<const i64*>(at) : (i64) * reinterpret_cast<const i32*>(at);
    const i64 of_table = max(0ll, min(position, (i64)forms.out_max_position - 1));
    return {forms.out_cos + of_table * forms.out_cos_stride_elems,
            forms.out_sin + of_table * forms.out_sin_stride_elems};
}

// An element of a pair; `other` is the pair's other one.
MLA_DEVICE float turned_element(const RowAngles& angles, i32 column, float x, float other) {
    const i32 pair = (column - kFirstTurnedColumn) / 2;
    const float sin = column % 2 == 0 ? angles.sin[pair] : -angles.sin[pair];
    return x * angles.cos[pair] + other * sin;
}

// Turns both elements of a pair; `column` is the column of the first. One element at a time would load the angles
// twice, and registers would spill.
MLA_DEVICE void turn_pair(const RowAngles& angles, i32 column, float& x, float& y) {
    const i32 pair = (column - kFirstTurnedColumn) / 2;
    const float cos = angles.cos[pair], sin = angles.sin[pair], turned = x * cos + y * sin;
    y = y * cos - x * sin;
    x = turned;
}
}  // namespace mla::attention
