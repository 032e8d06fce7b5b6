// Sparse decode from FP8 records on Blackwell: what the kernel chooses, shared memory, barriers. Warps that dequantise
// are those of Hopper's kernel for few heads (attention/sm90/small_records.cuh), products and softmax those of
// attention/sm100/swapped.cuh.
#pragma once
#include "attention/sm100/swapped.cuh"
#include "attention/sm90/small_records_dequant.cuh"
#include "common/limits.cuh"

namespace mla::sparse_decode::sm100 {
using namespace attention;
using namespace attention::sm100;
using attention::sm90::SmallStorage;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role       warps    regs   does
// softmax    0..3     200    P; rescales O^T where a maximum moved; results
// mma        4        72     tensor memory; one thread issues every product; three more warps do nothing
// dequant    8..15    120    eight rows of a tile per warp; Q
constexpr i32 kMmaWarp = 4, kDequantWarp = 8;
constexpr i32 kThreads = (kDequantWarp + sm90::kDequantWarps) * kWarpThreads;
constexpr i32 kRegsSoftmax = 200, kRegsIssue = 72, kRegsDequant = 120;
static_assert(kRegsSoftmax + kRegsIssue + 2 * kRegsDequant <= 4 * regs_at_entry(kThreads), "what the block has");
static_assert(sm90::kStagesKV == kStages, "stages");

// What the kernel chooses, and the sizes that follow. Rows come through registers: beside Q of 64 heads there is no
// room for them in shared memory.
template <class Element_, class Record, i32 kHeads_>
struct Config : sm90::SmallRecords<Element_, Record, SelectedTokens, kHeads_> {
    using Base = sm90::SmallRecords<Element_, Record, SelectedTokens, kHeads_>;
    static constexpr bool kTensorMemory = true;
    static constexpr bool kStaged = false, kScouted = false, kFencedByReaders = false;
    static constexpr i32 kMathGroups = 1, kStagesQ = 1;
    static constexpr i32 kHeads = kHeads_, kBlocks = 1;
    static constexpr bool kWithRowMax = Base::Tokens::kWithRowMax;
    static constexpr bool kScaled = !sm90::kSameFormat<Element_, typename Base::Latent>;
};
// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier         arrives (count)                    waits      first phase
// kv_full[s][g]   dequant warps (8)                  mma        blocked, a phase per kStages tiles
// kv_empty[s][g]  products (1)                       dequant    free, the same
// q_empty[0]      products (1), softmax warps (4)    dequant    free, a phase per work item
//
// The others are in attention/sm100/swapped.cuh. A query comes with group 0 of its first tile. The softmax reads the
// factors of its heads, and releases Q with the last tile's.
template <class C>
struct Storage : SmallStorage<C> {
    float warp_values[kStages][kWarpgroupWarps][C::kHeads];  // maxima, finally sums, of each warp's keys
    HeadStats<C::kHeads> stats;
    MBarrier s_full[kStages], p_full[kStages], out_full[kStages];
    TmemAddr tmem;

    MLA_DEVICE u8* p(i32 stage) { return this->kv[stage] + kSwTilesV * kSw128Bytes; }
};

template <class C>
MLA_DEVICE void init_storage(Storage<C>& s) {
    mbarrier_init(s.q_empty[0], 1 + kWarpgroupWarps);
    for (i32 stage = 0; stage < kStages; ++stage) {
        for (MBarrier& barrier : s.kv_full[stage]) mbarrier_init(barrier, sm90::kDequantWarps);
        for (MBarrier& barrier : s.kv_empty[stage]) mbarrier_init(barrier, 1);
        mbarrier_init(s.s_full[stage], 1);
        mbarrier_init(s.p_full[stage], kWarpgroupThreads);
        mbarrier_init(s.out_full[stage], 1);
    }
    fence_mbarrier_init();
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
template <class C>
MLA_DEVICE void run_block(const DecodeParams& p, Storage<C>& s) {
    using Work = typename C::Tokens::Work;
    sm90::SmallBlock<C> block(p, s);
    const auto init = [&] { init_storage(s); };
    run_with_tensor_memory<C>(s, kMmaWarp, init, [&](i32 warp, TmemAddr tmem) {
        if (warp < kMmaWarp) {
            setmaxnreg_inc<kRegsSoftmax>();
            const i32 thread = threadIdx.x;
            run_softmax_role<C, Work>(p, block.split, BlockHeads{block.kv_head, block.row0, block.rows}, s, tmem,
                                      thread, [&](auto& scores, i32 stage, const WorkItem& item, i32 tile) {
                                          if (C::kScaled)
                                              own_factors<C::kHeads>(s.q_factors[0], thread).multiply(scores);
                                          if (tile + 1 == item.tile_end) release(s.q_empty[0], thread);
                                          mask_absent(scores, s.present[stage], thread);
                                      });
        } else if (warp < kDequantWarp) {
            setmaxnreg_dec<kRegsIssue>();
            if (warp == kMmaWarp) run_mma_role<C, Work>(p, block.split, s, s.q_empty[0], tmem, [] {});
        } else {
            setmaxnreg_dec<kRegsDequant>();
            sm90::run_dequant_role(block, warp - kDequantWarp, threadIdx.x % kWarpThreads);
        }
    });
}
}  // namespace mla::sparse_decode::sm100
