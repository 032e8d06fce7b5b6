// Dense decode on Hopper with both products in FP8: the registers of its roles, and the one that loads tiles, for the
// kernels that differ in how they divide tokens among blocks. See decode/sm90_fp8.cu.
#pragma once
#include "attention/sm90/fp8.cuh"
#include "attention/token_record.cuh"
#include "decode/sm90_lean_load.cuh"
#include "tile/warp.cuh"

namespace mla::decode {
// ---- Budget ----------------------------------------------------------------------------------------------------
// role      warps    regs, of 64 rows   does
// left      0..3     232   240          even tiles: scores, weights; O[:, :256]
// right     4..7     232   240          odd tiles;  O[:, 256:]
// load      8        40    24           tiles, page by page; 9..11 have nothing to do
//
// Of 64 rows, O, two sums under way, their operands and factors are 224 numbers of a math thread.
constexpr i32 kBlockThreads = 3 * kWarpgroupThreads;
constexpr i32 kLoadWarp = 2 * kWarpgroupWarps;
constexpr bool kWide = MLA_BLOCK_ROWS == kFp8MmaRows;
constexpr i32 kRegsMath = kWide ? 240 : 232;
constexpr i32 kRegsLoad = kWide ? 24 : 40;
static_assert(2 * kRegsMath + kRegsLoad <= 3 * regs_at_entry(kBlockThreads), "what the block has at entry");

// ---- Load role -------------------------------------------------------------------------------------------------
template <class Block>
struct Fp8TileLoader {
    using Memory = typename Block::Memory;
    const Block& block;
    const TensorMap &latent_map, &rope_map;
    Ring<Memory::kStages> phases;
    i32 stage = 0;

    MLA_DEVICE void operator()(const TileBoxes& boxes, const WorkItem&, i32) { load_tile(*this, boxes); }

    // Fetches a tile by `loader.load_box`, for each box that the lane has.
    template <class Loader>
    MLA_DEVICE void load_tile(const Loader& loader, const TileBoxes& boxes) {
        Memory& s = block.s;
        const u64 present = boxes.present_tokens();
        MBarrier& full = s.kv_full[stage];
        const SmemAddr to = s.tile(block.ring, stage);
        mbarrier_wait(s.kv_empty[stage], phases.empty_parity(stage));
        if (boxes.lane == 0) {
            s.present[stage] = present;
            mbarrier_arrive_expect_tx(full, block.ring.tile_bytes);
        }
        __syncwarp();
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            if (boxes.contains(boxes.box(i))) loader.load_box(boxes, to, full, i);
        }
        phases.advance(stage);
        stage = block.ring.next(stage);
    }

    MLA_DEVICE void load_box(const TileBoxes& boxes, SmemAddr to, MBarrier& full, i32 i) const {
        const u32 first = boxes.box(i) * boxes.rows, rope_row_bytes = (block.ring.tile_bytes - kFp8LatentBytes) / 64;
        const i32 page = boxes.window.page[i], token = boxes.window.offset[i];
        for (i32 panel = 0; panel < kFp8Panels; ++panel) {
            cp_async_bulk_tensor_4d(to + (panel * kSw128Bytes + first * kSw128RowBytes), latent_map, full,
                                    panel * kSw128ByteColumns, token, block.kv_head, page, boxes.l2_policy);
        }
        cp_async_bulk_tensor_4d(to + (kFp8LatentBytes + first * rope_row_bytes), rope_map, full, kHeadDimV, token,
                                block.kv_head, page, boxes.l2_policy);
    }
};
}  // namespace mla::decode
