// Indexer logits on Hopper, for many query tokens.
//
//   logits[t, s] = k_scale[s] * sum_h weights[t, h] * max(q[t, h] . k[s], 0)   for keys s in the token's range
//
// A block has eight tokens, a tile 128 keys. The queries are the A operand: an m64 tile holds eight heads of eight
// tokens in rows 8 * head + token, so a thread has the same token in every tile and adds up heads in registers:
//
//   for each m64 tile i:   D = Q_i K^T  (64 x 128),   sum[s] += weight * max(D[row, s], 0)  for its two rows
//
// Warp w of a warpgroup owns heads 8i + 2w and 8i + 2w + 1. The four warps add their sums in the shared memory of the
// tile of keys, once no product reads it any more. The order of additions depends on the heads alone and equals the
// order in paged decode, so a logit's bits do not depend on the positions of its token and its key.
//
// Products and a thread's sums are float32. With MLA_ACCUMULATOR=float16 they are float16, and a tile has 256 keys; the
// codes of the queries must be small enough that no product exceeds 57,344.
//
// Grid: one block per SM. The tiles of all blocks of tokens lie in one line, which schedule.cu has cut into
// equal shares. Math warpgroups take the tiles of a share in turn, also across blocks of tokens:
//
//   math 0  | tile 0: products, sums, stores | tile 3 ...
//   math 1  |     tile 1                         | tile 4 ...
//   math 2  |         tile 2                         | tile 5 ...
//   load    | Q, tiles ...          | Q of the next block, tiles ...
//   fill    | -inf before and after the tiles
//
// Source: the operation is DeepGEMM's fp8_mqa_logits (2025). Differences: queries are A and keys B, heads are added
// without shuffles, the schedule is balanced to one tile, ranges mask the stores, and any number of heads fits.
#include "common/limits.cuh"
#include "indexer/logits/sm90.cuh"
#include "indexer/logits/sm90_head_sums.cuh"
#include "tile/product.cuh"
#include "tile/prologue.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::logits {
using namespace sm90;

// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDim = MLA_HEAD_DIM;
using Sums = HeadSums<MLA_ACCUMULATOR>;  // float, or float16 for queries with small codes

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kMathWarpgroups = 3;
constexpr i32 kThreads = Roles<kMathWarpgroups>::kThreads, kLoadWarp = Roles<kMathWarpgroups>::kLoadWarp;
constexpr i32 kMathWarps = Roles<kMathWarpgroups>::kMathWarps;
constexpr i32 kRegsMath = 152, kRegsLoad = 56;  // the fill role uses kRegsLoad, too
static_assert(kMathWarpgroups * kRegsMath + kRegsLoad <= kRegsOfLane, "registers of the block");

constexpr i32 kTileKeys = Sums::kTileKeys;
constexpr i32 kTileHeads = 8;  // heads in an m64 tile of queries
static_assert(kTileHeads * kMaxTokens == kSw128Rows, "an m64 tile");

// Rows are fetched in pieces of 128 bytes; TMA pads shorter pieces with zeros, which are not multiplied.
constexpr i32 kRowBytes = kHeadDim * element_bytes(Element{});
constexpr i32 kPieces = ceil_div(kRowBytes, (i32)kSw128RowBytes);
constexpr i32 kPieceElems = kSw128RowBytes / element_bytes(Element{});
constexpr i32 kMmaSteps = kRowBytes / kKMajorStepBytes;

constexpr u32 kQueryTileBytes = kPieces * kSw128Bytes;  // an m64 tile
constexpr u32 kKeyPieceBytes = kTileKeys * kSw128RowBytes;
constexpr u32 kKeyTileBytes = kPieces * kKeyPieceBytes;

// Room for the queries of one block of tokens, or of two blocks with at most half the heads.
constexpr u32 kQueryBytes = 131072;
constexpr i32 kMaxQueryTiles = kQueryBytes / kQueryTileBytes;
constexpr i32 kMaxHeads = kMaxQueryTiles * kTileHeads;
constexpr i32 kStages = kKeyTileBytes == 16384 ? 5 : 3;
constexpr i32 kMaxQueryStages = 2;
constexpr i32 kStageTiles = kMaxQueryTiles / kMaxQueryStages;

// A lane stores four keys of each part of a tile.
constexpr i32 kPartKeys = 4 * kWarpThreads, kParts = kTileKeys / kPartKeys;
constexpr i32 kLaneKeys = 4 * kParts;

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier       arrives (count)   carries          waits   first phase
// q_full[s]     load (1)          queries          math    blocked
// q_empty[s]    math warps (12)   -                load    free
// k_full[s]     load (1)          kKeyTileBytes    math    blocked; two, used in turn
// k_empty[s]    math warps (4)    -                load    free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kQueryBytes];
    u8 k[kStages][kKeyTileBytes];
    Sums::Weights weights[kMaxHeads / 2][kMaxTokens];  // weights of two heads; the second stage is the second half
    BlockInfo info[kMaxQueryStages];
    MBarrier q_full[kMaxQueryStages], q_empty[kMaxQueryStages];
    TileBarriers<kStages> k_full;
    MBarrier k_empty[kStages];
    float weight_scales[kMaxQueryStages][kMaxTokens];  // divisors of the float16 weights
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");
static_assert(sizeof(float) * kWarpgroupWarps * kMaxTokens * kTileKeys <= kKeyTileBytes, "the sums of four warps");

MLA_LOGITS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(max_short_line, kMaxShortLine);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(max_heads, kMaxHeads);
MLA_FACT(block_tokens, kMaxTokens);
MLA_FACT(tile_keys, kTileKeys);

// Named barriers within a math warpgroup: its products have been read; its sums are written. One of each per warpgroup.
enum NamedBarrier : i32 { ProductsDone = 1, SumsReady = ProductsDone + kMathWarpgroups };

MLA_DEVICE void init_storage(Storage& s) {
    for (i32 stage = 0; stage < kMaxQueryStages; ++stage) {
        mbarrier_init(s.q_full[stage], 1);
        mbarrier_init(s.q_empty[stage], kMathWarps);
    }
    for (i32 stage = 0; stage < kStages; ++stage) {
        for (auto& turn : s.k_full.barrier) mbarrier_init(turn[stage], 1);
        mbarrier_init(s.k_empty[stage], kWarpgroupWarps);
    }
    fence_mbarrier_init();
}

// Blocks of tokens with few heads use two stages in turn.
struct QueryStages {
    i32 tiles, count;

    MLA_DEVICE explicit QueryStages(const LogitsParams& p)
        : tiles(ceil_div(p.heads, kTileHeads)), count(tiles <= kStageTiles ? kMaxQueryStages : 1) {}
    MLA_DEVICE u32 q_offset(i32 stage) const { return stage * (kStageTiles * kQueryTileBytes); }
    MLA_DEVICE i32 pair(i32 stage) const { return stage * (kStageTiles * kTileHeads / 2); }
};

// ---- Load role -------------------------------------------------------------------------------------------------
MLA_DEVICE void load_queries(Storage& s, const TensorMap& q_map, const QueryStages& stages, i32 stage) {
    MBarrier& full = s.q_full[stage];
    const SmemAddr to = smem_addr(s.q) + stages.q_offset(stage);
    mbarrier_arrive_expect_tx(full, stages.tiles * kQueryTileBytes);
    for (i32 tile = 0; tile < stages.tiles; ++tile) {
#pragma unroll
        for (i32 piece = 0; piece < kPieces; ++piece) {
            cp_async_bulk_tensor_3d(to + (tile * kQueryTileBytes + piece * kSw128Bytes), q_map, full,
                                    piece * kPieceElems, s.info[stage].block * kMaxTokens, tile * kTileHeads,
                                    kEvictFirst);
        }
    }
}

MLA_DEVICE void put_weight(float2& pair, i32 head, float weight) { (head % 2 == 0 ? pair.x : pair.y) = weight; }
MLA_DEVICE void put_weight(u32& pair, i32 head, float weight) {
    reinterpret_cast<u16*>(&pair)[head % 2] = float16::from_float(weight);
}

// A power of two that scales the weights of the lane's token, from the largest of these weights.
MLA_DEVICE float find_weight_scale(const LogitsParams& p, const BlockInfo& info, i32 heads, i32 lane) {
    float largest = 0.f;  // NaN is ignored
    load_weights(p, info, heads, kMaxTokens, lane,
                 [&](i32, i32, float weight) { largest = fmaxf(largest, fabsf(weight)); });
#pragma unroll
    for (i32 step = kMaxTokens; step < kWarpThreads; step *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, step));
    }
    return scale_of_weights(largest);
}

MLA_DEVICE void load_weights(const LogitsParams& p, Storage& s, const QueryStages& stages, i32 stage, i32 lane) {
    const BlockInfo& info = s.info[stage];
    const i32 heads = stages.tiles * kTileHeads;
    float factor = 1.f;
    if constexpr (Sums::kHalf) {
        const float scale = find_weight_scale(p, info, heads, lane);
        if (lane < kMaxTokens) s.weight_scales[stage][lane] = scale;
        factor = inverse_power_of_2(scale);
    }
    Sums::Weights(*to)[kMaxTokens] = s.weights + stages.pair(stage);
    load_weights(p, info, heads, kMaxTokens, lane,
                 [&](i32 head, i32 token, float weight) { put_weight(to[head / 2][token], head, weight * factor); });
}

MLA_DEVICE void load_keys(Storage& s, const TensorMap& k_map, const StageWalk<kStages>& key, i32 tile) {
    MBarrier& full = s.k_full.of(key);
    mbarrier_arrive_expect_tx(full, kKeyTileBytes);
#pragma unroll
    for (i32 piece = 0; piece < kPieces; ++piece) {
        cp_async_bulk_tensor_3d(smem_addr(s.k[key.stage]) + piece * kKeyPieceBytes, k_map, full, piece * kPieceElems,
                                tile * kTileKeys, 0, kEvictLast);
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
        BlockInfo& info = s.info[query.stage];
        write_info(info, walk, found);
        if (!found) {
            if (lane == 0) mbarrier_arrive(s.q_full[query.stage]);
            return;
        }
        load_weights(p, s, stages, query.stage, lane);
        __syncwarp();
        if (lane == 0) load_queries(s, q_map, stages, query.stage);
        for (i32 tile = walk.tiles.begin; tile < walk.tiles.end; ++tile, key.advance()) {
            mbarrier_wait(s.k_empty[key.stage], key.parity() ^ 1);
            if (lane == 0) load_keys(s, k_map, key, tile);
        }
    }
}

// ---- Math role -------------------------------------------------------------------------------------------------
// Multiplies an m64 tile of queries by the tile of keys.
MLA_DEVICE void multiply(Sums::Products& d, SmemDesc q, SmemDesc k) {
    pin(d);
    wgmma_fence();
    multiply_abt<kMmaSteps, kSw128Bytes, kKeyPieceBytes>(Element{}, d, q, k);
    wgmma_commit_group();
}

// A thread of a math warpgroup: its rows belong to token `g` and to two heads of each m64 tile.
struct Math {
    i32 warpgroup, warp, g, c, thread;

    MLA_DEVICE Math(i32 block_warp, i32 thread)
        : warpgroup(block_warp / kWarpgroupWarps),
          warp(block_warp % kWarpgroupWarps),
          g(thread % kWarpThreads / 4),
          c(thread % 4),
          thread(thread) {}
};

// Adds the weighted products of all m64 tiles.
MLA_DEVICE void add_heads(Storage& s, const Math& math, const QueryStages& stages, i32 query_stage, i32 key_stage,
                          Sums& sums) {
    Sums::Products d;
    SmemDesc q = uniform(k_major_desc(smem_addr(s.q) + stages.q_offset(query_stage)));
    const SmemDesc k = uniform(k_major_desc(smem_addr(s.k[key_stage])));
    const Sums::Weights* weights = &s.weights[stages.pair(query_stage) + math.warp][math.g];
#pragma unroll 1
    for (i32 tile = 0; tile < stages.tiles; ++tile) {
        multiply(d, q, k);
        q = advance(q, kQueryTileBytes);
        const Sums::Weights pair = *weights;
        weights += kTileHeads / 2 * kMaxTokens;
        wgmma_wait_group<0>();
        pin(d);
        sums.add(d, pair);
    }
}

// The four warps exchange their sums here: rows of floats, [warp][token], in the memory of the tile of keys. A chunk
// has eight columns; chunk j of a token's row lies at j ^ token, which avoids bank conflicts.
MLA_DEVICE float* sum_at(Storage& s, i32 stage, i32 warp, i32 token, i32 chunk) {
    return reinterpret_cast<float*>(s.k[stage]) + (warp * kMaxTokens + token) * kTileKeys + (chunk ^ token) * 8;
}

MLA_DEVICE float4 operator*(float4 x, float y) { return make_float4(x.x * y, x.y * y, x.z * y, x.w * y); }

// Each warp stores two tokens; a lane stores four keys of each token in every part of the tile.
MLA_DEVICE void store_tile(const LogitsParams& p, Storage& s, const Math& math, i32 query_stage, i32 tile, i32 stage,
                           const float (&scales)[kLaneKeys]) {
    const BlockInfo& info = s.info[query_stage];
    const i32 lane = math.thread % kWarpThreads;
    float4 total[2 * kParts];
#pragma unroll
    for (i32 i = 0; i < 2 * kParts; ++i) {
        const i32 token = 2 * math.warp + i / kParts, chunk = i % kParts * (kPartKeys / 8) + lane / 2;
        float4 x[kWarpgroupWarps];
#pragma unroll
        for (i32 warp = 0; warp < kWarpgroupWarps; ++warp) {
            x[warp] = *reinterpret_cast<float4*>(sum_at(s, stage, warp, token, chunk) + lane % 2 * 4);
        }
        total[i].x = (x[0].x + x[1].x) + (x[2].x + x[3].x);
        total[i].y = (x[0].y + x[1].y) + (x[2].y + x[3].y);
        total[i].z = (x[0].z + x[1].z) + (x[2].z + x[3].z);
        total[i].w = (x[0].w + x[1].w) + (x[2].w + x[3].w);
    }
    fence_proxy_async();  // TMA writes the next tile of keys over the sums
    release(s.k_empty[stage], math.thread);
#pragma unroll
    for (i32 i = 0; i < 2 * kParts; ++i) {
        const i32 token = 2 * math.warp + i / kParts, part = i % kParts;
        if (token >= info.tokens) continue;
        const float4 x = Sums::kHalf ? total[i] * s.weight_scales[query_stage][token] : total[i];
        const float* scale = scales + 4 * part;
        const LogitsRow logits(p, info.block, token);
        logits.store4(tile * kTileKeys + part * kPartKeys + 4 * lane,
                      make_float4(x.x * scale[0], x.y * scale[1], x.z * scale[2], x.w * scale[3]), info.ranges[token]);
    }
}

MLA_DEVICE void run_tile(const LogitsParams& p, Storage& s, const Math& math, const QueryStages& stages,
                         i32 query_stage, i32 tile, i32 stage) {
    float scales[kLaneKeys];
    Sums sums;
#pragma unroll
    for (i32 i = 0; i < kLaneKeys; ++i) {
        const i32 key = tile * kTileKeys + i / 4 * kPartKeys + math.thread % kWarpThreads * 4 + i % 4;
        scales[i] = p.k_scale != nullptr && key < p.num_keys ? p.k_scale[key * p.k_scale_stride_elems] : 1.f;
    }
    add_heads(s, math, stages, query_stage, stage, sums);
    bar_sync(ProductsDone + math.warpgroup, kWarpgroupThreads);
#pragma unroll
    for (i32 chunk = 0; chunk < Sums::kChunks; ++chunk) {
        *reinterpret_cast<float2*>(sum_at(s, stage, math.warp, math.g, chunk) + 2 * math.c) = sums.of(chunk);
    }
    bar_sync(SumsReady + math.warpgroup, kWarpgroupThreads);
    store_tile(p, s, math, query_stage, tile, stage, scales);
}

MLA_DEVICE void run_math_role(const LogitsParams& p, Storage& s, const Math& math) {
    const QueryStages stages(p);
    StageWalk<kMaxQueryStages> query(0);
    StageWalk<kStages, kMathWarpgroups> key(math.warpgroup);
    i32 ahead = math.warpgroup;  // tiles of the other warpgroups before the next one of this warpgroup
    while (true) {
        mbarrier_wait(s.q_full[query.stage], query.parity());
        const TileRange tiles = s.info[query.stage].tiles;
        if (tiles.size() == 0) return;
#pragma unroll 1
        for (; ahead < tiles.size(); ahead += kMathWarpgroups, key.advance()) {
            s.k_full.wait(key);
            run_tile(p, s, math, stages, query.stage, tiles.begin + ahead, key.stage);
        }
        ahead -= tiles.size();
        release(s.q_empty[query.stage], math.thread);
        query.advance(stages.count);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_logits_sm90(const __grid_constant__ LogitsParams p, const __grid_constant__ TensorMap q_map,
                            const __grid_constant__ TensorMap k_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    start_block([&] { init_storage(s); }, q_map, k_map);

    const i32 warp = uniform_warp(), thread = threadIdx.x % kWarpgroupThreads;
    if (warp < kLoadWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_math_role(p, s, Math(warp, thread));
    } else {
        setmaxnreg_dec<kRegsLoad>();
        if (warp == kLoadWarp) {
            run_load_role(p, s, q_map, k_map, thread % kWarpThreads);
        } else {
            run_fill_role<kTileKeys, kWarpgroupWarps - 1>(p, warp - kLoadWarp - 1, thread % kWarpThreads);
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::logits
