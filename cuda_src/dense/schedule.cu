// The list of query tiles of dense attention, those with most keys first; for the backward also the list of key tiles,
// those with most queries first.
//
// A sequence of n queries is ceil(n / 128) tiles. Queries outside all sequences are tiles without keys. Tiles are
// sorted by their number of keys, in bins; their order within a bin is arbitrary and does not affect results. Key tiles
// are sorted the same way.
//
// Grid: one block. The caller's numbers are hostile: starts are clamped and never decrease.
#include "common/facts.cuh"
#include "dense/tiles.cuh"
#include "ptx/control.cuh"
#include "tile/warp.cuh"

namespace mla::dense {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 512;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kBins = kThreads;

// ---- Params ----------------------------------------------------------------------------------------------------
struct DenseScheduleParams {
    const i32* cu_seqlens_q;   // (b + 1,), or null: one sequence
    const i32* cu_seqlens_kv;  // (b + 1,), or null
    Schedule* schedule;
    Schedule* key_schedule;  // null: tiles of keys are not needed
    Sequence* sequences;     // b + 2
    QueryTile* tiles;
    KeyTile* key_tiles;
    i64 cu_seqlens_q_stride_elems, cu_seqlens_kv_stride_elems;
    i32 s_q, s_kv, b;
    i32 causal;
};

// ---- Storage ---------------------------------------------------------------------------------------------------
struct Storage {
    i32 num_tiles, num_key_tiles;
    i32 most_queries, most_keys;  // of a sequence
    i32 count[kBins];             // tiles of a bin; then, where its next tile goes
    i32 warp_sums[kWarps];
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(DenseScheduleParams, cu_seqlens_q_stride_elems),
              MLA_OFFSET(DenseScheduleParams, s_q), (int)sizeof(DenseScheduleParams));
MLA_FACT(threads, kThreads);
MLA_FACT(tile_queries, kTileQueries);
MLA_FACT(tile_keys, kKeyTileKeys);
MLA_FACT(row_group, kRowGroup);
MLA_FACT(schedule_bytes, sizeof(Schedule));
MLA_FACT(sequence_bytes, sizeof(Sequence));
MLA_FACT(tile_bytes, sizeof(QueryTile));
static_assert(sizeof(KeyTile) == sizeof(QueryTile), "one size for both lists");

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
// Stated end of the n-th of b + 2 sequences: the first holds the tokens before the caller's sequences, the last those
// after them.
MLA_DEVICE i32 stated_end(const i32* starts, i64 stride, i32 n, i32 b, i32 total) {
    if (n > b) return total;
    if (starts == nullptr) return n == 0 ? 0 : total;
    return max(0, min(starts[n * stride], total));
}

// The first and the last of b + 2 sequences hold what lies outside the caller's: their queries have no keys, and their
// keys no queries.
MLA_DEVICE bool is_callers(const DenseScheduleParams& p, i32 n) { return n > 0 && n <= p.b; }

// Called by one warp.
MLA_DEVICE void find_sequences(const DenseScheduleParams& p, Storage& s, i32 lane) {
    Sequence next = {};  // start of the next 32
    i32 most_queries = 0, most_keys = 0;
    for (i32 first = 0; first < p.b + 2; first += kWarpThreads) {
        const i32 n = first + lane;
        const i32 stated = stated_end(p.cu_seqlens_q, p.cu_seqlens_q_stride_elems, n, p.b, p.s_q);
        const i32 key_stated = stated_end(p.cu_seqlens_kv, p.cu_seqlens_kv_stride_elems, n, p.b, p.s_kv);
        const i32 end = max(next.first_query, inclusive_max(stated, lane));
        const i32 key_end = max(next.first_key, inclusive_max(key_stated, lane));
        const i32 before = __shfl_up_sync(kFullWarp, end, 1), key_before = __shfl_up_sync(kFullWarp, key_end, 1);
        const i32 begin = lane == 0 ? next.first_query : before, key_begin = lane == 0 ? next.first_key : key_before;
        const i32 queries = end - begin, keys = key_end - key_begin;
        const i32 tiles = ceil_div(queries, kTileQueries), key_tiles = ceil_div(keys, kKeyTileKeys);
        const i32 rows = ceil_div(queries, kRowGroup) * kRowGroup;
        const i32 tiles_end = next.first_tile + warp_inclusive_sum(tiles);
        const i32 key_tiles_end = next.first_key_tile + warp_inclusive_sum(key_tiles);
        const i32 rows_end = next.first_row + warp_inclusive_sum(rows);
        if (n < p.b + 2) {
            p.sequences[n] = Sequence{
                begin, queries, key_begin, keys, tiles_end - tiles, key_tiles_end - key_tiles, rows_end - rows};
        }
        most_queries = max(most_queries, inclusive_max(queries, lane));
        most_keys = max(most_keys, inclusive_max(keys, lane));
        next.first_query = __shfl_sync(kFullWarp, end, kWarpThreads - 1);
        next.first_key = __shfl_sync(kFullWarp, key_end, kWarpThreads - 1);
        next.first_tile = __shfl_sync(kFullWarp, tiles_end, kWarpThreads - 1);
        next.first_key_tile = __shfl_sync(kFullWarp, key_tiles_end, kWarpThreads - 1);
        next.first_row = __shfl_sync(kFullWarp, rows_end, kWarpThreads - 1);
    }
    if (lane == kWarpThreads - 1) {
        s.num_tiles = next.first_tile;
        s.num_key_tiles = next.first_key_tile;
        s.most_queries = most_queries;
        s.most_keys = most_keys;
        *p.schedule = Schedule{next.first_tile, 0};
        if (p.key_schedule != nullptr) *p.key_schedule = Schedule{next.first_key_tile, 0};
    }
}

// ---- Tiles -----------------------------------------------------------------------------------------------------
// The last sequence whose `first` is at or before a tile. It skips sequences without tiles, since they share their
// successor's `first`.
MLA_DEVICE i32 sequence_of(const DenseScheduleParams& p, i32 Sequence::* first, i32 tile) {
    i32 low = 0, high = p.b + 2;
    while (high - low > 1) {
        const i32 middle = (low + high) / 2;
        (p.sequences[middle].*first <= tile ? low : high) = middle;
    }
    return low;
}

struct Queries {
    using Tile = QueryTile;

    MLA_DEVICE static Tile* tiles(const DenseScheduleParams& p) { return p.tiles; }
    MLA_DEVICE static i32 count(const Storage& s) { return s.num_tiles; }
    MLA_DEVICE static i32 most_work(const Storage& s) { return s.most_keys; }
    MLA_DEVICE static i32 work(const Tile& tile) { return tile.seen_by_any(); }

    MLA_DEVICE static Tile tile(const DenseScheduleParams& p, i32 index) {
        const i32 n = sequence_of(p, &Sequence::first_tile, index);
        const Sequence all = p.sequences[n];
        const i32 first = (index - all.first_tile) * kTileQueries, keys = is_callers(p, n) ? all.keys : 0;
        const i32 diagonal = p.causal ? keys - all.queries + first : keys;
        return Tile{all.first_query + first,
                    min(kTileQueries, all.queries - first),
                    all.first_key,
                    keys,
                    diagonal,
                    all.first_row + first,
                    {}};
    }
};

struct Keys {
    using Tile = KeyTile;

    MLA_DEVICE static Tile* tiles(const DenseScheduleParams& p) { return p.key_tiles; }
    MLA_DEVICE static i32 count(const Storage& s) { return s.num_key_tiles; }
    MLA_DEVICE static i32 most_work(const Storage& s) { return s.most_queries; }
    MLA_DEVICE static i32 work(const Tile& tile) { return tile.seers(); }

    MLA_DEVICE static Tile tile(const DenseScheduleParams& p, i32 index) {
        const i32 n = sequence_of(p, &Sequence::first_key_tile, index);
        const Sequence all = p.sequences[n];
        const i32 first = (index - all.first_key_tile) * kKeyTileKeys, queries = is_callers(p, n) ? all.queries : 0;
        const i32 diagonal = p.causal ? first - (all.keys - queries) : -kKeyTileKeys;
        return Tile{all.first_key + first,
                    min(kKeyTileKeys, all.keys - first),
                    all.first_query,
                    queries,
                    diagonal,
                    all.first_row,
                    {}};
    }
};

// The first bin has the tiles with most work.
MLA_DEVICE i32 bin_of(i32 work, i32 most_work) {
    const i64 share = (i64)work * (kBins - 1);
    return kBins - 1 - (i32)(share / max(1, most_work));
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

template <class Kind>
MLA_DEVICE void list_tiles(const DenseScheduleParams& p, Storage& s, i32 thread) {
    const i32 count = Kind::count(s), most_work = Kind::most_work(s);
    s.count[thread] = 0;
    __syncthreads();
    for (i32 i = thread; i < count; i += kThreads) {
        atomicAdd(&s.count[bin_of(Kind::work(Kind::tile(p, i)), most_work)], 1);
    }
    __syncthreads();
    scan_bins(s, thread);
    for (i32 i = thread; i < count; i += kThreads) {
        const auto tile = Kind::tile(p, i);
        Kind::tiles(p)[atomicAdd(&s.count[bin_of(Kind::work(tile), most_work)], 1)] = tile;
    }
    __syncthreads();
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_dense_schedule(const __grid_constant__ DenseScheduleParams p) {
    __shared__ Storage s;
    const i32 thread = threadIdx.x;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (thread < kWarpThreads) find_sequences(p, s, thread);
    __syncthreads();
    list_tiles<Queries>(p, s, thread);
    if (p.key_schedule != nullptr) list_tiles<Keys>(p, s, thread);
}
}  // namespace mla::dense
