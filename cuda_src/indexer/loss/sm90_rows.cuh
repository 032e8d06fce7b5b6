// Shared by the loss's Hopper kernels with the tokens of one head as rows: the attention's output, the divergences per
// head, and the gradients by their index queries.
//
// A block has 128 tokens of a head, which stay in shared memory; keys arrive in tiles of 128. Keys, index keys and
// values of a tile are units of up to 128 columns, which pass through one ring.
#pragma once
#include "common/limits.cuh"
#include "indexer/loss/params.cuh"
#include "ptx/copy.cuh"
#include "tile/fragment.cuh"
#include "tile/product.cuh"
#include "tile/ring.cuh"
#include "tile/sw128.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::loss {
constexpr i32 kMathWarpgroups = 2;
constexpr i32 kThreads = (kMathWarpgroups + 1) * kWarpgroupThreads;
constexpr i32 kMathWarps = kMathWarpgroups * kWarpgroupWarps;
constexpr i32 kRegsMath = 240, kRegsLoad = 24;
static_assert(kMathWarpgroups * kRegsMath + kRegsLoad <= kRegsOfLane, "registers of the block");

constexpr i32 kTileTokens = kMathWarpgroups * kSw128Rows;
constexpr i32 kTileKeys = 128;
constexpr u32 kPieceBytes = 128 * kSw128RowBytes;  // 64 columns of 128 tokens, or keys
constexpr i32 kUnitPieces = 2;                     // of a unit at most; missing columns are zeros
constexpr i32 kAccumulators = kTileKeys / 2;       // of a thread
constexpr i32 kKeySteps = kTileKeys / kMmaK;       // of products that run along the keys

// ---- The tile --------------------------------------------------------------------------------------------------
struct RowTile {
    i32 head, first_token;
    TileRange keys;  // in tiles
};

// Called by a whole warp. The last tokens come first: under a causal limit their rows are the longest.
MLA_DEVICE RowTile row_tile(const LossParams& p, i32 lane) {
    const i32 first = (gridDim.y - 1 - blockIdx.y) * kTileTokens;
    RowTile tile{(i32)blockIdx.x, first, {}};
    KeyRange all{p.s_kv, 0};
#pragma unroll
    for (i32 i = lane; i < kTileTokens; i += kWarpThreads) {
        if (first + i >= p.s_q) continue;
        const KeyRange range = p.ranges[first + i];
        if (range.begin == range.end) continue;
        all = KeyRange{min(all.begin, range.begin), max(all.end, range.end)};
    }
    tile.keys = warp_tiles<kTileKeys>(all);
    return tile;
}

// ---- Load role -------------------------------------------------------------------------------------------------
template <i32 kCount>
MLA_DEVICE void load_rows(u8 (&to)[kCount][kPieceBytes], const TensorMap& map, MBarrier& full, const RowTile& tile) {
#pragma unroll 1
    for (i32 piece = 0; piece < kCount; ++piece) {
        cp_async_bulk_tensor_3d(smem_addr(to[piece]), map, full, piece * kSw128Columns, tile.first_token, tile.head,
                                kEvictFirst);
    }
}

// A ring of units. `Storage` has `units`, `unit_full` and `unit_empty`.
template <i32 kCount, class Storage, class Units>
MLA_DEVICE void load_unit(Storage& s, Units& units, const TensorMap& map, i32 keys) {
    MBarrier& full = s.unit_full[units.stage];
    units.wait_empty(s.unit_empty);
    mbarrier_arrive_expect_tx(full, kCount * kPieceBytes);
#pragma unroll 1
    for (i32 piece = 0; piece < kCount; ++piece) {
        cp_async_bulk_tensor_3d(smem_addr(s.units[units.stage][piece]), map, full, piece * kSw128Columns,
                                keys * kTileKeys, 0, kEvictLast);
    }
    units.advance();
}

// ---- Math role -------------------------------------------------------------------------------------------------
struct Math {
    i32 warpgroup, thread;
    i32 first_token;  // the thread's first row; its other one is eight further on

    MLA_DEVICE Math(const RowTile& tile, i32 warpgroup, i32 thread)
        : warpgroup(warpgroup),
          thread(thread),
          first_token(tile.first_token + warpgroup * kSw128Rows + fragment_row(thread)) {}

    MLA_DEVICE i32 token(i32 r) const { return first_token + 8 * r; }
};

// The keys that one of the thread's rows sees; none for an absent token. Loaded for each tile to save registers.
MLA_DEVICE KeyRange row_range(const LossParams& p, const Math& math, i32 r) {
    return math.token(r) < p.s_q ? p.ranges[math.token(r)] : KeyRange{0, 0};
}

struct RowRanges {
    KeyRange of[kFragmentRows];

    MLA_DEVICE RowRanges(const LossParams& p, const Math& math) : of{row_range(p, math, 0), row_range(p, math, 1)} {}

    MLA_DEVICE bool hold(i32 first_key) const {
        bool all = true;
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            all &= of[r].begin <= first_key && first_key + kTileKeys <= of[r].end;
        }
        return all;
    }
};

// Elements of keys that a row does not see become `x`.
template <i32 kCount>
MLA_DEVICE void hide(const RowRanges& ranges, i32 thread, i32 first_key, float x, float (&d)[kCount]) {
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
        d[i] = ranges.of[fragment_half(i)].contains(first_key + fragment_column(thread, i)) ? d[i] : x;
    }
}

// Waits for the next unit and returns its stage.
template <class Storage, class Units>
MLA_DEVICE i32 wait_unit(Storage& s, Units& units) {
    const i32 stage = units.stage;
    units.wait_full(s.unit_full);
    units.advance();
    return stage;
}

// Issues the products of the warpgroup's tokens with keys of a unit, two per accumulator, as one group.
template <i32 kCount, i32 kProducts>
MLA_DEVICE void issue_products(const u8 (&rows)[kCount][kPieceBytes], const u8* keys, i32 warpgroup,
                               float (&d)[kProducts]) {
    SmemDesc a = k_major_desc(smem_addr(rows) + warpgroup * kSw128Bytes), b = k_major_desc(smem_addr(keys));
    opaque(a.bits), opaque(b.bits);
    pin(d);
    wgmma_fence();
    multiply_abt<kCount * kSw128MmaSteps, kPieceBytes>(bfloat16{}, d, a, b);
    wgmma_commit_group();
}

// Issues sums += weights * unit, as one group; the unit's rows are keys, or whatever the weights' columns are.
template <i32 kSteps, i32 kSums>
MLA_DEVICE void issue_sums(const u32 (&weights)[kSteps][4], const u8* unit, float (&sums)[kSums]) {
    SmemDesc b = make_desc(smem_addr(unit), kPieceBytes, kSwizzleAtomBytes);  // columns of the next piece
    opaque(b.bits);
    pin(sums);
    wgmma_fence();
    multiply_ab(bfloat16{}, sums, weights, b, true);
    wgmma_commit_group();
}

template <i32 kSteps, i32 kSums>
MLA_DEVICE void add_products(const u32 (&weights)[kSteps][4], const u8* unit, float (&sums)[kSums]) {
    issue_sums(weights, unit, sums);
    wgmma_wait_group<0>();
    pin(sums);
}
}  // namespace mla::indexer::loss
