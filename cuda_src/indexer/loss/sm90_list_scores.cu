// Targets and scores of the sparse stage's loss on Hopper: `sm90_scores.cu` over the keys of a list.
//
//   target[t, i] = sum_h exp(scale * q_th . k_s - lse_th),   score[t, i] = sum_j W_tj max(iq_tj . ik_s, 0),   s = row i
//
// A block has a token. The queries of all its heads stay in shared memory and are the columns of the products; the keys
// of its list are their rows and arrive in pieces of 64 columns. So the sum over heads is a sum over a thread's
// accumulators. Index queries and keys may be e4m3.
//
//   gather   Q | K_0 K_1 ...                | IQ | IK_0 IK_1 ...
//   math_w       S = K Q^T, sum exp ... store      a = IK IQ^T, sum W max(a, 0) ... store
//
// Without heads of one kind (attention or index) the corresponding half is skipped. While one warpgroup computes
// exponentials, the other uses the tensor cores. Grid: one block per token of the chunk.
#include "common/limits.cuh"
#include "indexer/loss/sm90_lists.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "tile/fragment.cuh"
#include "tile/product.cuh"
#include "tile/prologue.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::loss {
// ---- Variant ---------------------------------------------------------------------------------------------------
// Pieces of 128 bytes: of a head, and of an index head. What a row lacks is zeros.
constexpr i32 kPieces = MLA_PIECES;
constexpr i32 kIndexPieces = MLA_INDEX_PIECES;
using IndexElement = MLA_INDEX_DTYPE;
constexpr i32 kIndexBytes = index_element_bytes(IndexElement{});
static_assert(kIndexBytes == 2 || kIndexPieces == 1, "rows of 128 codes at most");

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps    regs   does
// math_0   0..3     184    keys 0 .. 63 of the tile
// math_1   4..7     184    keys 64 .. 127
// gather   8..11    104    all copies
constexpr i32 kMathWarpgroups = 2;
constexpr i32 kThreads = (kMathWarpgroups + 1) * kWarpgroupThreads;
constexpr i32 kMathWarps = kMathWarpgroups * kWarpgroupWarps;
constexpr i32 kRegsMath = 184, kRegsGather = 104;
static_assert(kMathWarpgroups * kRegsMath + kRegsGather <= kRegsOfLane, "registers of the block");

constexpr i32 kMaxHeads = kListHeads, kFewHeads = 64;
constexpr i32 kStages = kPieces > 4 ? 5 : 10;
constexpr i32 kMathBarrier = 1;
static_assert(kIndexPieces <= kPieces, "index queries take the place of the queries");

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier       arrives (count)       carries          waits    first phase
// q_full        gather (1)            Q, then IQ       math     blocked
// q_empty       math warps (8)        -                gather   blocked: for IQ after Q only
// k_full[s]     gather (129)          a piece          math     blocked
// k_empty[s]    math warps (8)        -                gather   free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kPieces][kMaxHeads * kSw128RowBytes];
    u8 k[kStages][kListPieceBytes];
    alignas(16) float minus_lse[kMaxHeads];  // in base 2
    alignas(16) float weights[kMaxHeads];
    MBarrier q_full, q_empty, k_full[kStages], k_empty[kStages];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_heads, kMaxHeads);

MLA_DEVICE void init_storage(Storage& s) {
    mbarrier_init(s.q_full, 1);
    mbarrier_init(s.q_empty, kMathWarps);
    init_ring(s.k_full, s.k_empty, kGatherArrivals, kMathWarps);
    fence_mbarrier_init();
}

using Pieces = RingPosition<kStages>;

// ---- Gather role -----------------------------------------------------------------------------------------------
MLA_DEVICE void run_gather_role(const LossParams& p, Storage& s, const TensorMap& q_map, const TensorMap& index_q_map,
                                const KeyList& list, i32 thread) {
    Pieces pieces;
    if (p.heads > 0) {
        if (thread == 0) load_list_queries<kPieces>(s, q_map, list.token);
        gather_list_keys<kPieces>(s, pieces, list, p.k, p.k_stride_token_elems, p.s_kv, p.head_dim, thread);
    }
    if (p.index_heads > 0) {
        if (thread == 0) {
            if (p.heads > 0) mbarrier_wait(s.q_empty, 0);
            load_list_queries<kIndexPieces>(s, index_q_map, list.token);
        }
        const i64 stride = p.index_k_stride_elems * kIndexBytes / 2;  // in pairs of codes
        gather_list_keys<kIndexPieces>(s, pieces, list, static_cast<const u16*>(p.index_k), stride, p.s_kv,
                                       p.index_dim * kIndexBytes / 2, thread);
    }
    cp_async_wait_all();
}

// ---- Math role -------------------------------------------------------------------------------------------------
// The products of the warpgroup's keys with all heads.
template <i32 kCount, class Element, i32 kProducts>
MLA_DEVICE void multiply(Element, Storage& s, Pieces& pieces, i32 warpgroup, i32 thread, float (&d)[kProducts]) {
    pin(d);
#pragma unroll
    for (i32 piece = 0; piece < kCount; ++piece) {
        pieces.wait_full(s.k_full);
        fence_proxy_async();
        SmemDesc k = k_major_desc(smem_addr(s.k[pieces.stage]) + warpgroup * kSw128Bytes);
        SmemDesc q = k_major_desc(smem_addr(s.q[piece]));
        opaque(k.bits), opaque(q.bits);
        wgmma_fence();
        multiply_abt<kSw128MmaSteps>(Element{}, d, k, q, piece > 0);
        wgmma_commit_group();
        if (piece > 0) {
            wgmma_wait_group<1>();
            release(s.k_empty[pieces.before()], thread);
        }
        pieces.advance();
    }
    wgmma_wait_group<0>();
    release(s.k_empty[pieces.before()], thread);
    pin(d);
}

struct Exponential {
    float scale_log2;

    MLA_DEVICE float operator()(float x, float number) const { return ex2_approx(fmaf(x, scale_log2, number)); }
};

struct WeightedRelu {
    MLA_DEVICE float operator()(float x, float number) const { return fmaxf(x, 0.f) * number; }
};

// Sums over the heads, which are the columns, and stores the sums. `term(product, number)` is a head's contribution,
// times(place) the factor of a key.
template <i32 kCount, i32 kProducts, class Element, class Term, class Times>
MLA_DEVICE void make_sums(Element, Storage& s, Pieces& pieces, const KeyList& list, const float* numbers, float* to,
                          i32 warpgroup, i32 thread, Term term, Times times) {
    float d[kProducts];
#pragma unroll 1
    for (i32 tile = 0; tile < list.tiles(); ++tile) {
        multiply<kCount>(Element{}, s, pieces, warpgroup, thread, d);
        float sums[kFragmentRows] = {0.f, 0.f};
#pragma unroll
        for (i32 i = 0; i < kProducts; i += 4) {
            const float2 of = *reinterpret_cast<const float2*>(numbers + fragment_column(thread, i));
#pragma unroll
            for (i32 r = 0; r < kFragmentRows; ++r) {
                sums[r] += term(d[i + 2 * r], of.x) + term(d[i + 2 * r + 1], of.y);
            }
        }
        const i32 first = tile * kListTileKeys + warpgroup * kSw128Rows + fragment_row(thread);
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            const float sum = quad_sum(sums[r]);
            const i32 place = first + 8 * r;
            if (thread % 4 == 0 && place < list.count) to[place] = sum * times(place);
        }
    }
}

MLA_DEVICE float minus_lse2_of(const LossParams& p, i32 token, i32 head) {
    if (head >= p.heads) return negative_infinity();
    return minus_lse2(p.lse[token * p.lse_stride_token_elems + head * p.lse_stride_head_elems]);
}

MLA_DEVICE void load_numbers(const LossParams& p, Storage& s, i32 token, i32 warpgroup, i32 thread) {
    if (warpgroup == 0) {
        s.minus_lse[thread] = minus_lse2_of(p, token, thread);
    } else {
        s.weights[thread] = thread < p.index_heads ? index_weight(p, token, thread) : 0.f;
    }
    bar_sync(kMathBarrier, kMathWarpgroups * kWarpgroupThreads);
}

MLA_DEVICE void run_math_role(const LossParams& p, Storage& s, const KeyList& list, i32 warpgroup, i32 thread) {
    load_numbers(p, s, list.token, warpgroup, thread);
    Pieces pieces;
    if (p.heads > 0) {
        mbarrier_wait(s.q_full, 0);
        make_sums<kPieces, kMaxHeads / 2>(bfloat16{}, s, pieces, list, s.minus_lse,
                                          p.target + target_offset(p, list.token, 0), warpgroup, thread,
                                          Exponential{p.scale * kLog2E}, [](i32) { return 1.f; });
        release(s.q_empty, thread);
    }
    if (p.index_heads == 0) return;
    mbarrier_wait(s.q_full, p.heads > 0 ? 1 : 0);
    float* to = p.scores + row_offset(p, list.token, 0);
    const auto times = [&](i32 place) { return key_scale(p, list.rows[place]); };
    if (p.index_heads <= kFewHeads) {
        make_sums<kIndexPieces, kFewHeads / 2>(IndexElement{}, s, pieces, list, s.weights, to, warpgroup, thread,
                                               WeightedRelu{}, times);
    } else {
        make_sums<kIndexPieces, kMaxHeads / 2>(IndexElement{}, s, pieces, list, s.weights, to, warpgroup, thread,
                                               WeightedRelu{}, times);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_loss_sm90_list_scores(const __grid_constant__ LossParams p, const __grid_constant__ TensorMap q_map,
                                      const __grid_constant__ TensorMap index_q_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    start_block([&] { init_storage(s); }, q_map, index_q_map);

    const i32 warp = uniform_warp(), thread = threadIdx.x % kWarpgroupThreads;
    const KeyList list = key_list(p, p.first_token + blockIdx.x);
    if (list.count > 0) {
        if (warp < kMathWarps) {
            setmaxnreg_inc<kRegsMath>();
            run_math_role(p, s, list, warp / kWarpgroupWarps, thread);
        } else {
            setmaxnreg_dec<kRegsGather>();
            run_gather_role(p, s, q_map, index_q_map, list, thread);
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
