// Indexer logits on Hopper for the next tokens of sequences; keys lie in pages of 64.
//
//   logits[n, i, s] = scale[s] * sum_h weights[n, i, h] * max(q[n, i, h] . key[s], 0)   for s < length(n, i)
//
// Bound by reading the cache for few tokens. A page of keys is the A operand, one m64 tile, and the heads of one or two
// tokens are the columns, so no row is wasted on absent tokens:
//
//   for each token, or two:   D = K Q^T  (64 x heads),   sum[row] += weight * max(D[row, head], 0)
//
// A thread owns heads 8j + 2c and 8j + 2c + 1 of every eight, and the four threads of a row add up their sums. The
// order of additions equals the order in sm90.cu, so both kernels compute the same bits.
//
// Grid: one block per SM. The pages of all sequences lie in one line, which each block cuts into equal shares itself;
// for more than kMaxSequences sequences, schedule.cu cuts it. Math warpgroups take the pages of a share in turn, also
// across sequences:
//
//   math 0   | page 0: products, sums, stores | page 4 ...
//   math 1   |     page 1                         | page 5 ...
//   math 2   |         page 2                         | page 6 ...
//   math 3   |             page 3                         | page 7 ...
//   pages    | share, pages of the first sequence, of the next one, ...   (two warps in turn for few tokens)
//   queries  | share, Q of the first sequence, of the next one, ...
//   fill     | -inf after each sequence
//
// Keys in e2m1 (indexer/e2m1_keys.cuh) use a separate build: a math thread reads codes from shared memory and converts
// them into e4m3 fragments, the A operand in registers, before it multiplies.
//
// Source: the operation is DeepGEMM's fp8_paged_mqa_logits (2025). Differences: the schedule is balanced to one page,
// any number of heads fits, lengths may be given for the last tokens alone, and invalid pages are no error.
#include "common/limits.cuh"
#include "indexer/e2m1_near.cuh"
#include "indexer/logits/sm90.cuh"
#include "indexer/sm90_key_rows.cuh"
#include "ptx/load.cuh"
#include "tile/product.cuh"
#include "tile/sw64.cuh"
#include "tile/warp.cuh"

// Keys are in e4m3 unless a variant says otherwise.
#ifndef MLA_E2M1
#define MLA_E2M1 0
#endif

namespace mla::indexer::logits {
using namespace sm90;

// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = float8_e4m3fn;
constexpr bool kE2m1 = MLA_E2M1;
constexpr i32 kBlockHeads = MLA_BLOCK_HEADS;              // all heads of a token, the columns of its products
constexpr i32 kTokensAtOnce = kBlockHeads < 128 ? 2 : 1;  // most tokens in one product
constexpr i32 kRoomTiles = MLA_QUERY_TILES;               // query tiles in shared memory: see below
constexpr i32 kMaxQueryStages = 2, kStageTiles = kRoomTiles / kMaxQueryStages;
constexpr bool kFewTokens = kStageTiles == kTokensAtOnce;  // one product holds all tokens of a sequence

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kMathWarpgroups = kE2m1 ? 3 : 4;  // key fragments need registers
constexpr i32 kThreads = Roles<kMathWarpgroups>::kThreads, kLoadWarp = Roles<kMathWarpgroups>::kLoadWarp;
constexpr i32 kMathWarps = Roles<kMathWarpgroups>::kMathWarps;
constexpr i32 kPageWarps = kFewTokens ? 2 : 1;  // starting at kLoadWarp
constexpr i32 kQueryWarp = kLoadWarp + kPageWarps, kFillWarp = kQueryWarp + 1;
constexpr i32 kFillWarps = kLoadWarp + kWarpgroupWarps - kFillWarp;
constexpr i32 kStartBarrier = 1;                            // all warps but the fill warps
constexpr i32 kMaxSequences = kWarpThreads * kWarpThreads;  // limit without a schedule: see PageLine

constexpr i32 kHeadDim = kSw128RowBytes;
constexpr i32 kPageKeys = kSw128Rows;
constexpr u32 kCodeBytes = kE2m1 ? kSw64Bytes : kSw128Bytes;  // codes of a page
constexpr u32 kScaleBytes = kPageKeys * sizeof(float);
constexpr i32 kScaleRow = kCodeBytes / kScaleBytes;  // the last row of a page, in rows of kScaleBytes
constexpr i32 kMmaSteps = kHeadDim / kKMajorStepBytes;

constexpr u32 kQueryTileBytes = kBlockHeads * kSw128RowBytes;  // queries of one token
// Shared memory holds the queries of two sequences, or of one sequence with many heads and tokens.
constexpr i32 kStages = kE2m1 ? 18 : 8;  // more pages in flight are slower
// A share of at least kLongShare pages prefetches kPagesAhead of them into L2 before an earlier kernel is done; shorter
// shares get slower by it.
constexpr i32 kPagesAhead = 8, kLongShare = 128;
static_assert(kStages % kMathWarpgroups == 0 && kStages % kPageWarps == 0, "a stage always has the same warps");

constexpr i32 kProducts = kBlockHeads / 2;  // products of a thread per token
constexpr i32 kHeldPairs = 8;               // pairs of weights in registers
// Registers are scarce, so the load roles give some to the math role. The kernel starts with kStartRegisters per
// thread.
constexpr bool kMovesRegisters = !kE2m1 && kFewTokens && kBlockHeads >= 64;
constexpr i32 kMathRegisters = 104, kLoadRegisters = 64, kStartRegisters = 96;
static_assert(!kMovesRegisters ||
                  kMathWarpgroups * kMathRegisters + kLoadRegisters <= (kMathWarpgroups + 1) * kStartRegisters,
              "registers");

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier       arrives (count)   carries                     waits   first phase
// q_full[s]     queries (1 + 32)  queries, weights            math    blocked
// q_empty[s]    math warps (16)   -                           queries free
// k_full[s]     pages (1)         kCodeBytes + kScaleBytes    math    blocked
// k_empty[s]    math warps (4)    -                           pages   free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kRoomTiles][kQueryTileBytes];
    u8 k[kStages][kCodeBytes];
    float scales[kStages][kPageKeys];
    float weights[kRoomTiles][kBlockHeads];
    BlockInfo info[kMaxQueryStages];
    MBarrier q_full[kMaxQueryStages], q_empty[kMaxQueryStages], k_full[kStages], k_empty[kStages];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

MLA_LOGITS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(max_short_line, kMaxSequences);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(page_keys, kPageKeys);

// Called by a warp; each lane initialises one stage.
MLA_DEVICE void init_storage(Storage& s, i32 lane) {
    static_assert(kStages <= kWarpThreads && kMaxQueryStages <= kStages, "lanes");
    if (lane < kMaxQueryStages) {
        mbarrier_init(s.q_full[lane], 1 + kWarpThreads);
        mbarrier_init(s.q_empty[lane], kMathWarps);
    }
    if (lane < kStages) {
        mbarrier_init(s.k_full[lane], 1);
        mbarrier_init(s.k_empty[lane], kWarpgroupWarps);
    }
    fence_mbarrier_init();
}

// Each token of a sequence has a tile of queries. If the tiles of a sequence fit twice, sequences use two stages in
// turn.
MLA_DEVICE i32 query_stages(const LogitsParams& p) { return p.block_tokens <= kStageTiles ? kMaxQueryStages : 1; }

// ---- A block's share -------------------------------------------------------------------------------------------
MLA_DEVICE KeyRanges paged_ranges(const LogitsParams& p) {
    KeyRanges ranges = key_ranges(p);
    ranges.begins = nullptr;  // tells the compiler that there are none
    return ranges;
}

// Inclusive prefix sum over the lanes of a warp.
MLA_DEVICE i32 sum_through(i32 x, i32 lane) {
#pragma unroll
    for (i32 step = 1; step < kWarpThreads; step *= 2) {
        const i32 left = __shfl_up_sync(kFullWarp, x, step);
        if (lane >= step) x += left;
    }
    return x;
}

// The line of the pages of up to 32 groups of 32 sequences; a warp cuts it where schedule.cu would. Lane i holds the
// number of pages of group i, and of sequence i in the current group.
struct PageLine {
    static constexpr i32 kGroupsAtOnce = 4;
    const KeyRanges& ranges;
    i32 lane;
    i32 group_pages, groups_through,
        total;                    // pages of this lane's group, of it and all groups before it, of all groups
    i32 of_first[kGroupsAtOnce];  // pages of this lane's sequence in each of the first groups
    i32 group, pages, through;    // current group; pages of this lane's sequence, and of it and all before it
    i32 owner_pages;              // pages of the sequence with the last cut

    MLA_DEVICE PageLine(const KeyRanges& ranges, i32 lane)
        : ranges(ranges), lane(lane), group_pages(0), group(0), owner_pages(0) {
        const i32 groups = (u32)(ranges.num_blocks + kWarpThreads - 1) / kWarpThreads;
        for (i32 first = 0; first < groups; first += kGroupsAtOnce) {
            i32 of[kGroupsAtOnce];
            look_at(first, of);
#pragma unroll
            for (i32 i = 0; i < kGroupsAtOnce; ++i) {
                const i32 sum = __reduce_add_sync(kFullWarp, of[i]);
                if (lane == first + i) group_pages = sum;
            }
            if (first != 0) continue;
#pragma unroll
            for (i32 i = 0; i < kGroupsAtOnce; ++i) of_first[i] = of[i];
        }
        pages = of_first[0];
        groups_through = sum_through(group_pages, lane);
        total = __shfl_sync(kFullWarp, groups_through, kWarpThreads - 1);
        through = sum_through(pages, lane);
    }

    // Counts the pages of this lane's sequence in each of kGroups groups; their lengths are loaded together.
    template <i32 kGroups>
    MLA_DEVICE void look_at(i32 first, i32 (&of)[kGroups]) const {
        const i32 tokens = ranges.end_of_last ? 1 : ranges.block_tokens;
#pragma unroll
        for (i32 i = 0; i < kGroups; ++i) of[i] = 0;
        const i32 sequence = first * kWarpThreads + lane;
        const i32* length = ranges.ends + sequence * ranges.ends_stride_block_elems;
#pragma unroll 1
        for (i32 token = 0; token < tokens; ++token, length += ranges.ends_stride_token_elems) {
            i32 lengths[kGroups];
#pragma unroll
            for (i32 i = 0; i < kGroups; ++i) {
                const bool is_there = sequence + i * kWarpThreads < ranges.num_blocks;
                lengths[i] = ld_global_l2_4(length + i * kWarpThreads * ranges.ends_stride_block_elems, is_there);
            }
#pragma unroll
            for (i32 i = 0; i < kGroups; ++i) of[i] = max(of[i], lengths[i]);
        }
#pragma unroll
        for (i32 i = 0; i < kGroups; ++i) of[i] = (u32)(min(of[i], ranges.num_keys) + kPageKeys - 1) / kPageKeys;
    }

    // Pages of this lane's sequence in a group. The first groups are kept in registers, because a second look at the
    // lengths takes as long as the rest of the cut.
    MLA_DEVICE i32 pages_in(i32 of) const {
        if (of >= kGroupsAtOnce) {
            i32 looked_at[1];
            look_at(of, looked_at);
            return looked_at[0];
        }
        i32 found = of_first[0];
#pragma unroll
        for (i32 i = 1; i < kGroupsAtOnce; ++i) found = of == i ? of_first[i] : found;
        return found;
    }

    MLA_DEVICE TileCut cut(i32 place) {
        if (place >= total) return TileCut{ranges.num_blocks, 0};
        const i32 of = __ffs(__ballot_sync(kFullWarp, groups_through > place)) - 1;
        const i32 left = place - __shfl_sync(kFullWarp, groups_through - group_pages, of);
        if (of != group) {
            group = of;
            pages = pages_in(of);
            through = sum_through(pages, lane);
        }
        const i32 owner = __ffs(__ballot_sync(kFullWarp, through > left)) - 1;
        owner_pages = __shfl_sync(kFullWarp, pages, owner);
        return TileCut{group * kWarpThreads + owner, left - __shfl_sync(kFullWarp, through - pages, owner)};
    }
};

// This thread block's share of the pages.
struct PageShare : LineShare {
    i32 first_end;  // end of the first sequence in pages; 0: unknown
    bool is_long;   // the same for all shares

    MLA_DEVICE PageShare() : LineShare{}, first_end(0), is_long(false) {}
    MLA_DEVICE void find(const LogitsParams& p, const KeyRanges& ranges, i32 lane) {
        if (p.cuts != nullptr) {
            from = p.cuts[blockIdx.x];
            to = p.cuts[blockIdx.x + 1];
            return;
        }
        PageLine line(ranges, lane);
        is_long = (u32)line.total / gridDim.x >= kLongShare;
        from = line.cut(share_begin(blockIdx.x, gridDim.x, line.total));
        first_end = line.owner_pages;
        to = line.cut(share_begin(blockIdx.x + 1, gridDim.x, line.total));
    }
};

// ---- Load roles ------------------------------------------------------------------------------------------------
MLA_DEVICE void load_queries(const LogitsParams& p, Storage& s, const TensorMap& q_map, i32 sequence, i32 stage) {
    MBarrier& full = s.q_full[stage];
    mbarrier_arrive_expect_tx(full, p.block_tokens * kQueryTileBytes);
    for (i32 token = 0; token < p.block_tokens; ++token) {
        u8* to = s.q[stage * kStageTiles + token];
        cp_async_bulk_tensor_4d(smem_addr(to), q_map, full, 0, 0, token, sequence, kEvictFirst);
    }
}

// Absent heads have weight 0.
MLA_DEVICE void copy_weights(const LogitsParams& p, Storage& s, i32 sequence, i32 stage, i32 lane) {
    const float* row = p.weights + sequence * p.weights_stride_block_elems;
    float* to = s.weights[stage * kStageTiles];
    for (i32 token = 0; token < p.block_tokens; ++token, row += p.weights_stride_token_elems, to += kBlockHeads) {
#pragma unroll
        for (i32 head = lane; head < kBlockHeads; head += kWarpThreads) {
            const bool present = head < p.heads;
            cp_async<4>(smem_addr(to + head), present ? row + head * p.weights_stride_head_elems : row, present);
        }
    }
    cp_async_mbarrier_arrive_noinc(s.q_full[stage]);
}

// A page outside the pool lies outside the tensor, so TMA fills its codes and scales with zeros.
MLA_DEVICE void load_page(Storage& s, const TensorMap& codes_map, const TensorMap& scales_map, i32 stage, i32 page) {
    MBarrier& full = s.k_full[stage];
    mbarrier_arrive_expect_tx(full, kCodeBytes + kScaleBytes);
    cp_async_bulk_tensor_3d(smem_addr(s.k[stage]), codes_map, full, 0, 0, page, kEvictFirst);
    cp_async_bulk_tensor_3d(smem_addr(s.scales[stage]), scales_map, full, 0, kScaleRow, page, kEvictFirst);
}

// Yields the pool index of every kPageWarps-th page of a sequence in order. Lanes look up 32 pages at a time, and the
// next 32 while these are fetched.
struct PageNumbers {
    const i32* table;
    i64 stride_elems;
    i32 num_pages, lane;
    i32 begin, tile, end;
    i32 pages, next;

    MLA_DEVICE PageNumbers(const LogitsParams& p, i32 block, TileRange tiles, i32 lane)
        : table(p.block_table + block * p.table_stride_block_elems),
          stride_elems(p.table_stride_page_elems),
          num_pages(p.num_pages),
          lane(lane),
          begin(tiles.begin),
          tile(tiles.begin),
          end(tiles.end),
          pages(-1) {
        next = look_up(begin);
    }
    // Returns the entry unchecked: a check would wait for the load.
    MLA_DEVICE i32 look_up(i32 first) const {
        const i32 own = first + lane * kPageWarps;
        return own < end ? table[own * stride_elems] : -1;
    }
    MLA_DEVICE i32 take() {
        const i32 place = (tile - begin) / kPageWarps % kWarpThreads;
        if (place == 0) {
            pages = next;
            next = look_up(tile + kWarpThreads * kPageWarps);
        }
        tile += kPageWarps;
        const i32 page = __shfl_sync(kFullWarp, pages, place);
        return (u32)page < (u32)num_pages ? page : -1;
    }
};

struct Maps {
    const TensorMap &q, &codes, &scales;

    MLA_DEVICE void prefetch() const {
        if (!elect_one()) return;
        prefetch_tensormap(q);
        prefetch_tensormap(codes);
        prefetch_tensormap(scales);
    }
};

// Loads the queries and weights of the sequences of a share.
MLA_DEVICE void run_query_role(const LogitsParams& p, Storage& s, const Maps& maps, BlockWalk<kPageKeys> walk) {
    const i32 stages = query_stages(p);
    StageWalk<kMaxQueryStages> query(0);
    for (bool found = true; found; query.advance(stages)) {
        found = walk.next();
        mbarrier_wait(s.q_empty[query.stage], query.parity() ^ 1);
        write_info(s.info[query.stage], walk, found);
        if (found) {
            if (elect_one()) load_queries(p, s, maps.q, walk.block, query.stage);
            copy_weights(p, s, walk.block, query.stage, walk.lane);
        } else {
            if (walk.lane == 0) mbarrier_arrive(s.q_full[query.stage]);
            cp_async_mbarrier_arrive_noinc(s.q_full[query.stage]);
        }
    }
}

// Loads the pages of the sequences of a share; the page warps take turns. The page table of the first sequence is read
// while its lengths are read again.
MLA_DEVICE void run_page_role(const LogitsParams& p, Storage& s, const Maps& maps, BlockWalk<kPageKeys> walk,
                              i32 first_end, i32 warp) {
    i32 ahead = kPageWarps == 1 ? 0 : warp;  // pages of the other warp before the next one of this warp
    PageNumbers numbers(p, walk.from.block, TileRange{walk.from.tile + ahead, first_end}, walk.lane);
    StageWalk<kStages, kPageWarps> key(ahead);
    for (bool looked_up = first_end > 0; walk.next(); looked_up = false) {
        const i32 end = walk.tiles.end;
        if (!looked_up) numbers = PageNumbers(p, walk.block, TileRange{walk.tiles.begin + ahead, end}, walk.lane);
        for (numbers.end = end; numbers.tile < end; key.advance()) {
            const i32 page = numbers.take();
            mbarrier_wait(s.k_empty[key.stage], key.parity() ^ 1);
            if (elect_one()) load_page(s, maps.codes, maps.scales, key.stage, page);
        }
        if constexpr (kPageWarps > 1) ahead = numbers.tile - end;
    }
}

// Prefetches lengths and the block table into L2 before an earlier kernel is done; if that kernel writes them, L2 gets
// the new values. One line per thread; further rows of the table wait for memory.
MLA_DEVICE void prefetch_inputs(const LogitsParams& p, i32 warp, i32 lane) {
    constexpr u32 kLineElems = 128 / sizeof(i32);
    if (warp == 0 && lane * kLineElems < p.num_blocks) {
        prefetch_global_l2(p.ends + lane * kLineElems * p.ends_stride_block_elems);
    }
    const u32 row_lines = ceil_div((u32)p.num_keys / kPageKeys, kLineElems);
    const u32 line = (blockIdx.x * kFillWarps + warp) * kWarpThreads + lane, row = line / row_lines;
    if (p.table_stride_page_elems == 1 && row < p.num_blocks) {
        prefetch_global_l2(p.block_table + row * p.table_stride_block_elems + line % row_lines * kLineElems);
    }
}

// Prefetches the first pages of a share and their queries; called by a warp. If an earlier kernel still changes the
// lengths or the block table, the prefetch was useless but harmless.
MLA_DEVICE void prefetch_share(const LogitsParams& p, i32 lane) {
    const u64 most_pages = (u64)p.num_blocks * ((u32)p.num_keys / kPageKeys);
    if (p.cuts != nullptr || most_pages < (u64)kLongShare * gridDim.x) return;
    PageShare share;
    const KeyRanges ranges = paged_ranges(p);
    share.find(p, ranges, lane);
    if (!share.is_long) return;
    const i32 sequence = share.from.block, tile = share.from.tile + lane;
    const i32 end = sequence == share.to.block ? share.to.tile : share.first_end;
    if (lane < kPagesAhead && tile < end) {
        const i32* row = p.block_table + sequence * p.table_stride_block_elems;
        const u32 page = ld_global_l2_4(row + tile * p.table_stride_page_elems, true);
        if (page < (u32)p.num_pages) {
            cp_async_bulk_prefetch_l2(p.k + page * p.page_stride_bytes, kCodeBytes + kScaleBytes);
        }
    }
    if (p.q_stride_head_elems != kHeadDim) return;
    for (i32 token = 0; token < p.block_tokens; ++token) {
        const u8* heads = p.q + sequence * p.q_stride_block_elems + token * p.q_stride_token_elems;
        if (lane == 0) cp_async_bulk_prefetch_l2(heads, p.heads * kHeadDim);
    }
}

// ---- Math role -------------------------------------------------------------------------------------------------
// This thread's weights of one or two tokens: two heads of every eight. The first kHeld pairs stay in registers.
template <i32 kHeld>
struct Weights {
    const float2* from;
    float2 held[kHeld > 0 ? kHeld : 1];

    MLA_DEVICE explicit Weights(const float2* from) : from(from) {
#pragma unroll
        for (i32 i = 0; i < kHeld; ++i) held[i] = from[4 * i];
    }
    MLA_DEVICE float2 at(i32 i) const { return i < kHeld ? held[i] : from[4 * i]; }
};

// State of a math thread for one sequence, computed once instead of per page.
struct Sequence {
    i32 tokens;
    SmemDesc q;
    const float2* weights;  // weights of the first token for this thread's first two heads
    const KeyRange* ranges;
    i32 end;        // all tokens see the keys before `end`
    LogitsRow row;  // of the first token, or of the second if this thread stores it; starts at its key of a page
    u64 row_bytes;  // bytes between the rows of two tokens

    MLA_DEVICE Sequence(const LogitsParams& p, Storage& s, i32 stage, const RowThread& own)
        : tokens(p.block_tokens),
          q(uniform(k_major_desc(smem_addr(s.q[stage * kStageTiles])))),
          weights(reinterpret_cast<const float2*>(s.weights[stage * kStageTiles]) + own.c),
          ranges(s.info[stage].ranges),
          end(ranges[0].end),
          row(p, s.info[stage].block, own.c / 2),
          row_bytes(p.logits_stride_token_elems * (p.bf16_out ? 2 : 4)) {
        for (i32 token = 1; token < tokens; ++token) end = min(end, ranges[token].end);
        u64 offset = static_cast<u8*>(row.row) - static_cast<u8*>(p.logits) + own.row * (p.bf16_out ? 2 : 4);
        opaque(offset);  // keeps the compiler from computing it for each page
        row.row = static_cast<u8*>(p.logits) + offset;
    }
    MLA_DEVICE Weights<0> weights_of(i32 token) const { return Weights<0>(weights + token * kBlockHeads / 2); }
};

// The keys of a page as the A operand in shared memory.
struct SharedKeys {
    SmemDesc a;

    MLA_DEVICE SharedKeys(const Storage& s, i32 stage) : a(uniform(k_major_desc(smem_addr(s.k[stage])))) {}
    MLA_DEVICE float arrived(Storage& s, const RowThread& own, i32 stage, i32) const {
        return s.scales[stage][own.row];
    }
};

// Keys in e2m1 as the A operand in registers, so the stage can be refilled early. One step of a product covers the
// elements that share a scale.
struct ConvertedKeys {
    static_assert(kMmaSteps * kE2m1Group == kHeadDim, "a scale for each step");
    u32 a[kMmaSteps][4];

    MLA_DEVICE ConvertedKeys(const Storage&, i32) {}

    // Called once the page has arrived; returns the factor for the sums of this thread's key.
    MLA_DEVICE float arrived(Storage& s, const RowThread& own, i32 stage, i32 thread) {
        const i32 first = own.row & ~8;
        const E2m1Scales scales[2] = {E2m1Scales(__float_as_uint(s.scales[stage][first])),
                                      E2m1Scales(__float_as_uint(s.scales[stage][first + 8]))};
        if (__all_sync(kFullWarp, are_near(scales[0]) && are_near(scales[1]))) {
            convert<E2m1NearTables>(s, scales, first, own.c, stage);
        } else {
            convert<E2m1Tables>(s, scales, first, own.c, stage);
        }
        release(s.k_empty[stage], thread);
        return own.row == first ? scales[0].of_key() : scales[1].of_key();
    }

    // A thread converts four neighbours in each half of a step, for two keys.
    template <class Tables>
    MLA_DEVICE void convert(const Storage& s, const E2m1Scales (&scales)[2], i32 first, i32 c, i32 stage) {
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            const Tables tables(scales[i]);
#pragma unroll
            for (i32 step = 0; step < kMmaSteps; ++step) {
                const u8* const codes = s.k[stage] + sw64_offset(first + 8 * i, step) + 2 * c;
                const u32 low = *reinterpret_cast<const u16*>(codes), high = *reinterpret_cast<const u16*>(codes + 8);
                const uint2 keys = tables.of(step).to_e4m3(low | high << 16);
                a[step][i] = keys.x;
                a[step][i + 2] = keys.y;
            }
        }
    }
};

template <bool kConverted>
struct KeysOf {
    using Type = SharedKeys;
};
template <>
struct KeysOf<true> {
    using Type = ConvertedKeys;
};
using PageKeys = KeysOf<kE2m1>::Type;

// Computes the logits of a page for one or two tokens at a time.
struct PageMath {
    Storage& s;
    const Sequence& sequence;
    const RowThread& own;
    const PageKeys& keys;
    i32 stage, first_key, thread;
    float scale;

    MLA_DEVICE PageMath(Storage& s, const Sequence& sequence, const RowThread& own, const PageKeys& keys, float scale,
                        i32 stage, i32 tile, i32 thread)
        : s(s),
          sequence(sequence),
          own(own),
          keys(keys),
          stage(stage),
          first_key(tile * kPageKeys),
          thread(thread),
          scale(scale) {}

    template <i32 kColumns>
    MLA_DEVICE void multiply(float (&d)[kColumns], i32 token) {
        const SmemDesc q = advance(sequence.q, token * kQueryTileBytes);
        pin(d);
        wgmma_fence();
        if constexpr (kE2m1) {
            multiply_abt(Element{}, d, keys.a, q);
        } else {
            multiply_abt<kMmaSteps>(Element{}, d, keys.a, q);
        }
        wgmma_commit_group();
    }

    MLA_DEVICE void store(i32 token, float x) {
        LogitsRow row = sequence.row;
        row.row = static_cast<u8*>(row.row) + token * sequence.row_bytes;
        if (first_key + kPageKeys <= sequence.end) return row.store(first_key, x);
        const i32 key = first_key + own.row;
        if (sequence.ranges[token + own.c / 2].contains(key)) {
            row.store(first_key, x);
        } else if (row.clean && key < row.num_keys) {
            row.store(first_key, negative_infinity());
        }
    }

    // Computes the logits of kTokens tokens with one product. Heads are added a group at a time, with the weights of a
    // group in registers.
    template <i32 kTokens, i32 kHeld>
    MLA_DEVICE void run(i32 token, const Weights<kHeld>& of_tokens) {
        constexpr i32 kGroupHeads = kBlockHeads < 64 ? kBlockHeads : 64, kGroups = kBlockHeads / kGroupHeads;
        float d[kTokens * kProducts], sums[kTokens][2] = {};
        multiply(d, token);
#pragma unroll
        for (i32 group = 0; group < kTokens * kGroups; ++group) {
            float2 weights[kGroupHeads / 8];
#pragma unroll
            for (i32 j = 0; j < kGroupHeads / 8; ++j) weights[j] = of_tokens.at(group * kGroupHeads / 8 + j);
            if (group == 0) {
                wgmma_wait_group<0>();
                if (!kE2m1 && token + kTokens == sequence.tokens) release(s.k_empty[stage], thread);
                pin(d);
            }
#pragma unroll
            for (i32 j = 0; j < kGroupHeads / 8; ++j) {
#pragma unroll
                for (i32 i = 0; i < 2; ++i) {
                    const i32 at = group * kGroupHeads / 2 + 4 * j + 2 * i;
                    float& sum = sums[group / kGroups][i];
                    sum = fmaf(fmaxf(d[at], 0.f), weights[j].x, sum);
                    sum = fmaf(fmaxf(d[at + 1], 0.f), weights[j].y, sum);
                }
            }
        }
        finish(sums, token);
    }

    // Adds the sums of the four threads of a row: (0 + 1) + (2 + 3).
    MLA_DEVICE void finish(const float (&sums)[1][2], i32 token) {
        const float pair = add_in_pair(sums[0][0], sums[0][1], 1, own.c % 2);
        const float sum = add_in_pair(pair, pair, 2, false);
        if (own.c < 2) store(token, sum * scale);
    }
    MLA_DEVICE void finish(const float (&sums)[2][2], i32 token) {
        const float first = add_in_pair(sums[0][0], sums[0][1], 1, own.c % 2);
        const float second = add_in_pair(sums[1][0], sums[1][1], 1, own.c % 2);
        store(token, add_in_pair(first, second, 2, own.c / 2) * scale);
    }
};

// Computes this warpgroup's pages of a sequence with kTokens tokens in one product, or with any number if kTokens is 0.
template <i32 kTokens>
MLA_DEVICE void run_pages(Storage& s, const Sequence& sequence, const RowThread& own, TileRange tiles, i32& ahead,
                          StageWalk<kStages, kMathWarpgroups>& key, i32 thread) {
    constexpr i32 kPairs = kTokens * kBlockHeads / 8;
    const Weights<(kPairs < kHeldPairs ? kPairs : kHeldPairs)> weights(sequence.weights);
#pragma unroll 1
    for (; ahead < tiles.size(); ahead += kMathWarpgroups, key.advance()) {
        PageKeys keys(s, key.stage);
        mbarrier_wait(s.k_full[key.stage], key.parity());
        const float scale = keys.arrived(s, own, key.stage, thread);
        PageMath page(s, sequence, own, keys, scale, key.stage, tiles.begin + ahead, thread);
        if constexpr (kTokens > 0) {
            page.run<kTokens>(0, weights);
        } else {
            i32 token = 0;
            for (; token + kTokensAtOnce <= sequence.tokens; token += kTokensAtOnce) {
                page.run<kTokensAtOnce>(token, sequence.weights_of(token));
            }
            if (token < sequence.tokens) page.run<1>(token, sequence.weights_of(token));
        }
    }
}

MLA_DEVICE void run_math_role(const LogitsParams& p, Storage& s, i32 warpgroup, i32 thread) {
    const i32 stages = query_stages(p);
    const RowThread own(thread);
    StageWalk<kMaxQueryStages> query(0);
    StageWalk<kStages, kMathWarpgroups> key(warpgroup);
    i32 ahead = warpgroup;  // pages of the other warpgroups before the next one of this warpgroup
    while (true) {
        mbarrier_wait(s.q_full[query.stage], query.parity());
        const TileRange tiles = s.info[query.stage].tiles;
        if (tiles.size() == 0) return;
        const Sequence sequence(p, s, query.stage, own);
        if constexpr (!kFewTokens) {
            run_pages<0>(s, sequence, own, tiles, ahead, key, thread);
        } else if (sequence.tokens == 1) {
            run_pages<1>(s, sequence, own, tiles, ahead, key, thread);
        } else if constexpr (kTokensAtOnce > 1) {
            run_pages<kTokensAtOnce>(s, sequence, own, tiles, ahead, key, thread);
        }
        ahead -= tiles.size();
        release(s.q_empty[query.stage], thread);
        query.advance(stages);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_logits_sm90_paged(const __grid_constant__ LogitsParams p, const __grid_constant__ TensorMap q_map,
                                  const __grid_constant__ TensorMap codes_map,
                                  const __grid_constant__ TensorMap scales_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *static_cast<Storage*>(held_shared(smem));
    const Maps maps{q_map, codes_map, scales_map};
    const i32 warp = uniform_warp(), thread = threadIdx.x % kWarpgroupThreads, lane = thread % kWarpThreads;
    if (warp == 0) {
        init_storage(s, lane);
        maps.prefetch();
    } else if (warp >= kFillWarp) {
        prefetch_inputs(p, warp - kFillWarp, lane);
        if (warp == kFillWarp) prefetch_share(p, lane);
    }
    griddepcontrol_wait();  // before the first read of data that an earlier kernel may have written
    const KeyRanges ranges = paged_ranges(p);
    PageShare share;
    if (warp >= kLoadWarp && warp < kFillWarp) share.find(p, ranges, lane);
    // Waits for the barriers' initialisation only now, because the loads for the share take longer.
    if (warp < kFillWarp) bar_sync(kStartBarrier, kFillWarp * kWarpThreads);
    if (kMovesRegisters && warp >= kLoadWarp) setmaxnreg_dec<kLoadRegisters>();
    if (warp < kLoadWarp) {
        if constexpr (kMovesRegisters) setmaxnreg_inc<kMathRegisters>();
        run_math_role(p, s, warp / kWarpgroupWarps, thread);
    } else if (warp < kQueryWarp) {
        run_page_role(p, s, maps, BlockWalk<kPageKeys>(ranges, share, lane), share.first_end, warp - kLoadWarp);
    } else if (warp == kQueryWarp) {
        run_query_role(p, s, maps, BlockWalk<kPageKeys>(ranges, share, lane));
    } else {
        run_fill_role<kPageKeys, kFillWarps>(p, warp - kFillWarp, lane);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::logits
