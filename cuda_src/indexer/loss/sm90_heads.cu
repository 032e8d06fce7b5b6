// Attention on Hopper and, per head, the divergence of the indexer from it.
//
//   out[t, h] = softmax(scale * q_th . k) v,   attention_lse = log(sum_s exp(scale * q_th . k_s))
//   x_s = target_scale * q_th . k_s,           y_s = weight_th * max(iq_th . ik_s, 0)
//   kl[t, h] = sum_s softmax(x) (log softmax(x) - log softmax(y)),   mass, index_lse = log(sum exp) of x, y
//
// The tiles of keys arrive once; all sums are relative to the maxima so far:
//
//   load     Q, IQ | K IK V | K IK V ...
//   math_w       S = Q K^T | a = IQ IK^T, maxima of S | exponentials, sums | out += P V | S ...    merge, stores
//
// While one warpgroup computes exponentials, the other uses the tensor cores. Values are finite copies: a key hidden
// from a token has P = 0, and 0 * NaN would be NaN; non-finite elements are added at the end.
//
// Grid: x = heads, y = tiles of tokens: neighbours read the same keys at the same time.
#include "common/limits.cuh"
#include "indexer/loss/sm90_rows.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "tile/prologue.cuh"

namespace mla::indexer::loss {
// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr i32 kIndexPieces = MLA_INDEX_PIECES;  // 0: only attention
constexpr bool kWithOutput = MLA_WITH_OUTPUT;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps   regs   does
// math_0   0..3    240    tokens 0 .. 63 of the tile
// math_1   4..7    240    tokens 64 .. 127
// load     8       24     all copies
constexpr i32 kStages = 5;
constexpr i32 kHalf = kAccumulators / 2;                // of the indexer's products: registers are scarce
constexpr i32 kSums = kUnitPieces * kSw128Columns / 2;  // of the output, of a thread

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier          arrives (count)   carries        waits   first phase
// q_full           load (1)          Q, IQ          math    blocked
// unit_full[s]     load (1)          K, IK or V     math    blocked
// unit_empty[s]    math warps (8)    -              load    free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kUnitPieces][kPieceBytes];
    u8 index_q[kIndexPieces > 0 ? kIndexPieces : 1][kPieceBytes];
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
    const TensorMap &q, &k, &index_q, &index_k, &v;
};

// ---- Load role -------------------------------------------------------------------------------------------------
// Called by one thread.
MLA_DEVICE void run_load_role(Storage& s, const Maps& maps, const RowTile& tile) {
    mbarrier_arrive_expect_tx(s.q_full, (kUnitPieces + kIndexPieces) * kPieceBytes);
    load_rows(s.q, maps.q, s.q_full, tile);
    if constexpr (kIndexPieces > 0) load_rows(s.index_q, maps.index_q, s.q_full, tile);
    UnitRing units;
#pragma unroll 1
    for (i32 keys = tile.keys.begin; keys < tile.keys.end; ++keys) {
        load_unit<kUnitPieces>(s, units, maps.k, keys);
        if constexpr (kIndexPieces > 0) load_unit<kIndexPieces>(s, units, maps.index_k, keys);
        if constexpr (kWithOutput) load_unit<kUnitPieces>(s, units, maps.v, keys);
    }
}

// ---- Rows ------------------------------------------------------------------------------------------------------
constexpr float kLowestLog = -1e4f;  // log of terms excluded from a sum

MLA_DEVICE float unseen_score() { return -1e30f; }  // in base 2; finite, as it is multiplied by 0

MLA_DEVICE float finite_shift(float x) { return fmaxf(x, -kMaxFloat); }  // -inf less itself were NaN

// Sums of a row, in base 2. Maxima and shifts of the attention and of the target cover the whole row, which a quad
// shares; everything else covers the thread's share.
struct RowSums {
    float max_product = negative_infinity(), max_score = negative_infinity();
    float attention = 0.f, target = 0.f, score = 0.f;  // of exponentials
    float divergence = 0.f;                            // sum of exp(x) (x - y), both less their shifts

    MLA_DEVICE float product_shift() const { return finite_shift(max_product); }
    MLA_DEVICE float shift(float scale_log2) const { return finite_shift(scale_log2 * max_product); }
    MLA_DEVICE float score_shift() const { return finite_shift(max_score); }

    // Returns the factor of the output.
    MLA_DEVICE float raise_product(float next, float scale_log2, float target_log2) {
        const float before = shift(scale_log2), target_before = shift(target_log2);
        max_product = next;
        const float decay = ex2_approx(before - shift(scale_log2)), more = shift(target_log2) - target_before;
        attention *= decay;
        divergence = fmaf(-target, more, divergence) * ex2_approx(-more);
        target *= ex2_approx(-more);
        return decay;
    }
    MLA_DEVICE void raise_score(float next) {
        const float more = finite_shift(next) - score_shift();
        max_score = next;
        score *= ex2_approx(-more);
        divergence = fmaf(target, more, divergence);
    }
};

struct Factors {
    float scale_log2, target_log2;
    float weight_log2[kFragmentRows];
};

// Takes the products' maxima into account, in all that has been summed so far.
MLA_DEVICE void raise_products(const Factors& factors, const float (&d)[kAccumulators], RowSums (&rows)[kFragmentRows],
                               float (&out)[kSums]) {
    float next[kFragmentRows];
    bool more = false;
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        next[r] = rows[r].max_product;
#pragma unroll
        for (i32 i = 2 * r; i < kAccumulators; i += 4) next[r] = fmaxf(next[r], fmaxf(d[i], d[i + 1]));
        next[r] = quad_max(next[r]);
        more |= next[r] > rows[r].max_product;
    }
    if (!__any_sync(kFullWarp, more)) return;
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const float decay = rows[r].raise_product(next[r], factors.scale_log2, factors.target_log2);
        if constexpr (kWithOutput) {
#pragma unroll
            for (i32 i = 2 * r; i < kSums; i += 4) out[i] *= decay, out[i + 1] *= decay;
        }
    }
}

// The indexer's products become its scores, in base 2.
MLA_DEVICE void make_scores(const Factors& factors, float (&a)[kHalf]) {
#pragma unroll
    for (i32 i = 0; i < kHalf; ++i) a[i] = factors.weight_log2[fragment_half(i)] * fmaxf(a[i], 0.f);
}

MLA_DEVICE void raise_scores(const float (&a)[kHalf], RowSums (&rows)[kFragmentRows]) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        float next = rows[r].max_score;
#pragma unroll
        for (i32 i = 2 * r; i < kHalf; i += 4) next = fmaxf(next, fmaxf(a[i], a[i + 1]));
        rows[r].raise_score(next);
    }
}

// The sums of a pair of target and score. Products are subtracted before they are scaled: fma(product, factor, -shift)
// would not round as the shift was rounded, and for a huge shift exponents above 0 result.
MLA_DEVICE void add_pair(float product, float score, const Factors& factors, float shift, float score_shift,
                         RowSums& row) {
    const float x = (product - shift) * factors.target_log2, y = score - score_shift;
    const float weight = ex2_approx(x);
    row.target += weight;
    row.score += ex2_approx(y);
    row.divergence = fmaf(weight, fmaxf(x, kLowestLog) - y, row.divergence);
}

// Adds the pairs of half a tile's keys.
template <i32 kFirst>
MLA_DEVICE void add_pairs(const Factors& factors, const float (&d)[kAccumulators], const float (&a)[kHalf],
                          RowSums (&rows)[kFragmentRows]) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const float shift = rows[r].product_shift(), score_shift = rows[r].score_shift();
#pragma unroll
        for (i32 i = 2 * r; i < kHalf; i += 4) {
            add_pair(d[kFirst + i], a[i], factors, shift, score_shift, rows[r]);
            add_pair(d[kFirst + i + 1], a[i + 1], factors, shift, score_shift, rows[r]);
        }
    }
}

// P of half a tile, as the operand of the next product.
template <i32 kFirst>
MLA_DEVICE void attend(const Factors& factors, const float (&d)[kAccumulators], RowSums (&rows)[kFragmentRows],
                       u32 (&weights)[kKeySteps][4]) {
    if constexpr (kWithOutput) {
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            const float shift = rows[r].product_shift();
#pragma unroll
            for (i32 i = kFirst + 2 * r; i < kFirst + kHalf; i += 4) {
                const float low = ex2_approx((d[i] - shift) * factors.scale_log2);
                const float high = ex2_approx((d[i + 1] - shift) * factors.scale_log2);
                rows[r].attention += low + high;
                weights[i / 8][i / 4 % 2 * 2 + r] = cvt_x2(bfloat16{}, low, high);
            }
        }
    }
}

// ---- Stores ----------------------------------------------------------------------------------------------------
MLA_DEVICE float log_sum(float shift, float sum) {
    return sum == 0.f ? negative_infinity() : (shift + lg2_approx(sum)) * kLn2;
}

// Called by all lanes of a quad; one of them stores.
MLA_DEVICE void store_divergence(const LossParams& p, const RowTile& tile, const Math& math, const Factors& factors,
                                 i32 r, RowSums row) {
    row.raise_score(quad_max(row.max_score));
    const float target = quad_sum(row.target), score = quad_sum(row.score), divergence = quad_sum(row.divergence);
    if (math.thread % 4 != 0 || math.token(r) >= p.s_q) return;
    const KeyRange range = row_range(p, math, r);
    const bool seen = range.begin < range.end;
    const i64 token = math.token(r);
    const float index_lse = seen ? log_sum(row.score_shift(), score) : negative_infinity();
    const float mass = log_sum(row.shift(factors.target_log2), target);
    const float kl = (divergence / target + lg2_approx(score) - lg2_approx(target)) * kLn2;
    p.kl[token * p.kl_stride_token_elems + tile.head * p.kl_stride_head_elems] = is_live(mass, index_lse) ? kl : 0.f;
    p.mass[token * p.mass_stride_token_elems + tile.head * p.mass_stride_head_elems] = mass;
    p.index_lse[token * p.index_lse_stride_token_elems + tile.head * p.index_lse_stride_head_elems] = index_lse;
}

// Cold: adds the elements that the copy of the values has zeroed, for the keys that a row sees. Any multiple of an
// infinity is infinite.
MLA_DEVICE void add_nonfinite(const LossParams& p, const RowTile& tile, const Math& math, float (&out)[kSums]) {
#pragma unroll 1
    for (i32 keys = tile.keys.begin; keys < tile.keys.end; ++keys) {
        if (p.nonfinite_tiles[keys] == 0) continue;
#pragma unroll 1
        for (i32 key = keys * kTileKeys; key < min((keys + 1) * kTileKeys, p.s_kv); ++key) {
            const RowRanges ranges(p, math);
#pragma unroll
            for (i32 i = 0; i < kSums; ++i) {
                const i32 column = fragment_column(math.thread, i);
                if (column >= p.value_dim || !ranges.of[fragment_half(i)].contains(key)) continue;
                const float x = bfloat16::to_float(p.v[key * p.v_stride_token_elems + column]);
                if (!(fabsf(x) <= kMaxFloat)) out[i] += x;
            }
        }
    }
}

MLA_DEVICE void store_output(const LossParams& p, const RowTile& tile, const Math& math, i32 r, float sum,
                             const float (&out)[kSums]) {
    const bool there = math.token(r) < p.s_q;
    const float factor = sum == 0.f ? 0.f : 1.f / sum;
    const i64 token = math.token(r);
    u16* to = p.out + token * p.out_stride_token_elems + tile.head * p.out_stride_head_elems;
    const bool whole = p.value_dim == kUnitPieces * kSw128Columns && reinterpret_cast<u64>(to) % 16 == 0;
    if (__all_sync(kFullWarp, whole || !there)) {
        store_row(bfloat16{}, to, out, r, factor, there, math.thread);
        return;
    }
#pragma unroll
    for (i32 i = 2 * r; i < kSums; i += 4) {
#pragma unroll
        for (i32 j = i; j < i + 2; ++j) {
            const i32 column = fragment_column(math.thread, j);
            if (there && column < p.value_dim) to[column] = bfloat16::from_float(out[j] * factor);
        }
    }
}

MLA_DEVICE void store_attention(const LossParams& p, const RowTile& tile, const Math& math, const Factors& factors,
                                i32 r, const RowSums& row, const float (&out)[kSums]) {
    const float sum = quad_sum(row.attention);
    const i64 token = math.token(r);
    if (math.thread % 4 == 0 && math.token(r) < p.s_q) {
        p.attention_lse[token * p.attention_lse_stride_token_elems + tile.head * p.attention_lse_stride_head_elems] =
            log_sum(row.shift(factors.scale_log2), sum);
    }
    store_output(p, tile, math, r, sum, out);
}

// ---- Math role -------------------------------------------------------------------------------------------------
MLA_DEVICE Factors factors_of(const LossParams& p, const RowTile& tile, const Math& math) {
    Factors factors{p.scale * kLog2E, p.target_scale * kLog2E, {}};
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const bool there = kIndexPieces > 0 && math.token(r) < p.s_q;
        factors.weight_log2[r] = there ? kLog2E * index_weight(p, math.token(r), tile.head) : 0.f;
    }
    return factors;
}

// Adds half a tile's index keys, once their products are ready.
template <i32 kFirst>
MLA_DEVICE void add_scores(const LossParams& p, const Math& math, const Factors& factors, bool edge, i32 first_key,
                           const float (&d)[kAccumulators], float (&a)[kHalf], RowSums (&rows)[kFragmentRows]) {
    wgmma_wait_group<0>();
    pin(a);
    make_scores(factors, a);
    if (edge) hide(RowRanges(p, math), math.thread, first_key, unseen_score(), a);
    raise_scores(a, rows);
    add_pairs<kFirst>(factors, d, a, rows);
}

MLA_DEVICE void take_tile(const LossParams& p, Storage& s, UnitRing& units, const Math& math, const Factors& factors,
                          i32 first_key, RowSums (&rows)[kFragmentRows], float (&out)[kSums]) {
    float d[kAccumulators], a[kHalf];
    u32 weights[kKeySteps][4];
    const bool edge = !RowRanges(p, math).hold(first_key);
    const i32 k = wait_unit(s, units);
    issue_products(s.q, s.units[k][0], math.warpgroup, d);
    i32 index_k = 0;
    if constexpr (kIndexPieces > 0) {
        index_k = wait_unit(s, units);
        issue_products(s.index_q, s.units[index_k][0], math.warpgroup, a);
    }
    wgmma_wait_group<kIndexPieces == 0 ? 0 : 1>();
    pin(d);
    release(s.unit_empty[k], math.thread);
    if (edge) hide(RowRanges(p, math), math.thread, first_key, negative_infinity(), d);
    raise_products(factors, d, rows, out);
    if constexpr (kIndexPieces > 0) {
        add_scores<0>(p, math, factors, edge, first_key, d, a, rows);
        issue_products(s.index_q, s.units[index_k][0] + kSw128Bytes, math.warpgroup, a);
        if (p.out != nullptr) attend<0>(factors, d, rows, weights);  // a branch, to keep it before the wait
        add_scores<kHalf>(p, math, factors, edge, first_key + kTileKeys / 2, d, a, rows);
        release(s.unit_empty[index_k], math.thread);
    } else {
        attend<0>(factors, d, rows, weights);
    }
    attend<kHalf>(factors, d, rows, weights);
    if constexpr (kWithOutput) {
        const i32 v = wait_unit(s, units);
        add_products(weights, s.units[v][0], out);
        release(s.unit_empty[v], math.thread);
    }
}

MLA_DEVICE void run_math_role(const LossParams& p, Storage& s, const RowTile& tile, i32 warpgroup, i32 thread) {
    const Math math(tile, warpgroup, thread);
    const Factors factors = factors_of(p, tile, math);
    RowSums rows[kFragmentRows];
    float out[kSums];
#pragma unroll
    for (i32 i = 0; i < kSums; ++i) out[i] = 0.f;
    UnitRing units;
    mbarrier_wait(s.q_full, 0);
#pragma unroll 1
    for (i32 keys = tile.keys.begin; keys < tile.keys.end; ++keys) {
        take_tile(p, s, units, math, factors, keys * kTileKeys, rows, out);
    }
    if constexpr (kWithOutput) add_nonfinite(p, tile, math, out);
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        if constexpr (kIndexPieces > 0) store_divergence(p, tile, math, factors, r, rows[r]);
        if constexpr (kWithOutput) store_attention(p, tile, math, factors, r, rows[r], out);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_loss_sm90_heads(const __grid_constant__ LossParams p, const __grid_constant__ TensorMap q_map,
                                const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap index_q_map,
                                const __grid_constant__ TensorMap index_k_map,
                                const __grid_constant__ TensorMap v_map) {
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
            if (elect_one()) run_load_role(s, Maps{q_map, k_map, index_q_map, index_k_map, v_map}, tile);
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
