// Targets and scores of the warm-up loss on Hopper, one row per token.
//
//   target[t, s] = sum_h exp(scale * q_th . k_s - lse_th),   score[t, s] = sum_j W_tj max(iq_tj . ik_s, 0)
//
// A block has a tile of 128 tokens and 128 keys, and takes the heads one after the other: the keys stay in shared
// memory, the queries of each head come in pieces of 64 columns, and the sum over heads stays in registers.
//
//   load     K | Q_0 Q_1 ...                | IK | IQ_0 IQ_1 ...
//   math_w       S = Q_h K^T, sum += exp ...  store    a = IQ_j IK^T, sum += W max(a, 0) ...  store
//
// Without heads of one kind its half is left out.
//
// While one warpgroup has its exponentials, the other has the tensor cores. Index keys take the place of the keys. What
// lies outside a token's range is computed, stored and never read.
//
// Grid: x = tiles of keys, y = tiles of the chunk's tokens: neighbours read the same queries at the same time. A tile
// that no token of its rows sees ends at once.
#include "common/limits.cuh"
#include "indexer/loss/params.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "tile/fragment.cuh"
#include "tile/product.cuh"
#include "tile/prologue.cuh"
#include "tile/ring.cuh"
#include "tile/sw128.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::loss {
// ---- Variant ---------------------------------------------------------------------------------------------------
// Pieces of 64 columns: of a head, and of an index head. What a row lacks is zeros.
constexpr i32 kPieces = MLA_PIECES;
constexpr i32 kIndexPieces = MLA_INDEX_PIECES;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps   regs   does
// math_0   0..3    240    tokens 0 .. 63 of the tile
// math_1   4..7    240    tokens 64 .. 127
// load     8       24     all copies
constexpr i32 kMathWarpgroups = 2;
constexpr i32 kThreads = (kMathWarpgroups + 1) * kWarpgroupThreads;
constexpr i32 kMathWarps = kMathWarpgroups * kWarpgroupWarps;
constexpr i32 kRegsMath = 240, kRegsLoad = 24;
static_assert(kMathWarpgroups * kRegsMath + kRegsLoad <= kRegsOfLane, "registers of the block");

constexpr i32 kTileTokens = kMathWarpgroups * kSw128Rows;
constexpr i32 kTileKeys = 128;
constexpr u32 kPieceBytes = 128 * kSw128RowBytes;  // of 128 tokens, or keys
constexpr i32 kStages = kPieces > 4 ? 5 : 10;
static_assert(kIndexPieces <= kPieces, "index keys take the place of the keys");
constexpr i32 kAccumulators = kTileKeys / 2;  // of a thread

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier       arrives (count)   carries       waits   first phase
// k_full        load (1)          K, then IK    math    blocked
// k_empty       math warps (8)    -             load    blocked: for IK after K only
// q_full[s]     load (1)          kPieceBytes   math    blocked
// q_empty[s]    math warps (8)    -             load    free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 k[kPieces][kPieceBytes];
    u8 q[kStages][kPieceBytes];
    MBarrier k_full, k_empty, q_full[kStages], q_empty[kStages];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(tile_tokens, kTileTokens);

MLA_DEVICE void init_storage(Storage& s) {
    mbarrier_init(s.k_full, 1);
    mbarrier_init(s.k_empty, kMathWarps);
    init_ring(s.q_full, s.q_empty, 1, kMathWarps);
    fence_mbarrier_init();
}

using Pieces = RingPosition<kStages>;

// ---- The tile --------------------------------------------------------------------------------------------------
struct Tile {
    i32 first_token, tokens, first_key;
};

MLA_DEVICE Tile tile_of(const LossParams& p) {
    const i32 first = blockIdx.y * kTileTokens;
    return Tile{p.first_token + first, min(kTileTokens, p.num_tokens - first), (i32)blockIdx.x * kTileKeys};
}

// By a whole warp: whether any token sees a key of the tile.
MLA_DEVICE bool is_seen(const LossParams& p, const Tile& tile, i32 lane) {
    bool seen = false;
#pragma unroll
    for (i32 i = lane; i < kTileTokens; i += kWarpThreads) {
        if (i >= tile.tokens) continue;
        const KeyRange range = p.ranges[tile.first_token + i];
        seen |= range.begin < tile.first_key + kTileKeys && tile.first_key < range.end;
    }
    return __any_sync(kFullWarp, seen);
}

// ---- Load role -------------------------------------------------------------------------------------------------
template <i32 kCount>
MLA_DEVICE void load_keys(Storage& s, const TensorMap& map, const Tile& tile) {
    mbarrier_arrive_expect_tx(s.k_full, kCount * kPieceBytes);
#pragma unroll 1
    for (i32 piece = 0; piece < kCount; ++piece) {
        cp_async_bulk_tensor_3d(smem_addr(s.k[piece]), map, s.k_full, piece * kSw128Columns, tile.first_key, 0,
                                kEvictLast);
    }
}

template <i32 kCount>
MLA_DEVICE void load_queries(Storage& s, const TensorMap& map, Pieces& pieces, const Tile& tile, i32 heads) {
#pragma unroll 1
    for (i32 head = 0; head < heads; ++head) {
#pragma unroll 1
        for (i32 piece = 0; piece < kCount; ++piece, pieces.advance()) {
            MBarrier& full = s.q_full[pieces.stage];
            pieces.wait_empty(s.q_empty);
            mbarrier_arrive_expect_tx(full, kPieceBytes);
            cp_async_bulk_tensor_3d(smem_addr(s.q[pieces.stage]), map, full, piece * kSw128Columns, tile.first_token,
                                    head, kEvictNormal);
        }
    }
}

// By one thread.
MLA_DEVICE void run_load_role(const LossParams& p, Storage& s, const TensorMap& q_map, const TensorMap& k_map,
                              const TensorMap& index_q_map, const TensorMap& index_k_map, const Tile& tile) {
    Pieces pieces;
    if (p.heads > 0) {
        load_keys<kPieces>(s, k_map, tile);
        load_queries<kPieces>(s, q_map, pieces, tile, p.heads);
    }
    if (p.index_heads == 0) return;
    if (p.heads > 0) mbarrier_wait(s.k_empty, 0);
    load_keys<kIndexPieces>(s, index_k_map, tile);
    load_queries<kIndexPieces>(s, index_q_map, pieces, tile, p.index_heads);
}

// ---- Math role -------------------------------------------------------------------------------------------------
struct Math {
    i32 warpgroup, thread;
    i32 rows[kFragmentRows];    // in the tile
    bool there[kFragmentRows];  // whether there are such tokens
};

// The products of one head of the warpgroup's tokens with all keys.
template <i32 kCount>
MLA_DEVICE void multiply(Storage& s, Pieces& pieces, const Math& math, float (&d)[kAccumulators]) {
    pin(d);
#pragma unroll
    for (i32 piece = 0; piece < kCount; ++piece) {
        pieces.wait_full(s.q_full);
        SmemDesc q = k_major_desc(smem_addr(s.q[pieces.stage]) + math.warpgroup * kSw128Bytes);
        SmemDesc k = k_major_desc(smem_addr(s.k[piece]));
        opaque(q.bits), opaque(k.bits);
        wgmma_fence();
        multiply_abt<kSw128MmaSteps>(bfloat16{}, d, q, k, piece > 0);
        wgmma_commit_group();
        if (piece > 0) {
            wgmma_wait_group<1>();
            release(s.q_empty[pieces.before()], math.thread);
        }
        pieces.advance();
    }
    wgmma_wait_group<0>();
    release(s.q_empty[pieces.before()], math.thread);
    pin(d);
}

// The log-sum-exps of each head for the thread's rows; none for tokens that are not there.
struct RowLses {
    const float* row[kFragmentRows];
    i64 stride_elems;

    MLA_DEVICE RowLses(const LossParams& p, const Tile& tile, const Math& math)
        : stride_elems(p.lse_stride_head_elems) {
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            const i64 token = tile.first_token + math.rows[r];
            row[r] = math.there[r] ? p.lse + token * p.lse_stride_token_elems : nullptr;
        }
    }
    MLA_DEVICE float load(i32 r, i32 head) const {
        return row[r] == nullptr ? negative_infinity() : row[r][head * stride_elems];
    }
};

MLA_DEVICE float minus_lse2(float lse) {
    return fabsf(lse) <= kMaxFloat ? -lse * kLog2E : negative_infinity();  // no part: exp is 0
}

MLA_DEVICE void store_sums(float* to, i64 stride_elems, const Tile& tile, const Math& math,
                           const float (&sums)[kAccumulators]) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        if (!math.there[r]) continue;
        float* row = to + math.rows[r] * stride_elems + tile.first_key;
#pragma unroll
        for (i32 i = 2 * r; i < kAccumulators; i += 4) {
            *reinterpret_cast<float2*>(row + fragment_column(math.thread, i)) = make_float2(sums[i], sums[i + 1]);
        }
    }
}

MLA_DEVICE void clear(float (&sums)[kAccumulators]) {
#pragma unroll
    for (i32 i = 0; i < kAccumulators; ++i) sums[i] = 0.f;
}

MLA_DEVICE void make_targets(const LossParams& p, Storage& s, Pieces& pieces, const Tile& tile, const Math& math) {
    const RowLses lses(p, tile, math);
    const float scale_log2 = p.scale * kLog2E;
    float d[kAccumulators], sums[kAccumulators];
    clear(sums);
    mbarrier_wait(s.k_full, 0);
#pragma unroll 1
    for (i32 head = 0; head < p.heads; ++head) {
        float lse[kFragmentRows] = {lses.load(0, head), lses.load(1, head)};
        multiply<kPieces>(s, pieces, math, d);
        lse[0] = minus_lse2(lse[0]), lse[1] = minus_lse2(lse[1]);
#pragma unroll
        for (i32 i = 0; i < kAccumulators; ++i) {
            sums[i] += ex2_approx(fmaf(d[i], scale_log2, lse[fragment_half(i)]));
        }
    }
    release(s.k_empty, math.thread);
    store_sums(p.target + target_offset(p, tile.first_token, 0), p.target_stride_elems, tile, math, sums);
}

// A token that is not there has the bits of 0.
MLA_DEVICE u32 row_weight_bits(const LossParams& p, const Tile& tile, const Math& math, i32 r, i32 head) {
    return math.there[r] ? weight_bits(p, tile.first_token + math.rows[r], head) : 0;
}

MLA_DEVICE void make_scores(const LossParams& p, Storage& s, Pieces& pieces, const Tile& tile, const Math& math) {
    float d[kAccumulators], sums[kAccumulators];
    clear(sums);
    mbarrier_wait(s.k_full, p.heads > 0 ? 1 : 0);
#pragma unroll 1
    for (i32 head = 0; head < p.index_heads; ++head) {
        const u32 bits[kFragmentRows] = {row_weight_bits(p, tile, math, 0, head),
                                         row_weight_bits(p, tile, math, 1, head)};
        multiply<kIndexPieces>(s, pieces, math, d);
        const float weight[kFragmentRows] = {weight_of_bits(p, bits[0]), weight_of_bits(p, bits[1])};
#pragma unroll
        for (i32 i = 0; i < kAccumulators; ++i) {
            sums[i] = fmaf(fmaxf(d[i], 0.f), weight[fragment_half(i)], sums[i]);
        }
    }
    store_sums(p.scores + row_offset(p, tile.first_token, 0), p.row_stride_elems, tile, math, sums);
}

MLA_DEVICE void run_math_role(const LossParams& p, Storage& s, const Tile& tile, i32 warpgroup, i32 thread) {
    Math math{warpgroup, thread};
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        math.rows[r] = warpgroup * kSw128Rows + fragment_row(thread) + 8 * r;
        math.there[r] = math.rows[r] < tile.tokens;
    }
    Pieces pieces;
    if (p.heads > 0) make_targets(p, s, pieces, tile, math);
    if (p.index_heads > 0) make_scores(p, s, pieces, tile, math);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_loss_sm90_scores(const __grid_constant__ LossParams p, const __grid_constant__ TensorMap q_map,
                                 const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap index_q_map,
                                 const __grid_constant__ TensorMap index_k_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    start_block([&] { init_storage(s); }, q_map, k_map);

    const i32 warp = uniform_warp(), thread = threadIdx.x % kWarpgroupThreads;
    const Tile tile = tile_of(p);
    if (is_seen(p, tile, thread % kWarpThreads)) {
        if (warp < kMathWarps) {
            setmaxnreg_inc<kRegsMath>();
            run_math_role(p, s, tile, warp / kWarpgroupWarps, thread);
        } else {
            setmaxnreg_dec<kRegsLoad>();
            if (warp == kMathWarps && elect_one()) run_load_role(p, s, q_map, k_map, index_q_map, index_k_map, tile);
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
