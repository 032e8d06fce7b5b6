// Cuts a ragged batch into splits (attention/split_work.cuh) so that the longest one is as short as possible.
//
//   cost(split) = tiles + kItemCost * work items;   makespan = longest split + merge_cost if a request is cut
//
// A batch may also price partial results. Where splits are short, the price then counts:
//
//   price(tiles, partials) = max(tiles, all tiles / kServedBlocks) + piece_cost * partials
//
// since each partial result is stored and read again, while kServedBlocks blocks already saturate memory.
//
// One block computes four ways to cut, each with a thread per split, and keeps the one with the least makespan:
//
//   whole    boundary i = the request boundary nearest to i / num_splits of the total cost: nothing to merge
//   pieces   for b <= num_splits: a split holds one piece; request r is cut into ceil(tiles / limit) equal ones, where
//            limit is the least that num_splits allow, or, if partial results are priced, the cheapest of the 32 limits
//            from there on. Pieces of a lone request may be longer, see kSecondRound
//   even     cut i = i / num_splits of the total cost, moved to a request boundary at most kItemCost tiles away: a
//            shorter piece would not pay
//   loose    like even, with boundaries up to a quarter of a split away
//
// No way makes an empty piece: cuts within a request are at different tiles. (A split may be empty.) Requests are
// counted in units of 2^k tiles, k > 0 only where the total would not fit 32 bits.
//
// Source: the even cut is FlashMLA's metadata kernel's idea, one piece per split FlashAttention-3's. Here a thread per
// split replaces one thread's walk, ways to cut are compared by their cost, and only the cuts are stored: slots and
// counts follow from them.
#pragma once
#include "attention/decode_params.cuh"
#include "tile/warp.cuh"

namespace mla::attention {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kScheduleThreads = 1024;  // of the block
constexpr i32 kScheduleWarps = kScheduleThreads / kWarpThreads;
// Overhead of a work item in tiles: fetching Q, starting the pipeline, writing the result.
constexpr i32 kItemCost = 3;
constexpr i32 kMaxTotal = 1 << 30;  // of units and item costs
// Prices are in tiles / kPriceScale. Partial results are counted where no split needs more than kShortSplit tiles: with
// longer ones, storing them hides behind loads of other blocks, and fewer pieces have not been faster.
constexpr i32 kPriceScale = 1 << 14;
constexpr i32 kShortSplit = 4;
constexpr i32 kServedBlocks = 75;  // measured on an H200, 16 rows per block
// PERF(H200, 2026-11-29, one sequence of 100,000 tokens: -5 % with 128 heads, -10 % with 64): more pieces than a power
// of two are merged by twice as many groups of threads (attention/merge_partials.cuh). With blocks of 64 rows these are
// more units than are resident at once, and a second round of them costs more than two tiles.
constexpr i32 kSecondRound = 2;
constexpr i32 kMergeCostOf64Rows = 8;
enum Way : i32 { kWhole, kPieces, kLoose, kEven, kWays };
static_assert(kWays * kMaxSplits == kScheduleThreads, "a thread per split and way");
static_assert(kScheduleWarps == kWarpThreads, "a lane per warp's sum");

// ---- Shared memory ---------------------------------------------------------------------------------------------
struct Request {
    i32 index;
    i32 units;
    i32 before;  // sum of the units of the requests before it
};

struct Cut {
    i32 request;
    i32 unit;    // of the request
    i32 before;  // sum of the units before the cut
};

// Which of some increasing places lies in which interval: an interval marks its first place, and a place belongs to the
// last mark that is not after it.
struct Marks {
    u32 bits[kMaxSplits / kWarpThreads];
    Request marked[kMaxSplits];

    // At most one call per place.
    MLA_DEVICE void mark(i32 place, const Request& request) {
        marked[place] = request;
        atomicOr(&bits[place / kWarpThreads], 1u << place % kWarpThreads);
    }
    MLA_DEVICE i32 last_mark(i32 place) const {
        i32 word = place / kWarpThreads;
        u32 found = bits[word] & (u32)(2ull << place % kWarpThreads) - 1;
        while (found == 0 && word > 0) found = bits[--word];
        return found == 0 ? -1 : word * kWarpThreads + kWarpThreads - 1 - __clz(found);
    }
};

struct ScheduleStorage {
    Marks cuts;    // the places of `whole`, `loose` and `even`
    Marks pieces;  // the splits of `pieces`
    i32 warp_sums[kScheduleWarps];
    i32 units[kMaxSplits];  // per request, for `pieces`
    i32 max_units;
    u32 fits;        // bit w: what warp w tries as limit does
    i32 best_limit;  // least of price * kScheduleWarps + the addition to the limit
    i32 partials[kWays];
    Cut ways[kWays][kMaxSplits + 1];
    i32 costs[kWays];
    u32 has_cuts;  // bit w: way w cuts a request
};

// ---- Arithmetic ------------------------------------------------------------------------------------------------
struct Units {
    i32 shift;  // a unit is 2^shift tiles

    template <class Batch>
    MLA_DEVICE explicit Units(const Batch& batch) : shift(0) {
        const i64 tiles = max(0ll, (batch.max_tokens + kTileTokens - 1) / kTileTokens);
        while (batch.b * ((tiles >> shift) + 1 + kItemCost) > kMaxTotal) ++shift;
    }
    template <class Batch>
    MLA_DEVICE i32 of(const Batch& batch, i32 request) const {
        if (request >= batch.b) return 0;
        const u32 tokens = batch.tokens(request);
        const i32 tiles = (i32)((tokens + kTileTokens - 1) / kTileTokens);
        return (tiles + (1 << shift) - 1) >> shift;
    }
};

// Places i * total / num_splits, rounded down, in 32 bits.
struct Places {
    i32 step, rest, num_splits;

    MLA_DEVICE Places(i32 total, i32 num_splits)
        : step(total / num_splits), rest(total % num_splits), num_splits(num_splits) {}
    MLA_DEVICE i32 at(i32 i) const { return i * step + i * rest / num_splits; }
    // The first i with at(i) >= place.
    MLA_DEVICE i32 first_from(i32 place) const {
        const float splits_per_unit = (float)num_splits / fmaxf(1.f, (float)step * num_splits + rest);
        i32 i = min(num_splits, (i32)(place * splits_per_unit));
        while (i < num_splits && at(i) < place) ++i;
        while (i > 0 && at(i - 1) >= place) --i;
        return i;
    }
};

template <class Combine>
MLA_DEVICE i32 warp_reduce(i32 value, Combine combine) {
#pragma unroll
    for (i32 step = kWarpThreads / 2; step > 0; step /= 2)
        value = combine(value, __shfl_xor_sync(kFullWarp, value, step));
    return value;
}

MLA_DEVICE i32 warp_max(i32 value) {
    return warp_reduce(value, [](i32 a, i32 b) { return max(a, b); });
}
MLA_DEVICE i32 warp_sum(i32 value) {
    return warp_reduce(value, [](i32 a, i32 b) { return a + b; });
}

// Returns the sum of `warp_value` over the warps before this one; `total` is the sum over all. All threads call it.
MLA_DEVICE i32 sum_of_warps_before(ScheduleStorage& s, i32 warp_value, i32& total) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    __syncthreads();
    if (lane == 0) s.warp_sums[warp] = warp_value;
    __syncthreads();
    const i32 mine = s.warp_sums[lane], through = warp_inclusive_sum(mine);
    total = __shfl_sync(kFullWarp, through, kScheduleWarps - 1);
    return __shfl_sync(kFullWarp, through - mine, warp);
}

// ---- Whole, loose, even ----------------------------------------------------------------------------------------
// Each warp sums a contiguous share of the requests, one per lane. Returns the sum of all units.
template <class Batch>
MLA_DEVICE i32 mark_places(const Batch& batch, ScheduleStorage& s, const Units& units, Places& places) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const i32 share = ceil_div(batch.b, kScheduleThreads) * kWarpThreads, first = warp * share;
    i32 mine = 0, longest = 0;
    for (i32 request = first + lane; request < min(first + share, batch.b); request += kWarpThreads) {
        const i32 n = units.of(batch, request);
        if (request < kMaxSplits) s.units[request] = n;
        mine += n;
        longest = max(longest, n);
    }
    longest = warp_max(longest);
    if (lane == 0) atomicMax(&s.max_units, longest);
    i32 total;
    i32 before = sum_of_warps_before(s, warp_sum(mine), total);
    places = Places(total + batch.b * kItemCost, batch.num_splits);
    for (i32 base = first; base < min(first + share, batch.b); base += kWarpThreads) {
        const i32 request = base + lane, n = units.of(batch, request), through = warp_inclusive_sum(n);
        const Request found{request, n, before + through - n};
        const i32 start = found.before + request * kItemCost;
        if (request < batch.b) {
            const i32 place = places.first_from(start);
            if (place < batch.num_splits && places.at(place) < start + n + kItemCost) s.cuts.mark(place, found);
        }
        before += __shfl_sync(kFullWarp, through, kWarpThreads - 1);
    }
    return total;
}

// Cut `split` where its place is, or at a request boundary at most `reach` units away.
MLA_DEVICE Cut snapped_cut(const ScheduleStorage& s, const Places& places, i32 split, i32 reach) {
    const Request& r = s.cuts.marked[s.cuts.last_mark(split)];
    // A request's item cost comes before its first unit.
    const i32 unit = max(0, places.at(split) - (r.before + r.index * kItemCost) - kItemCost), left = r.units - unit;
    if (min(unit, left) > reach) return Cut{r.index, unit, r.before + unit};
    return unit <= left ? Cut{r.index, 0, r.before} : Cut{r.index + 1, 0, r.before + r.units};
}

// ---- Pieces ----------------------------------------------------------------------------------------------------
// The smallest limit for which all requests together have at most num_splits pieces of at most `limit` units each. Each
// warp tries one of 32 limits at a time.
template <class Batch>
MLA_DEVICE i32 min_limit(const Batch& batch, ScheduleStorage& s, i32 total) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    i32 low = max(1, ceil_div(total, batch.num_splits)), high = max(low, s.max_units);
    if (batch.num_splits > batch.b) high = min(high, max(low, ceil_div(total, batch.num_splits - batch.b)));
    while (low < high) {
        const i32 range = high - low;
        const i32 limit = low + range / kScheduleWarps * warp + range % kScheduleWarps * warp / kScheduleWarps;
        i32 pieces = 0;
        for (i32 request = lane; request < batch.b; request += kWarpThreads)
            pieces += (i32)((u32)(s.units[request] + limit - 1) / (u32)limit);
        const bool fits = warp_sum(pieces) <= batch.num_splits;
        if (threadIdx.x == 0) s.fits = 0;
        __syncthreads();
        if (lane == 0 && fits) atomicOr(&s.fits, 1u << warp);
        __syncthreads();
        const i32 first = s.fits == 0 ? kScheduleWarps : __ffs(s.fits) - 1;
        if (first < kScheduleWarps)
            high = low + range / kScheduleWarps * first + range % kScheduleWarps * first / kScheduleWarps;
        if (first > 0)
            low =
                low + range / kScheduleWarps * (first - 1) + range % kScheduleWarps * (first - 1) / kScheduleWarps + 1;
        __syncthreads();  // s.fits is read
    }
    return high;
}

// Cost of a schedule without its partial results, in tiles / kPriceScale.
MLA_DEVICE i32 price_of_tiles(i32 tiles, i32 total) {
    return max(tiles * kPriceScale, total * kPriceScale / kServedBlocks);
}

// The cheapest limit from `least` on; among equals the shortest. Each warp tries one of them.
template <class Batch>
MLA_DEVICE i32 cheapest_limit(const Batch& batch, ScheduleStorage& s, i32 least, i32 total) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads, limit = least + warp;
    i32 partials = 0;
    for (i32 request = lane; request < batch.b; request += kWarpThreads) {
        const i32 pieces = (i32)((u32)(s.units[request] + limit - 1) / (u32)limit);
        partials += pieces > 1 ? pieces : 0;
    }
    const i32 price = price_of_tiles(limit, total) + batch.piece_cost * warp_sum(partials);
    if (lane == 0) atomicMin(&s.best_limit, price * kScheduleWarps + warp);
    __syncthreads();
    return least + s.best_limit % kScheduleWarps;
}

// Tiles by which the pieces of a lone request become longer, so that one round merges them; 0 where that does not pay.
template <class Batch>
MLA_DEVICE i32 tiles_for_one_round(const Batch& batch, i32 limit, i32 total) {
    const i32 most = 1 << (31 - __clz(batch.num_splits)), more = ceil_div(total, most) - limit;
    const bool pays = more <= kSecondRound && batch.merge_cost >= kMergeCostOf64Rows;
    return batch.b == 1 && ceil_div(total, limit) > most && pays ? more : 0;
}

// One thread per request: marks the split of its first piece.
template <class Batch>
MLA_DEVICE void mark_pieces(const Batch& batch, ScheduleStorage& s, i32 limit) {
    const i32 request = threadIdx.x;
    const i32 units = request < batch.b ? s.units[request] : 0, pieces = ceil_div(units, limit);
    i32 total;
    const i32 units_through = warp_inclusive_sum(units), pieces_through = warp_inclusive_sum(pieces);
    const i32 units_before = sum_of_warps_before(s, __shfl_sync(kFullWarp, units_through, kWarpThreads - 1), total);
    const i32 pieces_before = sum_of_warps_before(s, __shfl_sync(kFullWarp, pieces_through, kWarpThreads - 1), total);
    if (pieces > 0) {
        s.pieces.mark(pieces_before + pieces_through - pieces,
                      Request{request, units, units_before + units_through - units});
    }
}

template <class Batch>
MLA_DEVICE Cut piece_cut(const Batch& batch, const ScheduleStorage& s, i32 split, i32 limit, i32 total) {
    const i32 mark = s.pieces.last_mark(split);
    if (split == 0 || mark < 0) return split == 0 ? Cut{0, 0, 0} : Cut{batch.b, 0, total};
    const Request& r = s.pieces.marked[mark];
    const i32 pieces = ceil_div(r.units, limit), piece = split - mark;
    if (piece >= pieces) return Cut{batch.b, 0, total};  // more splits than pieces
    const i32 unit = piece * (r.units / pieces) + min(piece, r.units % pieces);
    return Cut{r.index, unit, r.before + unit};
}

// ---- The choice ------------------------------------------------------------------------------------------------
// One warp: the longest of its splits, whether they cut a request, and into how many partial results.
template <class Batch>
MLA_DEVICE void weigh_splits(const Batch& batch, ScheduleStorage& s, i32 way, i32 split) {
    i32 cost = 0;
    bool cuts = false, continues = false, continued = false;
    if (split < batch.num_splits) {
        const Cut begin = s.ways[way][split], end = s.ways[way][split + 1];
        cuts = end.unit > 0;
        cost = end.before - begin.before + kItemCost * (end.request - begin.request + cuts);
        continues = begin.unit > 0;
        continued = cuts && !(continues && begin.request == end.request);
    }
    cost = warp_max(cost);
    cuts = __any_sync(kFullWarp, cuts);
    const i32 partials = __popc(__ballot_sync(kFullWarp, continues)) + __popc(__ballot_sync(kFullWarp, continued));
    if (threadIdx.x % kWarpThreads != 0) return;
    if (batch.piece_cost > 0 && partials > 0) atomicAdd(&s.partials[way], partials);
    atomicMax(&s.costs[way], cost);
    if (cuts) atomicOr(&s.has_cuts, 1u << way);
}

// Writes the schedule of a batch, by all threads of a block. A batch has `b` requests and the number of tokens of each,
// at most `max_tokens`; `merge_cost` is in tiles, `piece_cost` in tiles / kPriceScale, 0 to ignore it.
template <class Batch>
MLA_DEVICE void write_schedule(const Batch& batch, ScheduleStorage& s) {
    const i32 thread = threadIdx.x, way = thread / kMaxSplits, split = thread % kMaxSplits;
    if (thread < kMaxSplits / kWarpThreads) s.cuts.bits[thread] = s.pieces.bits[thread] = 0;
    if (thread < kWays) s.costs[thread] = s.partials[thread] = 0;
    if (thread == 0) s.max_units = s.has_cuts = 0, s.best_limit = 0x7fffffff;
    __syncthreads();

    const Units units(batch);
    Places places(0, 1);
    const i32 total = mark_places(batch, s, units, places);
    __syncthreads();
    const bool in_pieces = 2 * batch.b <= batch.num_splits;
    i32 limit = 1;
    bool counted = false;  // partial results
    i32 second_round = 0;  // in tiles: of the merge, where a lone request is cut otherwise than into pieces
    if (in_pieces) {
        limit = min_limit(batch, s, total);
        const bool priced = batch.piece_cost > 0 && units.shift == 0;
        counted = priced && limit <= kShortSplit;
        if (counted) {
            limit = cheapest_limit(batch, s, limit, total);
        } else if (priced) {
            second_round = tiles_for_one_round(batch, limit, total);
            limit += second_round;
        }
        mark_pieces(batch, s, limit);
        __syncthreads();
    }
    if (split < batch.num_splits) {
        const i32 reach = way == kWhole ? kMaxTotal : way == kLoose ? places.step / 4 : kItemCost;
        s.ways[way][split] =
            way == kPieces ? piece_cut(batch, s, split, limit, total) : snapped_cut(s, places, split, reach);
    }
    if (split == 0) s.ways[way][batch.num_splits] = Cut{batch.b, 0, total};
    __syncthreads();
    weigh_splits(batch, s, way, split);
    __syncthreads();
    const i32 merge_units = batch.merge_cost >> units.shift;
    const auto makespan_of = [&](i32 way) {
        const i32 rounds = merge_units + (way == kPieces ? 0 : second_round);
        const i32 merge = s.has_cuts >> way & 1 ? rounds : 0, longest = s.costs[way];
        if (!counted) return longest + merge;
        return price_of_tiles(longest - kItemCost, total) + (kItemCost + merge) * kPriceScale +
               batch.piece_cost * s.partials[way];
    };
    i32 best = kWhole, makespan = makespan_of(kWhole);
    for (i32 other = kPieces; other < kWays; ++other) {
        // Places closer than a unit could make empty pieces.
        const bool possible = other == kPieces ? in_pieces : places.step > 0;
        const i32 found = makespan_of(other);
        if (!possible || found >= makespan) continue;
        best = other;
        makespan = found;
    }
    if (thread <= batch.num_splits) {
        const Cut& cut = s.ways[best][thread];
        batch.schedule[thread] = SchedulePoint{cut.request, cut.unit << units.shift};
    }
}
}  // namespace mla::attention
