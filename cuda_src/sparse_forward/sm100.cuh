// The sparse forward on Blackwell: barriers, and the roles that load. Products and softmax are in
// attention/sm100/swapped.cuh.
//
// A block multiplies its heads by tile after tile of 64 listed rows.
#pragma once
#include "attention/row_list.cuh"
#include "attention/sm100/swapped.cuh"
#include "common/limits.cuh"
#include "ptx/copy.cuh"
#include "ptx/gather4.cuh"

namespace mla::sparse_forward::sm100 {
using namespace attention;
using namespace attention::sm100;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role       warps    regs   does
// softmax    0..3     232    P; rescales O^T where a maximum moved; results
// mma        4        136    tensor memory; one thread issues every product
// query      5        136    Q; two more warps of its warpgroup do nothing
// gather     8..11    136    K, each warp its columns
constexpr i32 kMmaWarp = 4, kQueryWarp = 5, kGatherWarp = 8, kGatherWarps = 4;
constexpr i32 kThreads = (kGatherWarp + kGatherWarps) * kWarpThreads;
constexpr i32 kRegsSoftmax = 232, kRegsIssue = 136;
static_assert(kRegsSoftmax + 2 * kRegsIssue <= 3 * regs_at_entry(kThreads), "what the block has at entry");

// Configuration of a kernel, and the sizes that follow.
template <class Element_, i32 kHeadDimQk_, i32 kHeads_>
struct Config {
    using Element = Element_;
    using Latent = Element;
    using Rope = Element;
    static constexpr i32 kHeadDimQk = kHeadDimQk_, kHeads = kHeads_;
    static_assert(is_head_dim_qk(kHeadDimQk), "with or without RoPE columns");
    static_assert(kHeads == 16 || kHeads == 32 || kHeads == 64, "heads");

    static constexpr i32 kSwTilesQk = kHeadDimQk / kSw128Columns, kLatentSwTiles = kSwTilesV;
    // K arrives and leaves in groups of SW128 tiles: the columns of a sum of 128 dims, and the RoPE columns.
    static constexpr i32 kGroupSwTiles = kTileDims / kSw128Columns, kGroups = ceil_div(kSwTilesQk, kGroupSwTiles);
    static constexpr bool kWithRowMax = true;
    static constexpr u32 kQSwTileBytes = kHeadSwTileBytes<kHeads>;
    static_assert(kQSwTileBytes % kSwizzleAtomBytes == 0, "SW128 tiles of Q");
};

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier         arrives (count)              carries                waits      first phase
// q_full          query (1)                    Q                      mma        blocked, a phase per work item
// q_empty         products (1)                 -                      query      free, the same
// kv_full[s][g]   gather (1)                   1 or 2 SW128 tiles     mma        blocked, a phase per kStages tiles
// kv_empty[s][g]  products (1)                 -                      gather     free, the same
//
// The others are in attention/sm100/swapped.cuh.
template <class C>
struct Storage {
    // The last SW128 tile of a stage has the RoPE columns until they are scored, then P: a row for each head, 64 keys.
    alignas(kSwizzleAtomBytes) u8 kv[kStages][kSwTilesStage * kSw128Bytes];
    u8 q[C::kSwTilesQk * C::kQSwTileBytes];
    float warp_values[kStages][kWarpgroupWarps][C::kHeads];  // maxima, finally sums, of each warp's keys
    HeadStats<C::kHeads> stats;
    MBarrier q_full, q_empty, kv_full[kStages][C::kGroups], kv_empty[kStages][C::kGroups];
    MBarrier s_full[kStages], p_full[kStages], out_full[kStages];
    TmemAddr tmem;

    MLA_DEVICE u8* p(i32 stage) { return kv[stage] + kSwTilesV * kSw128Bytes; }
};

template <class C>
MLA_DEVICE void init_storage(Storage<C>& s) {
    mbarrier_init(s.q_full, 1);
    mbarrier_init(s.q_empty, 1);
    for (i32 stage = 0; stage < kStages; ++stage) {
        for (MBarrier& barrier : s.kv_full[stage]) mbarrier_init(barrier, 1);
        for (MBarrier& barrier : s.kv_empty[stage]) mbarrier_init(barrier, 1);
        mbarrier_init(s.s_full[stage], 1);
        mbarrier_init(s.p_full[stage], kWarpgroupThreads);
        mbarrier_init(s.out_full[stage], 1);
    }
    fence_mbarrier_init();
}

// ---- Work ------------------------------------------------------------------------------------------------------
struct Maps {
    const TensorMap &kv, &q;
};

// The block's heads of queries, split by split.
template <class C>
struct Block {
    const DecodeParams& p;
    const Maps& maps;
    Storage<C>& s;

    MLA_DEVICE i32 split() const { return (i32)blockIdx.y; }
    MLA_DEVICE i32 head0() const { return (i32)blockIdx.x * C::kHeads; }

    // Calls act(item) for each work item with a tile.
    template <class Act>
    MLA_DEVICE void for_items(Act act) const {
        sm100::for_items<ScheduledWork>(p, split(), act);
    }
};

// ---- Loads -----------------------------------------------------------------------------------------------------
// Heads past the last one arrive as zeros.
template <class C>
MLA_DEVICE void run_query_role(const Block<C>& block) {
    if (!elect_one()) return;
    Storage<C>& s = block.s;
    Ring<1> ring;
    block.for_items([&](const WorkItem& item) {
        mbarrier_wait(s.q_empty, ring.empty_parity(0));
        ring.advance(0);
        mbarrier_arrive_expect_tx(s.q_full, sizeof(s.q));
        for (i32 sw_tile = 0; sw_tile < C::kSwTilesQk; ++sw_tile) {
            cp_async_bulk_tensor_3d(smem_addr(s.q) + sw_tile * C::kQSwTileBytes, block.maps.q, s.q_full,
                                    sw_tile * kSw128Columns, block.head0(), item.request, kEvictFirst);
        }
    });
}

// A lane gathers four keys. Entries past the end of the list are kNoRow, and become zeros.
constexpr i32 kKeysOfLane = 4;
constexpr u32 kGatherBytes = kKeysOfLane * kSw128RowBytes;

template <class C>
MLA_DEVICE void run_gather_role(const Block<C>& block, i32 warp, i32 lane) {
    constexpr i32 kLanes = kTileKeys / kKeysOfLane;
    const DecodeParams& p = block.p;
    Storage<C>& s = block.s;
    RingCount<kStages> ring;
    block.for_items([&](const WorkItem& item) {
        const i32* list = p.block_table + item.request * p.table_stride_b_elems;
        for (i32 tile = item.tile_begin; tile < item.tile_end; ++tile) {
            const i32 stage = ring.stage();
            int4 rows = make_int4(kNoRow, kNoRow, kNoRow, kNoRow);
            if (lane < kLanes) rows = reinterpret_cast<const int4*>(list + tile * kTileKeys)[lane];
            for (i32 group = warp; group < C::kGroups; group += kGatherWarps) {
                MBarrier& full = s.kv_full[stage][group];
                const i32 first = group * C::kGroupSwTiles, last = min(first + C::kGroupSwTiles, C::kSwTilesQk);
                mbarrier_wait(s.kv_empty[stage][group], ring.full_parity() ^ 1);
                if (lane == 0) mbarrier_arrive_expect_tx(full, (last - first) * kSw128Bytes);
                __syncwarp();
                for (i32 sw_tile = first; lane < kLanes && sw_tile < last; ++sw_tile) {
                    cp_async_bulk_tensor_gather4(smem_addr(s.kv[stage]) + (sw_tile * kSw128Bytes + lane * kGatherBytes),
                                                 block.maps.kv, full, sw_tile * kSw128Columns, rows, kEvictLast);
                }
            }
            ring.advance();
        }
    });
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
template <class C>
MLA_DEVICE void run_block(const DecodeParams& p, const Maps& maps, Storage<C>& s) {
    const Block<C> block{p, maps, s};
    const auto init = [&] { init_storage(s); };
    run_with_tensor_memory<C>(s, kMmaWarp, init, [&](i32 warp, TmemAddr tmem) {
        if (warp < kMmaWarp) {
            setmaxnreg_inc<kRegsSoftmax>();
            const i32 thread = threadIdx.x;
            run_softmax_role<C, ScheduledWork>(p, block.split(), BlockHeads{0, block.head0(), p.h_q}, s, tmem, thread,
                                               [&](auto& scores, i32, const WorkItem& item, i32 tile) {
                                                   mask_rows(scores, item.tokens - tile * kTileKeys, thread);
                                               });
            return;
        }
        setmaxnreg_dec<kRegsIssue>();
        if (warp == kMmaWarp) {
            Ring<1> items;
            run_mma_role<C, ScheduledWork>(p, block.split(), s, s.q_empty, tmem, [&] {
                mbarrier_wait(s.q_full, items.full_parity(0));
                items.advance(0);
            });
        } else if (warp == kQueryWarp) {
            run_query_role(block);
        } else if (warp >= kGatherWarp) {
            run_gather_role(block, warp - kGatherWarp, threadIdx.x % kWarpThreads);
        }
    });
}
}  // namespace mla::sparse_forward::sm100

// The facts of a kernel with the choices `C`. Products: M, N and the number of K = 16 of the scores, then of the
// values, per tile.
#define MLA_FORWARD_SM100_FACTS(C)                                                                           \
    static_assert(sizeof(Storage<C>) <= kMaxDynamicSmem, "shared memory");                                   \
    MLA_DECODE_FACTS();                                                                                      \
    MLA_FACT(threads, kThreads);                                                                             \
    MLA_FACT(smem_bytes, sizeof(Storage<C>));                                                                \
    MLA_FACT(block_heads, C::kHeads);                                                                        \
    MLA_FACT(tmem_columns, Columns<C::kHeads>::kAllocated);                                                  \
    MLA_FACT(tmem_columns_used, Columns<C::kHeads>::kUsed);                                                  \
    MLA_FACT(mbarriers, (MLA_OFFSET(Storage<C>, tmem) - MLA_OFFSET(Storage<C>, q_full)) / sizeof(MBarrier)); \
    MLA_FACT_LIST(products, kTileKeys, C::kHeads, C::kSwTilesQk* kSw128MmaSteps, kTileDims, C::kHeads,       \
                  kDimTiles* kTileKeys / kMmaK)
