// Dense MLA decode on Hopper with the seesaw schedule, for pages of few tokens.
//
// The mathematics, the grid, the time line and the source are in decode/sm90_seesaw.cu. What differs is how keys
// arrive: a box has all four SW128 tiles of a half, and 8 rows of each of them lie in turn (HalfLayout<true>). With
// pages of 16 tokens a tile of 64 is 12 boxes instead of 36, with pages of 64 it is 3 instead of 9; one thread after
// the other issues them, while both warpgroups wait for the first half.
//
// One KV head. Pages that are no multiples of 8 tokens come in boxes of one SW128 tile and up to 4 rows.
#include "common/limits.cuh"
#include "decode/sm90_seesaw.cuh"

#ifndef MLA_HEAD_DIM_QK
#define MLA_HEAD_DIM_QK 576
#endif

namespace mla::decode {
// ---- Variant ---------------------------------------------------------------------------------------------------
struct InTurn : Config<MLA_DTYPE, MLA_HEAD_DIM_QK, /*kSparse=*/false> {
    using Layout = HalfLayout</*kRowsInTurn=*/true>;
};

static_assert(sizeof(Storage<InTurn>) <= kMaxDynamicSmem, "shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage<InTurn>));
MLA_FACT(block_m, kBlockM);

// ---- Load role -------------------------------------------------------------------------------------------------
// The maps are of (64 columns, 8 tokens, SW128 tiles, groups of 8 tokens of a page, pages), with boxes of four SW128
// tiles and of one, which has the RoPE columns; or, if pages are no groups of 8, those of SwTileFetch.
struct HalfFetch {
    using Layout = InTurn::Layout;
    const TensorMap &half_map, &rope_map;
    bool in_groups;

    MLA_DEVICE void prefetch_maps() const {
        prefetch_tensormap(half_map);
        if constexpr (InTurn::kSwTilesRope > 0) prefetch_tensormap(rope_map);
    }
    MLA_DEVICE i32 most_tokens() const { return in_groups ? kTileTokens : Layout::kRowsInAtom; }

    template <bool kRight>
    MLA_DEVICE void half(const TileBoxes& boxes, SmemAddr to, MBarrier& full) const {
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            if (!boxes.contains(boxes.box(i))) continue;
            const i32 first = boxes.box(i) * boxes.rows, page = boxes.window.page[i], token = boxes.window.offset[i];
            if (in_groups) {
                fetch_groups<kRight>(boxes, to, full, first, page, token / Layout::kRowsInAtom);
            } else {
                fetch_rows<kRight>(boxes, to, full, first, page, token);
            }
        }
    }

    template <bool kRight>
    MLA_DEVICE void fetch_groups(const TileBoxes& boxes, SmemAddr to, MBarrier& full, i32 first, i32 page,
                                 i32 group) const {
        if constexpr (!kRight && InTurn::kSwTilesRope > 0) {
            cp_async_bulk_tensor_5d(to + (Layout::sw_tile_offset(kSwTilesV) + first * kSw128RowBytes), rope_map, full,
                                    0, 0, kSwTilesV, group, page, boxes.l2_policy);
        }
        const u32 rows = first / Layout::kRowsInAtom * Layout::kNextRows;
        cp_async_bulk_tensor_5d(to + ((kRight ? kHalfBytes : 0) + rows), half_map, full, 0, 0,
                                kRight ? kSwTilesHalf : 0, group, page, boxes.l2_policy);
    }

    template <bool kRight>
    MLA_DEVICE void fetch_rows(const TileBoxes& boxes, SmemAddr to, MBarrier& full, i32 first, i32 page,
                               i32 token) const {
        constexpr i32 kBegin = kRight ? InTurn::kSwTilesLeft : 0;
        constexpr i32 kEnd = kRight ? InTurn::kSwTilesQk : InTurn::kSwTilesLeft;
#pragma unroll 1
        for (i32 k = kBegin; k < kEnd; ++k) {
            const i32 sw_tile = InTurn::sw_tile_in_order(k);
            const u32 rows = sw_tile == kSwTilesV ? first * kSw128RowBytes
                                                  : first / Layout::kRowsInAtom * Layout::kNextRows +
                                                        first % Layout::kRowsInAtom * kSw128RowBytes;
            cp_async_bulk_tensor_4d(to + (Layout::sw_tile_offset(sw_tile) + rows), half_map, full,
                                    sw_tile * kSw128Columns, token, 0, page, boxes.l2_policy);
        }
    }
};

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode_sm90_seesaw_boxes(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap half_map,
                                 const __grid_constant__ TensorMap rope_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Block<InTurn> block(p, *reinterpret_cast<Storage<InTurn>*>(smem));
    run_seesaw_block(block, HalfFetch{half_map, rope_map, p.page_size % HalfFetch::Layout::kRowsInAtom == 0});
}
}  // namespace mla::decode
