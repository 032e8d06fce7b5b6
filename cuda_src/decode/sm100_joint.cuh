// Dense decode with joint products of a pair on Blackwell: the load roles, masks, and values that not every row sees.
// See decode/sm100_joint.cu; products, softmax and most barriers come from attention/sm100/joint.cuh.
#pragma once
#include "attention/sm100/joint.cuh"
#include "attention/sm90/nonfinite_values.cuh"
#include "common/limits.cuh"
#include "decode/sm90_load.cuh"

namespace mla::decode::sm100 {
using namespace attention;
using namespace attention::sm100;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps    does
// softmax  0..3     P, re-scaling of O, results
// keys     4        K of the block's half of the keys; which keys there are
// query    5..7     query rows: decode/sm90_load.cuh
// mma      8        tensor memory; in the leader one thread issues every product, in the other block one passes on Q
// values   9        the block's half of the columns of V
constexpr i32 kKeysWarp = kWarpgroupWarps, kQueryWarp = kKeysWarp + 1, kMmaWarp = 8, kValuesWarp = 9;
constexpr i32 kJointThreads = 10 * kWarpThreads;
static_assert(kMmaWarp == kQueryWarp + kQueryThreads / kWarpThreads, "one warp after another");

template <class Element_, i32 kHeadDimQk_>
struct JointConfig {
    using Element = Element_;
    static constexpr i32 kHeadDimQk = kHeadDimQk_;
    using Work = ScheduledWork;
    static constexpr i32 kSwTilesQk = kHeadDimQk / kSw128Columns;
    static constexpr bool kWithRowMax = false;
    static_assert(is_head_dim_qk(kHeadDimQk), "with or without RoPE columns");
};

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier           arrives (count)        carries              waits          first phase
// q_full            query threads (96)     Q of the block       mma            blocked, a phase per work item
// q_peer            mma of the peer (1)    Q of the peer        mma, leader    blocked, the same
// present_full[s]   keys (1)               present              softmax        blocked, a phase per two tiles
// present_empty[s]  softmax warps (4)      -                    keys           free, the same
// v_own             values (1)             V of the block       softmax        blocked, a phase per tile to mend
//
// v_full of a tile to mend carries nothing: p_full covers its values.
template <class C>
struct DecodeStorage : JointStorage<C> {
    u64 present[kStages][kHalves];  // bit t: the page of key t is in the pool
    MBarrier q_peer, present_full[kStages], present_empty[kStages], v_own;
};

template <class C>
MLA_DEVICE void init_storage(DecodeStorage<C>& s) {
    mbarrier_init(s.q_peer, 1);
    init_ring(s.present_full, s.present_empty, 1, kWarpgroupWarps);
    mbarrier_init(s.v_own, 1);
    init_joint_storage(s, kQueryThreads);
}

// State shared by all roles. Values are multiplied with all rows of the pair, so the pair's first row decides which
// tokens every row sees.
template <class C>
struct JointBlock : RowBlock<kJointHeads> {
    DecodeStorage<C>& s;
    const TensorMap& kv_map;
    u32 rank = cluster_rank();

    MLA_DEVICE JointBlock(const DecodeParams& p, DecodeStorage<C>& s, const TensorMap& kv_map)
        : RowBlock<kJointHeads>(p), s(s), kv_map(kv_map) {
        hidden = hidden_from(p, row0 - (i32)rank * kJointHeads);
    }

    MLA_DEVICE WorkIterator items() const { return WorkIterator(p, split, hidden); }
};

// Returns true if some row of the pair does not see a key of the joint tile from tile `tile` on: its values are then
// made finite.
MLA_DEVICE bool is_to_mend(const WorkItem& item, i32 tile) {
    return item.seen_by_all < min(tile + kHalves, item.tile_end) * kTileTokens;
}

// ---- Loads -----------------------------------------------------------------------------------------------------
// SW128 tiles [begin, begin + count) of 64 keys.
template <class C>
MLA_DEVICE void load_sw_tiles(const JointBlock<C>& block, const TileBoxes& boxes, u8* to, ClusterAddr full, i32 begin,
                              i32 count) {
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
        if (!boxes.contains(boxes.box(i))) continue;
        for (i32 sw_tile = 0; sw_tile < count; ++sw_tile) {
            const SmemAddr at = smem_addr(to) + (sw_tile * kSw128Bytes + boxes.box(i) * boxes.rows * kSw128RowBytes);
            cp_async_bulk_tensor_pair_4d(at, block.kv_map, full, (begin + sw_tile) * kSw128Columns,
                                         boxes.batch.offset[i], block.kv_head, boxes.batch.page[i], boxes.l2_policy);
        }
    }
}

// Calls load(boxes, half, tile) for each half of the joint tiles. A half behind the item's last tile has absent pages
// and becomes zeros, which do not count.
template <class Load>
MLA_DEVICE void for_halves(const TileBoxes& boxes, const WorkItem& item, i32 tile, Load load) {
    const i32 half = (tile - item.tile_begin) % kHalves;
    const i32 last = tile + 1 == item.tile_end ? kHalves - 1 : half;
    BoxBatch batch = boxes.batch;
#pragma unroll 1
    for (i32 i = half; i <= last; ++i) {
        load(TileBoxes{batch, boxes.first, boxes.count, boxes.rows, boxes.lane, boxes.l2_policy}, i, tile + i - half);
        batch = BoxBatch{{kAbsentPage, kAbsentPage}, {0, 0}};
    }
}

// Loads K: a block has half of the keys. Also records which keys of both halves exist.
template <class C>
struct KeysLoader {
    const JointBlock<C>& block;
    RingCount<kStages> at;
    u32 tiles = 0;

    MLA_DEVICE void load(const TileBoxes& boxes) const {
        DecodeStorage<C>& s = block.s;
#pragma unroll 1
        for (i32 group = 0; group < kKeyGroups<C>; ++group) {
            const i32 first = group * kJointGroupSwTiles, count = min(kJointGroupSwTiles, C::kSwTilesQk - first);
            mbarrier_wait(s.k_empty[group], tiles % 2 ^ 1);
            if (boxes.lane == 0) expect_of_both(s.k_full[group], count * kSw128Bytes, block.rank);
            __syncwarp();
            load_sw_tiles(block, boxes, s.k[first], of_leader(s.k_full[group]), first, count);
        }
    }

    MLA_DEVICE void operator()(const TileBoxes& boxes, const WorkItem& item, i32 tile) {
        DecodeStorage<C>& s = block.s;
        for_halves(boxes, item, tile, [&](const TileBoxes& boxes, i32 half, i32) {
            if (half == 0) at.wait_empty(s.present_empty);
            const u64 present = boxes.present_tokens();
            if (boxes.lane == 0) {
                s.present[at.stage()][half] = present;
                if (half == kHalves - 1) mbarrier_arrive(s.present_full[at.stage()]);
            }
            if (half == (i32)block.rank) load(boxes);
            if (half < kHalves - 1) return;
            at.advance();
            ++tiles;
        });
    }
};

// Loads V: a block has half of the columns.
template <class C>
struct ValuesLoader {
    const JointBlock<C>& block;
    u32 tiles = 0;

    MLA_DEVICE void operator()(const TileBoxes& boxes, const WorkItem& item, i32 tile) {
        DecodeStorage<C>& s = block.s;
        for_halves(boxes, item, tile, [&](const TileBoxes& boxes, i32 half, i32 tile) {
            const bool mend = is_to_mend(item, tile - half);
#pragma unroll 1
            for (i32 t = 0; t < kValueProducts; ++t) {
                const i32 group = t * kHalves + half;
                constexpr u32 kBytes = kJointGroupSwTiles * kSw128Bytes;
                mbarrier_wait(s.v_empty[group], tiles % 2 ^ 1);
                if (boxes.lane == 0) {
                    expect_of_both(s.v_full[group], mend ? 0 : kBytes, block.rank);
                    if (mend && group == 0) mbarrier_arrive_expect_tx(s.v_own, kValueGroups * kBytes);
                }
                __syncwarp();
                const ClusterAddr full =
                    mend ? map_to_rank(smem_addr(&s.v_own), block.rank) : of_leader(s.v_full[group]);
                load_sw_tiles(block, boxes, s.v[group * kJointGroupSwTiles], full,
                              ((i32)block.rank * kBlockDims + t * kTileDims) / kSw128Columns, kJointGroupSwTiles);
            }
            if (half == kHalves - 1) ++tiles;
        });
    }
};

// In the block that issues nothing: tells the leader that Q of each work item has arrived.
template <class C>
MLA_DEVICE void pass_on_queries(const JointBlock<C>& block) {
    if (!elect_one()) return;
    DecodeStorage<C>& s = block.s;
    const ClusterAddr to = of_leader(s.q_peer);
    Ring<1> items;
    for_items<ScheduledWork>(block.p, block.split, [&](const WorkItem&) {
        mbarrier_wait(s.q_full, items.full_parity(0));
        items.advance(0);
        mbarrier_arrive_cluster(to);
    });
}

// ---- Softmax ---------------------------------------------------------------------------------------------------
// Masks absent keys (bit = key).
MLA_DEVICE void mask_keys_absent(float (&scores)[kTileKeys], u64 present) {
    if (present == ~0ull) return;
#pragma unroll
    for (i32 i = 0; i < kTileKeys; ++i) {
        if (!(present >> i & 1)) scores[i] = negative_infinity();
    }
}

template <class C>
struct DecodeSoftmax : JointSoftmax<C, DecodeStorage<C>> {
    using Base = JointSoftmax<C, DecodeStorage<C>>;
    using Base::half;
    using Base::head;
    using Base::p;
    using Base::s;
    using Base::thread;

    const JointBlock<C>& block;
    RingCount<kStages> at;
    u32 mended = 0;  // tiles

    MLA_DEVICE DecodeSoftmax(const JointBlock<C>& block, TmemAddr tmem, i32 thread)
        : Base(block.p, block.s, tmem, thread), block(block) {}

    // `visible`: the first of the item's keys that the head's row does not see.
    MLA_DEVICE void mask(float (&scores)[kTileKeys], i32 visible) {
        mbarrier_wait(s.present_full[at.stage()], at.full_parity());
        const u64 present = s.present[at.stage()][half];
        release(s.present_empty[at.stage()], thread);
        at.advance();
        mask_keys_from(scores, visible);
        mask_keys_absent(scores, present);
    }

    // Makes the values finite that not every row of the pair sees.
    MLA_DEVICE void mend(const WorkItem& item, i32 tile) {
        if (!is_to_mend(item, tile)) return;
        mbarrier_wait(s.v_own, mended++ % 2);
        for (i32 group = 0; group < kValueGroups; ++group) {
            const i32 first = (tile + group % kHalves) * kTileTokens;
            if (item.seen_by_all >= first + kTileTokens) continue;
            i32 ignored;  // fixup_nonfinite checks all visible tokens again
            sm90::sanitize_rows<typename C::Element, kJointGroupSwTiles>(s.v[group * kJointGroupSwTiles],
                                                                         max(item.seen_by_all - first, 0),
                                                                         item.tokens - first, ignored, 0, thread);
        }
    }

    MLA_DEVICE void process(const WorkItem& item) {
        const BlockHeads heads{block.kv_head, block.row0, block.rows};
        const i32 row = min(block.row0 + head, block.rows - 1);
        const i32 visible = min(visible_tokens(p, item, row), item.tokens);
        this->reset();
        for (i32 tile = item.tile_begin; tile < item.tile_end; tile += kHalves) {
            this->tile(
                tile == item.tile_begin,
                [&](auto& scores, i32 half) { mask(scores, visible - (tile + half) * kTileTokens); },
                [&] { mend(item, tile); });
        }
        this->store(item, heads, item.tile_begin < item.tile_end);
        if (item.seen_by_all < min(item.tokens, item.tile_end * kTileTokens)) {
            bar_sync(kAllSoftmax, kWarpgroupThreads);  // other threads add to these threads' stores
            sm90::fixup_nonfinite<typename C::Element, kHeadDimV>(block, item, 0, thread);
        }
    }

    static constexpr i32 kAllSoftmax = RowsUpper + 1;
};

// ---- Kernel ----------------------------------------------------------------------------------------------------
template <class C>
MLA_DEVICE void run_joint_block(const DecodeParams& p, const TensorMap& kv_map, DecodeStorage<C>& s) {
    const auto init = [&] {
        prefetch_tensormap(kv_map);
        init_storage(s);
    };
    const JointBlock<C> block(p, s, kv_map);
    run_with_joint_memory(s, kMmaWarp, init, [&](i32 warp, TmemAddr tmem) {
        const i32 lane = threadIdx.x % kWarpThreads;
        if (warp < kKeysWarp) {
            DecodeSoftmax<C> softmax(block, tmem, threadIdx.x);
            WorkItem item;
            for (WorkIterator walk = block.items(); walk.next(p, item);) softmax.process(item);
        } else if (warp == kKeysWarp) {
            run_load_role(block, lane, KeysLoader<C>{block, {}});
        } else if (warp < kMmaWarp) {
            const QueryStages<1> stages{s.q[0], &s.q_full, &s.q_empty};
            run_query_role<C>(block, stages, threadIdx.x - kQueryWarp * kWarpThreads);
        } else if (warp == kValuesWarp) {
            run_load_role(block, lane, ValuesLoader<C>{block});
        } else if (block.rank == kPairLeader) {
            Ring<1> items;
            run_joint_mma_role<C, ScheduledWork>(p, block.split, s, tmem, [&] {
                mbarrier_wait(s.q_full, items.full_parity(0));
                mbarrier_wait_cluster(s.q_peer, items.full_parity(0));
                tcgen05_fence_after_thread_sync();
                items.advance(0);
            });
        } else {
            pass_on_queries(block);
        }
    });
}
}  // namespace mla::decode::sm100
