// Turns the indices of sparse attention into lists of kv rows, one list per query, without the invalid entries.
//
//   rows[i] = [start + j - first  for j in indices[i, :length]  if 0 <= j - first < limit],  sorted by bucket, stable
//
// Relative indices count from the start of their sequence: `first` is 0. For row numbers of all of kv it is `start`.
//
// Sparse decode's indices have an axis of sequences, n queries each: i is then (i / n, i % n).
//
// A bucket is a 256th of kv: with lists in this order, queries that run at the same time read the same part of kv at
// about the same time. Unordered lists have one bucket, so the entries keep their order.
//
// Grid: block x takes queries x, x + grid, ... Each warp owns a contiguous run of a query's top-k entries and its own
// counts:
//
//   warp    load, rank in buckets |                        | rows to their positions |
//   block                         | counts to offsets      |                      | write the list
//
// Source: ranks within a warp by matching buckets come from Ashkiani et al., "GPU Multisplit", 2016. Here a block sorts
// a whole list, so that one pass over shared memory is enough, and invalid entries are dropped on the way.
#include "attention/row_list.cuh"
#include "common/facts.cuh"
#include "ptx/control.cuh"

namespace mla::attention {

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kBuckets = 256;
constexpr i32 kBucketsPerThread = kBuckets / kThreads;
constexpr i32 kFirstBucket = kWarpThreads;  // kNoRow is in bucket -1, which has a count, too
constexpr i32 kUnorderedShift = 31;         // every row is in bucket 0
constexpr i32 kItems = 16;                  // entries of a lane that are in registers at once
constexpr i32 kBatch = 4;                   // of these, rows matched before the first is counted
constexpr i32 kStagedRows = 4096;           // longer lists are scattered straight to global memory
constexpr i32 kBlocksPerSM = 6;

static_assert(kStagedRows % kTileTokens == 0, "a padded list fits");
static_assert(kThreads >= kTileTokens, "each thread pads one place");

// ---- Params ----------------------------------------------------------------------------------------------------
// Strides are in elements.
struct SparseRowsParams {
    const i32* indices;        // (s_q / n, n, topk)
    const i32* topk_length;    // (s_q / n,), or null: every entry counts
    const i32* cu_seqlens_q;   // (b + 1,), or null: one sequence
    const i32* cu_seqlens_kv;  // (b + 1,), or null
    i32* rows;                 // (s_q, rows_stride): valid rows, then kNoRow to the end of the tile
    i32* counts;               // (s_q,): how many are valid
    u32* selected;             // (s_kv,), zeroed: how many entries select the row; or null
    i64 indices_stride_b_elems, indices_stride_s_elems, indices_stride_k_elems, topk_length_stride_elems;
    i64 cu_seqlens_q_stride_elems, cu_seqlens_kv_stride_elems;
    i64 rows_stride_elems;  // a multiple of kTileTokens, at least topk
    i32 s_q, s_kv, topk, b;
    i32 causal, ordered;
    i32 queries_of_length;  // n: queries of one topk_length
    i32 relative;           // 1: indices count from the first row of their sequence; 0: of all
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(SparseRowsParams, indices_stride_b_elems), MLA_OFFSET(SparseRowsParams, s_q),
              (int)sizeof(SparseRowsParams));
MLA_FACT(threads, kThreads);
MLA_FACT(rows_per_tile, kTileTokens);

// ---- Storage ---------------------------------------------------------------------------------------------------
struct alignas(16) FourRows {
    i32 row[4];
};

struct Storage {
    alignas(16) i32 list[kStagedRows];
    i32 counts[kWarps][kFirstBucket + kBuckets];  // of a warp's rows per bucket, then the next position in each
    i32 warp_sums[kWarps];
    i32 sequence;
};

// How a query's entries are read: index j is row start + j - first, if 0 <= j - first < limit and the entry is one of
// the first `length`.
struct Query {
    i32 start, first, limit, length;
};

struct TopkEntries {
    const i32* indices;
    i64 stride_elems;
    Query query;
};

// ---- Which rows count ------------------------------------------------------------------------------------------

// Returns the first sequence that contains query i; p.b if there is none. Called by all threads.
MLA_DEVICE i32 find_sequence(const SparseRowsParams& p, Storage& storage, i32 i) {
    if (threadIdx.x == 0) storage.sequence = p.b;
    __syncthreads();
    for (i32 n = threadIdx.x; n < p.b; n += kThreads) {
        const i32* bounds = p.cu_seqlens_q + n * p.cu_seqlens_q_stride_elems;
        if (bounds[0] <= i && i < bounds[p.cu_seqlens_q_stride_elems]) {
            atomicMin(&storage.sequence, n);
            break;
        }
    }
    __syncthreads();
    return storage.sequence;
}

// Called by all threads. Every number is hostile: 64 bits, and clamped where it becomes a row.
MLA_DEVICE Query resolve_query(const SparseRowsParams& p, Storage& storage, i32 i) {
    i64 start = 0, end = p.s_kv, end_q = p.s_q;
    if (p.cu_seqlens_q != nullptr) {
        const i32 n = find_sequence(p, storage, i);
        if (n == p.b) return Query{0, 0, 0, 0};
        const i32* bounds_kv = p.cu_seqlens_kv + n * p.cu_seqlens_kv_stride_elems;
        start = max(0, min(bounds_kv[0], p.s_kv));
        end = max(0, min(bounds_kv[p.cu_seqlens_kv_stride_elems], p.s_kv));
        end_q = p.cu_seqlens_q[(n + 1) * p.cu_seqlens_q_stride_elems];
    }
    // A causal query does not see what belongs to the queries after it.
    const i64 limit = end - start - (p.causal ? end_q - 1 - i : 0);
    const i32 length =
        p.topk_length == nullptr ? p.topk : p.topk_length[i / p.queries_of_length * p.topk_length_stride_elems];
    const i32 first = p.relative ? 0 : (i32)start;
    return Query{(i32)start, first, (i32)max(0ll, limit), max(0, min(length, p.topk))};
}

// Rows in a bucket differ in their low `shift` bits only.
MLA_DEVICE i32 bucket_shift(const SparseRowsParams& p) {
    return p.ordered ? max(0, 32 - __clz(max(p.s_kv - 1, 0)) - 8) : kUnorderedShift;
}

// Loads the rows of this lane's entries `first`, `first` + 32, ...: `steps` of them, at most kItems. Invalid entries
// become kNoRow.
MLA_DEVICE void load_rows(const TopkEntries& entries, u32 first, i32 steps, i32 (&rows)[kItems]) {
    const i32* from = entries.indices + first * entries.stride_elems;
    const u32 length = entries.query.length;
    const i32 left = first < length ? (i32)min(length - first, (u32)steps * kWarpThreads) : 0;
#pragma unroll
    for (i32 item = 0; item < kItems; ++item) {
        const i32 index = item * kWarpThreads < left ? *from : kNoRow;
        const u32 at = (u32)index - (u32)entries.query.first;  // negative ones stay above every limit
        rows[item] = at < (u32)entries.query.limit ? entries.query.start + (i32)at : kNoRow;
        from += kWarpThreads * entries.stride_elems;
    }
}

MLA_DEVICE void count_selections(u32* selected, const i32 (&rows)[kItems]) {
#pragma unroll
    for (i32 item = 0; item < kItems; ++item) {
        if (rows[item] >= 0) atomicAdd(&selected[rows[item]], 1u);
    }
}

// ---- Sorting ---------------------------------------------------------------------------------------------------

// Counts the rows of `steps` entries, and stores for each how many rows of its bucket the warp counted before it.
// Called by whole warps.
MLA_DEVICE void count_rows(i32* counts, const i32 (&rows)[kItems], i32 steps, i32 shift, i32 (&before)[kItems]) {
    const i32 lane = threadIdx.x % kWarpThreads;
#pragma unroll
    for (i32 first = 0; first < kItems; first += kBatch) {
        if (first >= steps) break;
        u32 peers[kBatch];  // the lanes whose rows are in the same bucket
#pragma unroll
        for (i32 n = 0; n < kBatch; ++n) peers[n] = __match_any_sync(kFullWarp, rows[first + n] >> shift);
#pragma unroll
        for (i32 n = 0; n < kBatch; ++n) {
            i32& count = counts[rows[first + n] >> shift];
            before[first + n] = count + __popc(peers[n] & ((1u << lane) - 1));
            __syncwarp();
            if (peers[n] >> lane == 1) count = before[first + n] + 1;  // by the last of the peers
            __syncwarp();
        }
    }
}

// Turns counts into positions: bucket after bucket, within a bucket warp after warp. Returns the length of the list.
// Called by all threads.
MLA_DEVICE i32 place_buckets(Storage& storage) {
    const i32 lane = threadIdx.x % kWarpThreads, own_warp = threadIdx.x / kWarpThreads;
    i32 counts[kBucketsPerThread][kWarps], total = 0;
#pragma unroll
    for (i32 n = 0; n < kBucketsPerThread; ++n) {
#pragma unroll
        for (i32 warp = 0; warp < kWarps; ++warp) {
            counts[n][warp] = storage.counts[warp][kFirstBucket + kBucketsPerThread * threadIdx.x + n];
            total += counts[n][warp];
        }
    }
    i32 sum = total;
#pragma unroll
    for (i32 step = 1; step < kWarpThreads; step *= 2) {
        const i32 before = __shfl_up_sync(kFullWarp, sum, step);
        if (lane >= step) sum += before;
    }
    if (lane == kWarpThreads - 1) storage.warp_sums[own_warp] = sum;
    __syncthreads();
    i32 place = sum - total, length = 0;
#pragma unroll
    for (i32 warp = 0; warp < kWarps; ++warp) {
        if (warp < own_warp) place += storage.warp_sums[warp];
        length += storage.warp_sums[warp];
    }
#pragma unroll
    for (i32 n = 0; n < kBucketsPerThread; ++n) {
#pragma unroll
        for (i32 warp = 0; warp < kWarps; ++warp) {
            storage.counts[warp][kFirstBucket + kBucketsPerThread * threadIdx.x + n] = place;
            place += counts[n][warp];
        }
    }
    __syncthreads();
    return length;
}

// ---- One query -------------------------------------------------------------------------------------------------

MLA_DEVICE void make_list(const SparseRowsParams& p, Storage& storage, i32 i, i32 shift) {
    const Query query = resolve_query(p, storage, i);
    const i32 warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
    // Runs are whole steps of a warp, and equally many for any length: the compiler then knows the branches to be
    // uniform and emits no reconvergence code.
    const i32 steps = ((u32)p.topk + kThreads - 1) / kThreads;
    const u32 first = (u32)warp * steps * kWarpThreads + lane;
    const i32 sequence = i / p.queries_of_length, in_sequence = i - sequence * p.queries_of_length;
    const i32* indices = p.indices + sequence * p.indices_stride_b_elems + in_sequence * p.indices_stride_s_elems;
    const TopkEntries entries{indices, p.indices_stride_k_elems, query};
    i32* counts = storage.counts[warp] + kFirstBucket;
    i32 rows[kItems], places[kItems];

#pragma unroll
    for (i32 bucket = -kFirstBucket; bucket < kBuckets; bucket += kWarpThreads) counts[bucket + lane] = 0;
    __syncwarp();
    for (i32 step = 0; step < steps; step += kItems) {
        load_rows(entries, first + step * kWarpThreads, steps - step, rows);
        count_rows(counts, rows, steps - step, shift, places);
        if (p.selected != nullptr) count_selections(p.selected, rows);
    }
    __syncthreads();
    const i32 length = place_buckets(storage);
    const i32 padded = ceil_div(length, kTileTokens) * kTileTokens;
    const bool staged = p.topk <= kStagedRows;
    i32* list = p.rows + i * p.rows_stride_elems;
    i32* to = staged ? storage.list : list;

    const bool kept = steps <= kItems;  // the rows and their ranks are still in registers
    for (i32 step = 0; step < steps; step += kItems) {
        if (!kept) {
            load_rows(entries, first + step * kWarpThreads, steps - step, rows);
            count_rows(counts, rows, steps - step, shift, places);
        }
#pragma unroll
        for (i32 item = 0; item < kItems; ++item) {
            const i32 place = places[item] + (kept ? counts[rows[item] >> shift] : 0);
            if (rows[item] >= 0) to[place] = rows[item];
        }
    }
    if ((i32)threadIdx.x < padded - length) to[length + threadIdx.x] = kNoRow;
    if (threadIdx.x == 0) p.counts[i] = length;
    __syncthreads();
    if (staged) {
        for (i32 at = 4 * threadIdx.x; at < padded; at += 4 * kThreads) {
            *reinterpret_cast<FourRows*>(list + at) = *reinterpret_cast<const FourRows*>(storage.list + at);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    mla_attention_row_lists(const __grid_constant__ SparseRowsParams p) {
    __shared__ Storage storage;
    griddepcontrol_wait();
    const i32 shift = bucket_shift(p);
    for (u32 i = blockIdx.x; i < (u32)p.s_q; i += gridDim.x) make_list(p, storage, (i32)i, shift);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::attention
