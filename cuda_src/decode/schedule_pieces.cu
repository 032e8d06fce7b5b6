// The batch-invariant schedule: every request is cut alone, into pieces of `piece_tiles` tiles and a last shorter one,
// so that a cut does not depend on what else is in the batch. Each piece is a split (attention/split_work.cuh).
//
// One block. A thread counts the pieces of some consecutive requests; sums over the threads before it say where they
// go. A request without tokens is one empty piece, since its result must be written too. The splits after the last
// piece are empty. Behind the points, first[r] is the first split of request r, and first[b] the number of pieces.
#include "attention/decode_params.cuh"
#include "ptx/control.cuh"
#include "tile/warp.cuh"

namespace mla::decode {
using namespace attention;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 1024;
constexpr i32 kWarps = kThreads / kWarpThreads;
static_assert(kWarps == kWarpThreads, "a lane per warp's sum");

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
MLA_FACT(threads, kThreads);

// ---- Steps -----------------------------------------------------------------------------------------------------
MLA_DEVICE i32 pieces_of(const DecodeSchedulePiecesParams& p, i32 request) {
    const i64 seqlen = p.seqlens[request * p.seqlens_stride_elems];
    const i32 tokens = request_length(seqlen, p.max_tokens, p.cp_world, p.cp_rank).tokens;
    return max(1, ceil_div(ceil_div(tokens, kTileTokens), p.piece_tiles));
}

// The sum over the threads before this one, and over all.
MLA_DEVICE i32 sum_before(i32 (&warp_sums)[kWarps], i32 value, i32& total) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const i32 through = warp_inclusive_sum(value);
    if (lane == kWarpThreads - 1) warp_sums[warp] = through;
    __syncthreads();
    const i32 mine = warp_sums[lane], warps_through = warp_inclusive_sum(mine);
    total = __shfl_sync(kFullWarp, warps_through, kWarps - 1);
    return __shfl_sync(kFullWarp, warps_through - mine, warp) + through - value;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode_schedule_pieces(const __grid_constant__ DecodeSchedulePiecesParams p) {
    __shared__ i32 warp_sums[kWarps];
    griddepcontrol_wait();
    i32* const first = reinterpret_cast<i32*>(p.schedule + p.num_splits + 1);
    const i32 share = ceil_div(p.b, kThreads);
    const i32 begin = min((i32)threadIdx.x * share, p.b), end = min(begin + share, p.b);
    i32 mine = 0, total;
    for (i32 request = begin; request < end; ++request) mine += pieces_of(p, request);
    i32 split = sum_before(warp_sums, mine, total);
    for (i32 request = begin; request < end; ++request) {
        first[request] = split;
        const i32 pieces = pieces_of(p, request);
        for (i32 piece = 0; piece < pieces; ++piece) {
            p.schedule[split++] = SchedulePoint{request, piece * p.piece_tiles};
        }
    }
    for (i32 i = total + threadIdx.x; i <= p.num_splits; i += kThreads) p.schedule[i] = SchedulePoint{p.b, 0};
    if (threadIdx.x == 0) first[p.b] = total;
    griddepcontrol_launch_dependents();
}
}  // namespace mla::decode
