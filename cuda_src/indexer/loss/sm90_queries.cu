// The gradients of the warm-up loss by index queries and weights on Hopper.
//
//   a = IQ_t IK^T,   M = [a > 0] G_t,   dq'_t = M IK,   d_index_q = W dq',   d_weights = score_unit * iq . dq'
//
// A block takes pairs of tokens, one after the other, and 64 index heads of each, which are the rows of one m64 tile
// per warpgroup. Keys come in tiles of 128 through a ring; a tile is the second operand of both products. M goes from
// the accumulators of the first to the registers of the second.
//
//   load     IQ | IK_0 IK_1 IK_2 ...                    | IQ of the next pair | IK_0 ...
//   math_w        a | M | dq' += M IK_0 | a ...                   | d_weights, stores | a ...
//
// While one warpgroup computes M, the other uses the tensor cores. G contains the scales of the keys. It is zero in
// tiles that a token's range only touches; keys are finite copies, so that keys hidden from a token cannot reach it.
//
// Grid: x = blocks that divide the pairs, the last pairs first, since they see most keys; y = groups of 64 heads.
#include "common/limits.cuh"
#include "indexer/loss/params.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "tile/elements.cuh"
#include "tile/fragment.cuh"
#include "tile/product.cuh"
#include "tile/prologue.cuh"
#include "tile/ring.cuh"
#include "tile/sw128.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::loss {
// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr i32 kIndexPieces = MLA_INDEX_PIECES;  // of 64 columns; missing columns are zeros

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps   regs   does
// math_w   0..7    232    token w of the pair
// load     8       40     all copies
constexpr i32 kMathWarpgroups = 2;
constexpr i32 kThreads = (kMathWarpgroups + 1) * kWarpgroupThreads;
constexpr i32 kMathWarps = kMathWarpgroups * kWarpgroupWarps;
constexpr i32 kRegsMath = 232, kRegsLoad = 40;
static_assert(kMathWarpgroups * kRegsMath + kRegsLoad <= kRegsOfLane, "registers of the block");

constexpr i32 kBlockTokens = kMathWarpgroups, kBlockHeads = kSw128Rows;
constexpr i32 kTileKeys = 128, kStages = 4, kPairStages = 2;
constexpr u32 kPieceBytes = kTileKeys * kSw128RowBytes;
constexpr i32 kMmaSteps = kTileKeys / kMmaK;             // of the second product
constexpr i32 kSums = kIndexPieces * kSw128Columns / 2;  // of a thread

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier       arrives (count)   carries         waits   first phase
// q_full[s]     load (1)          both tokens     math    blocked
// q_empty[s]    math warps (8)    -               load    free
// k_full[s]     load (1)          a tile          math    blocked
// k_empty[s]    math warps (8)    -               load    free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kPairStages][kBlockTokens][kIndexPieces][kSw128Bytes];
    u8 k[kStages][kIndexPieces][kPieceBytes];
    MBarrier q_full[kPairStages], q_empty[kPairStages], k_full[kStages], k_empty[kStages];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_tokens, kBlockTokens);
MLA_FACT(block_heads, kBlockHeads);

MLA_DEVICE void init_storage(Storage& s) {
    init_ring(s.q_full, s.q_empty, 1, kMathWarps);
    init_ring(s.k_full, s.k_empty, 1, kMathWarps);
    fence_mbarrier_init();
}

using Pairs = RingPosition<kPairStages>;
using Tiles = RingPosition<kStages>;

// ---- The pair --------------------------------------------------------------------------------------------------
struct Pair {
    i32 first_token, first_head;
    KeyRange ranges[kBlockTokens];
    TileRange tiles;  // tiles that either token needs

    MLA_DEVICE KeyRange range(i32 token) const { return token == 0 ? ranges[0] : ranges[1]; }
};

MLA_DEVICE Pair pair_of(const LossParams& p, i32 at) {
    Pair pair{at * kBlockTokens, (i32)blockIdx.y * kBlockHeads};
    i32 first = p.s_kv, last = 0;
#pragma unroll
    for (i32 i = 0; i < kBlockTokens; ++i) {
        const bool there = pair.first_token + i < p.num_tokens;
        pair.ranges[i] = there ? p.ranges[p.first_token + pair.first_token + i] : KeyRange{0, 0};
        if (pair.ranges[i].begin == pair.ranges[i].end) continue;
        first = min(first, pair.ranges[i].begin);
        last = max(last, pair.ranges[i].end);
    }
    pair.first_token += p.first_token;
    pair.tiles = tiles_of<kTileKeys>(first, last);
    return pair;
}

// ---- Load role -------------------------------------------------------------------------------------------------
MLA_DEVICE void load_queries(const LossParams& p, Storage& s, const TensorMap& q_map, const Pairs& pairs,
                             const Pair& pair) {
    MBarrier& full = s.q_full[pairs.stage];
    pairs.wait_empty(s.q_empty);
    mbarrier_arrive_expect_tx(full, sizeof(s.q[0]));
    for (i32 i = 0; i < kBlockTokens; ++i) {
#pragma unroll
        for (i32 piece = 0; piece < kIndexPieces; ++piece) {
            cp_async_bulk_tensor_3d(smem_addr(s.q[pairs.stage][i][piece]), q_map, full, piece * kSw128Columns,
                                    pair.first_token - p.first_fetched + i, pair.first_head, kEvictFirst);
        }
    }
}

MLA_DEVICE void load_keys(Storage& s, const TensorMap& k_map, Tiles& tiles, const Pair& pair) {
    for (i32 tile = pair.tiles.begin; tile < pair.tiles.end; ++tile, tiles.advance()) {
        const i32 stage = tiles.stage;
        tiles.wait_empty(s.k_empty);
        mbarrier_arrive_expect_tx(s.k_full[stage], kIndexPieces * kPieceBytes);
#pragma unroll
        for (i32 piece = 0; piece < kIndexPieces; ++piece) {
            cp_async_bulk_tensor_3d(smem_addr(s.k[stage][piece]), k_map, s.k_full[stage], piece * kSw128Columns,
                                    tile * kTileKeys, 0, kEvictLast);
        }
    }
}

// ---- Math role -------------------------------------------------------------------------------------------------
// The products of the token's heads with the tile's keys.
MLA_DEVICE void multiply(Storage& s, const u8* queries, i32 stage, float (&a)[64]) {
    pin(a);
    SmemDesc q = k_major_desc(smem_addr(queries)), k = k_major_desc(smem_addr(s.k[stage]));
    opaque(q.bits), opaque(k.bits);
    wgmma_fence();
    multiply_abt<kIndexPieces * kSw128MmaSteps, kSw128Bytes, kPieceBytes>(bfloat16{}, a, q, k);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(a);
}

// The gradients of two neighbouring columns, zero where the products are not positive.
MLA_DEVICE u32 masked(u32 gradients, float low, float high) {
    return (low > 0.f ? gradients & 0xffffu : 0u) | (high > 0.f ? gradients & 0xffff0000u : 0u);
}

MLA_DEVICE void add_keys(Storage& s, i32 stage, const float (&a)[64], const u32 (&gradients)[2 * kMmaSteps],
                         float (&sums)[kSums]) {
    u32 m[kMmaSteps][4];
#pragma unroll
    for (i32 step = 0; step < kMmaSteps; ++step) {
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            m[step][i] = masked(gradients[2 * step + i / 2], a[8 * step + 2 * i], a[8 * step + 2 * i + 1]);
        }
    }
    SmemDesc k = make_desc(smem_addr(s.k[stage]), kPieceBytes, kSwizzleAtomBytes);  // columns of the next piece
    opaque(k.bits);
    pin(sums);
    wgmma_fence();
    multiply_ab(bfloat16{}, sums, m, k, true);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(sums);
}

// The gradients of the columns that a thread holds: pairs, 8 columns apart.
MLA_DEVICE void load_gradients(u32 (&to)[2 * kMmaSteps], const u16* row, i32 thread) {
    const u32* pairs = reinterpret_cast<const u32*>(row) + thread % 4;
#pragma unroll
    for (i32 i = 0; i < 2 * kMmaSteps; ++i) to[i] = pairs[4 * i];
}

// A pair of the query's elements, which the thread has the sums of.
MLA_DEVICE float2 query_pair(const u8* queries, i32 row, i32 i, i32 thread) {
    const i32 chunk = i / 4;
    const u8* piece = queries + chunk / kSw128Chunks * kSw128Bytes;
    const u32 at = sw128_offset(row, chunk % kSw128Chunks) + thread % 4 * 4;
    return unpack<bfloat16>(*reinterpret_cast<const u32*>(piece + at));
}

// Two elements of a gradient in its own dtype, by one store where they are aligned.
MLA_DEVICE void store_pair(void* to, bool fp32, i64 at, float x, float y) {
    u16* pair = static_cast<u16*>(to) + at;
    if (!fp32 && reinterpret_cast<u64>(pair) % 4 == 0) {
        *reinterpret_cast<u32*>(pair) = cvt_x2(bfloat16{}, x, y);
        return;
    }
    store_gradient(to, fp32, at, x);
    store_gradient(to, fp32, at + 1, y);
}

// The thread's two heads, one after the other. A token that sees no key has no gradient, whatever its queries hold.
MLA_DEVICE void store_heads(const LossParams& p, const u8* queries, const Pair& pair, i32 warpgroup, i32 thread,
                            const float (&sums)[kSums]) {
    const i32 token = pair.first_token + warpgroup;
    const bool there = token < p.first_token + p.num_tokens;
    const KeyRange range = pair.range(warpgroup);
    const bool seen = range.begin < range.end;
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 row = fragment_row(thread) + 8 * r, head = pair.first_head + row;
        const bool stored = there && head < p.index_heads;
        const float factor = stored && seen ? query_factor(p, token, head) : 0.f;
        const i64 to = token * p.d_index_q_stride_token_elems + head * p.d_index_q_stride_head_elems;
        float by_weight = 0.f;
#pragma unroll
        for (i32 i = 2 * r; i < kSums; i += 4) {
            const float2 q = query_pair(queries, row, i, thread);
            by_weight = fmaf(q.x, sums[i], fmaf(q.y, sums[i + 1], by_weight));
            const i32 column = fragment_column(thread, i);
            if (stored && column < p.index_dim) {
                store_pair(p.d_index_q, p.d_index_q_fp32, to + column, factor * sums[i], factor * sums[i + 1]);
            }
        }
        by_weight = p.score_unit * quad_sum(by_weight);
        if (stored && thread % 4 == 0) {
            const i64 at = token * p.d_weights_stride_token_elems + head * p.d_weights_stride_head_elems;
            p.d_weights[at] = seen ? by_weight : 0.f;
        }
    }
}

MLA_DEVICE void take_pair(const LossParams& p, Storage& s, const Pair& pair, const Pairs& pairs, Tiles& tiles,
                          i32 warpgroup, i32 thread) {
    const u8* queries = s.q[pairs.stage][warpgroup][0];
    const KeyRange range = pair.range(warpgroup);
    const u16* row = p.gradient + row_offset(p, pair.first_token + warpgroup, 0);
    float sums[kSums];
#pragma unroll
    for (i32 i = 0; i < kSums; ++i) sums[i] = 0.f;
    u32 next[2 * kMmaSteps];
    const TileRange own = tiles_of<kTileKeys>(range.begin, range.end);
    if (own.begin < own.end) load_gradients(next, row + own.begin * kTileKeys, thread);
    pairs.wait_full(s.q_full);
#pragma unroll 1
    for (i32 tile = pair.tiles.begin; tile < pair.tiles.end; ++tile, tiles.advance()) {
        const i32 stage = tiles.stage;
        if (own.begin <= tile && tile < own.end) {
            u32 gradients[2 * kMmaSteps];
#pragma unroll
            for (i32 i = 0; i < 2 * kMmaSteps; ++i) gradients[i] = next[i];
            if (tile + 1 < own.end) load_gradients(next, row + (tile + 1) * kTileKeys, thread);
            tiles.wait_full(s.k_full);
            float a[64];
            multiply(s, queries, stage, a);
            add_keys(s, stage, a, gradients, sums);
        } else {
            tiles.wait_full(s.k_full);
        }
        release(s.k_empty[stage], thread);
    }
    store_heads(p, queries, pair, warpgroup, thread, sums);
    release(s.q_empty[pairs.stage], thread);
}

// The block's pairs.
template <class Take>
MLA_DEVICE void for_each_pair(const LossParams& p, Take take) {
    Pairs pairs;
    Tiles tiles;
#pragma unroll 1
    for (i32 at = ceil_div(p.num_tokens, kBlockTokens) - 1 - blockIdx.x; at >= 0; at -= gridDim.x, pairs.advance()) {
        take(pair_of(p, at), pairs, tiles);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_loss_sm90_queries(const __grid_constant__ LossParams p, const __grid_constant__ TensorMap q_map,
                                  const __grid_constant__ TensorMap k_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    start_block([&] { init_storage(s); }, q_map, k_map);

    const i32 warp = uniform_warp(), thread = threadIdx.x % kWarpgroupThreads;
    if (warp < kMathWarps) {
        setmaxnreg_inc<kRegsMath>();
        for_each_pair(p, [&](const Pair& pair, const Pairs& pairs, Tiles& tiles) {
            take_pair(p, s, pair, pairs, tiles, warp / kWarpgroupWarps, thread);
        });
    } else {
        setmaxnreg_dec<kRegsLoad>();
        if (warp == kMathWarps && elect_one()) {
            for_each_pair(p, [&](const Pair& pair, const Pairs& pairs, Tiles& tiles) {
                load_queries(p, s, q_map, pairs, pair);
                load_keys(s, k_map, tiles, pair);
            });
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
