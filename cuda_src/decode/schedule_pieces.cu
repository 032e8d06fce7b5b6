// The batch-invariant schedule of requests with lengths in memory: see attention/pieces.cuh.
//
// One block.
#include "attention/pieces.cuh"
#include "ptx/control.cuh"

namespace mla::decode {
using namespace attention;

// ---- Params ----------------------------------------------------------------------------------------------------
struct DecodeSchedulePiecesParams {
    const i32* seqlens;       // (b,)
    SchedulePoint* schedule;  // (num_splits + 1,), then i32 (b + 1,)
    i64 seqlens_stride_elems;
    i64 max_tokens;  // max_pages * page_size
    i32 b, num_splits;
    i32 piece_tiles;
    i32 cp_world, cp_rank;  // see DecodeParams
    i32 padding;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(DecodeSchedulePiecesParams, seqlens_stride_elems),
              MLA_OFFSET(DecodeSchedulePiecesParams, b), (int)sizeof(DecodeSchedulePiecesParams));
MLA_FACT(threads, kPieceThreads);

// ---- Kernel ----------------------------------------------------------------------------------------------------
struct Batch {
    const DecodeSchedulePiecesParams& p;
    SchedulePoint* schedule;
    i32 b, num_splits, piece_tiles;

    MLA_DEVICE explicit Batch(const DecodeSchedulePiecesParams& p)
        : p(p), schedule(p.schedule), b(p.b), num_splits(p.num_splits), piece_tiles(p.piece_tiles) {}
    MLA_DEVICE i32 merged() const { return b; }
    MLA_DEVICE i32 tokens(i32 request) const {
        const i64 seqlen = p.seqlens[request * p.seqlens_stride_elems];
        return request_length(seqlen, p.max_tokens, p.cp_world, p.cp_rank).tokens;
    }
};

extern "C" __global__ void __launch_bounds__(kPieceThreads, 1)
    mla_decode_schedule_pieces(const __grid_constant__ DecodeSchedulePiecesParams p) {
    __shared__ i32 warp_sums[kPieceWarps];
    griddepcontrol_wait();
    write_pieces(Batch(p), warp_sums);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::decode
