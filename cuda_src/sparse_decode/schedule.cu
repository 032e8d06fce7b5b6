// Cuts the lists of sparse decode into splits, with lengths from memory, see attention/split_schedule.cuh.
//
// Every entry within its `topk_length` counts as a token. With many invalid entries splits are less even.
//
// A variant writes the batch-invariant schedule instead: attention/pieces.cuh.
//
// One block.
#include "attention/pieces.cuh"
#include "attention/record_tokens.cuh"
#include "attention/split_schedule.cuh"

#ifndef MLA_PIECES
#define MLA_PIECES 0
#endif

namespace mla::sparse_decode {
using namespace attention;

static_assert(kPieceThreads == kScheduleThreads);

// ---- Params ----------------------------------------------------------------------------------------------------
struct SparseDecodeScheduleParams {
    const i32* topk_length;        // (b,), or null: every entry counts
    const i32* extra_topk_length;  // (b,), or null
    SchedulePoint* schedule;       // (num_splits + 1,)
    i64 topk_length_stride_elems, extra_topk_length_stride_elems;
    i32 queries, s_q, topk, extra_topk;
    i32 num_splits, merge_cost;    // see attention/split_schedule.cuh
    i32 piece_tiles = 0, padding;  // see attention/pieces.cuh
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(SparseDecodeScheduleParams, topk_length_stride_elems),
              MLA_OFFSET(SparseDecodeScheduleParams, queries), (int)sizeof(SparseDecodeScheduleParams));
MLA_FACT(threads, kScheduleThreads);
MLA_FACT(max_splits, kMaxSplits);

// ---- Kernel ----------------------------------------------------------------------------------------------------
// The queries as a batch.
struct Batch {
    const SparseDecodeScheduleParams& p;
    SchedulePoint* schedule;
    i64 max_tokens;
    i32 b, num_splits, merge_cost, piece_tiles;
    static constexpr i32 piece_cost = 0;  // has not been measured here

    MLA_DEVICE explicit Batch(const SparseDecodeScheduleParams& p)
        : p(p),
          schedule(p.schedule),
          max_tokens((i64)p.topk + p.extra_topk),
          b(p.queries),
          num_splits(p.num_splits),
          merge_cost(p.merge_cost),
          piece_tiles(p.piece_tiles) {}
    MLA_DEVICE i32 merged() const { return b; }
    MLA_DEVICE u32 tokens(i32 query) const {
        const i64 b = query / p.s_q;
        return clamped_length(p.topk_length, b * p.topk_length_stride_elems, p.topk) +
               clamped_length(p.extra_topk_length, b * p.extra_topk_length_stride_elems, p.extra_topk);
    }
};

extern "C" __global__ void __launch_bounds__(kScheduleThreads, 1)
    mla_sparse_decode_schedule(const __grid_constant__ SparseDecodeScheduleParams p) {
#if MLA_PIECES
    __shared__ i32 warp_sums[kPieceWarps];
    griddepcontrol_wait();
    write_pieces(Batch(p), warp_sums);
#else
    __shared__ ScheduleStorage s;
    griddepcontrol_wait();
    write_schedule(Batch(p), s);
#endif
    griddepcontrol_launch_dependents();
}
}  // namespace mla::sparse_decode
