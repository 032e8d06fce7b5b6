// Log-sum-exps of the main attention over lists of keys on Hopper, where the caller has none for the sparse stage's
// loss.
//
//   lse[t, h] = log(sum_i exp(scale * q_th . k_s)),   s = row i of the token's list
//
// A block has a token. The queries of its heads are the rows of the products, 64 to a warpgroup; the keys of its list
// are the columns.
//
//   gather   Q | K_0 K_1 ...
//   math_w       S = Q K_0^T, max, sum; S = Q K_1^T, ...   merge, store
//
// The loop of `sm90_lse.cu`, with the gather of `sm90_list_scores.cu`. With 64 heads or fewer the second warpgroup has
// none and ends at once. Grid: one block per token.
#include "common/limits.cuh"
#include "indexer/loss/sm90_lists.cuh"
#include "indexer/loss/sm90_lse.cuh"
#include "ptx/control.cuh"
#include "tile/prologue.cuh"

namespace mla::indexer::loss {
// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr i32 kPieces = MLA_PIECES;  // of 64 columns; missing columns are zeros

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps    regs   does
// math_0   0..3     184    heads 0 .. 63
// math_1   4..7     184    heads 64 .. 127
// gather   8..11    104    all copies
constexpr i32 kMathWarpgroups = 2;
constexpr i32 kThreads = (kMathWarpgroups + 1) * kWarpgroupThreads;
constexpr i32 kMathWarps = kMathWarpgroups * kWarpgroupWarps;
constexpr i32 kRegsMath = 184, kRegsGather = 104;
static_assert(kMathWarpgroups * kRegsMath + kRegsGather <= kRegsOfLane, "registers of the block");
static_assert(kLseTileKeys == kListTileKeys, "a tile of a list");

constexpr i32 kStages = kPieces > 4 ? 5 : 10;

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier       arrives (count)            carries   waits    first phase
// q_full        gather (1)                 Q         math     blocked
// k_full[s]     gather (129)               a piece   math     blocked
// k_empty[s]    warps with heads (4, 8)    -         gather   free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kPieces][kListHeads * kSw128RowBytes];
    u8 k[kStages][kListPieceBytes];
    MBarrier q_full, k_full[kStages], k_empty[kStages];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_heads, kListHeads);

MLA_DEVICE void init_storage(Storage& s, i32 heads) {
    mbarrier_init(s.q_full, 1);
    init_ring(s.k_full, s.k_empty, kGatherArrivals, heads > kSw128Rows ? kMathWarps : kWarpgroupWarps);
    fence_mbarrier_init();
}

using Pieces = RingPosition<kStages>;

// ---- Roles -----------------------------------------------------------------------------------------------------
MLA_DEVICE void run_gather_role(const LossParams& p, Storage& s, const TensorMap& q_map, const KeyList& list,
                                i32 thread) {
    if (thread == 0) load_list_queries<kPieces>(s, q_map, list.token);
    Pieces pieces;
    gather_list_keys<kPieces>(s, pieces, list, p.k, p.k_stride_token_elems, p.s_kv, p.head_dim, thread);
    cp_async_wait_all();
}

// Scores become scores in base 2; past the end of the list they are -inf.
MLA_DEVICE void scale_and_cut(const KeyList& list, i32 tile, i32 thread, float scale_log2, float (&d)[kLseProducts]) {
    const i32 left = list.count - tile * kListTileKeys;
#pragma unroll
    for (i32 i = 0; i < kLseProducts; ++i) d[i] *= scale_log2;
    if (left >= kListTileKeys) return;
#pragma unroll
    for (i32 i = 0; i < kLseProducts; ++i) d[i] = fragment_column(thread, i) < left ? d[i] : negative_infinity();
}

MLA_DEVICE void run_math_role(const LossParams& p, Storage& s, const KeyList& list, i32 warpgroup, i32 thread) {
    RunningSum rows[kFragmentRows];
    Pieces pieces;
    float d[kLseProducts];
    mbarrier_wait(s.q_full, 0);
#pragma unroll 1
    for (i32 tile = 0; tile < list.tiles(); ++tile) {
        multiply_rows<kPieces, true>(s, pieces, warpgroup, thread, d);
        scale_and_cut(list, tile, thread, p.scale * kLog2E, d);
        add_scores(rows, d);
    }
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const float lse = rows[r].merge();
        const i32 head = warpgroup * kSw128Rows + fragment_row(thread) + 8 * r;
        if (thread % 4 != 0 || head >= p.heads) continue;
        p.attention_lse[list.token * p.attention_lse_stride_token_elems + head * p.attention_lse_stride_head_elems] =
            lse;
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_loss_sm90_list_lse(const __grid_constant__ LossParams p, const __grid_constant__ TensorMap q_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    start_block([&] { init_storage(s, p.heads); }, q_map);

    const i32 warp = uniform_warp(), thread = threadIdx.x % kWarpgroupThreads;
    const KeyList list = key_list(p, blockIdx.x);
    if (warp < kMathWarps) {
        setmaxnreg_inc<kRegsMath>();
        const i32 warpgroup = warp / kWarpgroupWarps;
        if (warpgroup * kSw128Rows < p.heads) run_math_role(p, s, list, warpgroup, thread);
    } else {
        setmaxnreg_dec<kRegsGather>();
        run_gather_role(p, s, q_map, list, thread);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
