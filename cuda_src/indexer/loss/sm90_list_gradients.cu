// The gradients of the sparse stage's loss on Hopper.
//
//   a = IK IQ_t^T over the list,   M = [a > 0] G_t
//   d_index_q = W dq',  d_weights = score_unit * iq . dq'  with  dq' = M^T IK;   sums[row] += (M W) IQ_t
//
// A block has a token and 64 of its index heads, which are the columns of the first product; the keys of its list are
// the rows, 64 of a tile per warpgroup. M goes through shared memory, as the transposed operand of dq', which each
// warpgroup sums over its keys; M W goes from registers to registers. What a key gets is added to memory at once.
//
//   gather   IQ | IK_0 | IK_1 ...
//   math_w        a | M | dq' += M^T IK, dk = (M W) IQ | adds dk | a ...     | sum of both dq', stores
//
// Keys are finite copies: a list may have a key with NaN only where its token has no gradient, and 0 * NaN were NaN.
//
// Grid: x = tokens of the chunk, y = groups of 64 heads.
#include "common/limits.cuh"
#include "indexer/loss/sm90_lists.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/reduce.cuh"
#include "tile/binned_sum.cuh"
#include "tile/elements.cuh"
#include "tile/fragment.cuh"
#include "tile/product.cuh"
#include "tile/prologue.cuh"
#include "tile/sw128.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::loss {
// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr i32 kIndexPieces = MLA_INDEX_PIECES;  // of 64 columns; missing columns are zeros

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps    regs   does
// math_w   0..7     208    keys 64 w .. 64 w + 63 of a tile
// gather   8..11    88     all copies
constexpr i32 kMathWarpgroups = 2;
constexpr i32 kThreads = (kMathWarpgroups + 1) * kWarpgroupThreads;
constexpr i32 kMathWarps = kMathWarpgroups * kWarpgroupWarps;
constexpr i32 kRegsMath = 208, kRegsGather = 88;
static_assert(kMathWarpgroups * kRegsMath + kRegsGather <= kRegsOfLane, "registers of the block");

constexpr i32 kBlockHeads = kSw128Rows, kStages = 4;
constexpr i32 kProducts = kBlockHeads / 2;               // of a thread
constexpr i32 kMmaSteps = kBlockHeads / kMmaK;           // of products that run along 64 heads, or keys
constexpr i32 kSums = kIndexPieces * kSw128Columns / 2;  // of a thread
constexpr i32 kMathBarrier = 1;                          // all math warps; the warpgroups' own barriers follow

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier       arrives (count)     carries    waits    first phase
// q_full        gather (1)          IQ         math     blocked
// k_full[s]     gather (129)        a tile     math     blocked
// k_empty[s]    math warps (8)      -          gather   free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kIndexPieces][kSw128Bytes];
    u8 k[kStages][kIndexPieces][kListPieceBytes];
    u8 m[kMathWarpgroups][2][kSw128Bytes];  // of even and odd tiles: other warps may still read the last one
    alignas(16) float weights[kBlockHeads];
    float sums[kSums][kWarpgroupThreads];  // of the second warpgroup
    MBarrier q_full, k_full[kStages], k_empty[kStages];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_heads, kBlockHeads);

MLA_DEVICE void init_storage(Storage& s) {
    mbarrier_init(s.q_full, 1);
    init_ring(s.k_full, s.k_empty, kGatherArrivals, kMathWarps);
    fence_mbarrier_init();
}

using Tiles = RingPosition<kStages>;

// ---- Gather role -----------------------------------------------------------------------------------------------
MLA_DEVICE void run_gather_role(const LossParams& p, Storage& s, const TensorMap& q_map, const KeyList& list,
                                i32 first_head, i32 thread) {
    if (thread == 0) {
        mbarrier_arrive_expect_tx(s.q_full, sizeof(s.q));
#pragma unroll 1
        for (i32 piece = 0; piece < kIndexPieces; ++piece) {
            cp_async_bulk_tensor_3d(smem_addr(s.q[piece]), q_map, s.q_full, piece * kSw128Columns,
                                    list.token - p.first_fetched, first_head, kEvictFirst);
        }
    }
    Tiles tiles;
#pragma unroll 1
    for (i32 tile = 0; tile < list.tiles(); ++tile, tiles.advance()) {
        const TileSources sources = tile_sources(list, p.finite_keys, p.index_dim, p.s_kv, tile, thread);
        tiles.wait_empty(s.k_empty);
#pragma unroll
        for (i32 piece = 0; piece < kIndexPieces; ++piece) {
            gather_piece(smem_addr(s.k[tiles.stage][piece]), sources, piece, p.index_dim, thread);
        }
        arrive_when_gathered(s.k_full[tiles.stage], thread);
    }
    cp_async_wait_all();
}

// ---- Products --------------------------------------------------------------------------------------------------
// The products of the warpgroup's keys with the heads.
MLA_DEVICE void multiply(Storage& s, i32 stage, i32 warpgroup, float (&a)[kProducts]) {
    pin(a);
    SmemDesc k = k_major_desc(smem_addr(s.k[stage]) + warpgroup * kSw128Bytes), q = k_major_desc(smem_addr(s.q));
    opaque(k.bits), opaque(q.bits);
    wgmma_fence();
    multiply_abt<kIndexPieces * kSw128MmaSteps, kListPieceBytes, kSw128Bytes>(bfloat16{}, a, k, q);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(a);
}

// dq' += M^T IK, of the warpgroup's keys; dk = (M W) IQ.
MLA_DEVICE void multiply_gradients(Storage& s, i32 stage, i32 warpgroup, const u8* m_tile,
                                   const u32 (&weighted)[kMmaSteps][4], float (&sums)[kSums], float (&dk)[kSums]) {
    pin(sums);
    pin(dk);
    SmemDesc m = mn_major_desc(smem_addr(m_tile));
    SmemDesc k = make_desc(smem_addr(s.k[stage]) + warpgroup * kSw128Bytes, kListPieceBytes, kSwizzleAtomBytes);
    SmemDesc q = mn_major_desc(smem_addr(s.q));
    opaque(m.bits), opaque(k.bits), opaque(q.bits);
    wgmma_fence();
    multiply_atb<kMmaSteps>(bfloat16{}, sums, m, k, true);
    multiply_ab(bfloat16{}, dk, weighted, q);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(sums);
    pin(dk);
}

// ---- Math role -------------------------------------------------------------------------------------------------
struct Math {
    i32 warpgroup, thread;
};

// The numbers of the thread's two keys; nothing past the end of the list.
struct KeyNumbers {
    i32 row[kFragmentRows];
    float gradient[kFragmentRows];
    float scaled[kFragmentRows];  // the same times the scales of the keys
};

MLA_DEVICE KeyNumbers key_numbers(const LossParams& p, const KeyList& list, const Math& math, i32 tile) {
    KeyNumbers keys;
    const i32 first = tile * kListTileKeys + math.warpgroup * kSw128Rows + fragment_row(math.thread);
    const float* gradients = p.scores + row_offset(p, list.token, 0);
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const bool there = first + 8 * r < list.count;
        keys.row[r] = there ? list.rows[first + 8 * r] : -1;
        keys.gradient[r] = there ? gradients[first + 8 * r] : 0.f;
        keys.scaled[r] = keys.gradient[r] == 0.f ? 0.f : keys.gradient[r] * key_scale(p, keys.row[r]);
    }
    return keys;
}

// M to shared memory, M W to registers.
MLA_DEVICE void make_operands(const Storage& s, u8* m_tile, const Math& math, const KeyNumbers& keys,
                              const float (&a)[kProducts], u32 (&weighted)[kMmaSteps][4]) {
    u32 m[kMmaSteps][4];
#pragma unroll
    for (i32 block = 0; block < 2 * kMmaSteps; ++block) {  // of eight heads
        const float2 weights = *reinterpret_cast<const float2*>(s.weights + 8 * block + fragment_column(math.thread));
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            const i32 at = 4 * block + 2 * r;
            const float low = a[at] > 0.f ? keys.gradient[r] : 0.f, high = a[at + 1] > 0.f ? keys.gradient[r] : 0.f;
            m[block / 2][block % 2 * 2 + r] =
                cvt_x2(bfloat16{}, a[at] > 0.f ? keys.scaled[r] : 0.f, a[at + 1] > 0.f ? keys.scaled[r] : 0.f);
            weighted[block / 2][block % 2 * 2 + r] = cvt_x2(bfloat16{}, low * weights.x, high * weights.y);
        }
    }
    store_sw128(m_tile, m, math.thread);
    bar_sync(kMathBarrier + 1 + math.warpgroup, kWarpgroupThreads);
}

// Neighbouring lanes of a quad exchange pairs, so that each has four columns next to each other.
MLA_DEVICE void four_columns(const float* low, const float* high, bool odd, float (&x)[4]) {
    const float received0 = __shfl_xor_sync(kFullWarp, odd ? low[0] : high[0], 1);
    const float received1 = __shfl_xor_sync(kFullWarp, odd ? low[1] : high[1], 1);
    x[0] = odd ? received0 : low[0], x[1] = odd ? received1 : low[1];
    x[2] = odd ? high[0] : received0, x[3] = odd ? high[1] : received1;
}

// Adds dk to the rows of the keys, or of a deterministic call to bins.
MLA_DEVICE void add_to_keys(const LossParams& p, const Math& math, const KeyNumbers& keys, const float (&dk)[kSums]) {
    const bool odd = math.thread & 1, binned = p.extractors != nullptr;
    const i64 bin_elems = (i64)p.s_kv * p.index_dim;
    const i32 bound = binned ? __float_as_int(p.extractors[p.s_kv]) : 0;
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const bool there = keys.row[r] >= 0;
        float* row = p.key_sums + (there ? (i64)keys.row[r] * p.index_dim : 0);
        const i32 extractor = binned && there ? __float_as_int(p.extractors[keys.row[r]]) : 0;
#pragma unroll
        for (i32 i = 2 * r; i < kSums; i += 8) {
            float x[4];
            four_columns(dk + i, dk + i + 4, odd, x);
            const i32 column = 8 * (i / 4 + odd) + math.thread % 4 / 2 * 4;
            float* to = row + column;
            if (binned) to += Bins{bound, extractor}.round(x) * bin_elems;
            red_add_v4(to, x[0], x[1], x[2], x[3], there && column < p.index_dim);
        }
    }
}

MLA_DEVICE void run_tiles(const LossParams& p, Storage& s, const KeyList& list, const Math& math,
                          float (&sums)[kSums]) {
    Tiles tiles;
#pragma unroll 1
    for (i32 tile = 0; tile < list.tiles(); ++tile, tiles.advance()) {
        const KeyNumbers keys = key_numbers(p, list, math, tile);
        float a[kProducts], dk[kSums];
        u32 weighted[kMmaSteps][4];
        tiles.wait_full(s.k_full);
        fence_proxy_async();
        multiply(s, tiles.stage, math.warpgroup, a);
        u8* m_tile = s.m[math.warpgroup][tile % 2];
        make_operands(s, m_tile, math, keys, a, weighted);
        multiply_gradients(s, tiles.stage, math.warpgroup, m_tile, weighted, sums, dk);
        release(s.k_empty[tiles.stage], math.thread);
        add_to_keys(p, math, keys, dk);
    }
}

// ---- Stores ----------------------------------------------------------------------------------------------------
// A pair of the query's elements, which the thread has the sums of.
MLA_DEVICE float2 query_pair(const Storage& s, i32 row, i32 i, i32 thread) {
    const i32 chunk = i / 4;
    const u32 at = sw128_offset(row, chunk % kSw128Chunks) + thread % 4 * 4;
    return unpack<bfloat16>(*reinterpret_cast<const u32*>(s.q[chunk / kSw128Chunks] + at));
}

// Called by the first warpgroup, with the sums of both. A token without keys has no gradient, whatever its queries
// hold.
MLA_DEVICE void store_heads(const LossParams& p, const Storage& s, const KeyList& list, i32 first_head, i32 thread,
                            const float (&sums)[kSums]) {
    const bool seen = list.count > 0;
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 row = fragment_row(thread) + 8 * r, head = first_head + row;
        const bool stored = head < p.index_heads;
        const float factor = stored && seen ? query_factor(p, list.token, head) : 0.f;
        const i64 to = list.token * p.d_index_q_stride_token_elems + head * p.d_index_q_stride_head_elems;
        float by_weight = 0.f;
#pragma unroll
        for (i32 i = 2 * r; i < kSums; i += 4) {
            const float2 q = query_pair(s, row, i, thread);
            const float low = sums[i] + s.sums[i][thread], high = sums[i + 1] + s.sums[i + 1][thread];
            by_weight = fmaf(q.x, low, fmaf(q.y, high, by_weight));
            const i32 column = fragment_column(thread, i);
            if (stored && column < p.index_dim) {
                store_gradient(p.d_index_q, p.d_index_q_fp32, to + column, factor * low);
                store_gradient(p.d_index_q, p.d_index_q_fp32, to + column + 1, factor * high);
            }
        }
        by_weight = p.score_unit * quad_sum(by_weight);
        if (stored && thread % 4 == 0) {
            const i64 at = list.token * p.d_weights_stride_token_elems + head * p.d_weights_stride_head_elems;
            p.d_weights[at] = seen ? by_weight : 0.f;
        }
    }
}

MLA_DEVICE void run_math_role(const LossParams& p, Storage& s, const KeyList& list, i32 first_head, i32 warpgroup,
                              i32 thread) {
    constexpr i32 kMathThreads = kMathWarpgroups * kWarpgroupThreads;
    if (warpgroup == 0 && thread < kBlockHeads) {
        const i32 head = first_head + thread;
        s.weights[thread] = head < p.index_heads ? index_weight(p, list.token, head) : 0.f;
    }
    bar_sync(kMathBarrier, kMathThreads);
    float sums[kSums];
#pragma unroll
    for (i32 i = 0; i < kSums; ++i) sums[i] = 0.f;
    mbarrier_wait(s.q_full, 0);
    run_tiles(p, s, list, Math{warpgroup, thread}, sums);
    if (warpgroup == 1) {
#pragma unroll
        for (i32 i = 0; i < kSums; ++i) s.sums[i][thread] = sums[i];
    }
    bar_sync(kMathBarrier, kMathThreads);
    if (warpgroup == 0) store_heads(p, s, list, first_head, thread, sums);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_loss_sm90_list_gradients(const __grid_constant__ LossParams p,
                                         const __grid_constant__ TensorMap q_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    start_block([&] { init_storage(s); }, q_map);

    const i32 warp = uniform_warp(), thread = threadIdx.x % kWarpgroupThreads;
    const KeyList list = key_list(p, p.first_token + blockIdx.x);
    const i32 first_head = blockIdx.y * kBlockHeads;
    if (warp < kMathWarps) {
        setmaxnreg_inc<kRegsMath>();
        run_math_role(p, s, list, first_head, warp / kWarpgroupWarps, thread);
    } else {
        setmaxnreg_dec<kRegsGather>();
        run_gather_role(p, s, q_map, list, first_head, thread);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
