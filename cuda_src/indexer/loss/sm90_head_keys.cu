// The gradient of the loss per head by index keys on Hopper: partial sums over shares of the tokens and heads.
//
//   dk_s = sum_th [a > 0] row_weight_t weight_th (exp(y - index_lse) - exp(x - mass)) iq_th
//
// with x = target_scale * q . k, a = iq . ik, and y = weight * a where a > 0: the transposed products of
// `sm90_head_queries.cu`. A block has 128 keys, which stay in shared memory and are the rows of an m64 tile per
// warpgroup. A step is a head of 128 tokens. M, rounded to bf16, goes from the accumulators of the first products to
// the registers of the last.
//
//   load     K, IK | Q, IQ, numbers | Q, IQ, numbers | ...
//   math_w           S = K Q^T | a = IK IQ^T | M | dk += M IQ | S ...       stores
//
// Nothing is added atomically: a split has its own sums. The splits of a tile of keys divide the steps, tile of tokens
// by tile of tokens and head by head, from the first token to the last that sees a key of it.
//
// Grid: one block per tile of keys and split, the splits of a tile side by side. Under a causal limit a sequence's
// first keys are seen by the most tokens: so long blocks start before short ones.
#include "common/limits.cuh"
#include "indexer/loss/sm90_keys.cuh"
#include "indexer/loss/sm90_rows.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "tile/prologue.cuh"

namespace mla::indexer::loss {
// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr i32 kIndexPieces = MLA_INDEX_PIECES;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps    regs   does
// math_w   0..7     216    keys 64 w .. 64 w + 63
// load     8..11    56     copies; the numbers of a token per thread
constexpr i32 kRegsKeysMath = 232, kRegsKeysLoad = 40;
static_assert(kMathWarpgroups * kRegsKeysMath + kRegsKeysLoad <= kRegsOfLane, "registers of the block");
constexpr i32 kStages = kIndexPieces == 1 ? 3 : 2;
constexpr i32 kHalfTokens = kTileTokens / 2, kHalf = kAccumulators / 2;  // of a step: registers are scarce
constexpr i32 kTokenSteps = kHalfTokens / kMmaK;                         // of the product that runs along the tokens
constexpr i32 kMathBarrier = 1;
constexpr u32 kHalfBytes = kHalfTokens * kSw128RowBytes;
constexpr i32 kSums = kIndexPieces * kSw128Columns / 2;  // of a thread

// Constants of a token and head: terms of the exponents, in base 2, and the factor of its gradient.
struct TokenNumbers {
    float weight_log2, minus_mass, minus_index_lse, factor;
};

// The keys of a tile that a token sees, from `begin` on: what registers hold of a range. One word, to be loaded at
// once.
struct Visible {
    u16 begin, count;

    MLA_DEVICE bool contains(i32 key) const { return (u32)(key - begin) < count; }
};

MLA_DEVICE Visible visible_in_tile(const KeyRange& range, i32 first_key) {
    const i32 begin = max(range.begin, first_key), end = min(range.end, first_key + kTileKeys);
    return begin < end ? Visible{(u16)(begin - first_key), (u16)(end - begin)} : Visible{0, 0};
}

// No step; every token sees every key; every token sees some; some token sees none.
enum StepKind { kLast, kInside, kEdge, kBlind };

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier       arrives (count)     carries                            waits   first phase
// k_full        load (1)            the keys                           math    blocked
// q_full[s]     load warps (4)      a step: queries; numbers, ranges   math    blocked
// q_empty[s]    math warps (8)      -                                  load    free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 k[kUnitPieces][kPieceBytes];
    u8 index_k[kIndexPieces][kPieceBytes];
    u8 q[kStages][kUnitPieces][kPieceBytes];
    u8 index_q[kStages][kIndexPieces][kPieceBytes];
    alignas(16) TokenNumbers numbers[kStages][kTileTokens];
    alignas(16) Visible visible[kStages][kTileTokens];
    alignas(16) i32 kind[kStages][kWarpgroupWarps];  // the kind found by each warp of the load role
    TokenRange seen_by[kThreads / kWarpThreads];     // by the tokens that each warp has checked
    MBarrier k_full, q_full[kStages], q_empty[kStages];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");
using Steps = RingPosition<kStages>;

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_keys, kTileKeys);
MLA_FACT(tile_tokens, kTileTokens);

MLA_DEVICE void init_storage(Storage& s) {
    mbarrier_init(s.k_full, 1);
    init_ring(s.q_full, s.q_empty, kWarpgroupWarps, kMathWarps);
    fence_mbarrier_init();
}

struct Maps {
    const TensorMap &q, &k, &index_q, &index_k;
};

// ---- The share -------------------------------------------------------------------------------------------------
// Steps [begin, end), `heads` steps per tile of tokens; the first tile begins at `first_token`.
struct Share {
    i32 first_key, split, first_token;
    i64 begin, end;
};

MLA_DEVICE Share share_of(const LossParams& p, Storage& s) {
    const i32 tile = blockIdx.x / p.key_splits, split = blockIdx.x % p.key_splits;
    const TokenRange tokens = tokens_that_see<kTileKeys>(p, tile * kTileKeys, s.seen_by);
    const i64 steps = tokens.begin < tokens.end ? (i64)ceil_div(tokens.end - tokens.begin, kTileTokens) * p.heads : 0;
    const i64 size = (steps + p.key_splits - 1) / p.key_splits;
    const i64 begin = min(split * size, steps);
    return Share{tile * kTileKeys, split, tokens.begin, begin, min(begin + size, steps)};
}

// ---- Load role -------------------------------------------------------------------------------------------------
// Called by a whole warp. Tells if any token of the tile sees a key of the block, and if all tokens see all keys.
MLA_DEVICE StepKind tile_kind(const LossParams& p, const Share& share, i32 first_token, i32 lane) {
    bool any = false, all = true;
#pragma unroll
    for (i32 i = lane; i < kTileTokens; i += kWarpThreads) {
        const i32 token = first_token + i;
        const KeyRange range = token < p.s_q ? p.ranges[token] : KeyRange{0, 0};
        any |= range.begin < share.first_key + kTileKeys && share.first_key < range.end;
        all &= range.begin <= share.first_key && share.first_key + kTileKeys <= range.end;
    }
    if (!__any_sync(kFullWarp, any)) return kLast;
    return __all_sync(kFullWarp, all) ? kInside : kEdge;
}

// Called by all warps of the role, a thread per token.
MLA_DEVICE void load_step(const LossParams& p, Storage& s, const Maps& maps, const Share& share, Steps& steps,
                          StepKind kind, i32 first_token, i32 head, i32 thread) {
    const i32 token = first_token + thread, stage = steps.stage;
    const HeadRow row = head_row(p, token, head);
    const Visible visible = visible_in_tile(row.live ? p.ranges[token] : KeyRange{0, 0}, share.first_key);
    const float factor = row.live ? row_weight(p, token) * index_weight(p, token, head) : 0.f;
    const bool blind = __any_sync(kFullWarp, visible.count == 0);
    steps.wait_empty(s.q_empty);
    s.numbers[stage][thread] = TokenNumbers{row.weight_log2, row.minus_mass, row.minus_index_lse, factor};
    s.visible[stage][thread] = visible;
    if (thread % kWarpThreads == 0) s.kind[stage][thread / kWarpThreads] = blind ? kBlind : kind;
    __syncwarp();
    if (thread == 0) {
        mbarrier_arrive_expect_tx(s.q_full[stage], (kUnitPieces + kIndexPieces) * kPieceBytes);
#pragma unroll 1
        for (i32 piece = 0; piece < kUnitPieces; ++piece) {
            cp_async_bulk_tensor_3d(smem_addr(s.q[stage][piece]), maps.q, s.q_full[stage], piece * kSw128Columns,
                                    first_token, head, kEvictNormal);
        }
#pragma unroll 1
        for (i32 piece = 0; piece < kIndexPieces; ++piece) {
            cp_async_bulk_tensor_3d(smem_addr(s.index_q[stage][piece]), maps.index_q, s.q_full[stage],
                                    piece * kSw128Columns, first_token, head, kEvictNormal);
        }
    } else if (thread % kWarpThreads == 0) {
        mbarrier_arrive(s.q_full[stage]);
    }
    steps.advance();
}

MLA_DEVICE void load_keys(Storage& s, const Maps& maps, const Share& share) {
    mbarrier_arrive_expect_tx(s.k_full, (kUnitPieces + kIndexPieces) * kPieceBytes);
#pragma unroll 1
    for (i32 piece = 0; piece < kUnitPieces; ++piece) {
        cp_async_bulk_tensor_3d(smem_addr(s.k[piece]), maps.k, s.k_full, piece * kSw128Columns, share.first_key, 0,
                                kEvictNormal);
    }
#pragma unroll 1
    for (i32 piece = 0; piece < kIndexPieces; ++piece) {
        cp_async_bulk_tensor_3d(smem_addr(s.index_k[piece]), maps.index_k, s.k_full, piece * kSw128Columns,
                                share.first_key, 0, kEvictNormal);
    }
}

MLA_DEVICE void run_load_role(const LossParams& p, Storage& s, const Maps& maps, const Share& share, i32 thread) {
    if (thread == 0) load_keys(s, maps, share);
    Steps steps;
    i32 tile = -1;
    StepKind kind = kLast;
    for (i64 step = share.begin; step < share.end; ++step) {
        const i32 tile_of_step = (i32)(step / p.heads), head = (i32)(step % p.heads);
        const i32 first_token = share.first_token + tile_of_step * kTileTokens;
        if (tile_of_step != tile) kind = tile_kind(p, share, first_token, thread % kWarpThreads);
        tile = tile_of_step;
        if (kind != kLast) load_step(p, s, maps, share, steps, kind, first_token, head, thread);
    }
    steps.wait_empty(s.q_empty);
    if (thread % kWarpThreads == 0) {
        s.kind[steps.stage][thread / kWarpThreads] = kLast;
        mbarrier_arrive(s.q_full[steps.stage]);
    }
}

// ---- Math role -------------------------------------------------------------------------------------------------
// Called by all warps of the role. Index queries of tokens that see no key become 0: 0 times inf or NaN would not be 0.
MLA_DEVICE void clear_blind(Storage& s, i32 stage, i32 warpgroup, i32 thread) {
    constexpr i32 kWorkers = kMathWarpgroups * kWarpgroupThreads;
    const i32 first = warpgroup * kWarpgroupThreads + thread;
#pragma unroll 1
    for (i32 i = first; i < kIndexPieces * kTileTokens * kSw128Chunks; i += kWorkers) {
        const i32 row = i / kSw128Chunks;  // of all pieces
        if (s.visible[stage][row % kTileTokens].count != 0) continue;
        reinterpret_cast<uint4*>(s.index_q[stage][0])[i] = make_uint4(0, 0, 0, 0);
    }
    fence_proxy_async();
    bar_sync(kMathBarrier, kWorkers);
}

// Products of the indexer become -1, which has no gradient, where a token does not see a key.
MLA_DEVICE void hide_tokens(const Visible* visible, i32 key, i32 thread, float (&a)[kHalf]) {
#pragma unroll
    for (i32 i = 0; i < kHalf; ++i) {
        const bool seen = visible[fragment_column(thread, i)].contains(key + 8 * fragment_half(i));
        a[i] = seen ? a[i] : -1.f;
    }
}

MLA_DEVICE float weighted_gradient(const TokenNumbers& token, float target_log2, float product, float a) {
    const float target = ex2_approx(fmaf(product, target_log2, token.minus_mass));
    const float score = ex2_approx(fmaf(a, token.weight_log2, token.minus_index_lse));
    return a > 0.f ? token.factor * (score - target) : 0.f;
}

// M of half a step.
template <i32 kFirst>
MLA_DEVICE void make_gradients(const TokenNumbers* numbers, float target_log2, i32 thread,
                               const float (&d)[kAccumulators], const float (&a)[kHalf], u32 (&m)[kTokenSteps][4]) {
#pragma unroll
    for (i32 block = 0; block < 2 * kTokenSteps; ++block) {  // of eight tokens
        const TokenNumbers low = numbers[8 * block + fragment_column(thread)];
        const TokenNumbers high = numbers[8 * block + fragment_column(thread) + 1];
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            const i32 i = 4 * block + 2 * r;
            m[block / 2][block % 2 * 2 + r] =
                cvt_x2(bfloat16{}, weighted_gradient(low, target_log2, d[kFirst + i], a[i]),
                       weighted_gradient(high, target_log2, d[kFirst + i + 1], a[i + 1]));
        }
    }
}

struct Keys {
    i32 warpgroup, thread;
    i32 first;  // in the tile, of the thread's two; the other is eight further on
    float target_log2;
};

MLA_DEVICE void take_step(Storage& s, i32 stage, bool inside, const Keys& keys, float (&sums)[kSums]) {
    float d[kAccumulators], a[kHalf];
    u32 m[2][kTokenSteps][4];
    const TokenNumbers* numbers = s.numbers[stage];
    const Visible* visible = s.visible[stage];
    const u8* index_q = s.index_q[stage][0];
    issue_products(s.k, s.q[stage][0], keys.warpgroup, d);
    issue_products(s.index_k, index_q, keys.warpgroup, a);
    wgmma_wait_group<0>();
    pin(d);
    pin(a);
    if (!inside) hide_tokens(visible, keys.first, keys.thread, a);
    make_gradients<0>(numbers, keys.target_log2, keys.thread, d, a, m[0]);
    issue_sums(m[0], index_q, sums);
    issue_products(s.index_k, index_q + kHalfBytes, keys.warpgroup, a);
    wgmma_wait_group<0>();
    pin(sums);
    pin(a);
    if (!inside) hide_tokens(visible + kHalfTokens, keys.first, keys.thread, a);
    make_gradients<kHalf>(numbers + kHalfTokens, keys.target_log2, keys.thread, d, a, m[1]);
    add_products(m[1], index_q + kHalfBytes, sums);
}

MLA_DEVICE void store_sums(const LossParams& p, const Share& share, i32 warpgroup, i32 thread,
                           const float (&sums)[kSums]) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 key = share.first_key + warpgroup * kSw128Rows + fragment_row(thread) + 8 * r;
        if (key >= p.s_kv) continue;
        float* row = p.key_sums + ((i64)share.split * p.s_kv + key) * p.index_dim;
#pragma unroll
        for (i32 i = 2 * r; i < kSums; i += 4) {
            const i32 column = fragment_column(thread, i);
            if (column < p.index_dim) *reinterpret_cast<float2*>(row + column) = make_float2(sums[i], sums[i + 1]);
        }
    }
}

MLA_DEVICE void run_math_role(const LossParams& p, Storage& s, const Share& share, i32 warpgroup, i32 thread) {
    const Keys keys{warpgroup, thread, warpgroup * kSw128Rows + fragment_row(thread), p.target_scale * kLog2E};
    float sums[kSums];
#pragma unroll
    for (i32 i = 0; i < kSums; ++i) sums[i] = 0.f;
    Steps steps;
    mbarrier_wait(s.k_full, 0);
#pragma unroll 1
    while (true) {
        const i32 stage = steps.stage;
        steps.wait_full(s.q_full);
        const int4 kinds = *reinterpret_cast<const int4*>(s.kind[stage]);
        if (kinds.x == kLast) break;
        const i32 kind = max(max(kinds.x, kinds.y), max(kinds.z, kinds.w));
        if (kind == kBlind) clear_blind(s, stage, warpgroup, thread);
        take_step(s, stage, kind == kInside, keys, sums);
        release(s.q_empty[stage], thread);
        steps.advance();
    }
    store_sums(p, share, warpgroup, thread, sums);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_loss_sm90_head_keys(const __grid_constant__ LossParams p, const __grid_constant__ TensorMap q_map,
                                    const __grid_constant__ TensorMap k_map,
                                    const __grid_constant__ TensorMap index_q_map,
                                    const __grid_constant__ TensorMap index_k_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    start_block([&] { init_storage(s); }, q_map, k_map);

    const i32 warp = uniform_warp(), thread = threadIdx.x % kWarpgroupThreads;
    const Share share = share_of(p, s);
    if (warp < kMathWarps) {
        setmaxnreg_inc<kRegsKeysMath>();
        run_math_role(p, s, share, warp / kWarpgroupWarps, thread);
    } else {
        setmaxnreg_dec<kRegsKeysLoad>();
        run_load_role(p, s, Maps{q_map, k_map, index_q_map, index_k_map}, share, thread);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
