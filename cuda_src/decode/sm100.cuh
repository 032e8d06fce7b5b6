// Dense decode on Blackwell: barriers, the order of products, softmax, results. See decode/sm100.cu.
#pragma once
#include "attention/prefetch_inputs.cuh"
#include "attention/sm90/swapped.cuh"
#include "common/limits.cuh"
#include "decode/sm100_codes.cuh"
#include "decode/sm90_load.cuh"
#include "decode/swapped_tile.cuh"
#include "ptx/control.cuh"
#include "tile/matrix_desc.cuh"
#include "tile/warp.cuh"

namespace mla::decode::sm100 {
// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps    does
// softmax  0..3     P, re-scaling of O, results
// load     4        KV tiles:   decode/sm90_load.cuh
// query    5..7     query rows: the same, or in e4m3 decode/sm100_codes.cuh
// scores   8        one thread issues S^T = K Q^T; the warp owns tensor memory
// values   9        one thread issues O^T += V^T P^T
constexpr i32 kLoadWarp = kWarpgroupWarps, kQueryWarp = kLoadWarp + 1, kScoresWarp = 8, kValuesWarp = 9;
constexpr i32 kThreads = 10 * kWarpThreads;
static_assert(kScoresWarp == kQueryWarp + kQueryThreads / kWarpThreads, "one warp after another");
static_assert(kTileTokens == kSw128Rows, "a tile is 64 tokens");

// ---- Variant ---------------------------------------------------------------------------------------------------
// A tile arrives in groups, each scored on arrival: the RoPE columns, if any, then 128 columns at a time. Each group of
// values is a separate product and is released after it.
constexpr i32 kTileDims = 128;  // of the values: the rows of a product
constexpr i32 kDimTiles = kHeadDimV / kTileDims;

// Constants that follow from the keys' tiles.
template <class Element_, i32 kBlockRows_, class Tile_, bool kTree_>
struct ConfigOf : Tile_ {
    using Element = Element_;  // of results
    using Work = ScheduledWork;
    using Tile = Tile_;
    static constexpr i32 kBlockRows = kBlockRows_;
    static constexpr bool kTree = kTree_;
    static constexpr i32 kStagesQ = kBlockRows <= 32 ? 2 : 1;  // two fit for few rows
    static constexpr u32 kQSwTileBytes = kHeadSwTileBytes<kBlockRows>;
    static constexpr i32 kSwTilesPerDimTile = kTileDims / Tile::kSwTileColumns;
    static constexpr i32 kRopeGroups = Tile::kSwTilesRope;
    static constexpr i32 kGroups = kRopeGroups + kDimTiles;
    static_assert(kBlockRows % 16 == 0 && kBlockRows <= 64, "N of a product with M = 128; shared memory");

    // The first SW128 tile of a group, in the order of arrival.
    MLA_DEVICE static constexpr i32 group_begin(i32 group) {
        return group < kRopeGroups ? group : kRopeGroups + (group - kRopeGroups) * kSwTilesPerDimTile;
    }
    MLA_DEVICE static constexpr u32 group_bytes(i32 group) {
        return (u32)(group_begin(group + 1) - group_begin(group)) * kSw128Bytes;
    }
    // Products along the columns of an SW128 tile: RoPE columns may be fewer than it has.
    MLA_DEVICE static constexpr i32 steps_of(i32 sw_tile) {
        return min(kSw128MmaSteps, (Tile::kHeadDimQk - sw_tile * Tile::kSwTileColumns) / Tile::kMmaColumns);
    }
};

// Keys in 16 bits: operands and P have the results' type.
template <i32 kHeadDimQk>
struct WideTile : KeyTile<kHeadDimQk> {
    static constexpr bool kCodes = false;
    static constexpr i32 kStages = kStagesKV, kSwTileColumns = kSw128Columns, kMmaColumns = kMmaK;
};

template <class Element, i32 kBlockRows, i32 kHeadDimQk, bool kTree>
struct Config : ConfigOf<Element, kBlockRows, WideTile<kHeadDimQk>, kTree> {};

// A role's position: S has two stages, keys may have more.
constexpr i32 kStagesS = 2;

template <class C>
struct TilePosition {
    RingPosition<C::kStages> keys;
    RingPosition<kStagesS> of_scores;  // where it is not the same

    MLA_DEVICE const RingPosition<kStagesS>& scores() const {
        if constexpr (C::kStages == kStagesS) {
            return keys;
        } else {
            return of_scores;
        }
    }
    MLA_DEVICE void advance() {
        keys.advance();
        if constexpr (C::kStages != kStagesS) of_scores.advance();
    }
};

// ---- Tensor memory ---------------------------------------------------------------------------------------------
// sum      product   lanes                           columns, of R = kBlockRows
// S^T      M = 64    0..15 of every 32 (stage 0)     0 .. R - 1
//                    16..31 (stage 1)                the same
// O^T[t]   M = 128   all                             R (1 + t) ..
constexpr u32 kUpperLanes = 16;

MLA_DEVICE constexpr u32 columns_allocated(u32 used) {
    u32 columns = 32;
    while (columns < used) columns *= 2;
    return columns;
}

template <class C>
struct TmemMap {
    static constexpr u32 kColumnScores = 0;
    static constexpr u32 kColumnOut = C::kBlockRows;
    static constexpr u32 kUsed = kColumnOut + kDimTiles * C::kBlockRows;
    static constexpr u32 kAllocated = columns_allocated(kUsed);

    MLA_DEVICE static TmemAddr scores(TmemAddr tmem, i32 stage) {
        return tmem.lane(stage * kUpperLanes).column(kColumnScores);
    }
    MLA_DEVICE static TmemAddr out(TmemAddr tmem, i32 t) { return tmem.column(kColumnOut + t * C::kBlockRows); }
};

struct Region {
    u32 halves;  // of every 32 lanes: 1 the lower 16, 2 the upper
    u32 begin, columns;
};
template <class C>
constexpr bool regions_are_disjoint() {
    using Map = TmemMap<C>;
    constexpr u32 kRows = C::kBlockRows;
    constexpr Region kRegions[] = {
        {1, Map::kColumnScores, kRows},
        {2, Map::kColumnScores, kRows},
        {3, Map::kColumnOut, kRows},
        {3, Map::kColumnOut + kRows, kRows},
        {3, Map::kColumnOut + 2 * kRows, kRows},
        {3, Map::kColumnOut + 3 * kRows, kRows},
    };
    for (const Region& a : kRegions) {
        if (a.begin + a.columns > Map::kAllocated) return false;
        for (const Region& b : kRegions) {
            const bool apart = a.begin + a.columns <= b.begin || b.begin + b.columns <= a.begin;
            if (&a != &b && (a.halves & b.halves) != 0 && !apart) return false;
        }
    }
    return true;
}

// 16 lanes x kRows columns; there are loads and stores of powers of two.
template <i32 kCount, class Move>
MLA_DEVICE void move_fragment(float (&x)[kCount], TmemAddr at, Move move) {
    if constexpr (kCount == 24) {
        move(reinterpret_cast<float (&)[16]>(x[0]), at);
        move(reinterpret_cast<float (&)[8]>(x[16]), at.column(32));
    } else {
        move(x, at);
    }
}
template <i32 kCount>
MLA_DEVICE void load_fragment(float (&x)[kCount], TmemAddr from) {
    move_fragment(x, from, [](auto& part, TmemAddr at) { tcgen05_ld_16x256b(part, at); });
}
template <i32 kCount>
MLA_DEVICE void store_fragment(TmemAddr to, float (&x)[kCount]) {
    move_fragment(x, to, [](auto& part, TmemAddr at) { tcgen05_st_16x256b(at, part); });
}

// ---- Storage ---------------------------------------------------------------------------------------------------
// Tile j, counted over all work items of the block, is phase j of a barrier, unless it says otherwise.
//
// barrier         arrives (count)        carries              waits             first phase
// kv_full[s][g]   load (1)               1 or 2 SW128 tiles   scores, softmax   blocked, a phase per C::kStages tiles
// kv_empty[s][g]  products (1)           -                    load              free
// q_full[s]       query threads (96)     -                    scores            blocked, a work item each
// q_empty[s]      products (1)           -                    query             free
// s_full[s]       products (1)           -                    softmax           blocked, a phase per kStagesS tiles
// s_empty[s]      softmax warps (4)      -                    scores            free
// p_full          softmax (128)          -                    values            blocked
// out_done        products (1)           -                    softmax           blocked
//
// "products" is a commit: it arrives when everything that its thread issued before is done. RoPE columns and Q are
// released by the scores, the other columns by the values. out_done of a tile also means that P may be overwritten, and
// O read or re-scaled: its next products wait for p_full. In e4m3 the softmax reads the factors of Q's rows: it waits
// for q_full, too, and its warps (4) arrive at q_empty.
template <class C>
struct Storage : CodeRows<C> {
    alignas(kSwizzleAtomBytes) u8 kv[C::kStages][C::kTileBytes];
    u8 q[C::kStagesQ][C::kSwTilesQk][C::kQSwTileBytes];
    u8 p[C::kQSwTileBytes];  // [row][token]
    union {
        SharedMaxima<C::kBlockRows> maxima;
        float sums[kWarpgroupWarps][C::kBlockRows];
    } warp_values[2];  // of each warp's tokens; tiles take turns
    HeadStats<C::kBlockRows> stats;
    u64 present[C::kStages];  // bit t: the page of token t of the tile is in the pool
    i32 nonfinite_request;    // the last request in which sanitize_rows found NaN or Inf
    TmemAddr tmem;
    MBarrier kv_full[C::kStages][C::kGroups], kv_empty[C::kStages][C::kGroups];
    MBarrier q_full[C::kStagesQ], q_empty[C::kStagesQ];
    MBarrier s_full[kStagesS], s_empty[kStagesS], p_full, out_done;
};

// Softmax: within the warpgroup.
enum NamedBarrier : i32 { Softmax = 1 };

// Called by one thread, before the block's first barrier.
template <class C>
MLA_DEVICE void init_storage(Storage<C>& s) {
    for (i32 stage = 0; stage < C::kStages; ++stage) {
        for (MBarrier& full : s.kv_full[stage]) mbarrier_init(full, kLoadArrivals);
        for (MBarrier& empty : s.kv_empty[stage]) mbarrier_init(empty, 1);
    }
    init_ring(s.q_full, s.q_empty, kQueryThreads, C::kCodes ? 1 + kWarpgroupWarps : 1);
    init_ring(s.s_full, s.s_empty, 1, kWarpgroupWarps);
    mbarrier_init(s.p_full, kWarpgroupThreads);
    mbarrier_init(s.out_done, 1);
    fence_mbarrier_init();
    s.nonfinite_request = -1;
}

// State shared by all roles.
template <class C>
struct Block : RowBlock<C::kBlockRows, typename MaskedWork<C::kTree, ScheduledWork>::Type> {
    using Rows = RowBlock<C::kBlockRows, typename MaskedWork<C::kTree, ScheduledWork>::Type>;
    using Config = C;
    Storage<C>& s;

    MLA_DEVICE Block(const DecodeParams& p, Storage<C>& s) : Rows(p), s(s) {}

    // Parameters of an FP8 kernel.
    MLA_DEVICE const DecodeFp8Params& params() const { return static_cast<const DecodeFp8Params&>(this->p); }
};

// A wait for something in tensor memory, or before a product.
MLA_DEVICE void tmem_wait(MBarrier& barrier, u32 parity) {
    mbarrier_wait(barrier, parity);
    tcgen05_fence_after_thread_sync();
}

// ---- Load role -------------------------------------------------------------------------------------------------
template <class C>
struct GroupLoader {
    const Block<C>& block;
    const TensorMap& kv_map;
    RingPosition<C::kStages> at;

    MLA_DEVICE void operator()(const TileBoxes& boxes, const WorkItem&, i32) {
        Storage<C>& s = block.s;
        const i32 stage = at.stage;
        const u64 present = boxes.present_tokens();
        for (i32 group = 0; group < C::kGroups; ++group) {
            MBarrier& full = s.kv_full[stage][group];
            mbarrier_wait(s.kv_empty[stage][group], at.ring.empty_parity(stage));
            if (boxes.lane == 0) {
                if (group == C::kRopeGroups) s.present[stage] = present;  // once the values of the last tile are done
                mbarrier_arrive_expect_tx(full, C::group_bytes(group));
            }
            __syncwarp();
            load_group(boxes, smem_addr(s.kv[stage]), full, group);
        }
        at.advance();
    }

    MLA_DEVICE void load_group(const TileBoxes& boxes, SmemAddr tile, MBarrier& full, i32 group) const {
        const i32 begin = C::group_begin(group), end = C::group_begin(group + 1);
        if constexpr (!C::kCodes) {
            boxes.load<C>(tile, kv_map, full, block.kv_head, begin, end);
        } else {
#pragma unroll
            for (i32 i = 0; i < 2; ++i) {
                const i32 box = boxes.box(i);
                if (!boxes.contains(box)) continue;
                for (i32 k = begin; k < end; ++k) {
                    const i32 sw_tile = C::sw_tile_in_order(k);
                    cp_async_bulk_tensor_4d(tile + (sw_tile * kSw128Bytes + box * boxes.rows * kSw128RowBytes), kv_map,
                                            full, sw_tile * C::kSwTileColumns, boxes.batch.offset[i], block.kv_head,
                                            boxes.batch.page[i], boxes.l2_policy);
                }
            }
        }
    }
};

// ---- Products --------------------------------------------------------------------------------------------------
// Calls `process(item, tile, first, last)` for every tile of the block.
template <class Block, class Process>
MLA_DEVICE void for_each_tile(const Block& block, Process process) {
    WorkItem item;
    for (auto walk = block.items(); walk.next(block.p, item);) {
        for (i32 tile = item.tile_begin; tile < item.tile_end; ++tile) {
            process(tile == item.tile_begin, tile + 1 == item.tile_end);
        }
    }
}

// One product: 32 bytes of elements along the sum.
template <class C>
MLA_DEVICE constexpr InstructionDesc product_shape(u32 m, Major a) {
    if constexpr (C::kCodes) {
        return make_e4m3_instruction_desc(m, C::kBlockRows, a, Major::K);
    } else {
        return make_instruction_desc<typename C::Element>(m, C::kBlockRows, a, Major::K);
    }
}
template <class C>
MLA_DEVICE void issue_product(TmemAddr d, MatrixDesc a, MatrixDesc b, InstructionDesc shape, bool accumulate) {
    if constexpr (C::kCodes) {
        tcgen05_mma_f8f6f4(d, a, b, shape, accumulate);
    } else {
        tcgen05_mma_f16(d, a, b, shape, accumulate);
    }
}

// S^T += K Q^T of an SW128 tile's columns.
template <class C>
MLA_DEVICE void issue_scores(TmemAddr d, const u8* keys, const u8* queries, i32 steps, bool accumulate) {
    constexpr InstructionDesc kShape = product_shape<C>(kTileTokens, Major::K);
    const MatrixDesc a = k_major_matrix(smem_addr(keys)), b = k_major_matrix(smem_addr(queries));
#pragma unroll
    for (i32 step = 0; step < kSw128MmaSteps; ++step) {
        const u32 bytes = step * kKMajorStepBytes;
        if (step < steps) issue_product<C>(d, advance(a, bytes), advance(b, bytes), kShape, accumulate || step > 0);
    }
}

// 128 dims of O^T += V^T P^T.
template <class C>
MLA_DEVICE void issue_values(TmemAddr d, const u8* values, const u8* p, bool accumulate) {
    constexpr InstructionDesc kShape = product_shape<C>(kTileDims, Major::MN);
    constexpr i32 kDepth = C::kMmaColumns;  // tokens of a product: rows of an SW128 tile
    const MatrixDesc a = mn_major_matrix(smem_addr(values), kSw128Bytes), b = k_major_matrix(smem_addr(p));
#pragma unroll
    for (i32 step = 0; step < kTileTokens / kDepth; ++step) {
        issue_product<C>(d, advance(a, step * kDepth * kSw128RowBytes), advance(b, step * kKMajorStepBytes), kShape,
                         accumulate || step > 0);
    }
}

// Two threads issue scores and values, so that neither waits for the other's operands: keys that have arrived are
// scored before P of the previous tile is ready, and are released without waiting for the next ones.
template <class C>
MLA_DEVICE void run_scores_role(const Block<C>& block, TmemAddr tmem) {
    if (!elect_issuer()) return;
    Storage<C>& s = block.s;
    TilePosition<C> at;
    RingPosition<C::kStagesQ> q_at;
    for_each_tile(block, [&](bool first, bool last) {
        const i32 stage = at.keys.stage, s_stage = at.scores().stage;
        if (first) q_at.wait_full(s.q_full);
        tmem_wait(s.s_empty[s_stage], at.scores().ring.empty_parity(s_stage));
#pragma unroll 1  // a group's products take longer than an iteration of the loop
        for (i32 group = 0; group < C::kGroups; ++group) {
            tmem_wait(s.kv_full[stage][group], at.keys.ring.full_parity(stage));
            for (i32 i = C::group_begin(group); i < C::group_begin(group + 1); ++i) {
                const i32 sw_tile = C::sw_tile_in_order(i);
                issue_scores<C>(TmemMap<C>::scores(tmem, s_stage), s.kv[stage] + sw_tile * kSw128Bytes,
                                s.q[q_at.stage][sw_tile], C::steps_of(sw_tile), i > 0);
            }
            if (group < C::kRopeGroups) tcgen05_commit(s.kv_empty[stage][group]);
        }
        if (last) {
            tcgen05_commit(s.q_empty[q_at.stage]);
            q_at.advance();
        }
        tcgen05_commit(s.s_full[s_stage]);
        at.advance();
    });
}

template <class C>
MLA_DEVICE void run_values_role(const Block<C>& block, TmemAddr tmem) {
    if (!elect_issuer()) return;
    Storage<C>& s = block.s;
    i32 stage = 0;
    u32 parity = 0;
    for_each_tile(block, [&](bool first, bool) {
        tmem_wait(s.p_full, parity);
#pragma unroll 1
        for (i32 t = 0; t < kDimTiles; ++t) {
            issue_values<C>(TmemMap<C>::out(tmem, t), s.kv[stage] + t * C::kSwTilesPerDimTile * kSw128Bytes, s.p,
                            !first);
            tcgen05_commit(s.kv_empty[stage][C::kRopeGroups + t]);
        }
        tcgen05_commit(s.out_done);
        stage = stage + 1 == C::kStages ? 0 : stage + 1;
        parity ^= 1;
    });
}

// ---- Softmax role ----------------------------------------------------------------------------------------------
// A thread's share of a tile, and its role's position. A thread has two keys, eight apart, and two of every eight rows,
// as in a WGMMA accumulator.
template <class C>
struct Math {
    static constexpr i32 kRows = C::kBlockRows;
    float scores[C::kBlockRows / 2];
    HeadState<C::kBlockRows> heads;
    TilePosition<C> at;
    u32 parity;  // of the tile's phase of out_done
    CodeState<C> codes;
};

// Waits until the products of the tile before are done.
template <class C>
MLA_DEVICE void wait_for_out(Storage<C>& s, const Math<C>& math) {
    tmem_wait(s.out_done, math.parity ^ 1);
}

template <class C>
MLA_DEVICE void load_scores(Storage<C>& s, Math<C>& math, TmemAddr lanes, i32 thread) {
    const i32 stage = math.at.keys.stage, s_stage = math.at.scores().stage;
    tmem_wait(s.s_full[s_stage], math.at.scores().ring.full_parity(s_stage));
    load_fragment(math.scores, TmemMap<C>::scores(lanes, s_stage));
    tcgen05_wait_ld();
    pin_loaded(math.scores);
    tcgen05_fence_before_thread_sync();
    release(s.s_empty[s_stage], thread);
    // Makes visible what the load role stored next to the tile, and the values, which sanitize_v may change: a commit
    // need not pass on what its thread has waited for. The RoPE columns may be overwritten by now.
#pragma unroll
    for (i32 group = C::kRopeGroups; group < C::kGroups; ++group) {
        mbarrier_wait(s.kv_full[stage][group], math.at.keys.ring.full_parity(stage));
    }
}

// Multiplies O by a factor per row: seldom, since maxima are followed lazily.
template <class C>
MLA_DEVICE void rescale_out(const HeadValues<C::kBlockRows>& scale, TmemAddr lanes) {
#pragma unroll 1
    for (i32 i = 0; i < 2 * kDimTiles; ++i) {
        const TmemAddr from = TmemMap<C>::out(lanes, i / 2).lane(i % 2 * kUpperLanes);
        float x[C::kBlockRows / 2];
        load_fragment(x, from);
        tcgen05_wait_ld();
        pin_loaded(x);
        scale.multiply(x);
        store_fragment(from, x);
    }
    tcgen05_wait_st();
}

template <class C>
MLA_DEVICE void process_tile(const Block<C>& block, Math<C>& math, const WorkItem& item, i32 tile, TmemAddr lanes,
                             i32 thread) {
    constexpr i32 kRows = C::kBlockRows;
    Storage<C>& s = block.s;
    const float scale_log2 = block.p.scale_log2;
    const i32 stage = math.at.keys.stage;
    SharedMaxima<kRows>& maxima = s.warp_values[math.parity].maxima;
    load_scores(s, math, lanes, thread);
    if constexpr (C::kCodes) scale_scores(s, math, item, tile, thread);
    mask_tile<C>(block, math.scores, s.present[stage], item, tile, thread);
    const auto to = maxima.of_warp(thread / kWarpThreads);
    store_warp_maxima_by_halves<kRows>(to, math.scores, thread);
    bar_sync(Softmax, kWarpgroupThreads);
    HeadValues<kRows> scale;
    if constexpr (C::kCodes) {
        scale = move_code_maxima(math, maxima, scale_log2, thread);
        sanitize_codes(s.kv[stage], item, tile, thread);
    } else {
        scale = math.heads.move_max(maxima, scale_log2, thread);
        sanitize_v<C>(block, s.kv[stage], item, tile, thread);
    }
    if (tile > item.tile_begin) {
        wait_for_out(s, math);
        if (scale.any_but_one()) rescale_out<C>(scale, lanes);
    }
    if constexpr (C::kCodes) {
        store_code_weights(math, s.p, scale_log2, thread);
    } else {
        store_p(typename C::Element{}, math.heads, math.scores, smem_addr(s.p), scale_log2, thread);
    }
    tcgen05_fence_before_thread_sync();
    mbarrier_arrive(s.p_full);
    math.at.advance();
    math.parity ^= 1;
}

// ---- Results ---------------------------------------------------------------------------------------------------
// Start of each row of the block: a lane computes rows `lane` and `lane` + 32.
template <class C>
struct RowOffsets {
    static constexpr i32 kRowsOfLane = ceil_div(C::kBlockRows, kWarpThreads);
    i64 of[kRowsOfLane];

    MLA_DEVICE RowOffsets(const Block<C>& block, const WorkItem& item) {
        const DecodeParams& p = block.p;
#pragma unroll
        for (i32 i = 0; i < kRowsOfLane; ++i) {
            const i32 lane = threadIdx.x % kWarpThreads;
            const i32 row = min(block.row0 + i * kWarpThreads + lane, block.rows - 1);
            of[i] = item.partial_index == kNotSplit
                        ? out_offset(p, item.request, block.kv_head, row)
                        : workspace_row(p, item.partial_index, block.kv_head, row) * kHeadDimV;
        }
    }

    // Offset of row `first` + `more`; `first` is a constant, and one lane index holds both rows.
    MLA_DEVICE i64 at(i32 first, i32 more) const {
        return __shfl_sync(kFullWarp, of[first / kWarpThreads], first % kWarpThreads + more);
    }
};

// 32 dims of a warp, of all rows, as fragments of 16 dims each; zeros where nothing was summed.
template <i32 kRows>
MLA_DEVICE void load_out(float (&x)[2][kRows / 2], TmemAddr from, bool summed) {
    if (summed) {
        load_fragment(x[0], from);
        load_fragment(x[1], from.lane(kUpperLanes));
        tcgen05_wait_ld();
        pin_loaded(x[0]);
        pin_loaded(x[1]);
        return;
    }
#pragma unroll
    for (i32 i = 0; i < kRows / 2; ++i) x[0][i] = x[1][i] = 0.f;
}

// In fp32: eight dims at a time.
template <i32 kRows, class Offsets>
MLA_DEVICE void store_dims(float* to, const float (&x)[2][kRows / 2], const HeadValues<kRows>& factors,
                           const Offsets& offsets, i32 rows, i32 lane) {
#pragma unroll
    for (i32 i = 0; i < kRows / 2; ++i) {
        const i32 first = i / 4 * 8, more = fragment_column(lane) + i % 2;
        float* const row = to + offsets.at(first, more) + lane / 4 + 8 * fragment_half(i);
        if (first + more >= rows) continue;
#pragma unroll
        for (i32 h = 0; h < 2; ++h) row[16 * h] = x[h][i] * factors.of(i);
    }
}

// In 16 bits. Transposed, a quad holds a row's 32 dims: four chunks of 16 bytes.
template <class Element, i32 kRows, class Offsets>
MLA_DEVICE void store_dims(Element, u16* to, const float (&x)[2][kRows / 2], const HeadValues<kRows>& factors,
                           const Offsets& offsets, i32 rows, i32 lane) {
#pragma unroll
    for (i32 i = 0; i < kRows / 2; i += 4) {
        u32 words[4];
#pragma unroll
        for (i32 j = 0; j < 4; ++j) {
            const i32 d = i + 2 * (j % 2);
            words[j] =
                movmatrix_trans(cvt_x2(Element{}, x[j / 2][d] * factors.of(d), x[j / 2][d + 1] * factors.of(d + 1)));
        }
        quad_transpose(words, lane % 4);
        u16* const row = to + offsets.at(2 * i, lane / 4) + lane % 4 * 8;
        if (2 * i + lane / 4 < rows) {
            *reinterpret_cast<uint4*>(row) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

// The result of a work item. One thread finishes a row's statistics, since that needs divisions.
template <class C>
MLA_DEVICE void store_result(const Block<C>& block, const Math<C>& math, const WorkItem& item, TmemAddr lanes,
                             i32 thread) {
    constexpr i32 kRows = C::kBlockRows;
    const DecodeParams& p = block.p;
    Storage<C>& s = block.s;
    float (&sums)[kWarpgroupWarps][kRows] = s.warp_values[math.parity].sums;
    store_warp_sums<kRows>(sums[thread / kWarpThreads], math.heads.sum, thread);
    if constexpr (C::kCodes) {
        store_warp_sums<kRows>(s.rounded_sums[thread / kWarpThreads], math.codes.rounded_sum, thread);
    }
    if (thread < 4) {  // these threads hold every row
#pragma unroll
        for (i32 k = 0; k < kHeadsOfThread<kRows>; ++k) s.stats.max[kth_head(k, thread)] = math.heads.max.value[k];
    }
    bar_sync(Softmax, kWarpgroupThreads);
    const BlockHeads rows{block.kv_head, block.row0, block.rows};
    if constexpr (C::kCodes) {
        finish_code_row(block, item, sums, thread);
    } else {
        finish_head</*kWithRowMax=*/false>(p, item, rows, s.stats, sums, true, thread);
    }
    bar_sync(Softmax, kWarpgroupThreads);
    HeadValues<kRows> factors;
#pragma unroll
    for (i32 k = 0; k < kHeadsOfThread<kRows>; ++k) factors.value[k] = s.stats.factor[kth_head(k, thread)];

    const bool summed = item.tile_begin < item.tile_end, whole = item.partial_index == kNotSplit;
    if (summed) wait_for_out(s, math);
    const RowOffsets<C> offsets(block, item);
    const i32 lane = thread % kWarpThreads, present = block.rows - block.row0;
#pragma unroll 1
    for (i32 t = 0; t < kDimTiles; ++t) {
        float x[2][kRows / 2];
        load_out<kRows>(x, TmemMap<C>::out(lanes, t), summed);
        const i32 dim0 = t * kTileDims + thread / kWarpThreads * kWarpThreads;
        if (!whole || p.out_is_fp32) {
            float* const to = whole ? static_cast<float*>(p.out) : p.partial_out;
            store_dims<kRows>(to + dim0, x, factors, offsets, present, lane);
        } else {
            store_dims(typename C::Element{}, static_cast<u16*>(p.out) + dim0, x, factors, offsets, present, lane);
        }
    }
}

template <class C>
MLA_DEVICE void run_softmax_role(const Block<C>& block, TmemAddr tmem, i32 thread) {
    const DecodeParams& p = block.p;
    Storage<C>& s = block.s;
    const TmemAddr lanes = tmem.lane(thread / kWarpThreads * kWarpThreads);
    Math<C> math;
    math.parity = 0;
    WorkItem item;
    for (WorkIterator walk(p, block.split, block.hidden); walk.next(p, item);) {
        math.heads.reset();
        if constexpr (C::kCodes) math.codes.rounded_sum.fill(0.f);
#pragma unroll 1
        for (i32 tile = item.tile_begin; tile < item.tile_end; ++tile) {
            process_tile(block, math, item, tile, lanes, thread);
        }
        store_result(block, math, item, lanes, thread);
        if constexpr (C::kCodes) continue;  // a row that sees NaN is NaN as a whole
        if (s.nonfinite_request == item.request) {
            __syncwarp();  // it adds to columns that it has stored itself
            fixup_nonfinite<typename C::Element, kHeadDimV>(block, item, 0, thread);
        }
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
template <class C, class Params>
MLA_DEVICE void run_block(const Params& p, const TensorMap& kv_map, Storage<C>& s) {
    using Map = TmemMap<C>;
    const Block<C> block(p, s);
    const i32 warp = uniform_warp();
    if (threadIdx.x == 0) {
        prefetch_tensormap(kv_map);
        init_storage(s);
    }
    if (warp == kScoresWarp) {
        tcgen05_alloc<Map::kAllocated>(s.tmem);
        tcgen05_relinquish_alloc_permit();
    }
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    tcgen05_fence_after_thread_sync();
    const TmemAddr tmem = s.tmem;
    if constexpr (!C::kCodes)
        prefetch_inputs<typename C::Work, ItemRows<typename C::Work>::template kLatentLines<C>>(p);
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    if (warp < kLoadWarp) {
        run_softmax_role(block, tmem, threadIdx.x);
    } else if (warp == kLoadWarp) {
        run_load_role(block, threadIdx.x % kWarpThreads, GroupLoader<C>{block, kv_map, {}});
    } else if (warp < kScoresWarp) {
        const i32 thread = threadIdx.x - kQueryWarp * kWarpThreads;
        if constexpr (C::kCodes) {
            run_code_query_role<typename C::Query, kQueryThreads>(block, thread);
        } else {
            run_query_role<C>(block, QueryStages<C::kStagesQ>{s.q[0][0], s.q_full, s.q_empty}, thread);
        }
    } else if (warp == kScoresWarp) {
        run_scores_role(block, tmem);
    } else {
        run_values_role(block, tmem);
    }
    __syncwarp();
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    if (warp == kScoresWarp) {
        tcgen05_fence_after_thread_sync();
        tcgen05_dealloc<Map::kAllocated>(tmem);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::decode::sm100
