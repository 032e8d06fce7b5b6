// How keys arrive in the variants of decode/sm90_seesaw.cu with a tree or optional inputs: in boxes of one SW128 tile,
// 64 columns.
#pragma once
#include "decode/sm90_load.cuh"

namespace mla::decode {
template <class Tile>
struct SwTileKeys {
    const TensorMap& kv_map;
    i32 kv_head;

    MLA_DEVICE SwTileKeys(const DecodeParams&, const TensorMap& kv_map, const TensorMap&, i32 kv_head)
        : kv_map(kv_map), kv_head(kv_head) {}

    MLA_DEVICE void prefetch_maps() const { prefetch_tensormap(kv_map); }
    MLA_DEVICE i32 most_tokens() const { return kTileTokens; }  // of a box

    template <bool kRight>
    MLA_DEVICE void fetch_half(const TileBoxes& boxes, SmemAddr to, MBarrier& full) const {
        constexpr i32 kBegin = kRight ? Tile::kSwTilesLeft : 0, kEnd = kRight ? Tile::kSwTilesQk : Tile::kSwTilesLeft;
        boxes.load<Tile>(to, kv_map, full, kv_head, kBegin, kEnd);
    }
};
}  // namespace mla::decode
