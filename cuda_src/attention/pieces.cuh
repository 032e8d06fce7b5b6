// The batch-invariant schedule: every request is cut alone, into pieces of `piece_tiles` tiles and a last shorter one,
// so that a cut does not depend on what else is in the batch. Each piece is a split (attention/split_work.cuh).
//
// One block writes it. A thread counts the pieces of some consecutive requests; sums over the threads before it say
// where they go. A request without tokens is one empty piece, since its result must be written too. The splits after
// the last piece are empty. Behind the points, first[r] is the first split of request r; from the last request on it is
// the number of pieces.
#pragma once
#include "attention/decode_params.cuh"
#include "tile/warp.cuh"

namespace mla::attention {
MLA_DEVICE const i32* first_splits(const DecodeParams& p) {  // (b + 1,)
    return reinterpret_cast<const i32*>(p.schedule + p.num_splits + 1);
}

// ---- Writing it ------------------------------------------------------------------------------------------------
constexpr i32 kPieceThreads = 1024;  // of the block
constexpr i32 kPieceWarps = kPieceThreads / kWarpThreads;
static_assert(kPieceWarps == kWarpThreads, "a lane per warp's sum");

// The sum over the threads before this one, and over all.
MLA_DEVICE i32 sum_before(i32 (&warp_sums)[kPieceWarps], i32 value, i32& total) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const i32 through = warp_inclusive_sum(value);
    if (lane == kWarpThreads - 1) warp_sums[warp] = through;
    __syncthreads();
    const i32 mine = warp_sums[lane], warps_through = warp_inclusive_sum(mine);
    total = __shfl_sync(kFullWarp, warps_through, kPieceWarps - 1);
    return __shfl_sync(kFullWarp, warps_through - mine, warp) + through - value;
}

// `Batch` has schedule, b, num_splits, piece_tiles, tokens(request), and the number of requests that its merge reads.
template <class Batch>
MLA_DEVICE i32 pieces_of(const Batch& batch, i32 request) {
    return max(1, ceil_div(ceil_div((i32)batch.tokens(request), kTileTokens), batch.piece_tiles));
}

template <class Batch>
MLA_DEVICE void write_pieces(const Batch& batch, i32 (&warp_sums)[kPieceWarps]) {
    i32* const first = reinterpret_cast<i32*>(batch.schedule + batch.num_splits + 1);
    const i32 share = ceil_div(batch.b, kPieceThreads);
    const i32 begin = min((i32)threadIdx.x * share, batch.b), end = min(begin + share, batch.b);
    i32 mine = 0, total;
    for (i32 request = begin; request < end; ++request) mine += pieces_of(batch, request);
    i32 split = sum_before(warp_sums, mine, total);
    for (i32 request = begin; request < end; ++request) {
        first[request] = split;
        const i32 pieces = pieces_of(batch, request);
        for (i32 piece = 0; piece < pieces; ++piece) {
            batch.schedule[split++] = SchedulePoint{request, piece * batch.piece_tiles};
        }
    }
    for (i32 i = total + threadIdx.x; i <= batch.num_splits; i += kPieceThreads) {
        batch.schedule[i] = SchedulePoint{batch.b, 0};
    }
    for (i32 i = batch.b + threadIdx.x; i <= batch.merged(); i += kPieceThreads) first[i] = total;
}
}  // namespace mla::attention
