// Indexer logits on Hopper for the next tokens of sequences, whose keys lie in pages of 64.
//
//   logits[n, i, s] = scale[s] * sum_h weights[n, i, h] * max(q[n, i, h] . key[s], 0)   for s < length(n, i)
//
// Bound by the cache for few tokens. The keys are the A operand, a page one m64 tile, and the heads of one token or of
// two the columns, so that no row is wasted on tokens that are not there:
//
//   for each token, or two:   D = K Q^T  (64 x heads),   sum[row] += weight * max(D[row, head], 0)
//
// A thread has heads 8j + 2c and 8j + 2c + 1 of every eight, and the four threads of a row add up theirs: the order of
// additions is that of sm90.cu, and a logit's bits are the same.
//
// Grid: one block per SM. The pages of all sequences lie in one line, which each block cuts into equal shares, or, if
// there are very many sequences, schedule.cu for all. Math warpgroups take the pages of a share in turn, also
// across sequences:
//
//   math 0   | page 0: products, sums, stores | page 4 ...
//   math 1   |     page 1                         | page 5 ...
//   math 2   |         page 2                         | page 6 ...
//   math 3   |             page 3                         | page 7 ...
//   pages    | share, pages of the first sequence, of the next one, ...   (two warps in turn for few tokens)
//   queries  | share, Q of the first sequence, of the next one, ...
//   fill     | -inf behind each sequence
//
// Keys in e2m1 (indexer/e2m1_keys.cuh) are a build of their own, in which a math thread takes its codes from shared
// memory and turns them into fragments of e4m3, the A operand in registers, before it multiplies.
//
// Source: the operation is DeepGEMM's fp8_paged_mqa_logits (2025). What differs: the schedule is even to one page, any
// number of heads fits, lengths may be those of the last tokens, and pages that are not there are no error.
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
constexpr i32 kBlockHeads = MLA_BLOCK_HEADS;              // of a token, all of them: columns of its products
constexpr i32 kTokensAtOnce = kBlockHeads < 128 ? 2 : 1;  // multiplied, where there are so many
constexpr i32 kRoomTiles = MLA_QUERY_TILES;               // of queries, in shared memory: see below
constexpr i32 kMaxQueryStages = 2, kStageTiles = kRoomTiles / kMaxQueryStages;
constexpr bool kFewTokens = kStageTiles == kTokensAtOnce;  // in every sequence: all are multiplied at once

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kMathWarpgroups = kE2m1 ? 3 : 4;  // a fragment of keys takes registers
constexpr i32 kThreads = Roles<kMathWarpgroups>::kThreads, kLoadWarp = Roles<kMathWarpgroups>::kLoadWarp;
constexpr i32 kMathWarps = Roles<kMathWarpgroups>::kMathWarps;
constexpr i32 kPageWarps = kFewTokens ? 2 : 1;  // from kLoadWarp on
constexpr i32 kQueryWarp = kLoadWarp + kPageWarps, kFillWarp = kQueryWarp + 1;
constexpr i32 kFillWarps = kLoadWarp + kWarpgroupWarps - kFillWarp;
constexpr i32 kStartBarrier = 1;                            // of all warps but those that fill
constexpr i32 kMaxSequences = kWarpThreads * kWarpThreads;  // without a schedule: see PageLine

constexpr i32 kHeadDim = kSw128RowBytes;
constexpr i32 kPageKeys = kSw128Rows;
constexpr u32 kCodeBytes = kE2m1 ? kSw64Bytes : kSw128Bytes;  // of a page
constexpr u32 kScaleBytes = kPageKeys * sizeof(float);
constexpr i32 kScaleRow = kCodeBytes / kScaleBytes;  // a page as rows of so many bytes: its last one
constexpr i32 kMmaSteps = kHeadDim / kKMajorStepBytes;

constexpr u32 kQueryTileBytes = kBlockHeads * kSw128RowBytes;  // of one token
// There is room for the queries of two sequences, or of one of many heads and tokens.
constexpr i32 kStages = kE2m1 ? 18 : 8;  // more pages under way take longer
// Pages of a share that are brought into L2 before an earlier kernel is done, if it has so many: short ones lose by it.
constexpr i32 kPagesAhead = 8, kLongShare = 128;
static_assert(kStages % kMathWarpgroups == 0 && kStages % kPageWarps == 0, "a stage is always the same ones'");

constexpr i32 kProducts = kBlockHeads / 2;  // of a thread
constexpr i32 kHeldPairs = 8;               // of weights, in registers
// Which are few: the load roles leave some to the math role. The kernel starts with as many as fit its threads.
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

// By a warp, whose lanes have a stage each.
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

// The queries of a sequence are a tile for each token. Where all fit twice, sequences take turns in two stages.
MLA_DEVICE i32 query_stages(const LogitsParams& p) { return p.block_tokens <= kStageTiles ? kMaxQueryStages : 1; }

// ---- A block's share -------------------------------------------------------------------------------------------
MLA_DEVICE KeyRanges paged_ranges(const LogitsParams& p) {
    KeyRanges ranges = key_ranges(p);
    ranges.begins = nullptr;  // known to the compiler
    return ranges;
}

// Of this lane's number and those of all lanes before it.
MLA_DEVICE i32 sum_through(i32 x, i32 lane) {
#pragma unroll
    for (i32 step = 1; step < kWarpThreads; step *= 2) {
        const i32 left = __shfl_up_sync(kFullWarp, x, step);
        if (lane >= step) x += left;
    }
    return x;
}

// The line of the pages of up to 32 groups of 32 sequences, cut by a warp as schedule.cu would. Lane i knows how
// many pages group i has, and sequence i of one group.
struct PageLine {
    static constexpr i32 kGroupsAtOnce = 4;
    const KeyRanges& ranges;
    i32 lane;
    i32 group_pages, groups_through, total;  // of this lane's group; of it and those before it; of all
    i32 of_first[kGroupsAtOnce];             // of this lane's sequence of each of the first groups
    i32 group, pages, through;               // the one whose sequences are known: the same of this lane's sequence
    i32 owner_pages;                         // of the sequence that has been cut

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

    // The pages of this lane's sequence of each of some groups, whose lengths are asked for at once.
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

    // The pages of this lane's sequence of a group: to look at lengths once more takes as long as all else here.
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

// This thread block's.
struct PageShare : LineShare {
    i32 first_end;  // of the first sequence; 0: not known
    bool is_long;   // as all shares are, or none

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

// Heads that are not there weigh nothing.
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

// A page outside the pool lies outside the tensor for certain: its codes and scales become zeros.
MLA_DEVICE void load_page(Storage& s, const TensorMap& codes_map, const TensorMap& scales_map, i32 stage, i32 page) {
    MBarrier& full = s.k_full[stage];
    mbarrier_arrive_expect_tx(full, kCodeBytes + kScaleBytes);
    cp_async_bulk_tensor_3d(smem_addr(s.k[stage]), codes_map, full, 0, 0, page, kEvictFirst);
    cp_async_bulk_tensor_3d(smem_addr(s.scales[stage]), scales_map, full, 0, kScaleRow, page, kEvictFirst);
}

// Where every kPageWarps-th page of a sequence lies, one after the other. Lanes look up 32 at a time, the next ones
// while these are fetched.
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
    // As it stands in the table: a look at it would wait for it.
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

// The queries and weights of the sequences of a share.
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

// Their pages, by warps in turn. Where those of the first sequence lie is looked up while its lengths are read again.
MLA_DEVICE void run_page_role(const LogitsParams& p, Storage& s, const Maps& maps, BlockWalk<kPageKeys> walk,
                              i32 first_end, i32 warp) {
    i32 ahead = kPageWarps == 1 ? 0 : warp;  // pages of the others before this warp's next one
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

// Brings lengths and the block table into L2 before an earlier kernel is done, which may yet write them there: a line
// for each thread. Table rows of which there are more than that wait for memory.
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

// The same of a share's first pages and their queries, by a warp. An earlier kernel may yet make the share another, or
// its pages: then these were brought in vain.
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
// This thread's weights of one or two tokens: of two heads of every eight. The first of these pairs stay in registers.
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

// What a thread of a math warpgroup knows of a sequence: found out once, not for each of its pages.
struct Sequence {
    i32 tokens;
    SmemDesc q;
    const float2* weights;  // of its first token, this thread's first two heads
    const KeyRange* ranges;
    i32 end;        // all tokens see the keys before it
    LogitsRow row;  // of the first token, or of the second where this thread stores that; from its key of a page on
    u64 row_bytes;  // from one token's to the next's

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
        opaque(offset);  // kept, not found again for each page
        row.row = static_cast<u8*>(p.logits) + offset;
    }
    MLA_DEVICE Weights<0> weights_of(i32 token) const { return Weights<0>(weights + token * kBlockHeads / 2); }
};

// The keys of a page as the A operand: where they lie, ...
struct SharedKeys {
    SmemDesc a;

    MLA_DEVICE SharedKeys(const Storage& s, i32 stage) : a(uniform(k_major_desc(smem_addr(s.k[stage])))) {}
    MLA_DEVICE float arrived(Storage& s, const RowThread& own, i32 stage, i32) const {
        return s.scales[stage][own.row];
    }
};

// ... or, of codes in e2m1, as fragments, which leave the stage. A step of a product is the group of a scale.
struct ConvertedKeys {
    static_assert(kMmaSteps * kE2m1Group == kHeadDim, "a scale for each step");
    u32 a[kMmaSteps][4];

    MLA_DEVICE ConvertedKeys(const Storage&, i32) {}

    // Once the page is there; returns what the sums of this thread's key are to be multiplied by.
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

    // A thread has four neighbours of each half of a step, of two keys.
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

// A page, for one or two tokens at a time.
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

    // The logits of so many tokens, whose products are one. Heads are added a group at a time, whose weights are in
    // registers.
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

    // Over the four threads of a row: (0 + 1) + (2 + 3).
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

// This warpgroup's pages of a sequence that has kTokens tokens, which are multiplied at once, or, if 0, any number.
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
    i32 ahead = warpgroup;  // pages of the others before this warpgroup's next one
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
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written
    const KeyRanges ranges = paged_ranges(p);
    PageShare share;
    if (warp >= kLoadWarp && warp < kFillWarp) share.find(p, ranges, lane);
    // Not before: what has been asked for takes longer than the barriers.
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
