// Dense MLA decode on Hopper: two warpgroups that alternate on the tensor cores ("seesaw").
//
//   S = Q K^T * scale            (64 x 576) (576 x 64) per tile of 64 tokens
//   P = exp2(S log2(e) - m)      m: running row maximum, shared by both warpgroups
//   l = sum of P,  O = P V       V is K's first 512 columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// Grid: x = 64-row blocks of all KV heads (rows of one KV head = s_q * h_q / h_kv), y = splits. One block per
// SM iterates over the work items of its split (attention/split_work.cuh). No cluster.
//
// Tiles are processed in pairs: the left warpgroup scores the even tile, the right one the odd tile, and each
// multiplies both P's with its own half of the values (attention/sm90/seesaw.cuh).
//
//   left    | softmax 0 | O_L += P0 V0_L |          | O_L += P1 V1_L | S0 = Q K0'            | softmax 0'
//   right   |   S1      |  softmax 1     | O_R += P0 V0_R | O_R += P1 V1_R | S1 = Q K1'      | ...
//   load    |           |       K0'_left ->  K1'_left, K0'_right ->  K1'_right ->
//
// Source: FlashMLA's schedule (2025). The header says what differs in the products; here: a dedicated producer warp,
// and one mechanism for all page sizes.
#include "attention/sm90/seesaw.cuh"
#include "common/limits.cuh"
#include "decode/sm90_load.cuh"
#include "tile/warp.cuh"

// Keys have RoPE columns unless a variant says otherwise.
#ifndef MLA_HEAD_DIM_QK
#define MLA_HEAD_DIM_QK 576
#endif

// A mask says which drafts a query sees, if a variant says so.
#ifndef MLA_TREE_MASK
#define MLA_TREE_MASK 0
#endif

namespace mla::decode {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Dense = Config<MLA_DTYPE, MLA_HEAD_DIM_QK, /*kSparse=*/false, MLA_TREE_MASK>;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role          warps    regs   does
// left          0..3     224    even tiles: S0, softmax
// right         4..7     224    odd tiles:  S1, softmax
// load, query   8..11    56     decode/sm90_load.cuh
constexpr i32 kRegsMath = 224;
constexpr i32 kRegsLoad = 56;
static_assert(2 * kRegsMath + kRegsLoad <= 3 * kRegsEntry, "what the block has at entry");
static_assert(sizeof(Storage<Dense>) <= kMaxDynamicSmem, "shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage<Dense>));
MLA_FACT(block_m, kBlockM);

// ---- Load role -------------------------------------------------------------------------------------------------
// Both halves of a tile, each as soon as its place is free.
struct HalvesLoader {
    Block<Dense>& block;
    const TensorMap& kv_map;
    Ring<kStagesKV> ring;

    MLA_DEVICE void operator()(const TileBoxes& boxes, const WorkItem& item, i32 tile) {
        Storage<Dense>& s = block.s;
        const i32 stage = stage_of(item, tile);
        const u32 empty_parity = ring.empty_parity(stage);
        const SmemAddr to = smem_addr(s.kv[stage]);
        const u64 present = boxes.present_tokens();
        mbarrier_wait(s.kv_empty[stage].left, empty_parity);
        if (boxes.lane == 0) {
            s.present[stage] = present;
            mbarrier_arrive_expect_tx(s.kv_full[stage].left, Dense::kLeftBytes);
        }
        __syncwarp();
        boxes.load<Dense>(to, kv_map, s.kv_full[stage].left, block.kv_head, 0, Dense::kSwTilesLeft);

        mbarrier_wait(s.kv_empty[stage].right, empty_parity);
        if (boxes.lane == 0) mbarrier_arrive_expect_tx(s.kv_full[stage].right, Dense::kRightBytes);
        __syncwarp();
        boxes.load<Dense>(to, kv_map, s.kv_full[stage].right, block.kv_head, Dense::kSwTilesLeft, Dense::kSwTilesQk);
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
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode_sm90_seesaw(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap kv_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    auto& s = *reinterpret_cast<Storage<Dense>*>(smem);
    Block<Dense> block(p, s);
    if (threadIdx.x == 0) {
        prefetch_tensormap(kv_map);
        init_storage(s, kLoadArrivals, kQueryThreads);
    }
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    const i32 thread = threadIdx.x % kWarpgroupThreads;
    if (warp < kRightWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_left_role(block, thread);
    } else if (warp < kLoaderWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_right_role(block, thread);
    } else {
        setmaxnreg_dec<kRegsLoad>();
        if (warp == kLoaderWarp) {
            run_load_role(block, thread, HalvesLoader{block, kv_map});
        } else {
            const i32 query_thread = thread - kWarpThreads;
            const QueryStages<1> stages{s.q, &s.q_full, &s.q_empty};
            run_query_role<Dense>(block, stages, query_thread,
                                  [&](const WorkItem& item) { store_tree_words(block, item, query_thread); });
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::decode
