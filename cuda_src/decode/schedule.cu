// Cuts the work of a ragged batch into equal parts, on the device.
//
//   cost(request) = tiles + kRequestCost,   point[i] = where cost i / num_parts of the total lies
//
// One block. Each thread takes one request at a time; a running sum gives the cost before it, and the thread writes
// the points that fall inside its request. attention/split_work.cuh says how a part reads them.
//
// Source: the even cut is FlashMLA's metadata kernel's idea. What differs: every request is handled in parallel
// instead of by one thread's walk, and only the cuts are stored: slots and counts follow from them.
#include "attention/decode_params.cuh"
#include "ptx/control.cuh"

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 1024;
constexpr i32 kWarps = kThreads / kWarpThreads;
// What a request costs besides its tiles: fetching Q, starting the pipeline, writing the result.
constexpr i32 kRequestCost = 5;

// ---- Params ----------------------------------------------------------------------------------------------------
struct DecodeScheduleParams {
    const i32* seqlens;       // (b,)
    SchedulePoint* schedule;  // (num_parts + 1,)
    i64 seqlens_stride_elems;
    i64 most_tokens;  // max_pages * page_size
    i32 b, num_parts;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(DecodeScheduleParams, seqlens_stride_elems),
              MLA_OFFSET(DecodeScheduleParams, b), (int)sizeof(DecodeScheduleParams));
MLA_FACT(threads, kThreads);

MLA_DEVICE i32 request_tiles(const DecodeScheduleParams& p, i32 request) {
    const i64 tokens = max(0ll, min((i64)p.seqlens[request * p.seqlens_stride_elems], p.most_tokens));
    return (i32)((tokens + kTileTokens - 1) / kTileTokens);
}

// The sum of `value` over the threads up to and including this one; `total` over all of them.
MLA_DEVICE i64 block_inclusive_sum(i64 value, i64& total) {
    __shared__ i64 warp_sums[kWarps];
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
#pragma unroll
    for (i32 step = 1; step < kWarpThreads; step *= 2) {
        const i64 before = __shfl_up_sync(kFullWarp, value, step);
        if (lane >= step) value += before;
    }
    __syncthreads();
    if (lane == kWarpThreads - 1) warp_sums[warp] = value;
    __syncthreads();
    total = 0;
    for (i32 i = 0; i < kWarps; ++i) {
        if (i < warp) value += warp_sums[i];
        total += warp_sums[i];
    }
    return value;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode_schedule(const __grid_constant__ DecodeScheduleParams p) {
    griddepcontrol_wait();
    i64 total = 0;
    for (i32 first = 0; first < p.b; first += kThreads) {
        const i32 request = first + threadIdx.x;
        i64 chunk;
        block_inclusive_sum(request < p.b ? request_tiles(p, request) + kRequestCost : 0, chunk);
        total += chunk;
    }
    i64 before_chunk = 0;
    for (i32 first = 0; first < p.b; first += kThreads) {
        const i32 request = first + threadIdx.x;
        const i32 tiles = request < p.b ? request_tiles(p, request) : 0;
        const i64 cost = request < p.b ? tiles + kRequestCost : 0;
        i64 chunk;
        const i64 before = before_chunk + block_inclusive_sum(cost, chunk) - cost;
        before_chunk += chunk;
        // The points i with before <= i * total / num_parts < before + cost, rounded down.
        for (i64 i = (before * p.num_parts + total - 1) / total; cost > 0 && i < p.num_parts; ++i) {
            const i64 into = i * total / p.num_parts - before;
            if (into >= cost) break;
            // A cut within the fixed cost falls before the first tile.
            p.schedule[i] = SchedulePoint{request, (i32)max(0ll, into - kRequestCost)};
        }
    }
    if (threadIdx.x == 0) p.schedule[p.num_parts] = SchedulePoint{p.b, 0};
    griddepcontrol_launch_dependents();
}
