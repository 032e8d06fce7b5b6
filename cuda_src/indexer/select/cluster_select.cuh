// Exact top-k of a row whose keys lie in the shared memory of a cluster's blocks, each a contiguous share of the row.
//
//   digits of T (indexer/cluster_digits.cuh) | how many a warp selects | written
//
// Warps have contiguous shares of a block's keys, so that what is selected is written in ascending order.
#pragma once
#include "indexer/cluster_digits.cuh"

namespace mla::indexer::select {
// The keys of 32 neighbours that are above T, and those that are equal to it, if not all of these are selected.
struct Votes {
    u32 above, equal;

    // Numbers of them, the latter in the upper half.
    MLA_DEVICE u32 counts() const { return (u32)__popc(above) | (u32)__popc(equal) << 16; }
};

template <i32 kClusterBlocks, i32 kThreads, i32 kMaxKeys>
struct ClusterSelectStorage {
    ClusterDigitStorage<kClusterBlocks, u16> digits;
    ClusterDigitBarriers barriers;
    u32 keys[kMaxKeys];
    u32 warp_counts[kThreads / kWarpThreads];
};

template <i32 kClusterBlocks, i32 kThreads, i32 kMaxKeys>
struct ClusterSelect {
    static constexpr i32 kWarps = kThreads / kWarpThreads;
    static_assert(kWarps <= kWarpThreads, "a lane per warp");
    static_assert(kMaxKeys < 1 << 16, "half a word holds a count of keys");
    using Keys = ClusterSelectStorage<kClusterBlocks, kThreads, kMaxKeys>;

    Keys& s;
    ClusterDigits<kClusterBlocks, kThreads, u16> digits;

    MLA_DEVICE ClusterSelect(Keys& s, i32 own_rank) : s(s), digits(s.digits, s.barriers, own_rank) {}

    // Keeps the block's key number `at`, and counts its first digit.
    MLA_DEVICE void put(i32 at, u32 key) {
        s.keys[at] = key;
        if (key != kNoKey) digits.count_first(key);
    }

    // Selects from a row of more than k keys. put(n, at): the n-th selected key of the row is key `at` of the block.
    // `num_keys` is a multiple of 32.
    template <class Put>
    MLA_DEVICE void select(i32 k, i32 num_keys, Put put) {
        const ClusterThreshold t = digits.find_threshold(k, [&](auto visit) {
#pragma unroll 2
            for (i32 i = threadIdx.x; i < num_keys; i += kThreads) visit(s.keys[i]);
        });
        emit(t, num_keys, put);
    }

    MLA_DEVICE Votes vote(const ClusterThreshold& t, u32 key) const {
        const u32 reaching = __ballot_sync(kFullWarp, key >= t.range.lowest && key != kNoKey);
        if (t.takes_all) return Votes{reaching, 0};
        const u32 above = __ballot_sync(kFullWarp, key > t.range.highest());
        return Votes{above, reaching & ~above};
    }

    template <class Put>
    MLA_DEVICE void emit(const ClusterThreshold& t, i32 num_keys, Put put) {
        const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
        const i32 share = ceil_div(num_keys / kWarpThreads, kWarps) * kWarpThreads;
        const i32 first = min(warp * share, num_keys), end = min(first + share, num_keys);
        u32 own = 0;
#pragma unroll 2
        for (i32 i = first; i < end; i += kWarpThreads) own += vote(t, s.keys[i + lane]).counts();
        if (lane == 0) s.warp_counts[warp] = own;
        __syncthreads();
        const u32 before = __reduce_add_sync(kFullWarp, lane < warp ? s.warp_counts[lane] : 0);
        i32 above = t.above_before + (i32)(before & 0xffff), equal = t.equal_before + (i32)(before >> 16);
        const u32 bit = 1u << lane;
#pragma unroll 2
        for (i32 i = first; i < end; i += kWarpThreads) {
            const Votes votes = vote(t, s.keys[i + lane]);
            const i32 above_here = above + __popc(votes.above & (bit - 1));
            const i32 equal_here = min(equal + __popc(votes.equal & (bit - 1)), t.rank);
            if ((votes.above & bit) != 0 || ((votes.equal & bit) != 0 && equal_here < t.rank)) {
                put(above_here + equal_here, i + lane);
            }
            above += __popc(votes.above);
            equal += __popc(votes.equal);
        }
    }
};
}  // namespace mla::indexer::select
