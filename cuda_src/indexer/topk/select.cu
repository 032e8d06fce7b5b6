// Exact top-k of each row of logits, under one total order: larger first, then the lower index.
//
//   key(x) = the bits of x, monotone: NaN 1 < -inf < ... < -0 = +0 < ... < +inf < kept keys;  0: outside the range
//   T = the k-th largest key;  selected = {key > T} and the first of {key = T}, in ascending order
//
// Grid: kClusterBlocks blocks per row, the last row first because causal rows grow. A block holds its share of the row
// in registers, kItems keys per thread, and reads a longer share again in every pass.
//
//   histogram of the keys' upper 11 bits | digit of T | of the next 11 | digit | of the last 10 | digit | emit
//
// A pass counts only keys with the same upper bits as T, so no candidate list can overflow. The passes end as soon as
// all keys with the bits found so far are selected. The blocks of a cluster send each other histograms of shorter
// digits (indexer/cluster_digits.cuh).
//
// Bins: keys that differ in only a few bits would often hit the same bank of shared memory, which is up to ten times
// slower than other sets of digits; `place` therefore skips a word after every 32.
//
// Emission: indices are written in ascending order, at positions that are prefix sums over items, warps and lanes. With
// by_value, the selected keys are then sorted in shared memory.
//
// Source: radix select, as in Alabi et al., "Fast k-selection algorithms for graphics processing units", 2012.
// Differences: keys stay in registers, ties go to the lowest index, and there is no list of candidates.
#include "common/facts.cuh"
#include "common/types.cuh"
#include "indexer/cluster_digits.cuh"
#include "indexer/order.cuh"
#include "ptx/control.cuh"
#include "ptx/element.cuh"
#include "ptx/reduce.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::topk {

// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr i32 kClusterBlocks = MLA_CLUSTER_BLOCKS;
constexpr i32 kThreads = MLA_THREADS;  // fewer for short rows, so that an SM works on two rows

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kMaxThreads = 1024;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kItems = 32;                   // keys that a thread holds in registers
constexpr i32 kChunk = 4;                    // keys that are processed together, present or not
constexpr i32 kDigitBits = 11, kPasses = 3;  // the last digit has 10
constexpr i32 kBins = 1 << kDigitBits;
constexpr i32 kCapacity = kItems * kThreads;
constexpr i32 kBinsPerThread = kBins / kThreads;
constexpr i32 kMaxSorted = 8192;
constexpr i32 kWarpEntries = 2 * kWarpThreads;  // entries that a warp sorts without the other warps
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
    i32 rows_per_ke;  // rows that share a ke; it belongs to the last row, and each row before it sees one key less
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

    // An entry is the key, then the complement of the place; larger entries come first.
    MLA_DEVICE u64 get(i32 n) const { return (u64)keys[n] << 32 | (u16)~places[n]; }
    MLA_DEVICE void set(i32 n, u64 entry) {
        keys[n] = (u32)(entry >> 32);
        places[n] = (u16)~entry;
    }
};

// Numbers of keys before some place that are above T, and equal to T.
struct Before {
    i32 above, equal;
};

// Result of a pass: the digit of T, and of the keys that agree with T so far, the number selected and the total.
struct Found {
    i32 digit;
    i32 rank, count;
};

// Bit masks of 32 neighbouring keys: above T, and not below T.
struct alignas(8) Word {
    u32 above, reaching;

    MLA_DEVICE u32 equal() const { return reaching & ~above; }
};

// Place of a digit's bin; digits that agree in their lower bits lie in different banks. Digit kBins collects keys that
// do not count.
MLA_DEVICE constexpr u32 place(u32 digit) { return digit + (digit >> 5); }
constexpr i32 kPlaces = place(kBins) + 1;

struct BlockDigits {
    u32 histogram[kPlaces];
    Found found;
};

using ClusterStorage = ClusterDigitStorage<kClusterBlocks, u32>;
using InCluster = ClusterDigits<kClusterBlocks, kThreads, u32>;
template <bool kInCluster>
struct DigitsOf {
    using Type = BlockDigits;
};
template <>
struct DigitsOf<true> {
    using Type = ClusterStorage;
};

struct Scratch {
    alignas(16) DigitsOf<(kClusterBlocks > 1)>::Type digits;
    Word words[kThreads];
    Before all;
    u32 warp_sums[kWarps];
};

struct Storage {
    union {
        Scratch scratch;
        Sorted sorted;
    };
    ClusterDigitBarriers barriers;
};
MLA_FACT(smem_bytes, sizeof(Storage));

// ---- A row -----------------------------------------------------------------------------------------------------
struct Row {
    const TopkParams& p;
    i32 t, begin, end;
    i32 first, last;  // bounds of this block's share

    MLA_DEVICE i32 length() const { return end - begin; }
    MLA_DEVICE bool keeps(i32 s) const { return s - begin < p.keep_first || end - s <= p.keep_last; }
    MLA_DEVICE i32* indices() const { return p.indices + t * p.indices_stride_q_elems; }
    MLA_DEVICE float load(i32 s) const {
        const i64 at = t * p.logits_stride_q_elems + s;
        return p.logits_are_bf16 ? bfloat16::to_float(static_cast<const u16*>(p.logits)[at])
                                 : static_cast<const float*>(p.logits)[at];
    }
};

// Bounds from device memory may be invalid, so they are clamped.
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

MLA_DEVICE u32 key_of(const Row& row, i32 s, float x) { return row.keeps(s) ? kKeptKey : order_key(x); }

MLA_DEVICE bool fits(const Row& row) { return row.last - row.first <= kCapacity; }

// kItems keys of a thread, kThreads apart.
struct Keys {
    u32 at[kItems];

    // Sets kNoKey past the end of the share. All loads are issued before the first logit is used.
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

    // Separate from `load`, because few calls keep keys.
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

// Sum over the threads before this one. Called by all threads; needs a barrier before the next call.
MLA_DEVICE u32 block_exclusive_sum(Scratch& s, u32 x) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const u32 inclusive = warp_inclusive_sum(x);
    if (lane == kWarpThreads - 1) s.warp_sums[warp] = inclusive;
    __syncthreads();
    const u32 sums = warp_inclusive_sum(lane < kWarps ? s.warp_sums[lane] : 0);
    const u32 before = __shfl_sync(kFullWarp, sums, max(warp - 1, 0));
    return (warp == 0 ? 0 : before) + inclusive - x;
}

// Finds the digit of the rank-th largest counted key, and empties the bins for the next pass. Called by all threads.
MLA_DEVICE Found find_digit(Scratch& s, BlockDigits& digits, i32 rank) {
    const i32 top = kBins - 1 - kBinsPerThread * (i32)threadIdx.x;
    i32 counts[kBinsPerThread], sum = 0;
#pragma unroll
    for (i32 n = 0; n < kBinsPerThread; ++n) {
        u32& bin = digits.histogram[place(top - n)];
        counts[n] = (i32)bin;
        bin = 0;
        sum += counts[n];
    }
    i32 above = (i32)block_exclusive_sum(s, (u32)sum);
#pragma unroll
    for (i32 n = 0; n < kBinsPerThread; ++n) {
        if (above < rank && rank <= above + counts[n]) digits.found = Found{top - n, rank - above, counts[n]};
        above += counts[n];
    }
    __syncthreads();
    return digits.found;
}

// T lies in [lowest, highest]; the first `rank` keys in this interval are selected.
struct Threshold {
    u32 lowest, highest;
    i32 rank;
    bool takes_all;  // all keys in the interval are selected
};

// Calls visit(key) for this thread's keys of the share, kCapacity of the block at a time. `loaded`: a share that fits
// is in registers already. Also visits some kNoKey after the last key.
template <class Visit>
MLA_DEVICE void for_keys(const Row& row, Keys& keys, bool loaded, Visit visit) {
    for (i32 start = row.first; start < row.last; start += kCapacity) {
        if (!loaded || !fits(row)) keys.load(row, start);
#pragma unroll
        for (i32 i = 0; i < kItems; ++i) {
            if (i % kChunk == 0 && i * kThreads >= row.last - start) break;
            visit(keys.at[i]);
        }
        if (fits(row)) break;
    }
}

// Counts every key: for a whole row, a branch costs more than a bin for the keys that differ from T already.
MLA_DEVICE Threshold find_threshold(Storage& storage, BlockDigits& digits, const Row& row, Keys& keys, i32, Before&) {
    for (i32 n = threadIdx.x; n < kPlaces; n += kThreads) digits.histogram[n] = 0;
    __syncthreads();
    Found found{0, row.p.k, -1};
    u32 lowest = 0;
    i32 shift = 32;
    for (i32 pass = 0; pass < kPasses && found.rank != found.count; ++pass) {
        shift -= kDigitBits;
        u32 base = lowest;
        if (shift < 0) {  // the last digit has one bit less: the lower half of the bins holds keys below T
            shift = 0;
            base -= kBins / 2;
        }
        const SmemAddr histogram = smem_addr(digits.histogram);
        for_keys(row, keys, pass > 0,
                 [&](u32 key) { red_shared_inc(histogram + 4 * place(min((key - base) >> shift, (u32)kBins))); });
        __syncthreads();
        found = find_digit(storage.scratch, digits, found.rank);
        lowest = base + ((u32)found.digit << shift);
    }
    return Threshold{lowest, lowest + ((1u << shift) - 1), found.rank, found.rank == found.count};
}

// Sets `before` to the counts of earlier blocks.
MLA_DEVICE Threshold find_threshold(Storage& storage, ClusterStorage& counts, const Row& row, Keys& keys, i32 own_rank,
                                    Before& before) {
    InCluster digits(counts, storage.barriers, own_rank);
    for_keys(row, keys, false, [&](u32 key) { digits.count_first(key); });
    const ClusterThreshold t = digits.find_threshold(row.p.k, [&](auto visit) { for_keys(row, keys, true, visit); });
    before = Before{t.above_before, t.equal_before};
    return Threshold{t.range.lowest, t.range.highest(), t.rank, t.takes_all};
}

// ---- Emission --------------------------------------------------------------------------------------------------

// The lowest `count` set bits.
MLA_DEVICE u32 first_bits(u32 bits, i32 count) {
    u32 first = 0;
    for (; bits != 0 && count > 0; --count) {
        first |= bits & -bits;
        bits &= bits - 1;
    }
    return first;
}

// Writes the indices of the selected keys among 32 neighbours; the first neighbour has index s.
MLA_DEVICE void emit_word(i32* indices, const Threshold& threshold, const Word& word, i32 s, Before before) {
    u32 selected = word.above | first_bits(word.equal(), threshold.rank - before.equal);
    i32* to = indices + before.above + min(before.equal, threshold.rank);
    for (; selected != 0; selected &= selected - 1) *to++ = s + __ffs(selected) - 1;
}

// A warp's votes on an item form a word. With kTakesAll, all keys that reach T are selected and count as above T.
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

// Writes the selected indices of this block's share; `before` has the counts of earlier blocks. Words of votes lie in
// the order of the keys, and each thread owns one.
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

// ---- Result formats --------------------------------------------------------------------------------------------

// Destination and format of a row's results.
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
        return place_in_cache(table[page * p.table_stride_page_elems], p.page_size, s % p.page_size);
    }
    MLA_DEVICE void put(i32 at, i32 s) const {
        indices[at] = index_of(s);
        if (values != nullptr) values[at] = row.load(s);
    }
};

// Orders two entries: the larger one first, or last.
MLA_DEVICE void order(u64& a, u64& b, bool larger_first) {
    if ((a < b) != larger_first) return;
    const u64 first = b;
    b = a;
    a = first;
}

// Runs the steps of a merge within kWarpEntries neighbours; a lane owns the entries at `n` and `n` + 32.
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

// Merges runs of first_run to last_run entries, kWarpEntries at a time.
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

// Bitonic sort of `padded` entries, a power of 2 and at least kWarpEntries, the largest first. Only steps across warps
// need a barrier.
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

// Sorts the ascending indices by their keys; equal keys keep the lower index first.
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

// Pads the outputs after the selected indices, and converts indices to the caller's format unless they have it already.
// The threads of all blocks of a row share this work.
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
MLA_DEVICE void init_digits(Storage&, BlockDigits&, i32) {}
MLA_DEVICE void init_digits(Storage& storage, ClusterStorage& counts, i32 rank) {
    InCluster(counts, storage.barriers, rank).init();
    cluster_sync();
}

// Barrier of all threads of all blocks that share a row.
MLA_DEVICE void sync_row() {
    if (kClusterBlocks == 1) {
        __syncthreads();
    } else {
        cluster_sync();
    }
}

// Writes the indices of the selected logits in ascending order.
MLA_DEVICE void select(Storage& storage, const Row& row, i32 rank) {
    if (row.length() <= row.p.k) {  // all keys are selected: no logit is read
        for (i32 n = rank * kThreads + (i32)threadIdx.x; n < row.length(); n += kClusterBlocks * kThreads) {
            row.indices()[n] = row.begin + n;
        }
        return;
    }
    Keys keys;
    Before before{0, 0};
    const Threshold threshold = find_threshold(storage, storage.scratch.digits, row, keys, rank, before);
    emit(storage.scratch, row, keys, threshold, before);
}

extern "C" __global__ void __launch_bounds__(kThreads, kMaxThreads / kThreads)
    mla_indexer_topk_select(const __grid_constant__ TopkParams p) {
    extern __shared__ __align__(128) u8 smem[];
    Storage& storage = *reinterpret_cast<Storage*>(smem);
    const i32 rank = (i32)blockIdx.x % kClusterBlocks;
    init_digits(storage, storage.scratch.digits, rank);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const i32 t = p.s_q - 1 - (i32)(blockIdx.x / kClusterBlocks);
    const Row row = resolve_row(p, t, rank);
    const i32 count = min(p.k, row.length());
    select(storage, row, rank);
    sync_row();  // all indices are written, and no block reads another block's memory any more
    const Target to{row, row.indices(), p.values == nullptr ? nullptr : p.values + t * p.values_stride_q_elems,
                    p.block_table == nullptr ? nullptr : p.block_table + t / p.rows_per_table * p.table_stride_b_elems};
    if (rank == 0 && threadIdx.x == 0) p.counts[t * p.counts_stride_elems] = count;
    if (p.by_value && rank == 0) put_by_value(storage.sorted, to, count);
    finish(to, rank, count);
}
}  // namespace mla::indexer::topk
