// Sparse MLA on Hopper for few heads: bound by the gather of the rows, so the operands are swapped to waste little of
// the tensor cores.
//
//   S^T = K Q^T * scale           (64 rows x d_qk) (d_qk x heads) per tile of 64 listed rows
//   P^T = exp2(S^T log2(e) - m)   m: running maximum of each head
//   l = sum of P,  O^T = V^T P^T  (512 x 64) (64 x heads); V is K's first 512 columns
//   out = O / (l + exp2(sink - m)),   lse = ln 2 (m + log2 l),   max_logits = max of S
//
// 16 or 32 heads cost a quarter or half of the 64 that sparse_forward_sm90 computes: see attention/sm90/swapped.cuh.
//
// Grid: x = blocks of heads (one), y = splits, as in sparse_forward_sm90. A tile has two halves, columns
// 0..255 with the RoPE part, and 256..511, and each belongs to one warpgroup, which scores it, and multiplies it:
//
//   left    | S_L = K_L Q_L^T |      | max, P | O_L^T += V_L^T P^T | S_L' ...
//                            swap sums
//   right   | S_R = K_R Q_R^T |      | max, P | O_R^T += V_R^T P^T | S_R' ...
//   gather  |   the next tile, into the other stage  ...          | into this one, half by half
//
// They exchange only their shares of S = S_L + S_R; each computes all of P.
//
// Source: swapped operands for few query rows are FlashMLA-ETAP's idea (2025). What differs: both operands are read as
// gathered (V^T without a transpose), and the two halves of a row stay apart.
#include "attention/sm90/swapped.cuh"
#include "common/limits.cuh"
#include "sparse_forward/sm90_gather_role.cuh"
#include "tile/warp.cuh"

namespace mla::sparse_forward {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
using Tile = KeyTile<MLA_HEAD_DIM_QK>;
constexpr i32 kBlockHeads = MLA_BLOCK_HEADS;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role    warps    does
// left    0..3     S_L, softmax, O^T[:256]
// right   4..7     S_R, softmax, O^T[256:]
// gather  8..11    tiles of listed rows, and Q
constexpr i32 kThreads = 3 * kWarpgroupThreads;
constexpr i32 kMathThreads = 2 * kWarpgroupThreads;
constexpr i32 kRightWarp = kWarpgroupWarps, kGatherWarp = 2 * kWarpgroupWarps;
constexpr u32 kQSwTileBytes = kHeadSwTileBytes<kBlockHeads>;
constexpr i32 kScores = kBlockHeads / 2;  // per tile and thread: an MMA fragment of 64 x heads
static_assert(kTileTokens == kSw128Rows, "a tile is 64 listed rows");

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier            arrives (count)      waits      first phase
// kv_full[s].left    gather (129)         left       blocked
// kv_full[s].right   gather (129)         right      blocked
// kv_empty[s].left   left warps (4)       gather     free
// kv_empty[s].right  right warps (4)      gather     free
// q_full             gather (129)         math       blocked
// q_empty            math warps (8)       gather     free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 kv[kStagesKV][Tile::kTileBytes];
    u8 q[Tile::kSwTilesQk][kQSwTileBytes];
    u8 p[2][kQSwTileBytes];                               // left, right: the same P, [head][row]
    float4 scores[2][2][kScores / 4][kWarpgroupThreads];  // left, right: their shares, double-buffered
    float warp_values[2][kWarpgroupWarps][kBlockHeads];   // left, right: maxima, then sums, of each warp's rows
    HeadStats<kBlockHeads> stats[2];
    HalfBarriers kv_full[kStagesKV], kv_empty[kStagesKV];
    MBarrier q_full, q_empty;
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));

// LeftOnly, RightOnly: within a warpgroup. Left/RightShareReady: its share of a tile's scores is in shared
// memory.
enum NamedBarrier : i32 { LeftOnly = 1, RightOnly, LeftShareReady, RightShareReady };

struct Block {
    const DecodeParams& p;
    Storage& s;
    i32 split, head0;
};

// Called by one thread, before the block's first barrier.
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

    // Calls act(row, chunk, address, whether there is such a head) for this thread's 16-byte chunks of the first SW128
    // tile.
    template <class Act>
    MLA_DEVICE void for_chunks(i32 query, i32 thread, Act act) const {
        const DecodeParams& p = block.p;
        for (i32 i = thread; i < kBlockHeads * kSw128Chunks; i += kGatherThreads) {
            const i32 row = i / kSw128Chunks, chunk = i % kSw128Chunks;
            const bool present = block.head0 + row < p.h_q;
            const i32 head = present ? block.head0 + row : 0;
            act(row, chunk, p.q + query * p.q_stride_b_elems + head * p.q_stride_h_elems + chunk * 8, present);
        }
    }

    MLA_DEVICE void prefetch(i32 query, i32 thread) const {
        for_chunks(query, thread, [](i32 row, i32 chunk, const u16* from, bool present) {
            for (i32 sw_tile = chunk; present && sw_tile < Tile::kSwTilesQk; sw_tile += kSw128Chunks) {
                prefetch_global_l2(from + (sw_tile * kSw128Columns - chunk * 8));
            }
        });
    }

    MLA_DEVICE void gather(i32 query, i32 thread) const {
        const SmemAddr q = smem_addr(block.s.q);
        for_chunks(query, thread, [&](i32 row, i32 chunk, const u16* from, bool present) {
#pragma unroll
            for (i32 sw_tile = 0; sw_tile < Tile::kSwTilesQk; ++sw_tile) {
                cp_async_16<kFetchBytes>(q + (sw_tile * kQSwTileBytes + sw128_offset(row, chunk)),
                                         from + sw_tile * kSw128Columns, present, kQueryPolicy);
            }
        });
    }
};

// ---- Math roles ------------------------------------------------------------------------------------------------
struct Math : SwappedMath<kBlockHeads, kSwTilesHalf> {
    Ring<kStagesKV> ring;
    Ring<1> q_ring;
    i32 turn;  // index of the shares' two buffers
};

MLA_DEVICE constexpr i32 own_barrier(bool right) { return right ? RightOnly : LeftOnly; }

// This warpgroup's share of S^T.
template <bool kRight>
MLA_DEVICE void score(Storage& s, Math& math, i32 stage) {
    constexpr i32 kFirst = kRight ? Tile::kSwTilesLeft : 0, kLast = kRight ? Tile::kSwTilesQk : Tile::kSwTilesLeft;
    const SmemDesc q = uniform(k_major_desc(smem_addr(s.q)));
    const SmemDesc k = uniform(k_major_desc(smem_addr(s.kv[stage])));
    mbarrier_wait(kRight ? s.kv_full[stage].right : s.kv_full[stage].left, math.ring.full_parity(stage));
    math.ring.advance(stage);
    fence_proxy_async();  // a gathered tile is written by ordinary copies
    pin(math.scores);
    wgmma_fence();
#pragma unroll
    for (i32 i = kFirst; i < kLast; ++i) {
        const i32 sw_tile = Tile::sw_tile_in_order(i);
        multiply_abt<kSw128MmaSteps>(Element{}, math.scores, advance(k, sw_tile * kSw128Bytes),
                                     advance(q, sw_tile * kQSwTileBytes), i > kFirst);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(math.scores);
}

// Adds the other warpgroup's share. Double-buffered: both sides have synced between the reads of a buffer and its next
// writes.
template <bool kRight>
MLA_DEVICE void add_other_share(Storage& s, Math& math, i32 thread) {
    auto& own = s.scores[kRight][math.turn];
    const auto& other = s.scores[!kRight][math.turn];
    math.turn ^= 1;
#pragma unroll
    for (i32 i = 0; i < kScores; i += 4) {
        own[i / 4][thread] = make_float4(math.scores[i], math.scores[i + 1], math.scores[i + 2], math.scores[i + 3]);
    }
    // Not one barrier on which both sync: checkers take a barrier used at two program points for a divergent one. The
    // right side arrives only after it has synced with the left one, so neither can arrive twice.
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

template <bool kRight>
MLA_DEVICE void add_own_values(Storage& s, Math& math, i32 stage) {
    const SmemDesc p = uniform(k_major_desc(smem_addr(s.p[kRight])));
    const SmemDesc v = uniform(mn_major_desc(smem_addr(s.kv[stage] + (kRight ? kHalfBytes : 0))));
    add_values(Element{}, math.out, v, p);
}

template <bool kRight>
MLA_DEVICE void run_math_role(Block& block, i32 thread) {
    const DecodeParams& p = block.p;
    Storage& s = block.s;
    Math math;
    math.turn = 0;
    WorkItem item;
    for (WorkIterator walk(p, block.split); walk.next(p, item);) {
        math.reset();
        if (item.tile_begin < item.tile_end) {
            mbarrier_wait(s.q_full, math.q_ring.full_parity(0));
            math.q_ring.advance(0);
        }
#pragma unroll 1
        for (i32 tile = item.tile_begin; tile < item.tile_end; ++tile) {
            const i32 stage = stage_of(item, tile);
            score<kRight>(s, math, stage);
            if (tile + 1 == item.tile_end) release(s.q_empty, thread);
            add_other_share<kRight>(s, math, thread);
            mask_rows(math.scores, item.tokens - tile * kTileTokens, thread);
            update_maxima(math, s.warp_values[kRight], p.scale_log2, own_barrier(kRight), thread);
            store_p(Element{}, math.heads, math.scores, smem_addr(s.p[kRight]), p.scale_log2, thread);
            bar_sync(own_barrier(kRight), kWarpgroupThreads);
            add_own_values<kRight>(s, math, stage);
            release(kRight ? s.kv_empty[stage].right : s.kv_empty[stage].left, thread);
        }
        store_result</*kWithRowMax=*/true>(Element{}, p, item, BlockHeads{0, block.head0, p.h_q}, math,
                                           s.warp_values[kRight], s.stats[kRight], kRight ? kHeadDimV / 2 : 0, !kRight,
                                           own_barrier(kRight), thread);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_forward_sm90_small(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    Block block{p, s, (i32)blockIdx.y, (i32)blockIdx.x * kBlockHeads};
    if (threadIdx.x == 0) init_storage(s);
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    const i32 thread = threadIdx.x % kWarpgroupThreads;
    if (warp < kRightWarp) {
        run_math_role<false>(block, thread);
    } else if (warp < kGatherWarp) {
        run_math_role<true>(block, thread);
    } else {
        run_gather_role<Tile>(p, s, block.split, QueryGather{block}, thread);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::sparse_forward
