// Targets and scores of the warm-up loss on Hopper, one row per token.
//
//   target[t, s] = sum_h exp(scale * q_th . k_s - lse_th),   score[t, s] = sum_j W_tj max(iq_tj . ik_s, 0)
//
// A block has a tile of 128 tokens and 128 keys, and processes the heads one after the other: the keys stay in shared
// memory, the queries of each head arrive in pieces of 64 columns, and the sum over heads stays in registers.
//
//   load     K | Q_0 Q_1 ...                | IK | IQ_0 IQ_1 ...
//   math_w       S = Q_h K^T, sum += exp ...  store    a = IQ_j IK^T, sum += W max(a, 0) ...  store
//
// Without heads of one kind (attention or index) the corresponding half is skipped. Where heads have keys of their own,
// a piece of them arrives with each piece of the queries; last columns that all heads share stay. Index queries and
// keys may be e4m3. The products are the same as in the indexer's logits; the sums over heads have another order.
//
// While one warpgroup computes exponentials, the other uses the tensor cores; with keys per head, where products are
// short, they take turns issuing the products of a head. Index keys overwrite the keys. Elements outside a token's
// range are computed and stored but never read.
//
// Grid: x = tiles of keys, y = tiles of the chunk's tokens: neighbours read the same queries at the same time. A tile
// that no token of its rows sees ends at once.
#include "common/limits.cuh"
#include "indexer/loss/sm90_pieces.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "tile/fragment.cuh"
#include "tile/product.cuh"
#include "tile/prologue.cuh"
#include "tile/ring.cuh"
#include "tile/sw128.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::loss {
// ---- Variant ---------------------------------------------------------------------------------------------------
// Pieces of 128 bytes: of a key that all heads share, and of an index key. Missing columns are zeros. 0: heads have
// separate keys, of any width.
constexpr i32 kPieces = MLA_PIECES;
constexpr i32 kIndexPieces = MLA_INDEX_PIECES;
using IndexElement = MLA_INDEX_DTYPE;
constexpr bool kKeysPerHead = kPieces == 0;

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
constexpr i32 kStages = kKeysPerHead ? 6 : kPieces > 4 ? 5 : 10;
constexpr i32 kStagePieces = kKeysPerHead ? 2 : 1;  // of queries, of keys
constexpr i32 kResidentPieces = kKeysPerHead ? kIndexPieces : kPieces;
static_assert(kIndexPieces <= kResidentPieces, "index keys take the place of the keys");
constexpr i32 kAccumulators = kTileKeys / 2;  // of a thread
constexpr i32 kIndexPieceElems = kSw128RowBytes / index_element_bytes(IndexElement{});

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier       arrives (count)   carries            waits   first phase
// k_full        load (1)          K, then IK         math    blocked
// k_empty       math warps (8)    -                  load    blocked: for IK after K only
// q_full[s]     load (1)          a piece, or both   math    blocked
// q_empty[s]    math warps (8)    -                  load    free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 k[kResidentPieces][kPieceBytes];
    u8 q[kStages][kStagePieces][kPieceBytes];
    MBarrier k_full, k_empty, q_full[kStages], q_empty[kStages];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(tile_tokens, kTileTokens);

// Turns for issuing the products of a head: one barrier per warpgroup.
enum NamedBarrier : i32 { Turn = 1 };

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

// Called by a whole warp: true if any token sees a key of the tile.
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

// ---- Pieces ----------------------------------------------------------------------------------------------------
struct Maps {
    MainMaps main;
    const TensorMap &index_q, &index_k;
};

// With keys per head: true if a piece of the keys stays while the heads pass.
MLA_DEVICE bool stays(const MainPieces& pieces, i32 piece) { return pieces.shared_last && pieces.is_last(piece); }

// True if the attention's keys occupy the memory of the index keys.
MLA_DEVICE bool keys_stay(const LossParams& p, const MainPieces& pieces) {
    return p.heads > 0 && (!kKeysPerHead || pieces.shared_last);
}

// ---- Load role -------------------------------------------------------------------------------------------------
// Keys that stay: whole ones of all heads, or their last columns.
MLA_DEVICE void load_kept_keys(const LossParams& p, Storage& s, const Maps& maps, const MainPieces& pieces,
                               const Tile& tile) {
    const i32 begin = kKeysPerHead ? pieces.first : 0, count = kKeysPerHead ? 1 : kPieces;
    if (!keys_stay(p, pieces)) return;
    mbarrier_arrive_expect_tx(s.k_full, count * kPieceBytes);
#pragma unroll 1
    for (i32 i = 0; i < count; ++i) {
        load_key_piece(p, maps.main, pieces, smem_addr(s.k[i]), s.k_full, begin + i, tile.first_key, 0, kEvictLast);
    }
}

// The queries of all heads, with their keys if they have their own.
MLA_DEVICE void load_heads(const LossParams& p, Storage& s, const Maps& maps, const MainPieces& pieces, Pieces& stages,
                           const Tile& tile) {
    const i32 count = kKeysPerHead ? pieces.all : kPieces;
#pragma unroll 1
    for (i32 head = 0; head < p.heads; ++head) {
        const i32 kv_head = kKeysPerHead ? head / p.kv_head_heads : 0;
#pragma unroll 1
        for (i32 piece = 0; piece < count; ++piece, stages.advance()) {
            const bool with_keys = kKeysPerHead && !stays(pieces, piece);
            MBarrier& full = s.q_full[stages.stage];
            stages.wait_empty(s.q_empty);
            mbarrier_arrive_expect_tx(full, with_keys ? 2 * kPieceBytes : kPieceBytes);
            load_query_piece(p, maps.main, pieces, smem_addr(s.q[stages.stage][0]), full, piece, tile.first_token, head,
                             kEvictNormal);
            if (with_keys) {
                load_key_piece(p, maps.main, pieces, smem_addr(s.q[stages.stage][kStagePieces - 1]), full, piece,
                               tile.first_key, kv_head, kEvictNormal);
            }
        }
    }
}

MLA_DEVICE void load_index_keys(Storage& s, const TensorMap& map, const Tile& tile) {
    mbarrier_arrive_expect_tx(s.k_full, kIndexPieces * kPieceBytes);
#pragma unroll 1
    for (i32 piece = 0; piece < kIndexPieces; ++piece) {
        cp_async_bulk_tensor_3d(smem_addr(s.k[piece]), map, s.k_full, piece * kIndexPieceElems, tile.first_key, 0,
                                kEvictLast);
    }
}

MLA_DEVICE void load_index_queries(const LossParams& p, Storage& s, const TensorMap& map, Pieces& stages,
                                   const Tile& tile) {
#pragma unroll 1
    for (i32 head = 0; head < p.index_heads; ++head) {
#pragma unroll 1
        for (i32 piece = 0; piece < kIndexPieces; ++piece, stages.advance()) {
            MBarrier& full = s.q_full[stages.stage];
            stages.wait_empty(s.q_empty);
            mbarrier_arrive_expect_tx(full, kPieceBytes);
            cp_async_bulk_tensor_3d(smem_addr(s.q[stages.stage][0]), map, full, piece * kIndexPieceElems,
                                    tile.first_token, head, kEvictNormal);
        }
    }
}

// Called by one thread.
MLA_DEVICE void run_load_role(const LossParams& p, Storage& s, const Maps& maps, const Tile& tile) {
    const MainPieces pieces(p);
    Pieces stages;
    if (p.heads > 0) {
        load_kept_keys(p, s, maps, pieces, tile);
        load_heads(p, s, maps, pieces, stages, tile);
    }
    if (p.index_heads == 0) return;
    if (keys_stay(p, pieces)) mbarrier_wait(s.k_empty, 0);
    load_index_keys(s, maps.index_k, tile);
    load_index_queries(p, s, maps.index_q, stages, tile);
}

// ---- Math role -------------------------------------------------------------------------------------------------
struct Math {
    i32 warpgroup, thread;
    i32 rows[kFragmentRows];    // in the tile
    bool there[kFragmentRows];  // false: no such token
};

// Adds the products of a piece of the warpgroup's tokens with one of all keys, and releases the stage before.
template <class Element>
MLA_DEVICE void multiply_piece(Element, Storage& s, Pieces& stages, const Math& math, const u8* keys, bool accumulate,
                               float (&d)[kAccumulators]) {
    SmemDesc q = k_major_desc(smem_addr(s.q[stages.stage][0]) + math.warpgroup * kSw128Bytes);
    SmemDesc k = k_major_desc(smem_addr(keys));
    opaque(q.bits), opaque(k.bits);
    wgmma_fence();
    multiply_abt<kSw128MmaSteps>(Element{}, d, q, k, accumulate);
    wgmma_commit_group();
    if (accumulate) {
        wgmma_wait_group<1>();
        release(s.q_empty[stages.before()], math.thread);
    }
    stages.advance();
}

MLA_DEVICE void finish_head(Storage& s, const Pieces& stages, const Math& math, float (&d)[kAccumulators]) {
    wgmma_wait_group<0>();
    release(s.q_empty[stages.before()], math.thread);
    pin(d);
}

// The products of one head of the warpgroup's tokens with all keys, which stay.
template <i32 kCount, class Element>
MLA_DEVICE void multiply(Element, Storage& s, Pieces& stages, const Math& math, float (&d)[kAccumulators]) {
    pin(d);
#pragma unroll
    for (i32 piece = 0; piece < kCount; ++piece) {
        stages.wait_full(s.q_full);
        multiply_piece(Element{}, s, stages, math, s.k[piece], piece > 0, d);
    }
    finish_head(s, stages, math, d);
}

// PERF(H200, 2026-11-24, 13 %)
// Turns of the warpgroups, the first warpgroup's first. They read the same pieces, and would come to do all together:
// products, then exponentials. Of a head all pieces must be there at once: the other warpgroup releases none before its
// turn.
struct Turns {
    bool taken;
    i32 heads;  // left

    MLA_DEVICE Turns(const LossParams& p, const Math& math, const MainPieces& pieces)
        : taken(kKeysPerHead && pieces.all <= kStages), heads(p.heads) {
        if (taken && math.warpgroup == 1) pass(math);
    }
    MLA_DEVICE void pass(const Math& math) const {
        bar_arrive(Turn + (math.warpgroup ^ 1), kMathWarpgroups * kWarpgroupThreads);
    }
    MLA_DEVICE void wait(const Math& math) const {
        if (taken) bar_sync(Turn + math.warpgroup, kMathWarpgroups * kWarpgroupThreads);
    }
    // Once a head's products are issued. Nobody waits for the second warpgroup's last turn to end.
    MLA_DEVICE void end(const Math& math) {
        --heads;
        if (taken && (math.warpgroup == 0 || heads > 0)) pass(math);
    }
};

// Multiplies with the head's own keys.
MLA_DEVICE void multiply_own(Storage& s, Pieces& stages, const Math& math, const MainPieces& pieces, Turns& turns,
                             float (&d)[kAccumulators]) {
    turns.wait(math);
    pin(d);
#pragma unroll 1
    for (i32 piece = 0; piece < pieces.all; ++piece) {
        stages.wait_full(s.q_full);
        multiply_piece(bfloat16{}, s, stages, math, stays(pieces, piece) ? s.k[0] : s.q[stages.stage][kStagePieces - 1],
                       piece > 0, d);
    }
    turns.end(math);
    finish_head(s, stages, math, d);
}

// The log-sum-exps of each head for the thread's rows; none for absent tokens.
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

// times(key) multiplies what belongs to a key.
template <class Times>
MLA_DEVICE void store_sums(float* to, i64 stride_elems, const Tile& tile, const Math& math,
                           const float (&sums)[kAccumulators], Times times) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        if (!math.there[r]) continue;
        float* row = to + math.rows[r] * stride_elems + tile.first_key;
#pragma unroll
        for (i32 i = 2 * r; i < kAccumulators; i += 4) {
            const i32 column = fragment_column(math.thread, i), key = tile.first_key + column;
            *reinterpret_cast<float2*>(row + column) = make_float2(sums[i] * times(key), sums[i + 1] * times(key + 1));
        }
    }
}

MLA_DEVICE void clear(float (&sums)[kAccumulators]) {
#pragma unroll
    for (i32 i = 0; i < kAccumulators; ++i) sums[i] = 0.f;
}

MLA_DEVICE void make_targets(const LossParams& p, Storage& s, Pieces& stages, const MainPieces& pieces,
                             const Tile& tile, const Math& math) {
    const RowLses lses(p, tile, math);
    const float scale_log2 = p.scale * kLog2E;
    Turns turns(p, math, pieces);
    float d[kAccumulators], sums[kAccumulators];
    clear(sums);
    if (keys_stay(p, pieces)) mbarrier_wait(s.k_full, 0);
#pragma unroll 1
    for (i32 head = 0; head < p.heads; ++head) {
        float lse[kFragmentRows] = {lses.load(0, head), lses.load(1, head)};
        if constexpr (kKeysPerHead) {
            multiply_own(s, stages, math, pieces, turns, d);
        } else {
            multiply<kPieces>(bfloat16{}, s, stages, math, d);
        }
        lse[0] = minus_lse2(lse[0]), lse[1] = minus_lse2(lse[1]);
#pragma unroll
        for (i32 i = 0; i < kAccumulators; ++i) {
            sums[i] += ex2_approx(fmaf(d[i], scale_log2, lse[fragment_half(i)]));
        }
    }
    release(s.k_empty, math.thread);
    store_sums(p.target + target_offset(p, tile.first_token, 0), p.target_stride_elems, tile, math, sums,
               [](i32) { return 1.f; });
}

// An absent token has the bits of 0.
MLA_DEVICE u32 row_weight_bits(const LossParams& p, const Tile& tile, const Math& math, i32 r, i32 head) {
    return math.there[r] ? weight_bits(p, tile.first_token + math.rows[r], head) : 0;
}

MLA_DEVICE void make_scores(const LossParams& p, Storage& s, Pieces& stages, const MainPieces& pieces, const Tile& tile,
                            const Math& math) {
    float d[kAccumulators], sums[kAccumulators];
    clear(sums);
    mbarrier_wait(s.k_full, keys_stay(p, pieces) ? 1 : 0);
#pragma unroll 1
    for (i32 head = 0; head < p.index_heads; ++head) {
        const u32 bits[kFragmentRows] = {row_weight_bits(p, tile, math, 0, head),
                                         row_weight_bits(p, tile, math, 1, head)};
        multiply<kIndexPieces>(IndexElement{}, s, stages, math, d);
        const float weight[kFragmentRows] = {weight_of_bits(p, bits[0]), weight_of_bits(p, bits[1])};
#pragma unroll
        for (i32 i = 0; i < kAccumulators; ++i) {
            sums[i] = fmaf(fmaxf(d[i], 0.f), weight[fragment_half(i)], sums[i]);
        }
    }
    store_sums(p.scores + row_offset(p, tile.first_token, 0), p.row_stride_elems, tile, math, sums,
               [&](i32 key) { return key < p.s_kv ? key_scale(p, key) : 0.f; });
}

MLA_DEVICE void run_math_role(const LossParams& p, Storage& s, const Tile& tile, i32 warpgroup, i32 thread) {
    Math math{warpgroup, thread};
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        math.rows[r] = warpgroup * kSw128Rows + fragment_row(thread) + 8 * r;
        math.there[r] = math.rows[r] < tile.tokens;
    }
    const MainPieces pieces(p);
    Pieces stages;
    if (p.heads > 0) make_targets(p, s, stages, pieces, tile, math);
    if (p.index_heads > 0) make_scores(p, s, stages, pieces, tile, math);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_loss_sm90_scores(const __grid_constant__ LossParams p, const __grid_constant__ TensorMap q_map,
                                 const __grid_constant__ TensorMap q_rope_map, const __grid_constant__ TensorMap k_map,
                                 const __grid_constant__ TensorMap k_rope_map,
                                 const __grid_constant__ TensorMap index_q_map,
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
            const Maps maps{{q_map, q_rope_map, k_map, k_rope_map}, index_q_map, index_k_map};
            if (warp == kMathWarps && elect_one()) run_load_role(p, s, maps, tile);
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
