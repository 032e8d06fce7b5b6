// Indexer logits on Blackwell: contiguous keys for many query tokens, or paged keys for the next tokens of sequences.
//
//   logits[t, s] = k_scale[s] * sum_h weights[t, h] * max(q[t, h] . k[s], 0)   for keys s in the token's range
//
// A tile of 128 keys is the A operand; the queries of a block of 1, 2, 4 or 8 tokens are B, with column
// tokens * head + token. A thread owns one key and adds up the heads of each token in registers, in order, so a logit's
// bits depend neither on the positions of its token and key nor on other logits of the call:
//
//   for each 128 columns:   D = K Q^T  (128 x 128) in tensor memory,   sum[token] += weight[column] * max(D[key,
//   column], 0)
//
// Grid: one block per SM. The tiles of all blocks of tokens lie in one line, which schedule.cu has cut into
// equal shares. Two math warpgroups take the tiles of a share in turn, also across blocks of tokens. Each warpgroup has
// a thread that issues its MMAs, and half of tensor memory, which holds the products of two times 128 columns:
//
//   issue 0 | tile 0: columns 0.., 128..,  256..      | tile 2 ...
//   math 0  |                 0..  added, 128.. added | stores, tile 2 ...
//   issue 1 | tile 1 ...
//   math 1  |    tile 1 ...
//   load    | Q, tiles ...          | Q of the next block, tiles ...
//   fill    | -inf before and after the tiles
//
// Source: the operation is DeepGEMM's fp8_mqa_logits and fp8_paged_mqa_logits (2025). Differences: two issuing
// threads, no exchange between threads, a schedule balanced to one tile, and any number of heads.
#include "common/limits.cuh"
#include "indexer/logits/sm90.cuh"
#include "tile/matrix_desc.cuh"
#include "tile/prologue.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::logits {
using namespace sm90;

// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = float8_e4m3fn;
constexpr i32 kHeadDim = MLA_HEAD_DIM;
constexpr i32 kBlockTokens = MLA_BLOCK_TOKENS;  // columns per head
constexpr bool kPaged = MLA_PAGED;
static_assert(kBlockTokens <= kMaxTokens && (kBlockTokens & (kBlockTokens - 1)) == 0, "tokens");

// ---- Budget ----------------------------------------------------------------------------------------------------
// role      warps   does
// math w    4w..    every other tile: adds up the heads, stores
// issue w   8 + w   one thread issues MMAs; the first warp owns tensor memory
// load      10      queries and weights of each block of tokens, tiles of keys
// fill      11      -inf where no tile is computed
constexpr i32 kMathWarpgroups = 2;
constexpr i32 kMathWarps = kMathWarpgroups * kWarpgroupWarps;
constexpr i32 kIssueWarp = kMathWarps, kLoadWarp = kIssueWarp + kMathWarpgroups, kFillWarp = kLoadWarp + 1;
constexpr i32 kThreads = (kFillWarp + 1) * kWarpThreads;

constexpr i32 kTileKeys = 128;
constexpr i32 kPageKeys = kSw128Rows;
constexpr u32 kKeyTileBytes = kTileKeys * kSw128RowBytes;  // TMA pads shorter rows; the padding is not multiplied
constexpr i32 kMmaSteps = kHeadDim / (i32)kKMajorStepBytes;

constexpr i32 kBoxHeads = 8;
constexpr i32 kBoxRows = kBoxHeads * kBlockTokens;
constexpr i32 kColumnStep = 16;  // granularity of N for an MMA with M = 128
constexpr i32 kStepHeads = kBoxRows < kColumnStep ? kBoxHeads * kColumnStep / kBoxRows : kBoxHeads;
constexpr i32 kMaxQueryStages = 2;
constexpr i32 kMaxColumns = 128 * kBlockTokens;  // in all query stages together
constexpr i32 kStageColumns = kMaxColumns / kMaxQueryStages;
constexpr i32 kStages = 5;

constexpr i32 kChunkColumns = 128, kScoreStages = 2;
constexpr u32 kTmemColumns = kMathWarpgroups * kScoreStages * kChunkColumns;
static_assert(kTmemColumns == 512, "all of tensor memory");

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier        arrives (count)              carries          waits    first phase
// q_full[s]      load (1)                     queries          all      blocked
// q_empty[s]     math warps (8), issue (2 + 2) -               load     free
// k_full[s]      load (1)                     kKeyTileBytes    issue    blocked; two, used in turn
// k_empty[s]     products (1 commit)          -                load     free
// s_full[w][s]   products (1 commit)          -                math w   blocked
// s_empty[w][s]  math warps (4)               -                issue w  free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kMaxColumns][kSw128RowBytes];
    u8 k[kStages][kKeyTileBytes];
    float weights[kMaxColumns];
    BlockInfo info[kMaxQueryStages];
    MBarrier q_full[kMaxQueryStages], q_empty[kMaxQueryStages];
    TileBarriers<kStages> k_full;
    MBarrier k_empty[kStages];
    MBarrier s_full[kMathWarpgroups][kScoreStages], s_empty[kMathWarpgroups][kScoreStages];
    TmemAddr tmem;
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

MLA_LOGITS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(max_short_line, kMaxShortLine);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(tmem_columns, kTmemColumns);
MLA_FACT(tile_keys, kTileKeys);

MLA_DEVICE void init_storage(Storage& s) {
    for (i32 stage = 0; stage < kMaxQueryStages; ++stage) {
        mbarrier_init(s.q_full[stage], 1);
        mbarrier_init(s.q_empty[stage], kMathWarps + 2 * kMathWarpgroups);
    }
    for (i32 stage = 0; stage < kStages; ++stage) {
        for (auto& turn : s.k_full.barrier) mbarrier_init(turn[stage], 1);
        mbarrier_init(s.k_empty[stage], 1);
    }
    for (i32 w = 0; w < kMathWarpgroups; ++w) init_ring(s.s_full[w], s.s_empty[w], 1, kWarpgroupWarps);
    fence_mbarrier_init();
}

// Queries of few heads use two stages in turn. Columns are rounded up to whole boxes and whole steps of N.
struct QueryStages {
    i32 boxes, columns, count;

    MLA_DEVICE explicit QueryStages(const LogitsParams& p)
        : boxes(ceil_div(p.heads, kStepHeads) * kStepHeads / kBoxHeads),
          columns(boxes * kBoxRows),
          count(columns <= kStageColumns ? kMaxQueryStages : 1) {}
};

// ---- Load role -------------------------------------------------------------------------------------------------
MLA_DEVICE void load_queries(Storage& s, const TensorMap& q_map, const QueryStages& stages, i32 stage) {
    MBarrier& full = s.q_full[stage];
    const i32 block = s.info[stage].block;
    mbarrier_arrive_expect_tx(full, stages.columns * kSw128RowBytes);
    for (i32 box = 0; box < stages.boxes; ++box) {
        cp_async_bulk_tensor_4d(smem_addr(s.q[stage * kStageColumns + box * kBoxRows]), q_map, full, 0,
                                kPaged ? 0 : block * kBlockTokens, box * kBoxHeads, kPaged ? block : 0, kEvictFirst);
    }
}

// Index of a page of a sequence; -1, which lies outside the tensor, if there is no such page.
MLA_DEVICE i32 page_at(const LogitsParams& p, i32 block, i32 place) {
    if (place * kPageKeys >= p.num_keys) return -1;
    const i32 page = p.block_table[block * p.table_stride_block_elems + place * p.table_stride_page_elems];
    return (u32)page < (u32)p.num_pages ? page : -1;
}

MLA_DEVICE void load_keys(const LogitsParams& p, Storage& s, const TensorMap& k_map, const StageWalk<kStages>& key,
                          i32 block, i32 tile) {
    MBarrier& full = s.k_full.of(key);
    const SmemAddr to = smem_addr(s.k[key.stage]);
    mbarrier_arrive_expect_tx(full, kKeyTileBytes);
    if constexpr (kPaged) {
#pragma unroll
        for (i32 i = 0; i < kTileKeys / kPageKeys; ++i) {
            const i32 page = page_at(p, block, tile * (kTileKeys / kPageKeys) + i);
            cp_async_bulk_tensor_3d(to + i * kSw128Bytes, k_map, full, 0, 0, page, kEvictFirst);
        }
    } else {
        cp_async_bulk_tensor_3d(to, k_map, full, 0, tile * kTileKeys, 0, kEvictLast);
    }
}

MLA_DEVICE void run_load_role(const LogitsParams& p, Storage& s, const TensorMap& q_map, const TensorMap& k_map,
                              i32 lane) {
    const KeyRanges ranges = key_ranges(p);
    const QueryStages stages(p);
    StageWalk<kMaxQueryStages> query(0);
    StageWalk<kStages> key(0);
    BlockWalk<kTileKeys> walk(ranges, find_share<kTileKeys>(p, ranges, lane), lane);
    for (bool found = true; found; query.advance(stages.count)) {
        found = walk.next();
        mbarrier_wait(s.q_empty[query.stage], query.parity() ^ 1);
        write_info(s.info[query.stage], walk, found);
        if (!found) {
            if (lane == 0) mbarrier_arrive(s.q_full[query.stage]);
            break;
        }
        float* weights = s.weights + query.stage * kStageColumns;
        load_weights(p, s.info[query.stage], stages.boxes * kBoxHeads, kBlockTokens, lane,
                     [&](i32 head, i32 token, float weight) { weights[head * kBlockTokens + token] = weight; });
        __syncwarp();
        if (lane == 0) load_queries(s, q_map, stages, query.stage);
        for (i32 tile = walk.tiles.begin; tile < walk.tiles.end; ++tile, key.advance()) {
            mbarrier_wait(s.k_empty[key.stage], key.parity() ^ 1);
            if (lane == 0) load_keys(p, s, k_map, key, walk.block, tile);
        }
    }
    // A commit may arrive after the logits are stored, but must not arrive at a block that has exited.
    if (stages.count > 1) {
        query.advance();
        mbarrier_wait(s.q_empty[query.stage], query.parity() ^ 1);
    }
    for (i32 stage = 0; stage < kStages; ++stage, key.advance()) mbarrier_wait(s.k_empty[key.stage], key.parity() ^ 1);
}

// ---- Issue role ------------------------------------------------------------------------------------------------
// Calls act(query stage, tile, stage of keys) for the tiles of a warpgroup, and leave(query stage) after each block.
template <class Act, class Leave>
MLA_DEVICE void walk_tiles(Storage& s, const QueryStages& stages, i32 warpgroup, Act act, Leave leave) {
    StageWalk<kMaxQueryStages> query(0);
    StageWalk<kStages, kMathWarpgroups> key(warpgroup);
    i32 ahead = warpgroup;  // tiles of the other warpgroup before the next one of this warpgroup
    while (true) {
        mbarrier_wait(s.q_full[query.stage], query.parity());
        const TileRange tiles = s.info[query.stage].tiles;
        if (tiles.size() == 0) return;
#pragma unroll 1
        for (; ahead < tiles.size(); ahead += kMathWarpgroups, key.advance()) {
            act(query.stage, tiles.begin + ahead, key);
        }
        ahead -= tiles.size();
        leave(query.stage);
        query.advance(stages.count);
    }
}

MLA_DEVICE TmemAddr scores_at(TmemAddr tmem, i32 warpgroup, i32 stage) {
    return tmem.column((warpgroup * kScoreStages + stage) * kChunkColumns);
}

MLA_DEVICE void run_issue_role(const LogitsParams& p, Storage& s, TmemAddr tmem, i32 warpgroup) {
    const QueryStages stages(p);
    RingCount<kScoreStages> scores;
    walk_tiles(
        s, stages, warpgroup,
        [&](i32 query_stage, i32, const StageWalk<kStages, kMathWarpgroups>& key) {
            s.k_full.wait(key);
            const MatrixDesc a = k_major_matrix(smem_addr(s.k[key.stage]));
            for (i32 column = 0; column < stages.columns; column += kChunkColumns, scores.advance()) {
                const MatrixDesc b = k_major_matrix(smem_addr(s.q[query_stage * kStageColumns + column]));
                const InstructionDesc shape =
                    make_e4m3_instruction_desc(kTileKeys, min(kChunkColumns, stages.columns - column));
                scores.wait_empty(s.s_empty[warpgroup]);
                tcgen05_fence_after_thread_sync();
#pragma unroll
                for (i32 step = 0; step < kMmaSteps; ++step) {
                    const u32 bytes = step * kKMajorStepBytes;
                    tcgen05_mma_f8f6f4(scores_at(tmem, warpgroup, scores.stage()), advance(a, bytes), advance(b, bytes),
                                       shape, step > 0);
                }
                tcgen05_commit(s.s_full[warpgroup][scores.stage()]);
            }
            tcgen05_commit(s.k_empty[key.stage]);
        },
        [&](i32 query_stage) {
            tcgen05_commit(s.q_empty[query_stage]);   // the MMAs have read Q,
            mbarrier_arrive(s.q_empty[query_stage]);  // and this thread has read the range of tiles
        });
}

// ---- Math role -------------------------------------------------------------------------------------------------
template <i32 kCount>
MLA_DEVICE void add_columns(float (&sums)[kBlockTokens], TmemAddr from, const float* weights) {
    float x[kCount];
    tcgen05_ld_32x32b(x, from);
    tcgen05_wait_ld();
    pin_loaded(x);
#pragma unroll
    for (i32 i = 0; i < kCount; i += 4) {
        const float4 weight = *reinterpret_cast<const float4*>(weights + i);
        const float of[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
        for (i32 j = 0; j < 4; ++j) {
            float& sum = sums[(i + j) % kBlockTokens];
            sum = __fmaf_rn(of[j], fmaxf(x[i + j], 0.f), sum);
        }
    }
}

// Scale of a key that some token of the block sees; any value for other keys.
MLA_DEVICE float key_scale(const LogitsParams& p, i32 block, i32 key) {
    if (key >= p.num_keys) return 0.f;
    if constexpr (kPaged) {
        const i32 page = page_at(p, block, key / kPageKeys);
        if (page < 0) return 0.f;
        const u8* scales = p.k + page * p.page_stride_bytes + kPageKeys * kHeadDim;
        return reinterpret_cast<const float*>(scales)[key % kPageKeys];
    } else {
        return p.k_scale != nullptr ? p.k_scale[key * p.k_scale_stride_elems] : 1.f;
    }
}

MLA_DEVICE void run_math_role(const LogitsParams& p, Storage& s, TmemAddr tmem, i32 warpgroup, i32 thread) {
    const QueryStages stages(p);
    RingCount<kScoreStages> scores;
    const TmemAddr own_lanes = tmem.lane(thread / kWarpThreads * kWarpThreads);
    walk_tiles(
        s, stages, warpgroup,
        [&](i32 query_stage, i32 tile, const StageWalk<kStages, kMathWarpgroups>&) {
            const BlockInfo& info = s.info[query_stage];
            const i32 key = tile * kTileKeys + thread;
            const float scale = key_scale(p, info.block, key);
            const float* weights = s.weights + query_stage * kStageColumns;
            float sums[kBlockTokens] = {};
            for (i32 column = 0; column < stages.columns; column += kChunkColumns, scores.advance()) {
                const i32 count = min(kChunkColumns, stages.columns - column);
                scores.wait_full(s.s_full[warpgroup]);
                tcgen05_fence_after_thread_sync();
                const TmemAddr from = scores_at(own_lanes, warpgroup, scores.stage());
                i32 done = 0;
#pragma unroll 1
                for (; done + 32 <= count; done += 32) {
                    add_columns<32>(sums, from.column(done), weights + column + done);
                }
                if (done < count) add_columns<16>(sums, from.column(done), weights + column + done);
                tcgen05_fence_before_thread_sync();
                release(s.s_empty[warpgroup][scores.stage()], thread);
            }
#pragma unroll
            for (i32 token = 0; token < kBlockTokens; ++token) {
                if (token >= info.tokens) break;
                LogitsRow(p, info.block, token).store(key, sums[token] * scale, info.ranges[token]);
            }
        },
        [&](i32 query_stage) { release(s.q_empty[query_stage], thread); });
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_logits_sm100(const __grid_constant__ LogitsParams p, const __grid_constant__ TensorMap q_map,
                             const __grid_constant__ TensorMap k_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    const i32 warp = uniform_warp(), lane = threadIdx.x % kWarpThreads;
    if (warp == kIssueWarp) {
        tcgen05_alloc<kTmemColumns>(s.tmem);
        tcgen05_relinquish_alloc_permit();
        tcgen05_fence_before_thread_sync();
    }
    start_block([&] { init_storage(s); }, q_map, k_map);
    tcgen05_fence_after_thread_sync();
    const TmemAddr tmem = s.tmem;

    if (warp < kMathWarps) {
        run_math_role(p, s, tmem, warp / kWarpgroupWarps, threadIdx.x % kWarpgroupThreads);
    } else if (warp < kLoadWarp) {
        if (elect_issuer()) run_issue_role(p, s, tmem, warp - kIssueWarp);
    } else if (warp == kLoadWarp) {
        run_load_role(p, s, q_map, k_map, lane);
    } else {
        run_fill_role<kTileKeys, 1>(p, 0, lane);
    }
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    if (warp == kIssueWarp) tcgen05_dealloc<kTmemColumns>(tmem);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::logits
