// Exact top-k of each row of logits, under one total order: larger first, then the lower index.
//
//   key(x) = the bits of x, monotone: NaN 1 < -inf < ... < -0 = +0 < ... < +inf < kept keys;  0: not in the range
//   T = the k-th largest key;  selected = {key > T} and the first of {key = T}, in ascending order
//
// Grid: kClusterBlocks blocks per row, the last row first: causal rows grow. A block holds its share of the row in
// registers, kItems keys per thread, and reads longer shares again in every pass.
//
//   histogram of the keys' upper 11 bits | digit of T | of the next 11 | digit | of the last 10 | digit | emit
//
// A pass counts only keys whose upper bits are those of T, so nothing is stored that could overflow. The passes end as
// soon as all keys with the bits found so far are selected. The blocks of a cluster add each other's histograms and
// find the same digits.
//
// Bins: keys that differ in a few bits only would often share a bank of shared memory, which costs up to ten times
// as much as any other set of digits; `place` leaves out a word after every 32. Blocks of a cluster read each other's
// bins by lines of 128 bytes, so there it is the order within a line that differs.
//
// Emission: in ascending order of the index, positions are prefix sums over items, warps and lanes. By value, the
// selected keys are then sorted in shared memory.
//
// Source: radix select, as in Alabi et al., "Fast k-selection algorithms for graphics processing units", 2012. What
// differs: keys stay in registers, ties go to the lowest index, and there is no list of candidates.
#include "common/facts.cuh"
#include "common/types.cuh"
#include "ptx/cluster.cuh"
#include "ptx/control.cuh"
#include "ptx/element.cuh"
#include "ptx/reduce.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::topk {

// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr i32 kClusterBlocks = MLA_CLUSTER_BLOCKS;
constexpr i32 kThreads = MLA_THREADS;  // fewer where rows are short, so that an SM works on two

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kMaxThreads = 1024;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kItems = 32;                   // keys of a thread that are in registers at once
constexpr i32 kChunk = 4;                    // of these are worked on together, be they there or not
constexpr i32 kDigitBits = 11, kPasses = 3;  // the last digit has 10
constexpr i32 kBins = 1 << kDigitBits;
constexpr i32 kCapacity = kItems * kThreads;
constexpr i32 kBinsPerThread = kBins / kThreads;
constexpr i32 kHistograms = kClusterBlocks == 1 ? 1 : kPasses;  // other blocks of a cluster read that of a pass
constexpr i32 kMaxSorted = 8192;
constexpr i32 kWarpEntries = 2 * kWarpThreads;  // that a warp sorts without the others
constexpr u32 kNoKey = 0, kNanKey = 1, kKeptKey = 0xffffffffu;
static_assert(kPasses * kDigitBits == 33, "the digits cover a key");
static_assert(kWarps <= kWarpThreads && kItems * kWarps == kThreads, "a lane per warp's sum, a thread per word");
static_assert(kCapacity < 1 << 16, "half a word holds a count of keys");

// ---- Params ----------------------------------------------------------------------------------------------------
struct TopkParams {
    const void* logits;      // (s_q, s_kv), float32 or bfloat16
    const i32* ks;           // (s_q,), or null: 0
    const i32* ke;           // (s_q / rows_per_ke,), or null: s_kv
    const i32* block_table;  // (b, max_pages), or null
    i32* indices;            // (s_q, k)
    i32* counts;             // (s_q,)
    float* values;           // (s_q, k), or null
    i64 logits_stride_q_elems, ks_stride_elems, ke_stride_elems;
    i64 table_stride_b_elems, table_stride_page_elems;
    i64 indices_stride_q_elems, counts_stride_elems, values_stride_q_elems;
    i32 s_q, s_kv, k;
    i32 rows_per_table, max_pages, page_size;
    i32 rows_per_ke;  // that share a ke, which is the last one's: each row before it sees one key less
    i32 keep_first, keep_last;
    i32 by_value, relative, logits_are_bf16;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(TopkParams, logits_stride_q_elems), MLA_OFFSET(TopkParams, s_q),
              (int)sizeof(TopkParams));
MLA_FACT(threads, kThreads);
MLA_FACT(cluster, kClusterBlocks);
MLA_FACT(max_sorted, kMaxSorted);
MLA_FACT(items, kItems);

// ---- Storage ---------------------------------------------------------------------------------------------------
struct Sorted {
    u32 keys[kMaxSorted];
    u16 places[kMaxSorted];  // in ascending order of the index

    // The key, then the complement of the place: the larger one comes first.
    MLA_DEVICE u64 get(i32 n) const { return (u64)keys[n] << 32 | (u16)~places[n]; }
    MLA_DEVICE void set(i32 n, u64 entry) {
        keys[n] = (u32)(entry >> 32);
        places[n] = (u16)~entry;
    }
};

// How many keys that lie before some place are above T, and equal to it.
struct Before {
    i32 above, equal;
};

// What a pass finds: the digit of T, how many keys with the bits so far are selected, and how many there are.
struct Found {
    i32 digit;
    i32 rank, count;
    i32 equal_before;  // of these, how many earlier blocks of the cluster hold
};

// Which of 32 neighbouring keys are above T, and not below it.
struct alignas(8) Word {
    u32 above, reaching;

    MLA_DEVICE u32 equal() const { return reaching & ~above; }
};

// Where a bin lies: digits that agree in their lower bits are in different banks. The place of digit kBins is for keys
// that do not count.
MLA_DEVICE constexpr u32 place(u32 digit) {
    return kClusterBlocks == 1 ? digit + (digit >> 5) : digit ^ (digit >> 5 & 31) ^ digit >> 10;
}
constexpr i32 kLineBins = 32;
constexpr i32 kPlaces = (place(kBins) / kLineBins + 1) * kLineBins;

struct Scratch {
    alignas(4 * kLineBins) u32 histogram[kHistograms][kPlaces];
    Word words[kThreads];
    Before all;
    u32 warp_sums[kWarps];
    Found found;
};

struct Storage {
    union {
        Scratch scratch;
        Sorted sorted;
    };
};
MLA_FACT(smem_bytes, sizeof(Storage));

// ---- A row -----------------------------------------------------------------------------------------------------
struct Row {
    const TopkParams& p;
    i32 t, begin, end;
    i32 first, last;  // of this block's share

    MLA_DEVICE i32 length() const { return end - begin; }
    MLA_DEVICE bool keeps(i32 s) const { return s - begin < p.keep_first || end - s <= p.keep_last; }
    MLA_DEVICE i32* indices() const { return p.indices + t * p.indices_stride_q_elems; }
    MLA_DEVICE float load(i32 s) const {
        const i64 at = t * p.logits_stride_q_elems + s;
        return p.logits_are_bf16 ? bfloat16::to_float(static_cast<const u16*>(p.logits)[at])
                                 : static_cast<const float*>(p.logits)[at];
    }
};

// Values from the device are hostile: clamped.
MLA_DEVICE Row resolve_row(const TopkParams& p, i32 t, i32 rank) {
    const i32 begin = p.ks == nullptr ? 0 : max(0, min(p.ks[t * p.ks_stride_elems], p.s_kv));
    i64 ke = p.s_kv;
    if (p.ke != nullptr) {
        const i32 group = t / p.rows_per_ke, rows_after = p.rows_per_ke - 1 - (t - group * p.rows_per_ke);
        ke = (i64)p.ke[group * p.ke_stride_elems] - rows_after;
    }
    const i32 end = max((i32)max(0ll, min(ke, (i64)p.s_kv)), begin);
    const i64 share = ((i64)end - begin + kClusterBlocks - 1) / kClusterBlocks;
    const i64 first = begin + rank * share;
    return Row{p, t, begin, end, (i32)min(first, (i64)end), (i32)min(first + share, (i64)end)};
}

MLA_DEVICE u32 order_key(float x) {
    const u32 bits = __float_as_uint(x + 0.f);  // -0 becomes +0
    if ((bits & 0x7fffffffu) > 0x7f800000u) return kNanKey;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

MLA_DEVICE u32 key_of(const Row& row, i32 s, float x) { return row.keeps(s) ? kKeptKey : order_key(x); }

MLA_DEVICE bool fits(const Row& row) { return row.last - row.first <= kCapacity; }

// kItems keys of each thread, kThreads apart.
struct Keys {
    u32 at[kItems];

    // kNoKey past the end of the share. All loads are under way before the first logit is looked at.
    MLA_DEVICE void load(const Row& row, i32 start) {
        if (row.p.logits_are_bf16) {
            load_bits(row, start, static_cast<const u16*>(row.p.logits));
#pragma unroll
            for (i32 i = 0; i < kItems; ++i) at[i] <<= 16;
        } else {
            load_bits(row, start, static_cast<const u32*>(row.p.logits));
        }
        const i32 left = row.last - start - (i32)threadIdx.x;
#pragma unroll
        for (i32 i = 0; i < kItems; ++i) at[i] = i * kThreads < left ? order_key(__uint_as_float(at[i])) : kNoKey;
        if (row.p.keep_first > 0 || row.p.keep_last > 0) mark_kept(row, start);
    }

    // In a loop of its own: few calls keep any.
    MLA_DEVICE void mark_kept(const Row& row, i32 start) {
#pragma unroll
        for (i32 i = 0; i < kItems; ++i) {
            const i32 s = start + i * kThreads + (i32)threadIdx.x;
            if (s < row.last && row.keeps(s)) at[i] = kKeptKey;
        }
    }

    template <class Bits>
    MLA_DEVICE void load_bits(const Row& row, i32 start, const Bits* logits) {
        const i32 first = start + (i32)threadIdx.x;
        const Bits* from = logits + row.t * row.p.logits_stride_q_elems + first;
#pragma unroll
        for (i32 i = 0; i < kItems; ++i) at[i] = i * kThreads < row.last - first ? (u32)from[i * kThreads] : 0;
    }
};

// ---- The digits of T -------------------------------------------------------------------------------------------

// All threads of all blocks that share a row.
MLA_DEVICE void sync_row() {
    if (kClusterBlocks == 1) {
        __syncthreads();
    } else {
        cluster_sync();
    }
}

// The sum of the threads before this one. Called by all threads, not again before another barrier.
MLA_DEVICE u32 block_exclusive_sum(Scratch& s, u32 x) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const u32 inclusive = warp_inclusive_sum(x);
    if (lane == kWarpThreads - 1) s.warp_sums[warp] = inclusive;
    __syncthreads();
    const u32 sums = warp_inclusive_sum(lane < kWarps ? s.warp_sums[lane] : 0);
    const u32 before = __shfl_sync(kFullWarp, sums, max(warp - 1, 0));
    return (warp == 0 ? 0 : before) + inclusive - x;
}

// The sum of all threads.
MLA_DEVICE u32 block_sum(Scratch& s, u32 x) {
    const i32 lane = threadIdx.x % kWarpThreads;
    const u32 own = warp_inclusive_sum(x);
    if (lane == kWarpThreads - 1) s.warp_sums[threadIdx.x / kWarpThreads] = own;
    __syncthreads();
    return __shfl_sync(kFullWarp, warp_inclusive_sum(lane < kWarps ? s.warp_sums[lane] : 0), kWarpThreads - 1);
}

// How many keys a bin has, in all blocks of the cluster and in those before this one.
struct BinCount {
    i32 all, before;
};

// A bin that no other block reads is emptied for the next pass.
MLA_DEVICE BinCount take_bin(Scratch& s, i32 pass, i32 digit, i32 own_rank) {
    u32& bin = s.histogram[pass % kHistograms][place(digit)];
    if (kClusterBlocks == 1) {
        const BinCount count{(i32)bin, 0};
        bin = 0;
        return count;
    }
    BinCount count{0, 0};
#pragma unroll
    for (i32 rank = 0; rank < kClusterBlocks; ++rank) {
        const i32 theirs = (i32)ld_shared_cluster(map_to_rank(smem_addr(&bin), rank));
        count.all += theirs;
        if (rank < own_rank) count.before += theirs;
    }
    return count;
}

// The bins of a thread, downwards from `top`. In a cluster two neighbours come from each block by one load of 8 bytes,
// in which the lower digit's place is even or odd; on Blackwell that spills. PERF(H200, 2026-11-22, -26 % of a call in
// clusters): 8 loads from distributed shared memory instead of 16.
MLA_DEVICE void take_bins(Scratch& s, i32 pass, i32 top, i32 own_rank, BinCount (&counts)[kBinsPerThread]) {
#if __CUDA_ARCH__ == 900
    constexpr bool kOneLoad = kClusterBlocks > 1;
#else
    constexpr bool kOneLoad = false;
#endif
    if constexpr (kOneLoad) {
        static_assert(!kOneLoad || kBinsPerThread == 2, "one load has both");
        const u32 first = place(top);
        const SmemAddr pair = smem_addr(&s.histogram[pass % kHistograms][first & ~1u]);
        counts[0] = counts[1] = BinCount{0, 0};
#pragma unroll
        for (i32 rank = 0; rank < kClusterBlocks; ++rank) {
            const u64 both = ld_shared_cluster_u64(map_to_rank(pair, rank));
            const i32 low = (i32)(u32)both, high = (i32)(both >> 32);
            const i32 theirs[2] = {first & 1 ? high : low, first & 1 ? low : high};
#pragma unroll
            for (i32 n = 0; n < 2; ++n) {
                counts[n].all += theirs[n];
                if (rank < own_rank) counts[n].before += theirs[n];
            }
        }
    } else {
#pragma unroll
        for (i32 n = 0; n < kBinsPerThread; ++n) counts[n] = take_bin(s, pass, top - n, own_rank);
    }
}

// The digit of the key that is the rank-th largest of those counted. `above_before` grows by what earlier blocks of the
// cluster have above the digit. Called by all threads.
MLA_DEVICE Found find_digit(Scratch& s, i32 pass, i32 rank, i32 own_rank, i32& above_before) {
    const i32 top = kBins - 1 - kBinsPerThread * (i32)threadIdx.x;
    BinCount counts[kBinsPerThread];
    take_bins(s, pass, top, own_rank, counts);
    i32 sum = 0;
#pragma unroll
    for (i32 n = 0; n < kBinsPerThread; ++n) sum += counts[n].all;
    i32 above = (i32)block_exclusive_sum(s, (u32)sum);
#pragma unroll
    for (i32 n = 0; n < kBinsPerThread; ++n) {
        if (above < rank && rank <= above + counts[n].all) {
            s.found = Found{top - n, rank - above, counts[n].all, counts[n].before};
        }
        above += counts[n].all;
    }
    __syncthreads();
    const Found found = s.found;
    if (kClusterBlocks > 1) {
        i32 earlier = 0;
#pragma unroll
        for (i32 n = 0; n < kBinsPerThread; ++n) earlier += top - n > found.digit ? counts[n].before : 0;
        above_before += (i32)block_sum(s, (u32)earlier);
    }
    return found;
}

// T lies in [lowest, highest]; of the keys there, the first `rank` are selected.
struct Threshold {
    u32 lowest, highest;
    i32 rank;
    bool takes_all;  // of them
};

// Counts the digits of the keys from `base` on. For a whole row, a branch costs more than the place of all others.
// Items that begin at `left` keys or later are not there.
MLA_DEVICE void count_digits(const Keys& keys, SmemAddr histogram, u32 base, i32 shift, i32 left) {
#pragma unroll
    for (i32 i = 0; i < kItems; ++i) {
        if (i % kChunk == 0 && i * kThreads >= left) break;
        const u32 digit = min((keys.at[i] - base) >> shift, (u32)kBins);
        if (kClusterBlocks > 1 && digit == kBins) continue;
        red_shared_inc(histogram + 4 * place(digit));
    }
}

// `before` is what earlier blocks of the cluster hold.
MLA_DEVICE Threshold find_threshold(Scratch& s, const Row& row, Keys& keys, i32 own_rank, Before& before) {
    Found found{0, row.p.k, -1, 0};
    u32 lowest = 0;
    i32 shift = 32;
    for (i32 pass = 0; pass < kPasses && found.rank != found.count; ++pass) {
        shift -= kDigitBits;
        u32 base = lowest;
        if (shift < 0) {  // one bit less: the lower half of the bins holds keys below T
            shift = 0;
            base -= kBins / 2;
        }
        const SmemAddr histogram = smem_addr(s.histogram[pass % kHistograms]);
        for (i32 start = row.first; start < row.last; start += kCapacity) {
            if (pass == 0 || !fits(row)) keys.load(row, start);
            count_digits(keys, histogram, base, shift, row.last - start);
            if (fits(row)) break;
        }
        sync_row();
        found = find_digit(s, pass, found.rank, own_rank, before.above);
        lowest = base + ((u32)found.digit << shift);
    }
    before.equal = found.equal_before;
    return Threshold{lowest, lowest + ((1u << shift) - 1), found.rank, found.rank == found.count};
}

// ---- Emission --------------------------------------------------------------------------------------------------

// The first `count` of the bits that are set.
MLA_DEVICE u32 first_bits(u32 bits, i32 count) {
    u32 first = 0;
    for (; bits != 0 && count > 0; --count) {
        first |= bits & -bits;
        bits &= bits - 1;
    }
    return first;
}

// Writes the selected ones of 32 neighbouring keys, of which the first has index s.
MLA_DEVICE void emit_word(i32* indices, const Threshold& threshold, const Word& word, i32 s, Before before) {
    u32 selected = word.above | first_bits(word.equal(), threshold.rank - before.equal);
    i32* to = indices + before.above + min(before.equal, threshold.rank);
    for (; selected != 0; selected &= selected - 1) *to++ = s + __ffs(selected) - 1;
}

// A warp's votes on an item are a word. Where all of the keys that reach T are selected, they count as above it.
template <bool kTakesAll>
MLA_DEVICE void vote(Scratch& s, const Keys& keys, const Threshold& threshold, i32 left) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
#pragma unroll
    for (i32 i = 0; i < kItems; ++i) {
        if (i % kChunk == 0 && i * kThreads >= left) break;
        const u32 reaching = __ballot_sync(kFullWarp, keys.at[i] >= threshold.lowest);
        const u32 above = kTakesAll ? reaching : __ballot_sync(kFullWarp, keys.at[i] > threshold.highest);
        if (lane == 0) s.words[i * kWarps + warp] = Word{above, reaching};
    }
}

// Writes the selected indices of this block's share. `before` is what earlier blocks hold. Each thread owns one of the
// words of votes, which lie in the order of the keys.
MLA_DEVICE void emit(Scratch& s, const Row& row, Keys& keys, const Threshold& threshold, Before before) {
    const i32 thread = threadIdx.x;
    for (i32 start = row.first;; start += kCapacity) {
        if (!fits(row)) keys.load(row, start);
        if (threshold.takes_all) {
            vote<true>(s, keys, threshold, row.last - start);
        } else {
            vote<false>(s, keys, threshold, row.last - start);
        }
        __syncthreads();
        const i32 first = start + thread * kWarpThreads;
        const Word word = first < row.last ? s.words[thread] : Word{0, 0};
        const u32 own = (u32)__popc(word.above) | (u32)__popc(word.equal()) << 16;
        const u32 sum = block_exclusive_sum(s, own);
        const Before mine{before.above + (i32)(sum & 0xffff), before.equal + (i32)(sum >> 16)};
        emit_word(row.indices(), threshold, word, first, mine);
        if (fits(row) || start + kCapacity >= row.last) return;
        if (thread == kThreads - 1) {
            s.all = Before{mine.above + __popc(word.above), mine.equal + __popc(word.equal())};
        }
        __syncthreads();
        before = s.all;
    }
}

// ---- What the caller wants -------------------------------------------------------------------------------------

// Where the results of a row go.
struct Target {
    const Row& row;
    i32* indices;
    float* values;
    const i32* table;

    MLA_DEVICE i32 index_of(i32 s) const {
        const TopkParams& p = row.p;
        if (p.relative) return s - row.begin;
        if (table == nullptr) return s;
        const i32 page = s / p.page_size;
        if (page >= p.max_pages) return -1;
        const i64 place = (i64)table[page * p.table_stride_page_elems] * p.page_size + s % p.page_size;
        return (u64)place <= 0x7fffffffu ? (i32)place : -1;  // whatever the table says, no place but the one meant
    }
    MLA_DEVICE void put(i32 at, i32 s) const {
        indices[at] = index_of(s);
        if (values != nullptr) values[at] = row.load(s);
    }
};

// Puts the larger one first, or last.
MLA_DEVICE void order(u64& a, u64& b, bool larger_first) {
    if ((a < b) != larger_first) return;
    const u64 first = b;
    b = a;
    a = first;
}

// The steps of a run within kWarpEntries neighbours: of a lane, the one at `n` and the one 32 further on.
MLA_DEVICE void merge_in_warp(u64 (&x)[2], i32 n, i32 run) {
    if (run >= kWarpEntries) order(x[0], x[1], (n & run) == 0);
#pragma unroll
    for (i32 step = kWarpThreads / 2; step > 0; step /= 2) {
        if (step >= run) continue;
        const bool is_first = (n & step) == 0;
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            const u64 other = __shfl_xor_sync(kFullWarp, x[i], step);
            const bool keeps_larger = (((n + i * kWarpThreads) & run) == 0) == is_first;
            if ((x[i] < other) == keeps_larger) x[i] = other;
        }
    }
}

// The runs [first_run, last_run] of all entries, kWarpEntries at a time.
MLA_DEVICE void merge_runs(Sorted& sorted, i32 padded, i32 first_run, i32 last_run) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    for (i32 n = warp * kWarpEntries + lane; n < padded; n += kWarps * kWarpEntries) {
        u64 x[2] = {sorted.get(n), sorted.get(n + kWarpThreads)};
        for (i32 run = first_run; run <= last_run; run *= 2) merge_in_warp(x, n, run);
        sorted.set(n, x[0]);
        sorted.set(n + kWarpThreads, x[1]);
    }
    __syncthreads();
}

// Bitonic sort of `padded` entries, a power of 2 and at least kWarpEntries: the largest first. Only steps between
// entries of two warps need a barrier.
MLA_DEVICE void sort_entries(Sorted& sorted, i32 padded) {
    merge_runs(sorted, padded, 2, kWarpEntries);
    for (i32 run = 2 * kWarpEntries; run <= padded; run *= 2) {
        for (i32 step = run / 2; step >= kWarpEntries; step /= 2) {
            for (i32 i = threadIdx.x; i < padded / 2; i += kThreads) {
                const i32 n = 2 * i - (i & (step - 1));
                u64 low = sorted.get(n), high = sorted.get(n + step);
                order(low, high, (n & run) == 0);
                sorted.set(n, low);
                sorted.set(n + step, high);
            }
            __syncthreads();
        }
        merge_runs(sorted, padded, run, run);
    }
}

// Puts the ascending indices of the logits into the order of the keys; of equal keys, the lower index first.
MLA_DEVICE void put_by_value(Sorted& sorted, const Target& to, i32 count) {
    i32 padded = kWarpEntries;
    while (padded < count) padded *= 2;
    for (i32 n = threadIdx.x; n < padded; n += kThreads) {
        const i32 s = n < count ? to.indices[n] : 0;
        sorted.keys[n] = n < count ? key_of(to.row, s, to.row.load(s)) : kNoKey;
        sorted.places[n] = (u16)n;
    }
    __syncthreads();
    sort_entries(sorted, padded);
    for (i32 n = threadIdx.x; n < count; n += kThreads) {
        sorted.keys[n] = (u32)to.indices[sorted.places[n]];
    }
    __syncthreads();
    for (i32 n = threadIdx.x; n < count; n += kThreads) to.put(n, (i32)sorted.keys[n]);
}

// Fills up what is behind the selected ones; what is not in place gets the form that the caller wants. The blocks of a
// row share this work in steps of their threads.
MLA_DEVICE void finish(const Target& to, i32 rank, i32 count) {
    const TopkParams& p = to.row.p;
    const bool in_place = p.by_value || (!p.relative && to.table == nullptr && to.values == nullptr);
    const i32 first = (in_place ? count : 0) + rank * kThreads + (i32)threadIdx.x;
    for (i32 n = first; n < p.k; n += kClusterBlocks * kThreads) {
        if (n < count) {
            to.put(n, to.indices[n]);
        } else {
            to.indices[n] = -1;
            if (to.values != nullptr) to.values[n] = negative_infinity();
        }
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------

// Writes the indices of the selected logits in ascending order.
MLA_DEVICE void select(Scratch& s, const Row& row, i32 rank) {
    if (row.length() <= row.p.k) {  // all of them: no logit is read
        for (i32 n = rank * kThreads + (i32)threadIdx.x; n < row.length(); n += kClusterBlocks * kThreads) {
            row.indices()[n] = row.begin + n;
        }
        return;
    }
    for (i32 n = threadIdx.x; n < kHistograms * kPlaces; n += kThreads) s.histogram[0][n] = 0;
    __syncthreads();
    Keys keys;
    Before before{0, 0};
    const Threshold threshold = find_threshold(s, row, keys, rank, before);
    emit(s, row, keys, threshold, before);
}

extern "C" __global__ void __launch_bounds__(kThreads, kMaxThreads / kThreads)
    mla_indexer_topk_select(const __grid_constant__ TopkParams p) {
    extern __shared__ __align__(4 * kLineBins) u8 smem[];
    Storage& storage = *reinterpret_cast<Storage*>(smem);
    griddepcontrol_wait();
    const i32 rank = (i32)blockIdx.x % kClusterBlocks;
    const i32 t = p.s_q - 1 - (i32)(blockIdx.x / kClusterBlocks);
    const Row row = resolve_row(p, t, rank);
    const i32 count = min(p.k, row.length());
    select(storage.scratch, row, rank);
    sync_row();  // all is written, and no block reads another's memory any more
    const Target to{row, row.indices(), p.values == nullptr ? nullptr : p.values + t * p.values_stride_q_elems,
                    p.block_table == nullptr ? nullptr : p.block_table + t / p.rows_per_table * p.table_stride_b_elems};
    if (rank == 0 && threadIdx.x == 0) p.counts[t * p.counts_stride_elems] = count;
    if (p.by_value && rank == 0) put_by_value(storage.sorted, to, count);
    finish(to, rank, count);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::topk
