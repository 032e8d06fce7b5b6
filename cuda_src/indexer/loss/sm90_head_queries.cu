// The gradients of the loss per head by index queries and weights on Hopper.
//
//   G = exp(y - index_lse) - exp(x - mass),   M = [a > 0] G,   dq' = M IK
//   d_index_q = row_weight * weight * dq',    d_weights = row_weight * iq . dq'
//
// with x = target_scale * q . k, a = iq . ik, and y = weight * a where a > 0. A block has 128 tokens of a head; x and a
// of a tile of keys are recomputed, and M goes from their accumulators to the registers of the next product.
//
//   load     Q, IQ | K IK | K IK ...
//   math_w       S = Q K^T | a = IQ IK^T | M | dq' += M IK | S ...    stores
//
// While one warpgroup computes exponentials, the other uses the tensor cores. Index keys are finite copies, so that
// keys hidden from a token cannot reach it.
//
// Grid: x = heads, y = tiles of tokens: neighbours read the same keys at the same time.
#include "common/limits.cuh"
#include "indexer/loss/sm90_rows.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "tile/elements.cuh"
#include "tile/prologue.cuh"

namespace mla::indexer::loss {
// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr i32 kIndexPieces = MLA_INDEX_PIECES;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps   regs   does
// math_0   0..3    240    tokens 0 .. 63 of the tile
// math_1   4..7    240    tokens 64 .. 127
// load     8       24     all copies
constexpr i32 kStages = 5;
constexpr i32 kSums = kIndexPieces * kSw128Columns / 2;  // of a thread

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier          arrives (count)   carries        waits   first phase
// q_full           load (1)          Q, IQ          math    blocked
// unit_full[s]     load (1)          K or IK        math    blocked
// unit_empty[s]    math warps (8)    -              load    free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kUnitPieces][kPieceBytes];
    u8 index_q[kIndexPieces][kPieceBytes];
    u8 units[kStages][kUnitPieces][kPieceBytes];
    MBarrier q_full, unit_full[kStages], unit_empty[kStages];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");
using UnitRing = RingPosition<kStages>;

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(tile_tokens, kTileTokens);

MLA_DEVICE void init_storage(Storage& s) {
    mbarrier_init(s.q_full, 1);
    init_ring(s.unit_full, s.unit_empty, 1, kMathWarps);
    fence_mbarrier_init();
}

struct Maps {
    const TensorMap &q, &k, &index_q, &index_k;
};

// ---- Load role -------------------------------------------------------------------------------------------------
// Called by one thread.
MLA_DEVICE void run_load_role(Storage& s, const Maps& maps, const RowTile& tile) {
    mbarrier_arrive_expect_tx(s.q_full, (kUnitPieces + kIndexPieces) * kPieceBytes);
    load_rows(s.q, maps.q, s.q_full, tile);
    load_rows(s.index_q, maps.index_q, s.q_full, tile);
    UnitRing units;
#pragma unroll 1
    for (i32 keys = tile.keys.begin; keys < tile.keys.end; ++keys) {
        load_unit<kUnitPieces>(s, units, maps.k, keys);
        load_unit<kIndexPieces>(s, units, maps.index_k, keys);
    }
}

// ---- Math role -------------------------------------------------------------------------------------------------
// The exponents of a thread's rows, in base 2. Rows without a divergence see nothing.
struct RowExponents {
    float target_log2;
    float weight[kFragmentRows], minus_mass[kFragmentRows], minus_index_lse[kFragmentRows];
    bool live[kFragmentRows];
};

MLA_DEVICE RowExponents row_numbers(const LossParams& p, const RowTile& tile, const Math& math) {
    RowExponents numbers;
    numbers.target_log2 = p.target_scale * kLog2E;
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const HeadRow row = head_row(p, math.token(r), tile.head);
        numbers.live[r] = row.live;
        numbers.weight[r] = row.weight_log2;
        numbers.minus_mass[r] = row.minus_mass;
        numbers.minus_index_lse[r] = row.minus_index_lse;
    }
    return numbers;
}

// Products of the indexer become -1, which has no gradient, where a row does not see the key.
MLA_DEVICE void hide_keys(const LossParams& p, const Math& math, const RowExponents& numbers, i32 first_key,
                          float (&a)[kAccumulators]) {
    RowRanges ranges(p, math);
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        if (!numbers.live[r]) ranges.of[r] = KeyRange{0, 0};
    }
    if (!ranges.hold(first_key)) hide(ranges, math.thread, first_key, -1.f, a);
}

MLA_DEVICE float masked_gradient(const RowExponents& numbers, i32 r, float product, float a) {
    const float target = ex2_approx(fmaf(product, numbers.target_log2, numbers.minus_mass[r]));
    const float score = ex2_approx(fmaf(a, numbers.weight[r], numbers.minus_index_lse[r]));
    return a > 0.f ? score - target : 0.f;
}

MLA_DEVICE void make_gradients(const RowExponents& numbers, const float (&d)[kAccumulators],
                               const float (&a)[kAccumulators], u32 (&m)[kKeySteps][4]) {
#pragma unroll
    for (i32 i = 0; i < kAccumulators; i += 2) {
        const i32 r = fragment_half(i);
        m[i / 8][i / 2 % 4] = cvt_x2(bfloat16{}, masked_gradient(numbers, r, d[i], a[i]),
                                     masked_gradient(numbers, r, d[i + 1], a[i + 1]));
    }
}

MLA_DEVICE void take_tile(const LossParams& p, Storage& s, UnitRing& units, const Math& math,
                          const RowExponents& numbers, i32 first_key, float (&sums)[kSums]) {
    float d[kAccumulators], a[kAccumulators];
    const i32 k = wait_unit(s, units);
    issue_products(s.q, s.units[k][0], math.warpgroup, d);
    const i32 index_k = wait_unit(s, units);
    issue_products(s.index_q, s.units[index_k][0], math.warpgroup, a);
    wgmma_wait_group<0>();
    pin(d);
    pin(a);
    release(s.unit_empty[k], math.thread);
    hide_keys(p, math, numbers, first_key, a);
    u32 m[kKeySteps][4];
    make_gradients(numbers, d, a, m);
    add_products(m, s.units[index_k][0], sums);
    release(s.unit_empty[index_k], math.thread);
}

// A pair of the query's elements, which the thread has the sums of.
MLA_DEVICE float2 query_pair(const Storage& s, const Math& math, i32 i) {
    const i32 row = math.warpgroup * kSw128Rows + fragment_row(math.thread, i), chunk = i / 4;
    const u32 at = sw128_offset(row, chunk % kSw128Chunks) + math.thread % 4 * 4;
    return unpack<bfloat16>(*reinterpret_cast<const u32*>(s.index_q[chunk / kSw128Chunks] + at));
}

// A row without a divergence has no gradient, whatever its queries hold.
MLA_DEVICE void store_row_gradients(const LossParams& p, const Storage& s, const RowTile& tile, const Math& math, i32 r,
                                    bool live, const float (&sums)[kSums]) {
    const i32 token = math.token(r);
    const bool there = token < p.s_q;
    const float factor = there && live ? row_weight(p, token) : 0.f;
    const float query_factor = there && live ? factor * index_weight(p, token, tile.head) : 0.f;
    const i64 to = token * p.d_index_q_stride_token_elems + tile.head * p.d_index_q_stride_head_elems;
    float by_weight = 0.f;
#pragma unroll
    for (i32 i = 2 * r; i < kSums; i += 4) {
        const float2 q = query_pair(s, math, i);
        by_weight = fmaf(q.x, sums[i], fmaf(q.y, sums[i + 1], by_weight));
        const i32 column = fragment_column(math.thread, i);
        if (there && column < p.index_dim) {
            store_gradient(p.d_index_q, p.d_index_q_fp32, to + column, query_factor * sums[i]);
            store_gradient(p.d_index_q, p.d_index_q_fp32, to + column + 1, query_factor * sums[i + 1]);
        }
    }
    by_weight = p.score_unit * factor * quad_sum(by_weight);
    if (there && math.thread % 4 == 0) {
        p.d_weights[token * p.d_weights_stride_token_elems + tile.head * p.d_weights_stride_head_elems] =
            live ? by_weight : 0.f;
    }
}

MLA_DEVICE void run_math_role(const LossParams& p, Storage& s, const RowTile& tile, i32 warpgroup, i32 thread) {
    const Math math(tile, warpgroup, thread);
    const RowExponents numbers = row_numbers(p, tile, math);
    float sums[kSums];
#pragma unroll
    for (i32 i = 0; i < kSums; ++i) sums[i] = 0.f;
    UnitRing units;
    mbarrier_wait(s.q_full, 0);
#pragma unroll 1
    for (i32 keys = tile.keys.begin; keys < tile.keys.end; ++keys) {
        take_tile(p, s, units, math, numbers, keys * kTileKeys, sums);
    }
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) store_row_gradients(p, s, tile, math, r, numbers.live[r], sums);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_loss_sm90_head_queries(const __grid_constant__ LossParams p, const __grid_constant__ TensorMap q_map,
                                       const __grid_constant__ TensorMap k_map,
                                       const __grid_constant__ TensorMap index_q_map,
                                       const __grid_constant__ TensorMap index_k_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    start_block([&] { init_storage(s); }, q_map, k_map);

    const i32 warp = uniform_warp(), thread = threadIdx.x % kWarpgroupThreads;
    if (warp < kMathWarps) {
        setmaxnreg_inc<kRegsMath>();
        run_math_role(p, s, row_tile(p, thread % kWarpThreads), warp / kWarpgroupWarps, thread);
    } else {
        setmaxnreg_dec<kRegsLoad>();
        if (warp == kMathWarps) {
            const RowTile tile = row_tile(p, thread);
            if (elect_one()) run_load_role(s, Maps{q_map, k_map, index_q_map, index_k_map}, tile);
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
