// The sparse forward with joint products of a pair on Blackwell: the roles that gather. See
// sparse_forward/sm100_joint.cu; products, softmax and barriers come from attention/sm100/joint.cuh.
#pragma once
#include "attention/row_list.cuh"
#include "attention/sm100/joint.cuh"
#include "common/limits.cuh"

namespace mla::sparse_forward::sm100 {
using namespace attention;
using namespace attention::sm100;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role       warps    regs   does
// softmax    0..3     232    P; rescales O where a maximum moved; results
// mma        4        136    tensor memory; in the leader one thread issues every product
// query      5        136    Q of the block; two more warps of its warpgroup do nothing
// keys       8, 9     136    K of the block's half of the keys: groups of columns in turn
// values     10, 11   136    the block's half of the columns of V: the same
constexpr i32 kMmaWarp = 4, kQueryWarp = 5, kKeysWarp = 8, kValuesWarp = 10, kGatherWarps = 2;
constexpr i32 kJointThreads = (kValuesWarp + kGatherWarps) * kWarpThreads;
constexpr i32 kRegsSoftmax = 232, kRegsIssue = 136;
static_assert(kRegsSoftmax + 2 * kRegsIssue <= 3 * regs_at_entry(kJointThreads), "what the block has at entry");

template <class Element_, i32 kHeadDimQk>
struct JointConfig {
    using Element = Element_;
    static constexpr i32 kSwTilesQk = kHeadDimQk / kSw128Columns;
    static constexpr bool kWithRowMax = true;
    static_assert(is_head_dim_qk(kHeadDimQk), "with or without RoPE columns");
};

struct JointMaps {
    const TensorMap &kv, &q;
};

// State shared by all roles: the block's heads of queries, split by split.
template <class C>
struct JointBlock {
    const DecodeParams& p;
    const JointMaps& maps;
    JointStorage<C>& s;
    u32 rank = cluster_rank();

    MLA_DEVICE i32 split() const { return (i32)blockIdx.y; }
    MLA_DEVICE i32 head0() const { return (i32)blockIdx.x * kJointHeads; }

    // Calls act(item) for each work item with a tile.
    template <class Act>
    MLA_DEVICE void for_items(Act act) const {
        attention::sm100::for_items<ScheduledWork>(p, split(), act);
    }
};

// ---- Loads -----------------------------------------------------------------------------------------------------
// Heads past the last one arrive as zeros.
template <class C>
MLA_DEVICE void run_joint_query_role(const JointBlock<C>& block) {
    if (!elect_one()) return;
    JointStorage<C>& s = block.s;
    const ClusterAddr full = of_leader(s.q_full);
    Ring<1> ring;
    block.for_items([&](const WorkItem& item) {
        mbarrier_wait(s.q_empty, ring.empty_parity(0));
        ring.advance(0);
        expect_of_both(s.q_full, sizeof(s.q), block.rank);
        for (i32 sw_tile = 0; sw_tile < C::kSwTilesQk; ++sw_tile) {
            cp_async_bulk_tensor_pair_3d(smem_addr(s.q[sw_tile]), block.maps.q, full, sw_tile * kSw128Columns,
                                         block.head0(), item.request, kEvictFirst);
        }
    });
}

// A lane gathers four of 64 keys. Entries past the end of the list are kNoRow, and become zeros.
constexpr i32 kKeysOfLane = 4, kGatherLanes = kTileKeys / kKeysOfLane;
constexpr u32 kGatherBytes = kKeysOfLane * kSw128RowBytes;

// The lane's keys of a tile; none behind the item's last one.
MLA_DEVICE int4 listed_rows(const DecodeParams& p, const WorkItem& item, i32 tile, i32 lane) {
    const i32* const list = p.block_table + item.request * p.table_stride_b_elems;
    if (lane >= kGatherLanes || tile >= item.tile_end) return make_int4(kNoRow, kNoRow, kNoRow, kNoRow);
    return reinterpret_cast<const int4*>(list + tile * kTileKeys)[lane];
}

// One group of `sw_tiles` SW128 tiles, from column `column` of kv on.
template <class C>
MLA_DEVICE void gather_group(const JointBlock<C>& block, u8* to, MBarrier& full, MBarrier& empty, u32 parity,
                             const int4& rows, i32 column, i32 sw_tiles, i32 lane) {
    mbarrier_wait(empty, parity);
    if (lane == 0) expect_of_both(full, sw_tiles * kSw128Bytes, block.rank);
    __syncwarp();
    const ClusterAddr counted = of_leader(full);
    for (i32 i = 0; lane < kGatherLanes && i < sw_tiles; ++i) {
        cp_async_bulk_tensor_pair_gather4(smem_addr(to) + (i * kSw128Bytes + lane * kGatherBytes), block.maps.kv,
                                          counted, column + i * kSw128Columns, rows, kEvictLast);
    }
}

// Calls gather(item, tile, parity of the free barriers) for each joint tile.
template <class C, class Gather>
MLA_DEVICE void for_joint_tiles(const JointBlock<C>& block, Gather gather) {
    u32 tiles = 0;
    block.for_items([&](const WorkItem& item) {
        for (i32 tile = item.tile_begin; tile < item.tile_end; tile += kHalves) {
            gather(item, tile, tiles % 2 ^ 1);
            ++tiles;
        }
    });
}

// Half of the keys, all columns.
template <class C>
MLA_DEVICE void run_keys_role(const JointBlock<C>& block, i32 warp, i32 lane) {
    JointStorage<C>& s = block.s;
    for_joint_tiles(block, [&](const WorkItem& item, i32 tile, u32 parity) {
        const int4 rows = listed_rows(block.p, item, tile + (i32)block.rank, lane);
        for (i32 group = warp; group < kKeyGroups<C>; group += kGatherWarps) {
            const i32 first = group * kJointGroupSwTiles, sw_tiles = min(kJointGroupSwTiles, C::kSwTilesQk - first);
            gather_group(block, s.k[first], s.k_full[group], s.k_empty[group], parity, rows, first * kSw128Columns,
                         sw_tiles, lane);
        }
    });
}

// All keys, half of the columns of the values: each warp half of the keys.
template <class C>
MLA_DEVICE void run_values_role(const JointBlock<C>& block, i32 half, i32 lane) {
    JointStorage<C>& s = block.s;
    for_joint_tiles(block, [&](const WorkItem& item, i32 tile, u32 parity) {
        const int4 rows = listed_rows(block.p, item, tile + half, lane);
        for (i32 t = 0; t < kValueProducts; ++t) {
            const i32 group = t * kHalves + half;
            gather_group(block, s.v[group * kJointGroupSwTiles], s.v_full[group], s.v_empty[group], parity, rows,
                         (i32)block.rank * kBlockDims + t * kTileDims, kJointGroupSwTiles, lane);
        }
    });
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
template <class C>
MLA_DEVICE void run_joint_block(const DecodeParams& p, const JointMaps& maps, JointStorage<C>& s) {
    const JointBlock<C> block{p, maps, s};
    run_with_joint_memory(
        s, kMmaWarp, [&] { init_joint_storage(s, 1); },
        [&](i32 warp, TmemAddr tmem) {
            const i32 lane = threadIdx.x % kWarpThreads;
            if (warp < kMmaWarp) {
                setmaxnreg_inc<kRegsSoftmax>();
                const BlockHeads heads{0, block.head0(), p.h_q};
                run_joint_softmax_role<C, ScheduledWork>(
                    p, block.split(), heads, s, tmem, threadIdx.x, [&](auto& scores, const WorkItem& item, i32 tile) {
                        mask_keys_from(scores, min(item.tokens, item.tile_end * kTileKeys) - tile * kTileKeys);
                    });
                return;
            }
            setmaxnreg_dec<kRegsIssue>();
            if (warp == kMmaWarp) {
                if (block.rank != kPairLeader) return;
                Ring<1> items;
                run_joint_mma_role<C, ScheduledWork>(p, block.split(), s, tmem, [&] {
                    tmem_wait(s.q_full, items.full_parity(0));
                    items.advance(0);
                });
            } else if (warp == kQueryWarp) {
                run_joint_query_role(block);
            } else if (warp >= kValuesWarp) {
                run_values_role(block, warp - kValuesWarp, lane);
            } else if (warp >= kKeysWarp) {
                run_keys_role(block, warp - kKeysWarp, lane);
            }
        });
}
}  // namespace mla::sparse_forward::sm100
