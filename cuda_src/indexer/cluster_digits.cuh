// T, the k-th largest key of a row whose keys the blocks of a cluster share, digit by digit.
//
//   count the keys' digits | send the histogram to every block | find the digit of T
//
// Each block adds up the histograms of all blocks, so all find the same digit after one trip through distributed shared
// memory, without a barrier of the cluster. What earlier blocks have above T says where a block writes. Each digit has
// its own buffers, so no memory is reused.
//
// The upper 8 bits of most logits are equal. So the first digit divides powers of two instead, and the search begins
// again with the upper bits if T lies outside its windows.
#pragma once
#include "indexer/order.cuh"
#include "ptx/cluster.cuh"
#include "ptx/reduce.cuh"
#include "tile/ring.cuh"
#include "tile/warp.cuh"

namespace mla::indexer {
// Few bits: the bytes of the histograms that a block receives set the pace.
constexpr i32 kClusterDigitBits = 8;
constexpr i32 kClusterBins = 1 << kClusterDigitBits;
constexpr i32 kClusterDigits = 5;  // the first digit, and the digits of a whole key
constexpr i32 kBinWarps = kClusterBins / kWarpThreads;
constexpr i32 kBinBarrier = 5;  // of the threads that own a bin; warpgroups have those before it
#if __CUDA_ARCH__ == 900
constexpr i32 kSumsAtOnce = kBinWarps;
#else
constexpr i32 kSumsAtOnce = 1;  // more would spill next to a thread's 32 keys
#endif

// ---- Bins ------------------------------------------------------------------------------------------------------
// The keys from `lowest` on that agree in all but the last `bits` bits.
struct KeyInterval {
    u32 lowest;
    i32 bits;

    MLA_DEVICE i32 shift() const { return max(bits - kClusterDigitBits, 0); }
    MLA_DEVICE KeyInterval part(i32 digit) const { return KeyInterval{lowest + ((u32)digit << shift()), shift()}; }
    MLA_DEVICE u32 highest() const { return lowest + (bits == 32 ? ~0u : (1u << bits) - 1); }
};

// Windows of the first digit: eight bins for each power of two from 2^-12 on, four for each from -2^8 on. The bins
// between and around the windows have no range.
struct FirstDigit {
    static constexpr i32 kPositiveBits = 20, kNegativeBits = 21;
    static constexpr i32 kFirst = 64, kEnd = 255, kNegativeFirst = 1, kNegativeEnd = 61;
    static constexpr i32 kBase = 0x800 + (127 - 12) * 8 - kFirst;
    static constexpr i32 kNegativeBase = 0x400 - (127 + 8) * 4 - kNegativeFirst;

    MLA_DEVICE static i32 of(u32 key) {
        const i32 positive = min(max((i32)(key >> kPositiveBits) - kBase, kFirst - 1), kEnd);
        const i32 negative = min(max((i32)(key >> kNegativeBits) - kNegativeBase, 0), kNegativeEnd);
        return key >> 31 ? positive : negative == kNegativeEnd ? kFirst - 1 : negative;
    }
    MLA_DEVICE static bool has_range(i32 bin) {
        return (kFirst <= bin && bin < kEnd) || (kNegativeFirst <= bin && bin < kNegativeEnd);
    }
    MLA_DEVICE static KeyInterval range(i32 bin) {
        if (bin < kFirst) return KeyInterval{(u32)(bin + kNegativeBase) << kNegativeBits, kNegativeBits};
        return KeyInterval{(u32)(bin + kBase) << kPositiveBits, kPositiveBits};
    }
};

// Place of a bin among the counts of a block: digits with equal lower bits are in different banks.
MLA_DEVICE constexpr i32 cluster_place(i32 bin) { return bin ^ bin >> 5; }

// Place of a bin among the counts that are sent: a lane has four of each half.
MLA_DEVICE constexpr i32 sent_place(i32 bin) {
    const i32 at = cluster_place(bin), half = kClusterBins / 2;
    return at % half / 4 * 8 + at / half * 4 + at % 4;
}

// ---- Digits ----------------------------------------------------------------------------------------------------
// How many of the keys with a digit are selected, and how many there are. Of earlier blocks: how many have a higher
// digit, and how many this one.
struct ClusterDigit {
    i32 digit;
    i32 rank, count;
    i32 above_before, equal_before;
};

// `Count` holds how many keys a block has.
template <i32 kClusterBlocks, class Count>
struct ClusterDigitStorage {
    alignas(16) u32 histograms[kClusterDigits][kClusterBins];
    alignas(16) Count received[kClusterDigits][kClusterBlocks][kClusterBins];
    i32 warp_sums[kBinWarps][2];
    ClusterDigit found;
};

// Apart from the storage, whose memory may serve others once T is found. A barrier takes the histograms of a digit.
struct ClusterDigitBarriers {
    MBarrier arrived[kClusterDigits];
};

// T lies in a range; of the keys there, the first `rank` are selected.
struct ClusterThreshold {
    KeyInterval range;
    i32 rank;
    bool takes_all;                  // of them
    i32 above_before, equal_before;  // in earlier blocks
};

template <i32 kClusterBlocks, i32 kThreads, class Count>
struct ClusterDigits {
    static_assert(kThreads >= kClusterBins && kThreads >= kClusterBlocks * kWarpThreads, "a thread per bin");
    static constexpr i32 kUnroll = sizeof(Count) == sizeof(u16) ? kClusterBlocks : 4;
    using Counts = ClusterDigitStorage<kClusterBlocks, Count>;

    Counts& s;
    MBarrier (&arrived)[kClusterDigits];
    i32 own_rank;

    MLA_DEVICE ClusterDigits(Counts& s, ClusterDigitBarriers& barriers, i32 own_rank)
        : s(s), arrived(barriers.arrived), own_rank(own_rank) {}

    // Called by all threads before they arrive at a barrier of the cluster; they pass it before `find_threshold`.
    MLA_DEVICE void init() {
        const i32 thread = threadIdx.x;
        if (thread < kClusterDigits) {
            mbarrier_init(arrived[thread], 1);
            fence_mbarrier_init();
        }
        for (i32 i = thread; i < kClusterDigits * kClusterBins; i += kThreads) s.histograms[0][i] = 0;
    }

    MLA_DEVICE void count(i32 digit, i32 bin) { red_shared_inc(smem_addr(&s.histograms[digit][cluster_place(bin)])); }
    MLA_DEVICE void count_first(u32 key) { count(0, FirstDigit::of(key)); }

    // Called by all threads, for a row with more than k keys, after all keys were counted by their first digit.
    // for_keys(visit) calls visit(key) for each key of the thread.
    template <class ForKeys>
    MLA_DEVICE ClusterThreshold find_threshold(i32 k, ForKeys for_keys) {
        ClusterThreshold t{KeyInterval{0, 32}, k, false, 0, 0};
        const ClusterDigit first = find(0, k);
        if (FirstDigit::has_range(first.digit)) {
            narrow(t, first);
            t.range = FirstDigit::range(first.digit);
        }
#pragma unroll 1
        for (i32 digit = 1; t.range.bits > 0 && !t.takes_all; ++digit) {
            const KeyInterval range = t.range;
            const u32 end = 1u << (range.bits - range.shift());
            for_keys([&](u32 key) {
                const u32 bin = (key - range.lowest) >> range.shift();
                if (bin < end) count(digit, (i32)bin);
            });
            const ClusterDigit found = find(digit, t.rank);
            narrow(t, found);
            t.range = range.part(found.digit);
        }
        return t;
    }

    MLA_DEVICE static void narrow(ClusterThreshold& t, const ClusterDigit& found) {
        t.rank = found.rank;
        t.takes_all = found.rank == found.count;
        t.above_before += found.above_before;
        t.equal_before = found.equal_before;
    }

    // The digit of the key that is the rank-th largest of those counted.
    MLA_DEVICE ClusterDigit find(i32 digit, i32 rank) {
        const i32 thread = threadIdx.x, warp = thread / kWarpThreads;
        __syncthreads();  // all are counted
        if (thread == 0) mbarrier_arrive_expect_tx(arrived[digit], sizeof(s.received[digit]));
        if (warp < kClusterBlocks) send(digit, warp);
        if (thread < kClusterBins) look_for(digit, rank);
        __syncthreads();
        return s.found;
    }

    MLA_DEVICE static uint4 pack(uint4 low, uint4 high) {
        return make_uint4(low.x | low.y << 16, low.z | low.w << 16, high.x | high.y << 16, high.z | high.w << 16);
    }
    // Called by a warp.
    MLA_DEVICE void send(i32 digit, i32 to_rank) {
        const i32 lane = threadIdx.x % kWarpThreads;
        const ClusterAddr barrier = map_to_rank(smem_addr(&arrived[digit]), to_rank);
        const uint4* const own = reinterpret_cast<const uint4*>(s.histograms[digit]);
        const uint4 low = own[lane], high = own[kWarpThreads + lane];
        const SmemAddr to = smem_addr(&s.received[digit][own_rank][8 * lane]);
        if constexpr (sizeof(Count) == sizeof(u16)) {
            st_async_v4(map_to_rank(to, to_rank), pack(low, high), barrier);
        } else {
            st_async_v4(map_to_rank(to, to_rank), low, barrier);
            st_async_v4(map_to_rank(to + sizeof(uint4), to_rank), high, barrier);
        }
    }

    // One thread per bin, from the highest down.
    MLA_DEVICE void look_for(i32 digit, i32 rank) {
        const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
        const i32 bin = kClusterBins - 1 - (i32)threadIdx.x;
        mbarrier_wait(arrived[digit], 0);
        i32 all = 0, before = 0;
#pragma unroll(kUnroll)
        for (i32 block = 0; block < kClusterBlocks; ++block) {
            const i32 theirs = (i32)s.received[digit][block][sent_place(bin)];
            all += theirs;
            if (block < own_rank) before += theirs;
        }
        i32 above = warp_inclusive_sum(all), above_before = warp_inclusive_sum(before);
        if (lane == kWarpThreads - 1) {
            s.warp_sums[warp][0] = above;
            s.warp_sums[warp][1] = above_before;
        }
        bar_sync(kBinBarrier, kClusterBins);
        above -= all;
        above_before -= before;
#pragma unroll(kSumsAtOnce)
        for (i32 i = 0; i < kBinWarps; ++i) {
            if (i >= warp) continue;
            above += s.warp_sums[i][0];
            above_before += s.warp_sums[i][1];
        }
        if (above < rank && rank <= above + all) s.found = ClusterDigit{bin, rank - above, all, above_before, before};
    }
};
}  // namespace mla::indexer
