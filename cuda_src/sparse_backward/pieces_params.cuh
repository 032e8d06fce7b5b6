// Parameters of a main kernel that has a build for pieces of lists: see sparse_backward/dq_pieces.cu.
#pragma once
#include "sparse_backward/params.cuh"

namespace mla::sparse_backward {
// In that build `dq` is (queries from first_query on, pieces, h_q, d_qk) in float32, contiguous; `delta`, with `out`,
// (these queries, pieces, h_q). Piece i of a query has the entries i piece_keys, ... of its list.
struct PiecesParams : BackwardParams {
    i32 first_query, pieces, piece_keys;
};
}  // namespace mla::sparse_backward

#define MLA_PIECES_FACTS()                                                                         \
    MLA_FACT_LIST(params_layout, MLA_OFFSET(mla::sparse_backward::PiecesParams, q_stride_s_elems), \
                  MLA_OFFSET(mla::sparse_backward::PiecesParams, s_q),                             \
                  MLA_OFFSET(mla::sparse_backward::PiecesParams, lse2_factor),                     \
                  MLA_OFFSET(mla::sparse_backward::PiecesParams, first_query),                     \
                  (int)sizeof(mla::sparse_backward::PiecesParams))
