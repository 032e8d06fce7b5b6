// Divides a batch among the clusters of a launch: each cluster derives its share from the lengths, so no schedule is
// launched before.
//
// Clusters are assigned to requests so that the longest share is as short as possible. No share has fewer than
// kMinTilesPerBlock tiles per block unless it is the request's only one, because a merge in global memory costs about
// as much as a tile. The blocks of a cluster cut its share into equal intervals.
#pragma once
#include "attention/decode_params.cuh"

namespace mla::decode {
using namespace attention;

constexpr i32 kMaxClusters = kWarpThreads;  // clusters that may share requests: one request per lane
constexpr i32 kMinTilesPerBlock = 2;

struct ClusterShare {
    i32 request;
    i32 index, count;  // of the clusters that share the request
    i32 first;         // the cluster with index 0
};

struct TileRange {
    i32 begin, end;

    // Piece `i` of `count`; sizes differ by at most one.
    MLA_DEVICE TileRange piece(i32 i, i32 count) const {
        const i32 step = (end - begin) / count, rest = (end - begin) % count;
        const i32 first = begin + i * step + min(i, rest);
        return TileRange{first, first + step + (i < rest)};
    }
};

MLA_DEVICE i32 sum_over_warp(i32 x) {
#pragma unroll
    for (i32 step = kWarpThreads / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
    return x;
}

// The least number of units per cluster for which `clusters` > b suffice, where the lane's request has `units` (0 for
// lanes without one: these have no `request`). Even requests without a unit take a cluster, which writes their results.
MLA_DEVICE i32 least_limit(i32 units, bool request, i32 b, i32 clusters) {
    const i32 total = sum_over_warp(units);
    i32 low = max(kMinTilesPerBlock, ceil_div(total, clusters));
    i32 high = max(low, ceil_div(total, clusters - b));  // rounding up costs less than a cluster per request
    while (low < high) {
        const i32 middle = (low + high) / 2;
        if (sum_over_warp(request ? ceil_div(max(units, 1), middle) : 0) <= clusters) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// Computes the share of a cluster of `kBlocks`, called by a whole warp; false if there is none. A unit is one tile per
// block.
template <i32 kBlocks>
MLA_DEVICE bool find_share(const DecodeParams& p, i32 cluster, ClusterShare& share) {
    const i32 lane = threadIdx.x % kWarpThreads;
    share = ClusterShare{cluster, 0, 1, cluster};
    if (p.b >= p.num_splits) return cluster < p.b;
    const bool request = lane < p.b;
    const i32 tokens = request ? request_length(p, lane).tokens : 0;
    const i32 units = ceil_div(ceil_div(tokens, kTileTokens), kBlocks);
    const i32 limit = least_limit(units, request, p.b, p.num_splits);
    const i32 count = request ? ceil_div(max(units, 1), limit) : 0;
    i32 through = count;
#pragma unroll
    for (i32 step = 1; step < kWarpThreads; step *= 2) {
        const i32 before = __shfl_up_sync(kFullWarp, through, step);
        if (lane >= step) through += before;
    }
    const u32 found = __ballot_sync(kFullWarp, through > cluster);
    if (found == 0) return false;
    share.request = __ffs(found) - 1;
    share.count = __shfl_sync(kFullWarp, count, share.request);
    share.first = __shfl_sync(kFullWarp, through, share.request) - share.count;
    share.index = cluster - share.first;
    return true;
}
}  // namespace mla::decode
