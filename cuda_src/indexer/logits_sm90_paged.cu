// Indexer logits on Hopper for the next tokens of sequences, whose keys lie in pages of 64.
//
//   logits[n, i, s] = scale[s] * sum_h weights[n, i, h] * max(q[n, i, h] . key[s], 0)   for s < length(n, i)
//
// Bound by the cache for few tokens. The keys are the A operand, a page one m64 tile, and N = 32 or 64 heads of one
// token the columns, so that no row is wasted on tokens that are not there:
//
//   for each token, for each block of heads:   D = K Q^T  (64 x heads),   sum[row] += weight * max(D[row, head], 0)
//
// A thread has heads 8j + 2c and 8j + 2c + 1 of every eight, and the four threads of a row add up theirs: the order of
// additions is that of logits_sm90.cu, and a logit's bits are the same.
//
// Grid: one block per SM. The pages of all sequences lie in one line, which logits_schedule.cu has cut into equal
// shares. Math warpgroups take the pages of a share in turn, also across sequences:
//
//   math 0  | page 0: for each token products, sums, stores | page 4 ...
//   math 1  |     page 1                                      | page 5 ...
//   math 2  |         page 2                                      | page 6 ...
//   math 3  |             page 3                                      | page 7 ...
//   load    | Q, pages ...                 | Q of the next sequence, pages ...
//   fill    | -inf behind each sequence
//
// Source: the operation is DeepGEMM's fp8_paged_mqa_logits (2025). What differs: the schedule is even to one page, any
// number of heads fits, lengths may be those of the last tokens, and pages that are not there are no error.
#include "indexer/sm90_logits.cuh"
#include "ptx/wgmma_fp8.cuh"
#include "tile/warp.cuh"

namespace mla::indexer {
using namespace sm90;

// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = float8_e4m3fn;
constexpr i32 kBlockHeads = MLA_BLOCK_HEADS;  // columns of a product
constexpr i32 kRoomTiles = MLA_QUERY_TILES;   // of queries, in shared memory: see below

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kMathWarpgroups = 4;
constexpr i32 kThreads = Roles<kMathWarpgroups>::kThreads, kLoadWarp = Roles<kMathWarpgroups>::kLoadWarp;
constexpr i32 kMathWarps = Roles<kMathWarpgroups>::kMathWarps;

constexpr i32 kHeadDim = kSw128RowBytes;
constexpr i32 kPageKeys = kSw128Rows;
constexpr u32 kCodeBytes = kSw128Bytes;  // of a page
constexpr u32 kScaleBytes = kPageKeys * sizeof(float);
constexpr i32 kScaleRow = kCodeBytes / kScaleBytes;  // a page as rows of so many bytes: its last one
constexpr i32 kMmaBytes = 32;                        // of a row, for one wgmma
constexpr i32 kMmaSteps = kHeadDim / kMmaBytes;

constexpr u32 kQueryTileBytes = kBlockHeads * kSw128RowBytes;  // a block of heads of one token
// Room for the queries of two sequences of one block of heads, or of one of two; or for few queries and more pages.
constexpr i32 kMaxQueryStages = 2;
constexpr i32 kStageTiles = kRoomTiles / kMaxQueryStages;
constexpr i32 kStages = kRoomTiles * kQueryTileBytes <= (64 << 10) ? 12 : 8;
static_assert(kStages % kMathWarpgroups == 0, "a stage is always the same warpgroup's");

constexpr i32 kProducts = kBlockHeads / 2;  // of a thread

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier       arrives (count)   carries                     waits   first phase
// q_full[s]     load (1 + 32)     queries, weights            math    blocked
// q_empty[s]    math warps (16)   -                           load    free
// k_full[s]     load (1)          kCodeBytes + kScaleBytes    math    blocked
// k_empty[s]    math warps (4)    -                           load    free
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
MLA_FACT(max_short_line, kMaxShortLine);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(page_keys, kPageKeys);

MLA_DEVICE void init_storage(Storage& s) {
    for (i32 stage = 0; stage < kMaxQueryStages; ++stage) {
        mbarrier_init(s.q_full[stage], 1 + kWarpThreads);
        mbarrier_init(s.q_empty[stage], kMathWarps);
    }
    for (i32 stage = 0; stage < kStages; ++stage) {
        mbarrier_init(s.k_full[stage], 1);
        mbarrier_init(s.k_empty[stage], kWarpgroupWarps);
    }
    fence_mbarrier_init();
}

// The queries of a sequence: [token][block of heads]. Where all fit twice, sequences take turns in two stages.
struct QueryStages {
    i32 head_blocks, count;

    MLA_DEVICE explicit QueryStages(const LogitsParams& p)
        : head_blocks(ceil_div(p.heads, kBlockHeads)),
          count(p.block_tokens * head_blocks <= kStageTiles ? kMaxQueryStages : 1) {}
    MLA_DEVICE i32 first_tile(i32 stage) const { return stage * kStageTiles; }
};

// ---- Load role -------------------------------------------------------------------------------------------------
MLA_DEVICE void load_queries(Storage& s, const TensorMap& q_map, const QueryStages& stages, i32 stage) {
    const BlockInfo& info = s.info[stage];
    MBarrier& full = s.q_full[stage];
    mbarrier_arrive_expect_tx(full, info.tokens * stages.head_blocks * kQueryTileBytes);
    i32 tile = stages.first_tile(stage);
    for (i32 token = 0; token < info.tokens; ++token) {
        for (i32 head_block = 0; head_block < stages.head_blocks; ++head_block, ++tile) {
            cp_async_bulk_tensor_4d(smem_addr(s.q[tile]), q_map, full, 0, head_block * kBlockHeads, token, info.block,
                                    kEvictFirst);
        }
    }
}

// Heads that are not there weigh nothing.
MLA_DEVICE void copy_weights(const LogitsParams& p, Storage& s, const QueryStages& stages, i32 stage, i32 lane) {
    const BlockInfo& info = s.info[stage];
    const float* row = p.weights + info.block * p.weights_stride_block_elems;
    float* to = s.weights[stages.first_tile(stage)];
    const i32 heads = stages.head_blocks * kBlockHeads;
    for (i32 token = 0; token < info.tokens; ++token, row += p.weights_stride_token_elems, to += heads) {
        for (i32 head = lane; head < heads; head += kWarpThreads) {
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

// Where the pages of a sequence lie, one after the other. Lanes look up 32 at a time, the next ones while these are
// fetched.
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
    MLA_DEVICE i32 look_up(i32 first) const { return first + lane < end ? table[(first + lane) * stride_elems] : -1; }
    MLA_DEVICE i32 take() {
        const i32 place = (tile - begin) % kWarpThreads;
        if (place == 0) {
            pages = next;
            next = look_up(tile + kWarpThreads);
        }
        ++tile;
        const i32 page = __shfl_sync(kFullWarp, pages, place);
        return (u32)page < (u32)num_pages ? page : -1;
    }
};

struct Maps {
    const TensorMap &q, &codes, &scales;
};

// One warp asks for everything. The queries and weights of a sequence are asked for in front of all of its pages, and
// where they have two stages, in front of the last pages of the sequence before: what is small and comes late would
// wait behind all pages that are under way.
struct Loader {
    const LogitsParams& p;
    Storage& s;
    const Maps& maps;
    QueryStages stages;
    StageWalk<kMaxQueryStages> query;
    StageWalk<kStages> key;
    BlockWalk<kPageKeys> walk;

    MLA_DEVICE Loader(const LogitsParams& p, Storage& s, const Maps& maps, const KeyRanges& ranges, i32 lane)
        : p(p), s(s), maps(maps), stages(p), query(0), key(0), walk(p, ranges, lane) {}

    // Its pages; none if there is no sequence left.
    MLA_DEVICE PageNumbers next_sequence() {
        const bool found = walk.next();
        const PageNumbers numbers(p, walk.block, found ? walk.tiles : TileRange{0, 0}, walk.lane);
        mbarrier_wait(s.q_empty[query.stage], query.parity() ^ 1);
        write_info(s.info[query.stage], walk, found);
        if (found) {
            if (walk.lane == 0) load_queries(s, maps.q, stages, query.stage);
            copy_weights(p, s, stages, query.stage, walk.lane);
        } else {
            if (walk.lane == 0) mbarrier_arrive(s.q_full[query.stage]);
            cp_async_mbarrier_arrive_noinc(s.q_full[query.stage]);
        }
        query.advance(stages.count);
        return numbers;
    }

    MLA_DEVICE void load_pages(PageNumbers& numbers, i32 end) {
        for (; numbers.tile < end; key.advance()) {
            const i32 page = numbers.take();
            mbarrier_wait(s.k_empty[key.stage], key.parity() ^ 1);
            if (walk.lane == 0) load_page(s, maps.codes, maps.scales, key.stage, page);
        }
    }

    MLA_DEVICE void run() {
        PageNumbers numbers = next_sequence();
        while (numbers.tile < numbers.end) {
            // Once so many pages have a stage, the sequence before, in whose stage the next queries come, is nearly
            // done.
            const i32 ahead = stages.count == kMaxQueryStages ? numbers.tile + kStages : numbers.end;
            load_pages(numbers, min(ahead, numbers.end));
            const PageNumbers following = next_sequence();
            load_pages(numbers, numbers.end);
            numbers = following;
        }
    }
};

// ---- Math role -------------------------------------------------------------------------------------------------
MLA_DEVICE void multiply_step(float (&d)[16], SmemDesc a, SmemDesc b, bool accumulate) {
    wgmma_m64n32k32(Element{}, d, a, b, accumulate);
}
MLA_DEVICE void multiply_step(float (&d)[32], SmemDesc a, SmemDesc b, bool accumulate) {
    wgmma_m64n64k32(Element{}, d, a, b, accumulate);
}

// Over the four threads of a row: (0 + 1) + (2 + 3).
MLA_DEVICE float add_threads(float x) {
    x += __shfl_xor_sync(kFullWarp, x, 1);
    return x + __shfl_xor_sync(kFullWarp, x, 2);
}

// What a thread of a math warpgroup knows of a sequence: found out once, not for each of its pages.
struct Sequence {
    i32 tokens, head_blocks, q_tile;  // `q_tile`: its first one
    SmemDesc q;
    const KeyRange* ranges;
    LogitsRow row;  // of its first token
    i64 row_bytes;  // from one token's to the next's

    MLA_DEVICE Sequence(const LogitsParams& p, Storage& s, const QueryStages& stages, i32 stage)
        : tokens(s.info[stage].tokens),
          head_blocks(stages.head_blocks),
          q_tile(stages.first_tile(stage)),
          q(uniform(k_major_desc(smem_addr(s.q[q_tile])))),
          ranges(s.info[stage].ranges),
          row(p, s.info[stage].block, 0),
          row_bytes(p.logits_stride_token_elems * (p.bf16_out ? 2 : 4)) {
        u64 offset = static_cast<u8*>(row.row) - static_cast<u8*>(p.logits);
        opaque(offset);  // kept, not found again for each page
        row.row = static_cast<u8*>(p.logits) + offset;
    }
};

// A page, block of heads by block of heads of token by token: a unit each.
struct PageMath {
    Storage& s;
    const Sequence& sequence;
    SmemDesc k, q;
    MBarrier& k_empty;
    i32 thread, c, key;  // `key`: whose logit this thread stores, if c < 2
    float scale;
    // Of the next unit to be added:
    i32 token = 0, head_block = 0, left;
    const float2* weights;
    LogitsRow row;
    float sums[2] = {0.f, 0.f};

    // The first of a row's four threads stores it, the second stores the row eight further on.
    MLA_DEVICE PageMath(Storage& s, const Sequence& sequence, SmemDesc k, i32 stage, i32 tile, i32 thread)
        : s(s),
          sequence(sequence),
          k(k),
          q(sequence.q),
          k_empty(s.k_empty[stage]),
          thread(thread),
          c(thread % 4),
          left(sequence.tokens * sequence.head_blocks),
          weights(reinterpret_cast<const float2*>(s.weights[sequence.q_tile]) + thread % 4),
          row(sequence.row) {
        const i32 own_row = thread / kWarpThreads * 16 + thread % kWarpThreads / 4 + 8 * (c & 1);
        scale = s.scales[stage][own_row];
        key = tile * kPageKeys + own_row;
    }

    MLA_DEVICE void multiply(float (&d)[kProducts]) {
        pin(d);
        wgmma_fence();
#pragma unroll
        for (i32 step = 0; step < kMmaSteps; ++step) {
            multiply_step(d, advance(k, step * kMmaBytes), advance(q, step * kMmaBytes), step > 0);
        }
        wgmma_commit_group();
        q = advance(q, kQueryTileBytes);
    }

    // Adds the weighted products to the sums of this thread's rows, g and g + 8.
    MLA_DEVICE void add(const float (&d)[kProducts], const float2 (&w)[kBlockHeads / 8], KeyRange range) {
#pragma unroll
        for (i32 j = 0; j < kBlockHeads / 8; ++j) {
#pragma unroll
            for (i32 i = 0; i < 2; ++i) {
                sums[i] = fmaf(fmaxf(d[4 * j + 2 * i], 0.f), w[j].x, sums[i]);
                sums[i] = fmaf(fmaxf(d[4 * j + 2 * i + 1], 0.f), w[j].y, sums[i]);
            }
        }
        if (++head_block == sequence.head_blocks) finish_token(range);
    }

    MLA_DEVICE void finish_token(KeyRange range) {
        const float low = add_threads(sums[0]), high = add_threads(sums[1]);
        if (c < 2) row.store(key, (c == 0 ? low : high) * scale, range);
        row.row = static_cast<u8*>(row.row) + sequence.row_bytes;
        sums[0] = sums[1] = 0.f;
        head_block = 0;
        ++token;
    }

    // So many units: the products of the later ones are computed while the earlier ones are added.
    template <i32 kUnits>
    MLA_DEVICE void run() {
        float d[kUnits][kProducts];
#pragma unroll
        for (i32 i = 0; i < kUnits; ++i) multiply(d[i]);
        left -= kUnits;
#pragma unroll
        for (i32 i = 0; i < kUnits; ++i) {
            float2 w[kBlockHeads / 8];
#pragma unroll
            for (i32 j = 0; j < kBlockHeads / 8; ++j) w[j] = weights[4 * j];
            weights += kBlockHeads / 2;
            const KeyRange range = sequence.ranges[token];
            if (i + 1 == kUnits) {
                wgmma_wait_group<0>();
                if (left == 0) release(k_empty, thread);
            } else {
                wgmma_wait_group<1>();
            }
            pin(d[i]);
            add(d[i], w, range);
        }
    }
};

MLA_DEVICE void run_math_role(const LogitsParams& p, Storage& s, i32 warpgroup, i32 thread) {
    const QueryStages stages(p);
    StageWalk<kMaxQueryStages> query(0);
    StageWalk<kStages, kMathWarpgroups> key(warpgroup);
    i32 ahead = warpgroup;  // pages of the others before this warpgroup's next one
    while (true) {
        mbarrier_wait(s.q_full[query.stage], query.parity());
        const TileRange tiles = s.info[query.stage].tiles;
        if (tiles.size() == 0) return;
        const Sequence sequence(p, s, stages, query.stage);
#pragma unroll 1
        for (; ahead < tiles.size(); ahead += kMathWarpgroups, key.advance()) {
            const SmemDesc k = uniform(k_major_desc(smem_addr(s.k[key.stage])));
            mbarrier_wait(s.k_full[key.stage], key.parity());
            PageMath page(s, sequence, k, key.stage, tiles.begin + ahead, thread);
            while (page.left > 1) page.run<2>();
            if (page.left > 0) page.run<1>();
        }
        ahead -= tiles.size();
        release(s.q_empty[query.stage], thread);
        query.advance(stages.count);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_logits_sm90_paged(const __grid_constant__ LogitsParams p, const __grid_constant__ TensorMap q_map,
                                  const __grid_constant__ TensorMap codes_map,
                                  const __grid_constant__ TensorMap scales_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *static_cast<Storage*>(held_shared(smem));
    if (threadIdx.x == 0) {
        init_storage(s);
        prefetch_tensormap(q_map);
        prefetch_tensormap(codes_map);
        prefetch_tensormap(scales_map);
    }
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp(), thread = threadIdx.x % kWarpgroupThreads;
    if (warp < kLoadWarp) {
        run_math_role(p, s, warp / kWarpgroupWarps, thread);
    } else if (warp == kLoadWarp) {
        const KeyRanges ranges = key_ranges(p);
        Loader(p, s, Maps{q_map, codes_map, scales_map}, ranges, thread % kWarpThreads).run();
    } else {
        run_fill_role<kPageKeys>(p, warp - kLoadWarp - 1, thread % kWarpThreads);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer
