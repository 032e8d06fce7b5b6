// Sparse MLA on Hopper for few heads: bound by the gather of the rows, so the products are turned round to waste
// little.
//
//   S^T = K Q^T * scale           (64 rows x d_qk) (d_qk x heads) per tile of 64 listed rows
//   P^T = exp2(S^T log2(e) - m)   m: running maximum of each head
//   l = sum of P,  O^T = V^T P^T  (512 x 64) (64 x heads); V is K's first 512 columns
//   out = O / (l + exp2(sink - m)),   lse = ln 2 (m + log2 l),   max_logits = max of S
//
// The tensor cores work on 64 rows of the first operand at a time, whatever the second one's width: with keys and
// values first, 16 or 32 heads cost a quarter or half of the 64 that sparse_forward.cu computes.
//
// Grid: x = blocks of heads (one), y = parts of the schedule, as in sparse_forward.cu. A tile has two halves, columns
// 0..255 with the RoPE part, and 256..511, and each belongs to one warpgroup, which scores it, and multiplies it:
//
//   left    | S_L = K_L Q_L^T |      | max, P | O_L^T += V_L^T P^T | S_L' ...
//                            swap sums
//   right   | S_R = K_R Q_R^T |      | max, P | O_R^T += V_R^T P^T | S_R' ...
//   gather  |   the next tile, into the other stage  ...          | into this one, half by half
//
// S = S_L + S_R is the only thing that they exchange; each makes the whole P for itself.
//
// Source: swapped operands for few query rows are FlashMLA-ETAP's idea (2025). What differs: both operands stay where
// the gather put them (V^T is read as it lies), and the two halves of a row never meet.
#include "attention/sparse_forward_variant.cuh"
#ifndef MLA_BLOCK_HEADS
#error "MLA_BLOCK_HEADS must be 16 or 32"
#endif
#include "attention/decode_output.cuh"
#include "attention/gather_role_sm90.cuh"
#include "attention/head_softmax.cuh"
#include "ptx/matrix.cuh"
#include "tile/warp.cuh"

constexpr i32 kBlockHeads = MLA_BLOCK_HEADS;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role    warps    does
// left    0..3     S_L, softmax, O^T[:256]
// right   4..7     S_R, softmax, O^T[256:]
// gather  8..11    tiles of listed rows, and Q
constexpr i32 kThreads = 3 * kWarpgroupThreads;
constexpr i32 kMathThreads = 2 * kWarpgroupThreads;
constexpr u32 kHeadPanelBytes = kBlockHeads * kPanelRowBytes;  // 64 columns of Q or P, in the swizzle of a panel
constexpr i32 kScores = kBlockHeads / 2;                       // of a tile, a thread: fragment of 64 x heads
static_assert(kBlockHeads == 16 || kBlockHeads == 32, "what P's stores and the products are written for");
static_assert(kHeadPanelBytes % kSwizzleAtomBytes == 0, "every panel starts at a multiple of the swizzle's atom");
static_assert(kTileTokens == kRowsPerTile, "a tile is 64 listed rows");

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier            arrives (count)      waits      first phase
// kv_full[s].left    gather (129)         left       blocked
// kv_full[s].right   gather (129)         right      blocked
// kv_empty[s].left   left warps (4)       gather     free
// kv_empty[s].right  right warps (4)      gather     free
// q_full             gather (129)         math       blocked
// q_empty            math warps (8)       gather     free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 kv[kStagesKV][kTileBytes];
    u8 q[kPanelsQk][kHeadPanelBytes];
    u8 p[2][kHeadPanelBytes];                             // left, right: the same P, [head][row]
    float4 scores[2][2][kScores / 4][kWarpgroupThreads];  // left, right: their shares, in turns
    float warp_values[2][kWarpgroupWarps][kBlockHeads];   // left, right: maxima, then sums, of each warp's rows
    HalfBarriers kv_full[kStagesKV], kv_empty[kStagesKV];
    MBarrier q_full, q_empty;
};
static_assert(sizeof(Storage) <= 232448, "a block has 227 KB of shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));

// LeftOnly, RightOnly: a warpgroup among itself. Left/RightShareReady: its share of a tile's scores is in shared
// memory.
enum NamedBarrier : i32 { LeftOnly = 1, RightOnly, LeftShareReady, RightShareReady };

struct Block {
    const DenseDecodeParams& p;
    Storage& s;
    i32 part, head0;
};

// By one thread, before the block's first barrier.
MLA_DEVICE void init_storage(Storage& s) {
    for (i32 stage = 0; stage < kStagesKV; ++stage) {
        mbarrier_init(s.kv_full[stage].left, kGatherArrivals);
        mbarrier_init(s.kv_full[stage].right, kGatherArrivals);
        mbarrier_init(s.kv_empty[stage].left, kWarpgroupWarps);
        mbarrier_init(s.kv_empty[stage].right, kWarpgroupWarps);
    }
    mbarrier_init(s.q_full, kGatherArrivals);
    mbarrier_init(s.q_empty, kMathThreads / kWarpThreads);
    fence_mbarrier_init();
}

// ---- Gather role -----------------------------------------------------------------------------------------------
struct QueryGather {
    const Block& block;

    // Calls act(row, chunk, address, whether there is such a head) for this thread's 16-byte chunks of the first panel.
    template <class Act>
    MLA_DEVICE void for_chunks(i32 query, i32 thread, Act act) const {
        const DenseDecodeParams& p = block.p;
        for (i32 i = thread; i < kBlockHeads * kPanelChunks; i += kGatherThreads) {
            const i32 row = i / kPanelChunks, chunk = i % kPanelChunks;
            const bool present = block.head0 + row < p.h_q;
            const i32 head = present ? block.head0 + row : 0;
            act(row, chunk, p.q + query * p.q_stride_b_elems + head * p.q_stride_h_elems + chunk * 8, present);
        }
    }

    MLA_DEVICE void prefetch(i32 query, i32 thread) const {
        for_chunks(query, thread, [](i32 row, i32 chunk, const u16* from, bool present) {
            for (i32 panel = chunk; present && panel < kPanelsQk; panel += kPanelChunks) {
                prefetch_global_l2(from + (panel * kPanelColumns - chunk * 8));
            }
        });
    }

    MLA_DEVICE void gather(i32 query, i32 thread) const {
        const SmemAddr q = smem_addr(block.s.q);
        for_chunks(query, thread, [&](i32 row, i32 chunk, const u16* from, bool present) {
#pragma unroll
            for (i32 panel = 0; panel < kPanelsQk; ++panel) {
                cp_async_16<kFetchBytes>(q + (panel * kHeadPanelBytes + panel_offset(row, chunk)),
                                         from + panel * kPanelColumns, present, kQueryPolicy);
            }
        });
    }
};

// ---- Math roles ------------------------------------------------------------------------------------------------
struct Math {
    float scores[kScores];
    float out[kPanelsHalf][kScores];  // O^T: 64 columns of the values each
    HeadState<kBlockHeads> heads;
    Ring<kStagesKV> ring;
    Ring<1> q_ring;
    i32 turn;  // which of the two places of the shares
};

MLA_DEVICE constexpr i32 own_barrier(bool right) { return right ? RightOnly : LeftOnly; }

// First operand [64 x 16] K-major ...
MLA_DEVICE void multiply(float (&d)[8], SmemDesc a, SmemDesc b, bool accumulate) {
    wgmma_m64n16k16<false>(Element{}, d, a, b, accumulate);
}
MLA_DEVICE void multiply(float (&d)[16], SmemDesc a, SmemDesc b, bool accumulate) {
    wgmma_m64n32k16<false>(Element{}, d, a, b, accumulate);
}
// ... or as it lies [16 x 64].
MLA_DEVICE void multiply_transposed(float (&d)[8], SmemDesc a, SmemDesc b) {
    wgmma_m64n16k16<false, true>(Element{}, d, a, b, true);
}
MLA_DEVICE void multiply_transposed(float (&d)[16], SmemDesc a, SmemDesc b) {
    wgmma_m64n32k16<false, true>(Element{}, d, a, b, true);
}

// This warpgroup's share of S^T.
template <bool kRight>
MLA_DEVICE void score(Storage& s, Math& math, i32 stage) {
    constexpr i32 kFirst = kRight ? kPanelsLeft : 0, kLast = kRight ? kPanelsQk : kPanelsLeft;
    SmemDesc q = k_major_desc(smem_addr(s.q)), k = k_major_desc(smem_addr(s.kv[stage]));
    opaque(q.bits);
    opaque(k.bits);
    mbarrier_wait(kRight ? s.kv_full[stage].right : s.kv_full[stage].left, math.ring.full_parity(stage));
    math.ring.advance(stage);
    fence_proxy_async();  // a gathered tile is written by ordinary copies
    pin(math.scores);
    wgmma_fence();
#pragma unroll
    for (i32 i = kFirst; i < kLast; ++i) {
        const i32 panel = panel_in_order(i);
#pragma unroll
        for (i32 step = 0; step < kPanelMmaSteps; ++step) {
            multiply(math.scores, advance(k, panel * kPanelBytes + step * kKMajorStepBytes),
                     advance(q, panel * kHeadPanelBytes + step * kKMajorStepBytes), i > kFirst || step > 0);
        }
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(math.scores);
}

// Adds the other warpgroup's share. Two places in turns: whoever writes one again has met the other side since.
template <bool kRight>
MLA_DEVICE void add_other_share(Storage& s, Math& math, i32 thread) {
    auto& own = s.scores[kRight][math.turn];
    const auto& other = s.scores[!kRight][math.turn];
    math.turn ^= 1;
#pragma unroll
    for (i32 i = 0; i < kScores; i += 4) {
        own[i / 4][thread] = make_float4(math.scores[i], math.scores[i + 1], math.scores[i + 2], math.scores[i + 3]);
    }
    // Not one barrier that both sync on: checkers take a barrier met at two places for a divergent one. The right side
    // answers only when it has met the left one, so neither can arrive twice.
    if (!kRight) bar_arrive(LeftShareReady, kMathThreads);
    bar_sync(kRight ? LeftShareReady : RightShareReady, kMathThreads);
    if (kRight) bar_arrive(RightShareReady, kMathThreads);
#pragma unroll
    for (i32 i = 0; i < kScores; i += 4) {
        const float4 x = other[i / 4][thread];
        math.scores[i] += x.x;
        math.scores[i + 1] += x.y;
        math.scores[i + 2] += x.z;
        math.scores[i + 3] += x.w;
    }
}

// Moves the heads' maxima to the tile's, where it is time to, and what was accumulated with them.
template <bool kRight>
MLA_DEVICE void update_maxima(Storage& s, Math& math, float scale_log2, i32 thread) {
    auto& warps = s.warp_values[kRight];
    store_warp_maxima<kBlockHeads>(warps[thread / kWarpThreads], math.scores, thread);
    bar_sync(own_barrier(kRight), kWarpgroupThreads);
    const HeadValues<kBlockHeads> scale = math.heads.move_max(warps, scale_log2, thread);
    if (!scale.any_but_one()) return;
#pragma unroll
    for (auto& columns : math.out) scale.multiply(columns);
}

// P^T from registers to [head][row] in shared memory.
template <bool kRight>
MLA_DEVICE void store_p(Storage& s, Math& math, float scale_log2, i32 thread) {
    const i32 warp = thread / kWarpThreads, lane = thread % kWarpThreads;
    u32 p_fragment[kScores / 2];
    math.heads.exponentiate(Element{}, p_fragment, math.scores, scale_log2);
#pragma unroll
    for (i32 i = 0; i < kScores / 2; i += 4) {
        // Matrix lane / 8: heads 8 * (lane / 16) on from the first, rows 8 * (lane / 8 % 2) on from the warp's first.
        const i32 head = 4 * i + lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
        stmatrix_x4_trans(smem_addr(s.p[kRight]) + panel_offset(head, chunk),
                          {p_fragment[i], p_fragment[i + 1], p_fragment[i + 2], p_fragment[i + 3]});
    }
    fence_proxy_async();
    bar_sync(own_barrier(kRight), kWarpgroupThreads);
}

template <bool kRight>
MLA_DEVICE void add_values(Storage& s, Math& math, i32 stage) {
    SmemDesc p = k_major_desc(smem_addr(s.p[kRight]));
    SmemDesc v = mn_major_desc(smem_addr(s.kv[stage] + (kRight ? kHalfBytes : 0)));
    opaque(p.bits);
    opaque(v.bits);
#pragma unroll
    for (auto& columns : math.out) pin(columns);
    wgmma_fence();
#pragma unroll
    for (i32 panel = 0; panel < kPanelsHalf; ++panel) {
#pragma unroll
        for (i32 step = 0; step < kPanelMmaSteps; ++step) {
            multiply_transposed(math.out[panel], advance(v, panel * kPanelBytes + step * kMnMajorStepBytes),
                                advance(p, step * kKMajorStepBytes));
        }
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
#pragma unroll
    for (auto& columns : math.out) pin(columns);
}

// Writes this warpgroup's 256 columns of each head.
template <bool kRight>
MLA_DEVICE void store_out(const Block& block, const Fragment& fragment, const Math& math,
                          const HeadValues<kBlockHeads>& factors, i32 thread) {
    const DenseDecodeParams& p = block.p;
    const bool whole = fragment.slot == kWholeRequest;
    const i32 lane = thread % kWarpThreads;
    const i32 column0 = (kRight ? kHeadDimV / 2 : 0) + thread / kWarpThreads * 16;  // of the warp, in the first panel
    if (!whole || p.out_is_fp32) {
#pragma unroll
        for (i32 i = 0; i < kScores; ++i) {
            const i32 head = block.head0 + head_of(i, thread);
            if (head >= p.h_q) continue;
            float* to = whole ? static_cast<float*>(p.out) + out_offset(p, fragment.request, 0, head)
                              : p.partial_out + workspace_row(p, fragment.slot, 0, head) * kHeadDimV;
            to += column0 + lane / 4 + 8 * fragment_half(i);
#pragma unroll
            for (i32 panel = 0; panel < kPanelsHalf; ++panel) {
                to[panel * kPanelColumns] = math.out[panel][i] * factors.of(i);
            }
        }
        return;
    }
    // Transposed, a quad holds one head: of two panels, 16 columns each, four chunks of 16 bytes.
#pragma unroll
    for (i32 i = 0; i < kScores; i += 4) {
        const i32 head = block.head0 + 2 * i + lane / 4;
        u16* to = static_cast<u16*>(p.out) + out_offset(p, fragment.request, 0, min(head, p.h_q - 1)) + column0;
#pragma unroll
        for (i32 panel = 0; panel < kPanelsHalf; panel += 2) {
            u32 words[4];
#pragma unroll
            for (i32 j = 0; j < 4; ++j) {
                const float (&columns)[kScores] = math.out[panel + j / 2];
                const i32 d = i + 2 * (j % 2);
                words[j] =
                    movmatrix_trans(cvt_x2(Element{}, columns[d] * factors.of(d), columns[d + 1] * factors.of(d + 1)));
            }
            quad_transpose(words, lane % 4);
            if (head < p.h_q) {
                const i32 column = (panel + lane % 4 / 2) * kPanelColumns + lane % 2 * 8;
                *reinterpret_cast<uint4*>(to + column) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
}

template <bool kRight>
MLA_DEVICE void store_result(const Block& block, const Fragment& fragment, Math& math, i32 thread) {
    const DenseDecodeParams& p = block.p;
    auto& warps = block.s.warp_values[kRight];
    store_warp_sums<kBlockHeads>(warps[thread / kWarpThreads], math.heads.sum, thread);
    bar_sync(own_barrier(kRight), kWarpgroupThreads);
    HeadValues<kBlockHeads> factors;
#pragma unroll
    for (i32 k = 0; k < kHeadsOfThread<kBlockHeads>; ++k) {
        const i32 within = kth_head(k, thread), head = block.head0 + within;
        const float max = math.heads.max.value[k];
        float sum = 0.f;
#pragma unroll
        for (i32 warp = 0; warp < kWarpgroupWarps; ++warp) sum += warps[warp][within];
        factors.value[k] = output_factor(p, fragment, 0, min(head, p.h_q - 1), max, sum);
        if (kRight || thread >= 4 || head >= p.h_q) continue;  // four threads hold every head
        store_row_lse(p, fragment, 0, head, row_lse2(max, sum));
        store_row_max(p, fragment, 0, head, with_nan_of(sum, math.heads.top.value[k]));
    }
    store_out<kRight>(block, fragment, math, factors, thread);
    bar_sync(own_barrier(kRight), kWarpgroupThreads);  // the sums are read
}

template <bool kRight>
MLA_DEVICE void run_math_role(Block& block, i32 thread) {
    const DenseDecodeParams& p = block.p;
    Storage& s = block.s;
    Math math;
    math.turn = 0;
    Fragment fragment;
    for (FragmentWalk walk(p, block.part); walk.next(p, fragment);) {
        math.heads.reset();
#pragma unroll
        for (auto& columns : math.out) {
#pragma unroll
            for (float& x : columns) x = 0.f;
        }
        if (fragment.tile_begin < fragment.tile_end) {
            mbarrier_wait(s.q_full, math.q_ring.full_parity(0));
            math.q_ring.advance(0);
        }
#pragma unroll 1
        for (i32 tile = fragment.tile_begin; tile < fragment.tile_end; ++tile) {
            const i32 stage = stage_of(fragment, tile);
            score<kRight>(s, math, stage);
            if (tile + 1 == fragment.tile_end) release(s.q_empty, thread);
            add_other_share<kRight>(s, math, thread);
            mask_rows(math.scores, fragment.tokens - tile * kTileTokens, thread);
            update_maxima<kRight>(s, math, p.scale_log2, thread);
            store_p<kRight>(s, math, p.scale_log2, thread);
            add_values<kRight>(s, math, stage);
            release(kRight ? s.kv_empty[stage].right : s.kv_empty[stage].left, thread);
        }
        store_result<kRight>(block, fragment, math, thread);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_forward_small_sm90(const __grid_constant__ DenseDecodeParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    Block block{p, s, (i32)blockIdx.y, (i32)blockIdx.x * kBlockHeads};
    if (threadIdx.x == 0) init_storage(s);
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    const i32 thread = threadIdx.x % kWarpgroupThreads;
    if (warp < 4) {
        run_math_role<false>(block, thread);
    } else if (warp < 8) {
        run_math_role<true>(block, thread);
    } else {
        run_gather_role(p, s, block.part, QueryGather{block}, thread);
    }
    griddepcontrol_launch_dependents();
}
