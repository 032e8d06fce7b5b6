// The list of tiles of queries of dense attention, those with most keys first.
//
// A sequence of n queries is ceil(n / 128) tiles. Queries of no sequence, before the first one and after the last, are
// tiles without keys. Tiles are sorted by their number of keys, in bins; their order within a bin is arbitrary, and
// means nothing to the results.
//
// Grid: one block. Numbers of the caller are hostile: starts are clamped, and never go down.
#include "dense/params.cuh"
#include "ptx/control.cuh"
#include "tile/warp.cuh"

namespace mla::dense {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 512;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kBins = kThreads;

// ---- Storage ---------------------------------------------------------------------------------------------------
struct Storage {
    i32 num_tiles, most_keys;
    i32 count[kBins];  // tiles of a bin; then, where its next tile goes
    i32 warp_sums[kWarps];
};

MLA_PREFILL_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(tile_queries, kTileQueries);
MLA_FACT(schedule_bytes, sizeof(Schedule));
MLA_FACT(sequence_bytes, sizeof(Sequence));
MLA_FACT(tile_bytes, sizeof(QueryTile));

// The largest over the lanes up to this one.
MLA_DEVICE i32 inclusive_max(i32 x, i32 lane) {
#pragma unroll
    for (i32 step = 1; step < kWarpThreads; step *= 2) {
        const i32 other = __shfl_up_sync(kFullWarp, x, step);
        if (lane >= step) x = max(x, other);
    }
    return x;
}

// ---- Sequences -------------------------------------------------------------------------------------------------
// Where the n-th of b + 2 sequences ends, were it alone: the first is what comes before the caller's, the last after.
MLA_DEVICE i32 stated_end(const i32* starts, i64 stride, i32 n, i32 b, i32 total) {
    if (n > b) return total;
    if (starts == nullptr) return n == 0 ? 0 : total;
    return max(0, min(starts[n * stride], total));
}

// By one warp.
MLA_DEVICE void find_sequences(const PrefillParams& p, Storage& s, i32 lane) {
    i32 query = 0, key = 0, tile = 0, most = 0;  // where the next 32 begin
    for (i32 first = 0; first < p.b + 2; first += kWarpThreads) {
        const i32 n = first + lane;
        const i32 end =
            max(query, inclusive_max(stated_end(p.cu_seqlens_q, p.cu_seqlens_q_stride_elems, n, p.b, p.s_q), lane));
        const i32 key_end =
            max(key, inclusive_max(stated_end(p.cu_seqlens_kv, p.cu_seqlens_kv_stride_elems, n, p.b, p.s_kv), lane));
        const i32 before = __shfl_up_sync(kFullWarp, end, 1), key_before = __shfl_up_sync(kFullWarp, key_end, 1);
        const i32 begin = lane == 0 ? query : before, key_begin = lane == 0 ? key : key_before;
        const i32 keys = n == 0 || n > p.b ? 0 : key_end - key_begin;
        const i32 tiles = ceil_div(end - begin, kTileQueries), tiles_end = tile + warp_inclusive_sum(tiles);
        if (n < p.b + 2) p.sequences[n] = Sequence{begin, end - begin, key_begin, keys, tiles_end - tiles};
        most = max(most, inclusive_max(keys, lane));
        query = __shfl_sync(kFullWarp, end, kWarpThreads - 1);
        key = __shfl_sync(kFullWarp, key_end, kWarpThreads - 1);
        tile = __shfl_sync(kFullWarp, tiles_end, kWarpThreads - 1);
    }
    if (lane == kWarpThreads - 1) {
        s.num_tiles = tile;
        s.most_keys = most;
        *p.schedule = Schedule{tile, 0};
    }
}

// ---- Tiles -----------------------------------------------------------------------------------------------------
// The last sequence that begins at or before a tile, with those that have none left out: they share their successor's.
MLA_DEVICE QueryTile tile_at(const PrefillParams& p, i32 tile) {
    i32 low = 0, high = p.b + 2;
    while (high - low > 1) {
        const i32 middle = (low + high) / 2;
        (p.sequences[middle].first_tile <= tile ? low : high) = middle;
    }
    const Sequence sequence = p.sequences[low];
    const i32 first = (tile - sequence.first_tile) * kTileQueries;
    const i32 queries = min(kTileQueries, sequence.queries - first);
    const i32 diagonal = p.causal ? sequence.keys - sequence.queries + first : sequence.keys;
    return QueryTile{sequence.first_query + first, queries, sequence.first_key, sequence.keys, diagonal, {}};
}

// The first bin has the tiles with most keys.
MLA_DEVICE i32 bin_of(const QueryTile& tile, i32 most_keys) {
    const i64 share = (i64)tile.seen_by_any() * (kBins - 1);
    return kBins - 1 - (i32)(share / max(1, most_keys));
}

// Each bin's count becomes the number of tiles in the bins before it.
MLA_DEVICE void scan_bins(Storage& s, i32 thread) {
    const i32 lane = thread % kWarpThreads, warp = thread / kWarpThreads;
    const i32 own = s.count[thread], up_to = warp_inclusive_sum(own);
    if (lane == kWarpThreads - 1) s.warp_sums[warp] = up_to;
    __syncthreads();
    i32 before = 0;
    for (i32 i = 0; i < warp; ++i) before += s.warp_sums[i];
    s.count[thread] = before + up_to - own;
    __syncthreads();
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) mla_dense_schedule(const __grid_constant__ PrefillParams p) {
    __shared__ Storage s;
    const i32 thread = threadIdx.x;
    s.count[thread] = 0;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (thread < kWarpThreads) find_sequences(p, s, thread);
    __syncthreads();
    for (i32 i = thread; i < s.num_tiles; i += kThreads) atomicAdd(&s.count[bin_of(tile_at(p, i), s.most_keys)], 1);
    __syncthreads();
    scan_bins(s, thread);
    for (i32 i = thread; i < s.num_tiles; i += kThreads) {
        const QueryTile tile = tile_at(p, i);
        p.tiles[atomicAdd(&s.count[bin_of(tile, s.most_keys)], 1)] = tile;
    }
}
}  // namespace mla::dense
