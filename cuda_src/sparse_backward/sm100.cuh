// The roles of the sparse MLA backward on Blackwell: barriers, gather, order of the products, softmax. A kernel's plan
// lays out tensor memory, and hence determines the products and how their results are read.
//
// A plan is a struct of constants and static functions, in the words of this file:
//   Config                    configuration of the kernel
//   kTiles                    number of dKV's tiles of dims, each with its own columns of tensor memory
//   kScores, key              elements of S, later of dP, that a softmax thread holds; and the key of each
//   Heads                     lse2 and delta of a thread's heads
//   issue_*                   products, issued by one thread; issue_s calls back before it reads an SW128 tile of K,
//                             issue_dq after the last product that reads a group of them
//   load_s, load_dp, store_*  tensor memory to registers, registers to shared memory
//   DkvStore                  dKV of a tile to global memory
#pragma once
#include "common/limits.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/gather4.cuh"
#include "ptx/matrix.cuh"
#include "sparse_backward/params.cuh"
#include "tile/fragment.cuh"
#include "tile/matrix_desc.cuh"
#include "tile/ring.cuh"
#include "tile/tmem_product.cuh"
#include "tile/warp.cuh"

namespace mla::sparse_backward::sm100 {
// ---- Budget ----------------------------------------------------------------------------------------------------
// role       warps    regs   does
// softmax    0..3     152    P, dS; finally dQ
// epilogue   4..11    136    dKV and its additions, two alternating warpgroups
// mma        12       88     tensor memory; one thread issues every product
// gather     13..15   88     K, each warp its groups of columns; before that, the last one Q and dO
constexpr i32 kBlockHeads = 64;
constexpr i32 kThreads = 4 * kWarpgroupThreads;
constexpr i32 kEpilogueGroups = 2;
constexpr i32 kEpilogueWarp = kWarpgroupWarps, kMmaWarp = 12, kGatherWarp = 13, kGatherWarps = 3;
constexpr i32 kRegsSoftmax = 152;
constexpr i32 kRegsEpilogue = 136;
constexpr i32 kRegsIssue = 88;
static_assert(kRegsSoftmax + kEpilogueGroups * kRegsEpilogue + kRegsIssue == 4 * 128, "what the block has at entry");

constexpr i32 kSwTilesV = kHeadDimV / kSw128Columns;
constexpr i32 kRopeSwTile = kSwTilesV;
constexpr i32 kTileKeys = 32;
constexpr u32 kKeySwTileBytes = kTileKeys * kSw128RowBytes;
constexpr i32 kStagesK = 2;  // two fit

// K comes and goes in pairs of SW128 tiles: the next tile's first columns are fetched while dQ still needs the last
// ones, and scored while those are on their way.
constexpr i32 kGroupSwTiles = 2;
constexpr i32 kRopeGroup = kRopeSwTile / kGroupSwTiles;

// Configuration of a kernel, and the sizes that follow.
template <class Element_, i32 kHeadDimQk_, bool kDeterministic_>
struct Config {
    using Element = Element_;
    static constexpr i32 kHeadDimQk = kHeadDimQk_;
    static constexpr bool kDeterministic = kDeterministic_;
    static_assert(is_head_dim_qk(kHeadDimQk), "with or without RoPE columns");

    static constexpr i32 kSwTilesQk = kHeadDimQk / kSw128Columns;
    static constexpr bool kHasRope = kSwTilesQk > kSwTilesV;
    static constexpr i32 kGroups = ceil_div(kSwTilesQk, kGroupSwTiles);
};

// ---- Storage ---------------------------------------------------------------------------------------------------
// Tile j of the block is phase j of a barrier, unless it says otherwise.
//
// barrier        arrives (count)          carries            waits      first phase
// q_landed       gather (1)               Q, dO              softmax    blocked, one phase
// q_full         softmax (128)            -                  mma        blocked, one phase
// k_full[s][g]   gather (1)               2 SW128 tiles, 1   mma        blocked, a phase per kStagesK tiles
// k_empty[s][g]  products (1)             -                  gather     free
// s_full         products (1)             -                  softmax    blocked
// dp_full        products (1)             -                  softmax    blocked
// p_full         softmax (128)            -                  mma        blocked
// ds_full        softmax (128)            -                  mma        blocked
// dkv_full[t]    products (1)             -                  epilogue   blocked
// dkv_free[t]    its epilogue warps (4)   -                  mma        free
// rope_full      products (1)             -                  epilogue   blocked
// rope_free      all epilogue warps (8)   -                  mma        free
// dq_full        products (1)             -                  softmax    blocked, one phase
//
// "products" is a commit: it arrives when everything issued before it is done. So s_full of a tile also means that P of
// the previous tile may be overwritten, and dp_full the same for dS; S and dP may be overwritten after ds_full.
template <class C, i32 kTiles>
struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[C::kSwTilesQk * kSw128Bytes];  // finally dQ
    u8 dout[kSwTilesV * kSw128Bytes];
    u8 k[kStagesK][C::kSwTilesQk * kKeySwTileBytes];
    u8 p[kKeySwTileBytes];   // P^T: a row for each key, 64 heads
    u8 ds[kKeySwTileBytes];  // dS^T
    MBarrier q_landed, q_full, k_full[kStagesK][C::kGroups], k_empty[kStagesK][C::kGroups];
    MBarrier s_full, dp_full, p_full, ds_full;
    MBarrier dkv_full[kTiles], dkv_free[kTiles], rope_full, rope_free, dq_full;
    TmemAddr tmem;
};

template <class C, i32 kTiles>
MLA_DEVICE void init_storage(Storage<C, kTiles>& s) {
    for (MBarrier* barrier : {&s.q_landed, &s.s_full, &s.dp_full, &s.rope_full, &s.dq_full}) mbarrier_init(*barrier, 1);
    for (i32 i = 0; i < kStagesK * C::kGroups; ++i) {
        mbarrier_init(s.k_full[i / C::kGroups][i % C::kGroups], 1);
        mbarrier_init(s.k_empty[i / C::kGroups][i % C::kGroups], 1);
    }
    for (MBarrier& barrier : s.dkv_full) mbarrier_init(barrier, 1);
    for (MBarrier& barrier : s.dkv_free) mbarrier_init(barrier, kWarpgroupWarps);
    mbarrier_init(s.rope_free, kEpilogueGroups * kWarpgroupWarps);
    mbarrier_init(s.q_full, kWarpgroupThreads);
    mbarrier_init(s.p_full, kWarpgroupThreads);
    mbarrier_init(s.ds_full, kWarpgroupThreads);
    fence_mbarrier_init();
}

// ---- Work ------------------------------------------------------------------------------------------------------
// A block's work item: 64 heads of a query, and the tiles of the query's list.
template <class C>
struct Item {
    const BackwardParams& p;
    i32 query, head0, heads, count, tiles;

    MLA_DEVICE explicit Item(const BackwardParams& p) : p(p) {
        const i32 head_blocks = ceil_div(p.h_q, kBlockHeads);
        query = blockIdx.x / head_blocks;
        head0 = blockIdx.x % head_blocks * kBlockHeads;
        heads = min(p.h_q - head0, kBlockHeads);
        count = p.counts[query];
        tiles = ceil_div(count, kTileKeys);
    }

    MLA_DEVICE const i32* rows(i32 tile) const { return p.rows + query * p.rows_stride_elems + tile * kTileKeys; }
    // The base-2 lse of a head of the block; +inf for a head without a gradient and past the last head.
    MLA_DEVICE float lse2(i32 head) const {
        return head < heads ? p.lse2[(i64)query * p.h_q + head0 + head] : -negative_infinity();
    }
    MLA_DEVICE float delta(i32 head) const { return head < heads ? p.delta[(i64)query * p.h_q + head0 + head] : 0.f; }
};

struct Maps {
    const TensorMap &kv, &q, &dout, &dq;
};

// dQ of an item without a key.
template <class C>
MLA_DEVICE void store_zeros(const Item<C>& item) {
    constexpr i32 kChunks = C::kHeadDimQk / 8;
    const BackwardParams& p = item.p;
    for (i32 i = threadIdx.x; i < item.heads * kChunks; i += kThreads) {
        u16* to = p.dq + item.query * p.dq_stride_s_elems + (i64)(item.head0 + i / kChunks) * p.dq_stride_h_elems;
        *reinterpret_cast<uint4*>(to + i % kChunks * 8) = make_uint4(0, 0, 0, 0);
    }
}

// ---- Loads -----------------------------------------------------------------------------------------------------
// Heads past the last one arrive as zeros.
template <class C, class S>
MLA_DEVICE void load_item(const Item<C>& item, const Maps& maps, S& s) {
    mbarrier_arrive_expect_tx(s.q_landed, sizeof(s.q) + sizeof(s.dout));
    for (i32 sw_tile = 0; sw_tile < C::kSwTilesQk; ++sw_tile) {
        cp_async_bulk_tensor_3d(smem_addr(s.q) + sw_tile * kSw128Bytes, maps.q, s.q_landed, sw_tile * kSw128Columns,
                                item.head0, item.query, kEvictFirst);
    }
    for (i32 sw_tile = 0; sw_tile < kSwTilesV; ++sw_tile) {
        cp_async_bulk_tensor_3d(smem_addr(s.dout) + sw_tile * kSw128Bytes, maps.dout, s.q_landed,
                                sw_tile * kSw128Columns, item.head0, item.query, kEvictFirst);
    }
}

// A lane gathers four keys. Entries past the end of the list are kNoRow, and become zeros. The lanes' copies are issued
// one after the other, about ten instructions each: a single warp would take about as long as the products.
constexpr u32 kGatherBytes = 4 * kSw128RowBytes;

template <class C, class S>
MLA_DEVICE void run_gather_role(const Item<C>& item, const Maps& maps, S& s, i32 warp, i32 lane) {
    if (warp == kGatherWarps - 1 && elect_one()) load_item(item, maps, s);
    __syncwarp();
    Ring<kStagesK> ring;
    const bool gathers = lane < kTileKeys / 4;
    for (i32 tile = 0; tile < item.tiles; ++tile) {
        const i32 stage = tile % kStagesK;
        int4 rows = make_int4(kNoRow, kNoRow, kNoRow, kNoRow);
        if (gathers) rows = reinterpret_cast<const int4*>(item.rows(tile))[lane];
        for (i32 group = warp; group < C::kGroups; group += kGatherWarps) {
            MBarrier& full = s.k_full[stage][group];
            const i32 sw_tile0 = group * kGroupSwTiles, sw_tiles = min(C::kSwTilesQk - sw_tile0, kGroupSwTiles);
            mbarrier_wait(s.k_empty[stage][group], ring.empty_parity(stage));
            if (lane == 0) mbarrier_arrive_expect_tx(full, sw_tiles * kKeySwTileBytes);
            __syncwarp();
            for (i32 sw_tile = sw_tile0; gathers && sw_tile < sw_tile0 + sw_tiles; ++sw_tile) {
                cp_async_bulk_tensor_gather4(smem_addr(s.k[stage]) + (sw_tile * kKeySwTileBytes + lane * kGatherBytes),
                                             maps.kv, full, sw_tile * kSw128Columns, rows, kEvictLast);
            }
        }
        ring.advance(stage);
    }
}

// ---- Products --------------------------------------------------------------------------------------------------
// All in one thread, in this order; tile j of the list:
//
//   dV of tile j (P^T dO) | dQ += dS K | dK of tile j (dS^T Q), to the same columns as dV | S, dP of tile j + 1
template <class Plan, class S>
MLA_DEVICE void issue_scores(S& s, TmemAddr tmem, i32 tile) {
    const i32 stage = tile % kStagesK;
    Plan::issue_s(s, tmem, stage, [&](i32 sw_tile) {
        if (sw_tile % kGroupSwTiles == 0) tmem_wait(s.k_full[stage][sw_tile / kGroupSwTiles], tile / kStagesK & 1);
    });
    tcgen05_commit(s.s_full);
    Plan::issue_dp(s, tmem, stage);
    tcgen05_commit(s.dp_full);
}

template <class Plan, class C, class S>
MLA_DEVICE void run_mma_role(const Item<C>& item, S& s, TmemAddr tmem) {
    if (!elect_issuer()) return;
    const i32 head_steps = ceil_div(item.heads, kMmaK);  // the others would only add zeros
    tmem_wait(s.q_full, 0);
    issue_scores<Plan>(s, tmem, 0);
    for (i32 tile = 0; tile < item.tiles; ++tile) {
        const u32 parity = tile & 1;
        tmem_wait(s.p_full, parity);
        for (i32 t = 0; t < Plan::kTiles; ++t) {
            tmem_wait(s.dkv_free[t], parity ^ 1);
            Plan::issue_dv(s, tmem, t, head_steps);
        }
        tmem_wait(s.ds_full, parity);
        const i32 stage = tile % kStagesK;
        Plan::issue_dq(s, tmem, stage, tile > 0, [&](i32 group) { tcgen05_commit(s.k_empty[stage][group]); });
        for (i32 t = 0; t < Plan::kTiles; ++t) {
            Plan::issue_dk(s, tmem, t, head_steps);
            tcgen05_commit(s.dkv_full[t]);
        }
        if (C::kHasRope) {
            tmem_wait(s.rope_free, parity ^ 1);
            Plan::issue_dk_rope(s, tmem, head_steps);
            tcgen05_commit(s.rope_full);
        }
        if (tile + 1 < item.tiles) issue_scores<Plan>(s, tmem, tile + 1);
    }
    tcgen05_commit(s.dq_full);
}

// ---- Softmax ---------------------------------------------------------------------------------------------------
MLA_DEVICE void clear_row(u8* sw_tiles, i32 count, i32 row) {
    for (i32 i = 0; i < count * kSw128Chunks; ++i) {
        u8* chunk = sw_tiles + i / kSw128Chunks * kSw128Bytes + sw128_offset(row, i % kSw128Chunks);
        *reinterpret_cast<uint4*>(chunk) = make_uint4(0, 0, 0, 0);
    }
}

// Q and dO of heads without a gradient become zeros, whatever they hold.
template <class C, class S>
MLA_DEVICE void clear_absent_heads(const Item<C>& item, S& s, i32 thread) {
    if (thread < item.heads && item.lse2(thread) == -negative_infinity()) {
        clear_row(s.q, C::kSwTilesQk, thread);
        clear_row(s.dout, kSwTilesV, thread);
    }
    fence_proxy_async();
}

enum NamedBarrier : i32 { DqStored = 1 };  // within softmax: dQ is in shared memory

// P and dS are masked after the exponent: absent keys are zeros, but exp2(-lse2) may be infinite.
template <class Plan, class C, class S>
MLA_DEVICE void run_softmax_role(const Item<C>& item, const Maps& maps, S& s, TmemAddr tmem, i32 thread) {
    const BackwardParams& p = item.p;
    mbarrier_wait(s.q_landed, 0);
    clear_absent_heads(item, s, thread);
    mbarrier_arrive(s.q_full);
    const typename Plan::Heads heads(item, thread);
    float x[Plan::kScores], weight[Plan::kScores];
    for (i32 tile = 0; tile < item.tiles; ++tile) {
        const u32 parity = tile & 1;
        const i32 keys = item.count - tile * kTileKeys;
        tmem_wait(s.s_full, parity);
        Plan::load_s(x, tmem, thread);
#pragma unroll
        for (i32 i = 0; i < Plan::kScores; ++i) {
            const float exponential = ex2_approx(fmaf(x[i], p.scale_log2, -heads.lse2(i)));
            weight[i] = Plan::key(i, thread) < keys && heads.present(i) ? exponential : 0.f;
        }
        Plan::store_scores(s.p, weight, thread);
        fence_proxy_async();
        mbarrier_arrive(s.p_full);
        tmem_wait(s.dp_full, parity);
        Plan::load_dp(x, tmem, thread);
        tcgen05_fence_before_thread_sync();
#pragma unroll
        for (i32 i = 0; i < Plan::kScores; ++i) {
            const float ds = weight[i] * fmaf(x[i], p.scale, -heads.delta(i));
            x[i] = Plan::key(i, thread) < keys && heads.present(i) ? ds : 0.f;
        }
        Plan::store_scores(s.ds, x, thread);
        fence_proxy_async();
        mbarrier_arrive(s.ds_full);
    }
    tmem_wait(s.dq_full, 0);
    Plan::store_dq(s.q, tmem, thread);
    fence_proxy_async();
    bar_sync(DqStored, kWarpgroupThreads);
    if (thread != 0) return;
    for (i32 sw_tile = 0; sw_tile < C::kSwTilesQk; ++sw_tile) {
        cp_async_bulk_tensor_3d_store(maps.dq, smem_addr(s.q) + sw_tile * kSw128Bytes, sw_tile * kSw128Columns,
                                      item.head0, item.query);
    }
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_read();
}

// ---- DkvStore -----------------------------------------------------------------------------------------------------
// Warpgroup `group` of the two stores every other tile of dims, and its share of the RoPE dims.
template <class Plan, class C, class S>
MLA_DEVICE void run_epilogue_role(const Item<C>& item, S& s, TmemAddr tmem, i32 group, i32 thread) {
    for (i32 tile = 0; tile < item.tiles; ++tile) {
        const typename Plan::DkvStore dkv_store(item, tile, thread);
#pragma unroll
        for (i32 t = group; t < Plan::kTiles; t += kEpilogueGroups) {
            tmem_wait(s.dkv_full[t], tile & 1);
            dkv_store.add_tile(tmem, t, [&] { release_tmem(s.dkv_free[t], thread); });
        }
        if (C::kHasRope) {
            tmem_wait(s.rope_full, tile & 1);
            dkv_store.add_rope(tmem, group, [&] { release_tmem(s.rope_free, thread); });
        }
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
template <class Plan>
MLA_DEVICE void run_block(const BackwardParams& p, const Maps& maps, Storage<typename Plan::Config, Plan::kTiles>& s) {
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written
    const Item<typename Plan::Config> item(p);
    if (item.tiles == 0) {
        store_zeros(item);
        return;
    }
    const i32 warp = uniform_warp();
    const i32 thread = threadIdx.x % kWarpgroupThreads;
    if (threadIdx.x == 0) init_storage(s);
    if (warp == kMmaWarp) {
        tcgen05_alloc<kTmemColumns>(s.tmem);
        tcgen05_relinquish_alloc_permit();
    }
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    tcgen05_fence_after_thread_sync();
    const TmemAddr tmem = s.tmem;
    if (warp < kEpilogueWarp) {
        setmaxnreg_inc<kRegsSoftmax>();
        run_softmax_role<Plan>(item, maps, s, tmem, thread);
    } else if (warp < kMmaWarp) {
        setmaxnreg_inc<kRegsEpilogue>();
        run_epilogue_role<Plan>(item, s, tmem, warp / kWarpgroupWarps - 1, thread);
    } else {
        setmaxnreg_dec<kRegsIssue>();
        if (warp == kMmaWarp) {
            run_mma_role<Plan>(item, s, tmem);
        } else {
            run_gather_role(item, maps, s, warp - kGatherWarp, threadIdx.x % kWarpThreads);
        }
    }
    __syncwarp();
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    if (warp == kMmaWarp) {
        tcgen05_fence_after_thread_sync();
        tcgen05_dealloc<kTmemColumns>(tmem);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::sparse_backward::sm100

// The facts of a kernel with the storage `Shared` and the choices `C`.
#define MLA_SM100_FACTS(C, Shared)        \
    MLA_BACKWARD_FACTS();                 \
    MLA_FACT(threads, kThreads);          \
    MLA_FACT(block_heads, kBlockHeads);   \
    MLA_FACT(tile_keys, kTileKeys);       \
    MLA_FACT(tmem_columns, kTmemColumns); \
    MLA_FACT(smem_bytes, sizeof(Shared)); \
    MLA_FACT(mbarriers, (MLA_OFFSET(Shared, tmem) - MLA_OFFSET(Shared, q_landed)) / sizeof(MBarrier))
