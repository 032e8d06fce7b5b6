// Log-sum-exps of the main attention on Hopper, where the caller has none for the indexer's loss.
//
//   lse[t, h] = log(sum_s exp(scale * q_th . k_s)), over the keys that token t sees
//
// A block has 128 tokens of one head.
//
//   load     Q | K_0 K_1 ...
//   math_w       S = Q K_0^T, max, sum; S = Q K_1^T, ...   merge, store
//
// While one warpgroup computes exponentials, the other uses the tensor cores. Same loop as `sm90_scores.cu`, with
// queries and keys exchanged.
//
// Grid: x = heads, y = tiles of tokens, the last first: neighbours read the same keys at the same time, and under a
// causal limit the longest rows are the first.
#include "common/limits.cuh"
#include "indexer/loss/sm90_lse.cuh"
#include "indexer/loss/sm90_pieces.cuh"
#include "ptx/control.cuh"
#include "tile/prologue.cuh"

namespace mla::indexer::loss {
// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr i32 kPieces = MLA_PIECES;  // of 64 columns; missing columns are zeros

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
constexpr i32 kTileKeys = kLseTileKeys;
constexpr u32 kPieceBytes = 128 * kSw128RowBytes;  // of 128 tokens, or keys
constexpr i32 kStages = kPieces > 4 ? 5 : 10;

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier       arrives (count)   carries               waits   first phase
// q_full        load (1)          kPieces pieces        math    blocked
// k_full[s]     load (1)          kPieceBytes           math    blocked
// k_empty[s]    math warps (8)    -                     load    free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kPieces][kPieceBytes];
    u8 k[kStages][kPieceBytes];
    MBarrier q_full, k_full[kStages], k_empty[kStages];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(tile_tokens, kTileTokens);

MLA_DEVICE void init_storage(Storage& s) {
    mbarrier_init(s.q_full, 1);
    init_ring(s.k_full, s.k_empty, 1, kMathWarps);
    fence_mbarrier_init();
}

using Pieces = RingPosition<kStages>;

// ---- The tile --------------------------------------------------------------------------------------------------
struct Tile {
    i32 head, first_token, tokens;
    TileRange keys;  // in tiles
};

// Called by a whole warp.
MLA_DEVICE Tile tile_of(const LossParams& p, i32 lane) {
    const i32 first = (gridDim.y - 1 - blockIdx.y) * kTileTokens;
    Tile tile{(i32)blockIdx.x, first, min(kTileTokens, p.s_q - first), {}};
    KeyRange all{p.s_kv, 0};
#pragma unroll
    for (i32 i = lane; i < kTileTokens; i += kWarpThreads) {
        if (i >= tile.tokens) continue;
        const KeyRange range = p.ranges[first + i];
        if (range.begin == range.end) continue;
        all = KeyRange{min(all.begin, range.begin), max(all.end, range.end)};
    }
    tile.keys = warp_tiles<kTileKeys>(all);
    return tile;
}

// ---- Load role -------------------------------------------------------------------------------------------------
// Called by one thread.
MLA_DEVICE void run_load_role(const LossParams& p, Storage& s, const MainMaps& maps, const Tile& tile) {
    const MainPieces main(p);
    const i32 kv_head = tile.head / p.kv_head_heads;
    mbarrier_arrive_expect_tx(s.q_full, sizeof(s.q));
#pragma unroll 1
    for (i32 piece = 0; piece < kPieces; ++piece) {
        load_query_piece(p, maps, main, smem_addr(s.q[piece]), s.q_full, piece, tile.first_token, tile.head,
                         kEvictFirst);
    }
    Pieces pieces;
#pragma unroll 1
    for (i32 keys = tile.keys.begin; keys < tile.keys.end; ++keys) {
#pragma unroll 1
        for (i32 piece = 0; piece < kPieces; ++piece, pieces.advance()) {
            MBarrier& full = s.k_full[pieces.stage];
            pieces.wait_empty(s.k_empty);
            mbarrier_arrive_expect_tx(full, kPieceBytes);
            load_key_piece(p, maps, main, smem_addr(s.k[pieces.stage]), full, piece, keys * kTileKeys, kv_head,
                           kEvictLast);
        }
    }
}

// ---- Math role -------------------------------------------------------------------------------------------------
struct Math {
    i32 warpgroup, thread;
    i32 rows[kFragmentRows];         // in the tile
    KeyRange ranges[kFragmentRows];  // empty for absent tokens
};

// Scores become scores in base 2, or -inf for keys that a row does not see.
MLA_DEVICE void scale_and_mask(const Math& math, float scale_log2, i32 first_key, float (&d)[kLseProducts]) {
    bool inside = true;
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        inside &= math.ranges[r].begin <= first_key && first_key + kTileKeys <= math.ranges[r].end;
    }
#pragma unroll
    for (i32 i = 0; i < kLseProducts; ++i) d[i] *= scale_log2;
    if (inside) return;
#pragma unroll
    for (i32 i = 0; i < kLseProducts; ++i) {
        const bool seen = math.ranges[fragment_half(i)].contains(first_key + fragment_column(math.thread, i));
        d[i] = seen ? d[i] : negative_infinity();
    }
}

// Called by all lanes of a quad; one of them stores.
MLA_DEVICE void store(const LossParams& p, const Tile& tile, const Math& math, RunningSum (&rows)[kFragmentRows]) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const float lse = rows[r].merge();
        if (math.thread % 4 != 0 || math.rows[r] >= tile.tokens) continue;
        const i64 token = tile.first_token + math.rows[r];
        p.attention_lse[token * p.attention_lse_stride_token_elems + tile.head * p.attention_lse_stride_head_elems] =
            lse;
    }
}

MLA_DEVICE void run_math_role(const LossParams& p, Storage& s, const Tile& tile, i32 warpgroup, i32 thread) {
    Math math{warpgroup, thread};
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        math.rows[r] = warpgroup * kSw128Rows + fragment_row(thread) + 8 * r;
        const bool there = math.rows[r] < tile.tokens;
        math.ranges[r] = there ? p.ranges[tile.first_token + math.rows[r]] : KeyRange{0, 0};
    }
    RunningSum rows[kFragmentRows];
    Pieces pieces;
    float d[kLseProducts];
    mbarrier_wait(s.q_full, 0);
#pragma unroll 1
    for (i32 keys = tile.keys.begin; keys < tile.keys.end; ++keys) {
        multiply_rows<kPieces, false>(s, pieces, warpgroup, thread, d);
        scale_and_mask(math, p.scale * kLog2E, keys * kTileKeys, d);
        add_scores(rows, d);
    }
    store(p, tile, math, rows);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_loss_sm90_lse(const __grid_constant__ LossParams p, const __grid_constant__ TensorMap q_map,
                              const __grid_constant__ TensorMap q_rope_map, const __grid_constant__ TensorMap k_map,
                              const __grid_constant__ TensorMap k_rope_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    start_block([&] { init_storage(s); }, q_map, k_map);

    const i32 warp = uniform_warp(), thread = threadIdx.x % kWarpgroupThreads;
    const Tile tile = tile_of(p, thread % kWarpThreads);
    if (warp < kMathWarps) {
        setmaxnreg_inc<kRegsMath>();
        run_math_role(p, s, tile, warp / kWarpgroupWarps, thread);
    } else {
        setmaxnreg_dec<kRegsLoad>();
        if (warp == kMathWarps && elect_one())
            run_load_role(p, s, MainMaps{q_map, q_rope_map, k_map, k_rope_map}, tile);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
