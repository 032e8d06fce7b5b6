// Cuts the tiles of keys that all blocks of tokens need into equal shares, one per thread block of the logits kernel.
//
//   place i = i * total / num_splits;   cuts[i] = the block of tokens and the tile at that place
//
// Grid: one block. A thread sums a contiguous share of the blocks of tokens; the thread of a cut then looks for its
// place among these sums, and walks through one share.
//
//   all  | tiles of a share | prefix sums | one cut per thread
#include "common/facts.cuh"
#include "indexer/key_ranges.cuh"
#include "ptx/control.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::logits {
// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr i32 kTileKeys = MLA_TILE_KEYS;
using Cost = BlockCost<kTileKeys>;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 1024;
constexpr i32 kWarps = kThreads / kWarpThreads;
static_assert(kWarps == kWarpThreads, "one warp adds up the others' sums");

// ---- Params ----------------------------------------------------------------------------------------------------
// Strides are in elements.
struct LogitsScheduleParams {
    const i32* begins;
    const i32* ends;
    TileCut* cuts;  // (num_splits + 1,)
    i64 begins_stride_elems;
    i64 ends_stride_block_elems, ends_stride_token_elems;
    i32 num_tokens, num_blocks, block_tokens, num_keys, end_of_last;
    i32 num_splits;  // at most 1023
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(LogitsScheduleParams, begins_stride_elems),
              MLA_OFFSET(LogitsScheduleParams, num_tokens), (int)sizeof(LogitsScheduleParams));
MLA_FACT(threads, kThreads);
MLA_FACT(max_splits, kThreads - 1);
MLA_FACT(tile_keys, kTileKeys);

struct Storage {
    i32 through[kThreads];  // tiles of this thread's share and of all shares before it
    i32 warp_sums[kWarps];
};

// Called by all threads; returns the total.
MLA_DEVICE i32 sum_shares(Storage& s, i32 mine) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const i32 through = warp_inclusive_sum(mine);
    if (lane == kWarpThreads - 1) s.warp_sums[warp] = through;
    __syncthreads();
    const i32 warps = warp_inclusive_sum(s.warp_sums[lane]);
    const i32 before = __shfl_sync(kFullWarp, warps, max(0, warp - 1));
    s.through[threadIdx.x] = through + (warp == 0 ? 0 : before);
    __syncthreads();
    return __shfl_sync(kFullWarp, warps, kWarpThreads - 1);
}

// The first thread with a sum beyond the place.
MLA_DEVICE i32 share_of(const Storage& s, i32 place) {
    i32 low = 0, high = kThreads - 1;
    while (low < high) {
        const i32 middle = (low + high) / 2;
        if (s.through[middle] > place) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

MLA_DEVICE TileCut cut_at(const KeyRanges& ranges, const Storage& s, i32 place, i32 share_blocks) {
    const i32 share = share_of(s, place);
    i32 block = share * share_blocks, left = place - (share == 0 ? 0 : s.through[share - 1]);
    TileRange tiles = block_tiles<kTileKeys>(ranges, block);
    while (left >= Cost::of(tiles) && block + 1 < ranges.num_blocks) {
        left -= Cost::of(tiles);
        tiles = block_tiles<kTileKeys>(ranges, ++block);
    }
    return TileCut{block, Cost::tile_at(tiles, left)};
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_logits_schedule(const __grid_constant__ LogitsScheduleParams p) {
    __shared__ Storage s;
    griddepcontrol_wait();
    const KeyRanges ranges{p.begins,
                           p.ends,
                           p.begins_stride_elems,
                           p.ends_stride_block_elems,
                           p.ends_stride_token_elems,
                           p.num_tokens,
                           p.num_blocks,
                           p.block_tokens,
                           p.num_keys,
                           p.end_of_last};
    const i32 blocks = ranges.num_blocks, share_blocks = ceil_div(blocks, kThreads);
    const i32 first = min(blocks, (i32)threadIdx.x * share_blocks), last = min(blocks, first + share_blocks);
    i32 mine = 0;
    for (i32 block = first; block < last; ++block) mine += Cost::of(block_tiles<kTileKeys>(ranges, block));
    const i32 total = sum_shares(s, mine);

    const i32 split = threadIdx.x, place = share_begin(split, p.num_splits, total);
    if (split <= p.num_splits) {
        p.cuts[split] = place < total ? cut_at(ranges, s, place, share_blocks) : TileCut{blocks, 0};
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::logits
