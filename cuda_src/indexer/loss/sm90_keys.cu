// The gradient of the warm-up loss by index keys on Hopper: partial sums over the tokens of a split.
//
//   a = IK IQ_t^T,   M = [a > 0] (G_t W_t),   dk += M IQ_t        for the tokens t of the split, in order
//
// The gradients G by the scores contain the scales of the keys, which are divided out at the end.
//
// A block has 128 keys, which stay in shared memory and are the rows of an m64 tile per warpgroup. Tokens arrive one
// after the other, 64 index heads at a time, with their weights and the gradients by their scores. M, rounded to bf16,
// goes from the accumulators of the first product to the registers of the second.
//
//   load     IK | token, heads | token, heads | ...
//   math_w        a | M | dk += M IQ | a ...                      | stores
//
// Nothing is added atomically: a split owns its sums and adds each chunk to them. The splits of a tile of keys divide
// the tokens from the first to the last that sees a key of it; tokens in between that see none are skipped.
//
// Grid: one block per tile of keys and split of its tokens, the splits of a tile side by side. Under a causal limit a
// sequence's first keys are seen by the most tokens: so long blocks start before short ones.
#include "common/limits.cuh"
#include "indexer/loss/sm90_keys.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "tile/fragment.cuh"
#include "tile/product.cuh"
#include "tile/prologue.cuh"
#include "tile/ring.cuh"
#include "tile/sw128.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::loss {
// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr i32 kIndexPieces = MLA_INDEX_PIECES;  // of 64 columns; missing columns are zeros

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps   regs   does
// math_w   0..7    216    keys 64 w .. 64 w + 63
// load     8..11   56     all copies, weights and gradients
constexpr i32 kMathWarpgroups = 2;
constexpr i32 kThreads = (kMathWarpgroups + 1) * kWarpgroupThreads;
constexpr i32 kMathWarps = kMathWarpgroups * kWarpgroupWarps;
constexpr i32 kRegsMath = 216, kRegsLoad = 56;
static_assert(kMathWarpgroups * kRegsMath + kRegsLoad <= kRegsOfLane, "registers of the block");

constexpr i32 kTileKeys = kMathWarpgroups * kSw128Rows, kBlockHeads = kSw128Rows, kStages = 8;
constexpr u32 kPieceBytes = kTileKeys * kSw128RowBytes;
constexpr i32 kProducts = kBlockHeads / 2;               // of a thread
constexpr i32 kMmaSteps = kBlockHeads / kMmaK;           // of the second product
constexpr i32 kSums = kIndexPieces * kSw128Columns / 2;  // of a thread

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier       arrives (count)   carries         waits   first phase
// k_full        load (1)          the keys        math    blocked
// q_full[s]     load (1)          64 heads        math    blocked
// q_empty[s]    math warps (8)    -               load    free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 k[kIndexPieces][kPieceBytes];
    u8 q[kStages][kIndexPieces][kSw128Bytes];
    alignas(16) u16 gradients[kStages][kTileKeys];
    alignas(16) float weights[kStages][kBlockHeads];
    i32 last[kStages];                            // there are no more tokens
    TokenRange seen_by[kThreads / kWarpThreads];  // by the tokens that each warp has checked
    MBarrier k_full, q_full[kStages], q_empty[kStages];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_keys, kTileKeys);

MLA_DEVICE void init_storage(Storage& s) {
    mbarrier_init(s.k_full, 1);
    init_ring(s.q_full, s.q_empty, 1, kMathWarps);
    fence_mbarrier_init();
}

using Steps = RingPosition<kStages>;

// ---- The share -------------------------------------------------------------------------------------------------
// Work of a block.
struct Share {
    i32 first_key, split;
    TokenRange tokens;
};

MLA_DEVICE Share share_of(const LossParams& p, Storage& s) {
    const i32 tile = blockIdx.x / p.key_splits, split = blockIdx.x % p.key_splits;
    const TokenRange all = tokens_that_see<kTileKeys>(p, tile * kTileKeys, s.seen_by);
    const i32 size = max(ceil_div(max(0, all.end - all.begin), p.key_splits), p.min_split_tokens);
    const i32 begin = min(all.begin + split * size, all.end);
    return Share{tile * kTileKeys, split, {begin, min(begin + size, all.end)}};
}

// ---- Load role -------------------------------------------------------------------------------------------------
// Called by a whole warp, for 64 heads of a token. Each lane has two weights and four gradients.
MLA_DEVICE void load_heads(const LossParams& p, Storage& s, const TensorMap& q_map, const Share& share,
                           const Steps& steps, i32 token, i32 first_head, i32 lane) {
    const u16* gradients = p.gradient + row_offset(p, token, 0) + share.first_key;
    const uint2 four = reinterpret_cast<const uint2*>(gradients)[lane];
    float weights[2];
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
        const i32 head = first_head + i * kWarpThreads + lane;
        weights[i] = head < p.index_heads ? index_weight(p, token, head) : 0.f;
    }
    const i32 stage = steps.stage;
    steps.wait_empty(s.q_empty);
    reinterpret_cast<uint2*>(s.gradients[stage])[lane] = four;
#pragma unroll
    for (i32 i = 0; i < 2; ++i) s.weights[stage][i * kWarpThreads + lane] = weights[i];
    if (lane == 0) s.last[stage] = 0;
    __syncwarp();
    if (lane == 0) {
        mbarrier_arrive_expect_tx(s.q_full[stage], kIndexPieces * kSw128Bytes);
#pragma unroll
        for (i32 piece = 0; piece < kIndexPieces; ++piece) {
            cp_async_bulk_tensor_3d(smem_addr(s.q[stage][piece]), q_map, s.q_full[stage], piece * kSw128Columns,
                                    token - p.first_fetched, first_head, kEvictNormal);
        }
    }
}

// PERF(H200, 2026-11-22, 9 %)
// The warps of the role take turns: a wait for one token's weights and gradients does not hold up the next token.
MLA_DEVICE void run_load_role(const LossParams& p, Storage& s, const TensorMap& q_map, const TensorMap& k_map,
                              const Share& share, i32 warp, i32 lane) {
    if (warp == 0 && lane == 0) {
        mbarrier_arrive_expect_tx(s.k_full, sizeof(s.k));
        for (i32 piece = 0; piece < kIndexPieces; ++piece) {
            cp_async_bulk_tensor_3d(smem_addr(s.k[piece]), k_map, s.k_full, piece * kSw128Columns, share.first_key, 0,
                                    kEvictFirst);
        }
    }
    Steps steps;
    i32 turn = 0;
    for (i32 first = share.tokens.begin; first < share.tokens.end; first += kWarpThreads) {
        const i32 mine = first + lane;
        u32 seen = __ballot_sync(kFullWarp, mine < share.tokens.end && is_seen<kTileKeys>(p, mine, share.first_key));
        for (; seen != 0; seen &= seen - 1) {
            const i32 token = first + __ffs(seen) - 1;
            for (i32 head = 0; head < p.index_heads; head += kBlockHeads) {
                if (turn == warp) load_heads(p, s, q_map, share, steps, token, head, lane);
                turn = (turn + 1) % kWarpgroupWarps;
                steps.advance();
            }
        }
    }
    if (turn != warp) return;
    steps.wait_empty(s.q_empty);
    if (lane == 0) {
        s.last[steps.stage] = 1;
        mbarrier_arrive(s.q_full[steps.stage]);
    }
}

// ---- Math role -------------------------------------------------------------------------------------------------
// Issues the products of the warpgroup's keys with the next heads; false if there are no more heads.
MLA_DEVICE bool issue_next(Storage& s, Steps& ahead, i32 warpgroup, float (&a)[kProducts]) {
    const i32 stage = ahead.stage;
    ahead.wait_full(s.q_full);
    if (s.last[stage]) return false;
    ahead.advance();
    pin(a);
    SmemDesc k = k_major_desc(smem_addr(s.k) + warpgroup * kSw128Bytes), q = k_major_desc(smem_addr(s.q[stage]));
    opaque(k.bits), opaque(q.bits);
    wgmma_fence();
    multiply_abt<kIndexPieces * kSw128MmaSteps, kPieceBytes, kSw128Bytes>(bfloat16{}, a, k, q);
    wgmma_commit_group();
    return true;
}

// Two neighbouring heads of M.
MLA_DEVICE u32 weighted(float gradient, float2 weights, float low, float high) {
    return cvt_x2(bfloat16{}, low > 0.f ? gradient * weights.x : 0.f, high > 0.f ? gradient * weights.y : 0.f);
}

// Computes M while the next products run, then adds to the sums. Returns true if there are next products.
MLA_DEVICE bool take_step(Storage& s, Steps& steps, Steps& ahead, i32 warpgroup, i32 thread,
                          const float (&a)[kProducts], float (&next)[kProducts], float (&sums)[kSums]) {
    const bool more = issue_next(s, ahead, warpgroup, next);
    const i32 stage = steps.stage;
    const u16* gradients = s.gradients[stage] + warpgroup * kSw128Rows + fragment_row(thread);
    const float of_row[kFragmentRows] = {bfloat16::to_float(gradients[0]), bfloat16::to_float(gradients[8])};
    u32 m[kMmaSteps][4];
#pragma unroll
    for (i32 block = 0; block < 2 * kMmaSteps; ++block) {  // of eight heads
        const float2 weights = *reinterpret_cast<const float2*>(s.weights[stage] + 8 * block + fragment_column(thread));
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            const i32 at = 4 * block + 2 * r;
            m[block / 2][block % 2 * 2 + r] = weighted(of_row[r], weights, a[at], a[at + 1]);
        }
    }
    SmemDesc q = mn_major_desc(smem_addr(s.q[stage]));
    opaque(q.bits);
    pin(sums);
    wgmma_fence();
    multiply_ab(bfloat16{}, sums, m, q, true);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(next);
    pin(sums);
    release(s.q_empty[stage], thread);
    steps.advance();
    return more;
}

// Adds to the sums of the split, which hold the earlier chunks.
MLA_DEVICE void store_sums(const LossParams& p, const Share& share, i32 warpgroup, i32 thread,
                           const float (&sums)[kSums]) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 key = share.first_key + warpgroup * kSw128Rows + fragment_row(thread) + 8 * r;
        if (key >= p.s_kv) continue;
        float* row = p.key_sums + ((i64)share.split * p.s_kv + key) * p.index_dim;
        const float scale = 1.f / key_scale(p, key), factor = fabsf(scale) <= kMaxFloat ? scale : 0.f;
#pragma unroll
        for (i32 i = 2 * r; i < kSums; i += 4) {
            const i32 column = fragment_column(thread, i);
            if (column >= p.index_dim) continue;
            float2* to = reinterpret_cast<float2*>(row + column);
            const float2 before = p.first_chunk ? make_float2(0.f, 0.f) : *to;
            *to = make_float2(fmaf(sums[i], factor, before.x), fmaf(sums[i + 1], factor, before.y));
        }
    }
}

MLA_DEVICE void run_math_role(const LossParams& p, Storage& s, const Share& share, i32 warpgroup, i32 thread) {
    float sums[kSums];
#pragma unroll
    for (i32 i = 0; i < kSums; ++i) sums[i] = 0.f;
    float even[kProducts], odd[kProducts];
    Steps steps, ahead;
    mbarrier_wait(s.k_full, 0);
    bool more = issue_next(s, ahead, warpgroup, even);
    wgmma_wait_group<0>();
    pin(even);
#pragma unroll 1
    while (more) {
        more = take_step(s, steps, ahead, warpgroup, thread, even, odd, sums);
        if (!more) break;
        more = take_step(s, steps, ahead, warpgroup, thread, odd, even, sums);
    }
    store_sums(p, share, warpgroup, thread, sums);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_loss_sm90_keys(const __grid_constant__ LossParams p, const __grid_constant__ TensorMap q_map,
                               const __grid_constant__ TensorMap k_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    start_block([&] { init_storage(s); }, q_map, k_map);

    const i32 warp = uniform_warp(), thread = threadIdx.x % kWarpgroupThreads;
    const Share share = share_of(p, s);
    if (p.first_chunk || share.tokens.begin < share.tokens.end) {  // later nothing is added to the sums
        if (warp < kMathWarps) {
            setmaxnreg_inc<kRegsMath>();
            run_math_role(p, s, share, warp / kWarpgroupWarps, thread);
        } else {
            setmaxnreg_dec<kRegsLoad>();
            run_load_role(p, s, q_map, k_map, share, warp - kMathWarps, thread % kWarpThreads);
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
