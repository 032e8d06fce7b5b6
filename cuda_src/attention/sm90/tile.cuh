// A tile of 64 keys in shared memory, in the attention kernels for Hopper: SW128 tiles of 64 columns, in two halves.
#pragma once
#include "attention/split_work.cuh"
#include "tile/ring.cuh"
#include "tile/sw128.cuh"

namespace mla::attention::sm90 {
constexpr i32 kStagesKV = 2;
constexpr i32 kSwTilesV = kHeadDimV / kSw128Columns;  // 8
constexpr i32 kSwTilesHalf = kSwTilesV / 2;           // 4: one half of the values
constexpr u32 kHalfBytes = kSwTilesHalf * kSw128Bytes;

// Layout of a half's SW128 tiles: one after another, or 8 rows of each in turn, as a TMA box of several tiles arrives.
// RoPE columns, a single SW128 tile, look the same in both.
template <bool kRowsInTurn>
struct HalfLayout {
    static constexpr i32 kRowsInAtom = kSwizzleAtomBytes / kSw128RowBytes;
    static constexpr u32 kNextSwTile = kRowsInTurn ? kSwizzleAtomBytes : kSw128Bytes;
    static constexpr u32 kNextRows = kRowsInTurn ? kSwTilesHalf * kSwizzleAtomBytes : kSwizzleAtomBytes;

    // Offset of an SW128 tile within a tile of keys ...
    MLA_DEVICE static constexpr u32 sw_tile_offset(i32 sw_tile) {
        return sw_tile / kSwTilesHalf * kHalfBytes + sw_tile % kSwTilesHalf * kNextSwTile;
    }
    // The descriptor of the RoPE columns, from the latent columns' descriptor at the same place.
    MLA_DEVICE static SmemDesc keys_desc(SmemDesc latent, i32 sw_tile) {
        if (!kRowsInTurn || sw_tile < kSwTilesV) return latent;
        return with_next_rows(latent, kSwizzleAtomBytes);
    }
    // ... and of a chunk of a row within an SW128 tile.
    MLA_DEVICE static u32 chunk_offset(i32 row, i32 chunk) {
        if constexpr (!kRowsInTurn) return sw128_offset(row, chunk);
        return (u32)(row / kRowsInAtom) * kNextRows + sw128_offset(row % kRowsInAtom, chunk);
    }
};

// The sizes that depend on the width of a key.
template <i32 kHeadDimQk_>
struct KeyTile {
    using Layout = HalfLayout<false>;
    static constexpr i32 kHeadDimQk = kHeadDimQk_;
    static_assert(is_head_dim_qk(kHeadDimQk), "with or without RoPE columns");
    static constexpr i32 kSwTilesQk = kHeadDimQk / kSw128Columns;  // 9, or 8 without RoPE
    static constexpr i32 kSwTilesRope = kSwTilesQk - kSwTilesV;    // 1 or 0
    static constexpr u32 kTileBytes = kSwTilesQk * kSw128Bytes;
    // A tile arrives, and is released, in two halves, one for each warpgroup's half of P V; the RoPE columns come with
    // the left half.
    static constexpr i32 kSwTilesLeft = kSwTilesRope + kSwTilesHalf;
    static constexpr u32 kLeftBytes = kSwTilesLeft * kSw128Bytes;  // SW128 tiles 8, 0..3
    static constexpr u32 kRightBytes = kHalfBytes;                 // SW128 tiles 4..7
    static_assert(kLeftBytes + kRightBytes == kTileBytes, "the halves are the tile");

    // The i-th SW128 tile in the order of arrival and of scoring: 8, 0..7.
    MLA_DEVICE static constexpr i32 sw_tile_in_order(i32 i) {
        return i < kSwTilesRope ? kSwTilesV + i : i - kSwTilesRope;
    }
};

struct HalfBarriers {
    MBarrier left, right;
};

// Every work item starts at stage 0.
MLA_DEVICE i32 stage_of(const WorkItem& item, i32 tile) { return (tile - item.tile_begin) & (kStagesKV - 1); }
}  // namespace mla::attention::sm90
