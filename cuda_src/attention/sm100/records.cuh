// Attention to FP8 records on Blackwell: configuration, shared memory, barriers, roles. The dequantising warps come
// from Hopper's kernels for few rows (attention/sm90/small_records.cuh), products and softmax from
// attention/sm100/swapped.cuh; query rows that share keys are called heads. The kernels differ in where tokens lie
// (attention/record_tokens.cuh) and which of them a row sees.
#pragma once
#include "attention/sm100/swapped.cuh"
#include "attention/sm90/small_records_dequant.cuh"
#include "common/limits.cuh"

namespace mla::attention::sm100 {
using sm90::SmallBlock;
using sm90::SmallStorage;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role       warps    regs   does
// softmax    0..3     200    P; rescales O^T where a maximum moved; results
// mma        4        72     tensor memory; one thread issues every product; three more warps do nothing
// dequant    8..15    120    eight rows of a tile per warp; Q
constexpr i32 kMmaWarp = 4, kDequantWarp = 8;
constexpr i32 kRecordThreads = (kDequantWarp + sm90::kDequantWarps) * kWarpThreads;
constexpr i32 kRegsSoftmax = 200, kRegsIssue = 72, kRegsDequant = 120;
static_assert(kRegsSoftmax + kRegsIssue + 2 * kRegsDequant <= 4 * regs_at_entry(kRecordThreads), "what the block has");
static_assert(sm90::kStagesKV == kStages, "stages");

// Configuration of a kernel, and the sizes that follow. Cache rows come through registers: next to Q of 64 heads shared
// memory has no room for them.
template <class Element_, class Record, class Tokens, i32 kHeads_>
struct RecordConfig : sm90::SmallRecords<Element_, Record, Tokens, kHeads_> {
    using Base = sm90::SmallRecords<Element_, Record, Tokens, kHeads_>;
    static constexpr bool kTensorMemory = true;
    static constexpr bool kStaged = false, kScouted = false, kFencedByReaders = false;
    static constexpr i32 kMathGroups = 1, kStagesQ = 1;
    static constexpr i32 kHeads = kHeads_;
    static constexpr bool kWithRowMax = Tokens::kWithRowMax;
    static constexpr bool kScaled = !sm90::kSameFormat<Element_, typename Base::Latent>;
};

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier         arrives (count)                    waits            first phase
// kv_full[s][g]   dequant warps (8)                  mma, softmax     blocked, a phase per kStages tiles
// kv_empty[s][g]  products (1)                       dequant          free, the same
// q_empty[0]      products (1), softmax warps (4)    dequant          free, a phase per work item
//
// The others are in attention/sm100/swapped.cuh. A query comes with group 0 of its first tile. The softmax reads the
// factors of its heads, and releases Q with the last tile's.
template <class C>
struct RecordStorage : SmallStorage<C> {
    float warp_values[kStages][kWarpgroupWarps][C::kHeads];  // maxima, finally sums, of each warp's keys
    HeadStats<C::kHeads> stats;
    MBarrier s_full[kStages], p_full[kStages], out_full[kStages];
    TmemAddr tmem;

    MLA_DEVICE u8* p(i32 stage) { return this->kv[stage] + kSwTilesV * kSw128Bytes; }
};

template <class C>
MLA_DEVICE void init_storage(RecordStorage<C>& s) {
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

// ---- Softmax ---------------------------------------------------------------------------------------------------
// The result of a work item. Of a record with one scale for the whole cache it is multiplied by that here, once.
template <class C>
MLA_DEVICE void store_item(SwappedSoftmax<C, RecordStorage<C>>& softmax, const WorkItem& item, const BlockHeads& rows) {
    if (item.tile_begin >= item.tile_end) return softmax.store_nothing(item, rows);
    if constexpr (!kHasValueScale<typename C::TokenRecord>) {
        softmax.store(item, rows);
    } else {
        auto& s = softmax.s;
        const i32 thread = softmax.thread;
        finish_heads<C::kWithRowMax>(softmax.p, item, rows, softmax.heads, s.warp_values[softmax.ring.stage()], s.stats,
                                     true, SoftmaxOnly, thread);
        if (thread < C::kHeads) s.stats.factor[thread] *= softmax.p.value_scale;
        bar_sync(SoftmaxOnly, kWarpgroupThreads);
        softmax.wait_for_out();
        for (i32 head = 0; head < C::kHeads; head += softmax.kPieceHeads) softmax.store_heads(item, rows, head);
    }
}

// `mask(block, scores, stage, item, tile, thread)` hides tokens that a head does not see, and makes their values
// finite.
template <class C, class Mask>
MLA_DEVICE void run_softmax_role(const SmallBlock<C>& block, RecordStorage<C>& s, TmemAddr tmem, i32 thread,
                                 Mask mask) {
    const BlockHeads rows{block.kv_head, block.row0, block.rows};
    SwappedSoftmax<C, RecordStorage<C>> softmax{block.p, s, tmem, thread};
    using Work = WorkIteratorOf<typename C::Tokens::Work>;
    WorkItem item;
    for (Work walk(block.p, block.split, C::Tokens::kMasked ? block.hidden : 0); walk.next(block.p, item);) {
        softmax.heads.reset();
        for (i32 tile = item.tile_begin; tile < item.tile_end; ++tile) {
            const u32 parity = softmax.ring.full_parity();
            softmax.tile(tile == item.tile_begin, [&](auto& scores, i32 stage) {
                // Makes visible what the dequantising warps stored next to the tile, and the values: a commit need not
                // pass on what its thread has waited for.
                for (MBarrier& full : s.kv_full[stage]) mbarrier_wait(full, parity);
                if (C::kScaled) own_factors<C::kHeads>(s.q_factors[0], thread).multiply(scores);
                if (tile + 1 == item.tile_end) release(s.q_empty[0], thread);
                mask(block, scores, stage, item, tile, thread);
            });
        }
        store_item(softmax, item, rows);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
template <class C, class Mask>
MLA_DEVICE void run_records(const DecodeParams& p, RecordStorage<C>& s, Mask mask) {
    SmallBlock<C> block(p, s);
    const auto init = [&] { init_storage(s); };
    run_with_tensor_memory<C>(s, kMmaWarp, init, [&](i32 warp, TmemAddr tmem) {
        if (warp < kMmaWarp) {
            setmaxnreg_inc<kRegsSoftmax>();
            run_softmax_role(block, s, tmem, threadIdx.x, mask);
        } else if (warp < kDequantWarp) {
            setmaxnreg_dec<kRegsIssue>();
            if (warp == kMmaWarp) {
                run_mma_role<C, typename C::Tokens::Work>(p, block.split, s, s.q_empty[0], tmem, [] {});
            }
        } else {
            setmaxnreg_dec<kRegsDequant>();
            sm90::run_dequant_role(block, warp - kDequantWarp, threadIdx.x % kWarpThreads);
        }
    });
}
}  // namespace mla::attention::sm100

// Facts of a kernel with configuration `C`, in addition to the facts of its parameters.
#define MLA_RECORDS_SM100_FACTS(C)                                                                      \
    static_assert(sizeof(mla::attention::sm100::RecordStorage<C>) <= kMaxDynamicSmem, "shared memory"); \
    MLA_FACT(threads, mla::attention::sm100::kRecordThreads);                                           \
    MLA_FACT(smem_bytes, sizeof(mla::attention::sm100::RecordStorage<C>));                              \
    MLA_FACT(block_rows, C::kBlockRows);                                                                \
    MLA_FACT(tmem_columns, mla::attention::sm100::Columns<C::kHeads>::kAllocated);                      \
    MLA_FACT(tmem_columns_used, mla::attention::sm100::Columns<C::kHeads>::kUsed);                      \
    MLA_RECORD_FACT(C::TokenRecord)
