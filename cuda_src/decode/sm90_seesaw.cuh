// A thread block of dense decode on Hopper with the seesaw schedule, for the kernels that differ in whose queries and
// tokens it works at: decode/sm90_seesaw.cu, which explains it, and decode/sm90_seesaw_forms.cu.
#pragma once
#include "attention/sm90/seesaw.cuh"
#include "common/limits.cuh"
#include "decode/sm90_huge_rows.cuh"
#include "decode/sm90_load.cuh"
#include "tile/warp.cuh"

namespace mla::decode {
// ---- Budget ----------------------------------------------------------------------------------------------------
// role          warps    regs   does
// left          0..3     224    even tiles: S0, softmax
// right         4..7     224    odd tiles:  S1, softmax
// load, query   8..11    56     decode/sm90_load.cuh
constexpr i32 kRegsSeesawMath = 224;
constexpr i32 kRegsSeesawLoad = 56;
static_assert(2 * kRegsSeesawMath + kRegsSeesawLoad <= 3 * kRegsEntry, "what the block has at entry");

// ---- Load role -------------------------------------------------------------------------------------------------
// Boxes of 64 columns each.
template <class C>
struct SwTileFetch {
    const TensorMap& kv_map;
    i32 kv_head;

    MLA_DEVICE void prefetch_maps() const { prefetch_tensormap(kv_map); }
    MLA_DEVICE i32 most_tokens() const { return kTileTokens; }  // of a box
    template <bool kRight>
    MLA_DEVICE void half(const TileBoxes& boxes, SmemAddr to, MBarrier& full) const {
        constexpr i32 kBegin = kRight ? C::kSwTilesLeft : 0, kEnd = kRight ? C::kSwTilesQk : C::kSwTilesLeft;
        boxes.load<C>(to, kv_map, full, kv_head, kBegin, kEnd);
    }
};

// Both halves of a tile, each as soon as its place is free. `fetch.half<kRight>(boxes, to, full)` starts one.
template <class C, class Fetch>
struct HalvesLoader {
    Block<C>& block;
    const Fetch& fetch;
    Ring<kStagesKV> ring;

    MLA_DEVICE void operator()(const TileBoxes& boxes, const WorkItem& item, i32 tile) {
        Storage<C>& s = block.s;
        const i32 stage = stage_of(item, tile);
        const u32 empty_parity = ring.empty_parity(stage);
        const SmemAddr to = smem_addr(s.kv[stage]);
        const u64 present = boxes.present_tokens();
        mbarrier_wait(s.kv_empty[stage].left, empty_parity);
        if (boxes.lane == 0) {
            s.present[stage] = present;
            mbarrier_arrive_expect_tx(s.kv_full[stage].left, C::kLeftBytes);
        }
        __syncwarp();
        fetch.template half<false>(boxes, to, s.kv_full[stage].left);

        mbarrier_wait(s.kv_empty[stage].right, empty_parity);
        if (boxes.lane == 0) mbarrier_arrive_expect_tx(s.kv_full[stage].right, C::kRightBytes);
        __syncwarp();
        fetch.template half<true>(boxes, to, s.kv_full[stage].right);
        ring.advance(stage);
    }
};

// ---- Query role ------------------------------------------------------------------------------------------------
// Which drafts each row sees, by a thread per row.
template <class C>
MLA_DEVICE void store_tree_words(Block<C>& block, const WorkItem& item, i32 thread) {
    if constexpr (C::kTree) {
        static_assert(kBlockM <= kQueryThreads, "a thread per row");
        if (thread >= kBlockM) return;
        const SeenTokens seen = seen_of_tree(block.p, item, block.row0 + thread);
        const i32 first_tile = first_tile_of_drafts(seen.first);
#pragma unroll
        for (i32 i = 0; i < 2; ++i) block.s.tree.of_tile[i][thread] = seen.of_tile((first_tile + i) * kTileTokens);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
// Math -> query, at the end: all results are stored, and all huge rows known.
enum StoredBarrier : i32 { AllStored = P1Ready + 1 };
constexpr i32 kStoredThreads = kMathThreads + kQueryThreads;

// `fetch` starts the copies of keys, see HalvesLoader.
template <class C, class Fetch>
MLA_DEVICE void run_seesaw_block(Block<C>& block, const Fetch& fetch) {
    Storage<C>& s = block.s;
    if (threadIdx.x == 0) {
        fetch.prefetch_maps();
        init_storage(s, kLoadArrivals, kQueryThreads);
    }
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    const i32 thread = threadIdx.x % kWarpgroupThreads;
    if (warp < kRightWarp) {
        setmaxnreg_inc<kRegsSeesawMath>();
        run_left_role(block, thread);
        if constexpr (C::kRedoesHugeRows) bar_arrive(AllStored, kStoredThreads);
    } else if (warp < kLoaderWarp) {
        setmaxnreg_inc<kRegsSeesawMath>();
        run_right_role(block, thread);
        if constexpr (C::kRedoesHugeRows) bar_arrive(AllStored, kStoredThreads);
    } else {
        setmaxnreg_dec<kRegsSeesawLoad>();
        if (warp == kLoaderWarp) {
            run_load_role(block, thread, HalvesLoader<C, Fetch>{block, fetch}, fetch.most_tokens());
        } else {
            const i32 query_thread = thread - kWarpThreads;
            const QueryStages<1> stages{s.q, &s.q_full, &s.q_empty};
            run_query_role<C>(block, stages, query_thread,
                              [&](const WorkItem& item) { store_tree_words(block, item, query_thread); });
            if constexpr (C::kRedoesHugeRows) {
                griddepcontrol_launch_dependents();  // before the wait, or the combine kernel starts 1 us later
                bar_sync(AllStored, kStoredThreads);
                redo_huge_rows(block, query_thread);
            }
        }
    }
    griddepcontrol_launch_dependents();
}

template <class C>
MLA_DEVICE void run_seesaw_block(const DecodeParams& p, const TensorMap& kv_map, Storage<C>& s) {
    Block<C> block(p, s);
    run_seesaw_block(block, SwTileFetch<C>{kv_map, block.kv_head});
}
}  // namespace mla::decode
