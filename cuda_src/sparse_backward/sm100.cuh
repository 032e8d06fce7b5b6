// The choreography of the sparse MLA backward on Blackwell: roles, barriers, gather and order of the products. What
// lies where in tensor memory, and hence which products there are and how their results are read, is a kernel's plan.
//
// A plan is a struct of constants and static functions, in the words of this file:
//   kSlots, kTiles            dKV is made in kTiles tiles of its dims, which take turns in kSlots places
//   kScores, key              how many numbers of S, later of dP, a softmax thread holds; and of which key each is
//   Heads                     lse2 and delta of a thread's heads
//   issue_*                   products of one thread; issue_s is told when a slab of K is there, issue_dq tells when it
//                             has issued the last product with a group of them
//   load_s, load_dp, store_*  tensor memory to registers, registers to shared memory
//   Drain                     dKV of a tile to global memory
#pragma once
#include "attention/exact_addition.cuh"
#include "attention/sparse_backward_variant.cuh"
#include "attention/sparse_params.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/gather4.cuh"
#include "ptx/matrix.cuh"
#include "ptx/reduce.cuh"
#include "tile/fragment.cuh"
#include "tile/matrix_desc.cuh"
#include "tile/ring.cuh"
#include "tile/warp.cuh"

// ---- Variant ---------------------------------------------------------------------------------------------------
#ifndef MLA_TILE_KEYS
#error "MLA_TILE_KEYS must be 32 or 64"
#endif
constexpr i32 kTileKeys = MLA_TILE_KEYS;
static_assert(kTileKeys == 32 || kTileKeys == 64, "tile");

// ---- Budget ----------------------------------------------------------------------------------------------------
// role      warps    regs   does
// softmax   0..3     152    P, dS; at last dQ
// drain     4..11    136    dKV and its additions, two warpgroups that take turns
// mma       12       88     tensor memory; one thread issues every product
// gather    13..15   88     K, each warp its groups of columns; the last one Q and dO before
constexpr i32 kBlockHeads = 64;
constexpr i32 kThreads = 4 * kWarpgroupThreads;
constexpr i32 kDrainGroups = 2;
constexpr i32 kMmaWarp = 12, kGatherWarp = 13, kGatherWarps = 3;
constexpr i32 kRegsSoftmax = 152;
constexpr i32 kRegsDrain = 136;
constexpr i32 kRegsIssue = 88;
static_assert(kRegsSoftmax + kDrainGroups * kRegsDrain + kRegsIssue == 4 * 128, "what the block has at entry");

constexpr i32 kSlabsQk = kHeadDimQk / kPanelColumns;
constexpr i32 kSlabsV = kHeadDimV / kPanelColumns;
constexpr i32 kRopeSlab = kSlabsV;
constexpr bool kHasRope = kSlabsQk > kSlabsV;
constexpr u32 kKeySlabBytes = kTileKeys * kPanelRowBytes;
constexpr i32 kStagesK = kTileKeys == 32 ? 2 : 1;  // what fits
constexpr u32 kTmemColumns = 512;

// K comes and goes in pairs of slabs: the next tile's first columns are fetched while dQ still needs the last ones, and
// scored while those are on their way.
constexpr i32 kGroupSlabs = 2;
constexpr i32 kGroups = ceil_div(kSlabsQk, kGroupSlabs);
constexpr i32 kRopeGroup = kRopeSlab / kGroupSlabs;

// ---- Storage ---------------------------------------------------------------------------------------------------
// Tile j of the block is phase j of a barrier, unless it says otherwise.
//
// barrier       arrives (count)         carries      waits        first phase
// q_landed      gather (1)              Q, dO        softmax      blocked, one phase
// q_full        softmax (128)           -            mma          blocked, one phase
// k_full[s][g]  gather (1)              2 slabs, 1   mma          blocked, a phase each kStagesK tiles
// k_empty[s][g] products (1)            -            gather       free
// s_full        products (1)            -            softmax      blocked
// dp_full       products (1)            -            softmax      blocked
// p_full        softmax (128)           -            mma          blocked
// ds_full       softmax (128)           -            mma          blocked
// dkv_full[i]   products (1)            -            drain        blocked, a phase each use of the place
// dkv_free[i]   its drain warps (4)     -            mma          free
// rope_full     products (1)            -            drain        blocked
// rope_free     all drain warps (8)     -            mma          free
// dq_full       products (1)            -            softmax      blocked, one phase
//
// "products" is a commit: it arrives when everything that was issued before it is done. So s_full of a tile also says
// that P of the tile before may be overwritten, and dp_full the same of dS; S and dP may be when ds_full has come.
template <i32 kSlots>
struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kSlabsQk * kPanelBytes];  // at last dQ
    u8 dout[kSlabsV * kPanelBytes];
    u8 k[kStagesK][kSlabsQk * kKeySlabBytes];
    u8 p[kKeySlabBytes];   // P^T: a row for each key, 64 heads
    u8 ds[kKeySlabBytes];  // dS^T
    MBarrier q_landed, q_full, k_full[kStagesK][kGroups], k_empty[kStagesK][kGroups];
    MBarrier s_full, dp_full, p_full, ds_full;
    MBarrier dkv_full[kSlots], dkv_free[kSlots], rope_full, rope_free, dq_full;
    TmemAddr tmem;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(SparseBackwardParams, q_stride_s_elems), MLA_OFFSET(SparseBackwardParams, s_q),
              MLA_OFFSET(SparseBackwardParams, scale), (int)sizeof(SparseBackwardParams));
MLA_FACT(threads, kThreads);
MLA_FACT(block_heads, kBlockHeads);
MLA_FACT(tile_keys, kTileKeys);
MLA_FACT(tmem_columns, kTmemColumns);
// Of a plan's Storage.
#define MLA_STORAGE_FACTS(Shared)                                                   \
    static_assert(sizeof(Shared) <= 232448, "a block has 227 KB of shared memory"); \
    MLA_FACT(smem_bytes, sizeof(Shared));                                           \
    MLA_FACT(mbarriers, (MLA_OFFSET(Shared, tmem) - MLA_OFFSET(Shared, q_landed)) / sizeof(MBarrier))

template <class S>
MLA_DEVICE void init_storage(S& s) {
    constexpr u32 kWarpgroupWarps = kWarpgroupThreads / kWarpThreads;
    for (MBarrier* barrier : {&s.q_landed, &s.s_full, &s.dp_full, &s.rope_full, &s.dq_full}) mbarrier_init(*barrier, 1);
    for (i32 i = 0; i < kStagesK * kGroups; ++i) {
        mbarrier_init(s.k_full[i / kGroups][i % kGroups], 1);
        mbarrier_init(s.k_empty[i / kGroups][i % kGroups], 1);
    }
    for (MBarrier& barrier : s.dkv_full) mbarrier_init(barrier, 1);
    for (MBarrier& barrier : s.dkv_free) mbarrier_init(barrier, kWarpgroupWarps);
    mbarrier_init(s.rope_free, kDrainGroups * kWarpgroupWarps);
    mbarrier_init(s.q_full, kWarpgroupThreads);
    mbarrier_init(s.p_full, kWarpgroupThreads);
    mbarrier_init(s.ds_full, kWarpgroupThreads);
    fence_mbarrier_init();
}

// ---- Work ------------------------------------------------------------------------------------------------------
// The block's item: 64 heads of a query, which goes through the tiles of the query's list.
struct Item {
    const SparseBackwardParams& p;
    i32 query, head0, heads, count, tiles;

    MLA_DEVICE explicit Item(const SparseBackwardParams& p) : p(p) {
        const i32 head_blocks = ceil_div(p.h_q, kBlockHeads);
        query = blockIdx.x / head_blocks;
        head0 = blockIdx.x % head_blocks * kBlockHeads;
        heads = min(p.h_q - head0, kBlockHeads);
        count = p.counts[query];
        tiles = ceil_div(count, kTileKeys);
    }

    MLA_DEVICE const i32* rows(i32 tile) const { return p.rows + query * p.rows_stride_elems + tile * kTileKeys; }
    // Of a head of the block; +inf where it has no gradient, or is not there.
    MLA_DEVICE float lse2(i32 head) const {
        return head < heads ? p.lse2[(i64)query * p.h_q + head0 + head] : -negative_infinity();
    }
    MLA_DEVICE float delta(i32 head) const { return head < heads ? p.delta[(i64)query * p.h_q + head0 + head] : 0.f; }
};

struct Maps {
    const TensorMap &kv, &q, &dout, &dq;
};

// dQ of an item without a key.
MLA_DEVICE void store_zeros(const Item& item) {
    constexpr i32 kChunks = kHeadDimQk / 8;
    const SparseBackwardParams& p = item.p;
    for (i32 i = threadIdx.x; i < item.heads * kChunks; i += kThreads) {
        u16* to = p.dq + item.query * p.dq_stride_s_elems + (i64)(item.head0 + i / kChunks) * p.dq_stride_h_elems;
        *reinterpret_cast<uint4*>(to + i % kChunks * 8) = make_uint4(0, 0, 0, 0);
    }
}

// After a wait for something that tensor memory has to do with.
MLA_DEVICE void tmem_wait(MBarrier& barrier, u32 parity) {
    mbarrier_wait(barrier, parity);
    tcgen05_fence_after_thread_sync();
}

// ---- Loads -----------------------------------------------------------------------------------------------------
// Heads past the last one arrive as zeros.
template <class S>
MLA_DEVICE void load_item(const Item& item, const Maps& maps, S& s) {
    mbarrier_arrive_expect_tx(s.q_landed, sizeof(s.q) + sizeof(s.dout));
    for (i32 slab = 0; slab < kSlabsQk; ++slab) {
        cp_async_bulk_tensor_3d(smem_addr(s.q) + slab * kPanelBytes, maps.q, s.q_landed, slab * kPanelColumns,
                                item.head0, item.query, kEvictFirst);
    }
    for (i32 slab = 0; slab < kSlabsV; ++slab) {
        cp_async_bulk_tensor_3d(smem_addr(s.dout) + slab * kPanelBytes, maps.dout, s.q_landed, slab * kPanelColumns,
                                item.head0, item.query, kEvictFirst);
    }
}

// A lane looks after four keys. Slots past the end of the list name no row, and become zeros. Each lane's instructions
// are issued one after the other, some ten instructions for each: a single warp would take about as long as the
// products.
constexpr i32 kGatherLanes = kTileKeys / 4;
constexpr u32 kGatherBytes = 4 * kPanelRowBytes;

template <class S>
MLA_DEVICE void run_gather_role(const Item& item, const Maps& maps, S& s, i32 warp, i32 lane) {
    if (warp == kGatherWarps - 1 && elect_one()) load_item(item, maps, s);
    __syncwarp();
    Ring<kStagesK> ring;
    const bool gathers = lane < kGatherLanes;
    for (i32 tile = 0; tile < item.tiles; ++tile) {
        const i32 stage = tile % kStagesK;
        int4 rows = make_int4(kNoRow, kNoRow, kNoRow, kNoRow);
        if (gathers) rows = reinterpret_cast<const int4*>(item.rows(tile))[lane];
        for (i32 group = warp; group < kGroups; group += kGatherWarps) {
            MBarrier& full = s.k_full[stage][group];
            const i32 slab0 = group * kGroupSlabs, slabs = min(kSlabsQk - slab0, kGroupSlabs);
            mbarrier_wait(s.k_empty[stage][group], ring.empty_parity(stage));
            if (lane == 0) mbarrier_arrive_expect_tx(full, slabs * kKeySlabBytes);
            __syncwarp();
            for (i32 slab = slab0; gathers && slab < slab0 + slabs; ++slab) {
                cp_async_bulk_tensor_gather4(smem_addr(s.k[stage]) + (slab * kKeySlabBytes + lane * kGatherBytes),
                                             maps.kv, full, slab * kPanelColumns, rows, kEvictLast);
            }
        }
        ring.advance(stage);
    }
}

// ---- Products --------------------------------------------------------------------------------------------------
// One product of K = 16, kRows x kColumns.
template <bool kWeightStationary, i32 kRows, i32 kColumns, Major kMajorA, Major kMajorB>
struct Product {
    TmemAddr d;

    MLA_DEVICE void operator()(MatrixDesc a, MatrixDesc b, bool accumulate) const {
        constexpr InstructionDesc kShape = make_instruction_desc<Element>(kRows, kColumns, kMajorA, kMajorB);
        if (kWeightStationary) {
            tcgen05_mma_ws_f16(d, a, b, kShape, accumulate);
        } else {
            tcgen05_mma_f16(d, a, b, kShape, accumulate);
        }
    }
};

// Along the columns of kSlabs slabs of both operands, to a fresh sum. `ready` is called before each slab.
template <i32 kSlabs, class Multiply, class Ready>
MLA_DEVICE void multiply_columns(MatrixDesc a, u32 a_slab_bytes, MatrixDesc b, u32 b_slab_bytes, Multiply multiply,
                                 Ready ready) {
    opaque(a);
    opaque(b);
#pragma unroll 1  // four products last longer than a turn of the loop
    for (i32 slab = 0; slab < kSlabs; ++slab) {
        ready(slab);
#pragma unroll
        for (i32 step = 0; step < kPanelMmaSteps; ++step) {
            const u32 bytes = step * kKMajorStepBytes;
            multiply(advance(a, slab * a_slab_bytes + bytes), advance(b, slab * b_slab_bytes + bytes), slab + step > 0);
        }
    }
}

// In `steps` equal steps of each operand; the first adds to what is there if `accumulate`.
template <class Multiply>
MLA_DEVICE void multiply_steps(MatrixDesc a, u32 a_step_bytes, MatrixDesc b, u32 b_step_bytes, i32 steps,
                               bool accumulate, Multiply multiply) {
    opaque(a);
    opaque(b);
    for (i32 step = 0; step < steps; ++step) {
        multiply(advance(a, step * a_step_bytes), advance(b, step * b_step_bytes), accumulate || step > 0);
    }
}

// All in one thread, in this order; tile j of the list:
//
//   dV of tile j (P^T dO) | dQ += dS K | dK of tile j (dS^T Q), to the same places as dV | S, dP of tile j + 1
//
// Where dKV has fewer places than tiles, those of the second turn come whole after dQ.
template <class Plan, class S>
MLA_DEVICE void issue_scores(const Item& item, S& s, TmemAddr tmem, i32 tile) {
    const i32 stage = tile % kStagesK;
    Plan::issue_s(s, tmem, stage, [&](i32 slab) {
        if (slab % kGroupSlabs == 0) tmem_wait(s.k_full[stage][slab / kGroupSlabs], tile / kStagesK & 1);
    });
    tcgen05_commit(s.s_full);
    Plan::issue_dp(s, tmem, stage);
    tcgen05_commit(s.dp_full);
}

// How often the place of dKV's tile t has been used before tile `tile` of the list does.
template <class Plan>
MLA_DEVICE u32 uses(i32 tile, i32 t) {
    return tile * (Plan::kTiles / Plan::kSlots) + t / Plan::kSlots;
}

template <class Plan, class S>
MLA_DEVICE void issue_dv(S& s, TmemAddr tmem, i32 tile, i32 t, i32 head_steps) {
    tmem_wait(s.dkv_free[t % Plan::kSlots], (uses<Plan>(tile, t) & 1) ^ 1);
    Plan::issue_dv(s, tmem, t, head_steps);
}

template <class Plan, class S>
MLA_DEVICE void issue_dk(S& s, TmemAddr tmem, i32 t, i32 head_steps) {
    Plan::issue_dk(s, tmem, t, head_steps);
    tcgen05_commit(s.dkv_full[t % Plan::kSlots]);
}

template <class Plan, class S>
MLA_DEVICE void run_mma_role(const Item& item, S& s, TmemAddr tmem) {
    if (!elect_issuer()) return;
    const i32 head_steps = ceil_div(item.heads, kMmaK);  // the others would only add zeros
    tmem_wait(s.q_full, 0);
    issue_scores<Plan>(item, s, tmem, 0);
    for (i32 tile = 0; tile < item.tiles; ++tile) {
        const u32 parity = tile & 1;
        tmem_wait(s.p_full, parity);
        for (i32 t = 0; t < Plan::kSlots; ++t) issue_dv<Plan>(s, tmem, tile, t, head_steps);
        tmem_wait(s.ds_full, parity);
        const i32 stage = tile % kStagesK;
        Plan::issue_dq(s, tmem, stage, tile > 0, [&](i32 group) { tcgen05_commit(s.k_empty[stage][group]); });
        for (i32 t = 0; t < Plan::kSlots; ++t) issue_dk<Plan>(s, tmem, t, head_steps);
        for (i32 t = Plan::kSlots; t < Plan::kTiles; ++t) {
            issue_dv<Plan>(s, tmem, tile, t, head_steps);
            issue_dk<Plan>(s, tmem, t, head_steps);
        }
        if (kHasRope) {
            tmem_wait(s.rope_free, parity ^ 1);
            Plan::issue_dk_rope(s, tmem, head_steps);
            tcgen05_commit(s.rope_full);
        }
        if (tile + 1 < item.tiles) issue_scores<Plan>(item, s, tmem, tile + 1);
    }
    tcgen05_commit(s.dq_full);
}

// ---- Softmax ---------------------------------------------------------------------------------------------------
MLA_DEVICE void clear_row(u8* slabs, i32 count, i32 row) {
    for (i32 i = 0; i < count * kPanelChunks; ++i) {
        u8* chunk = slabs + i / kPanelChunks * kPanelBytes + panel_offset(row, i % kPanelChunks);
        *reinterpret_cast<uint4*>(chunk) = make_uint4(0, 0, 0, 0);
    }
}

// Q and dO of heads without a gradient become zeros, whatever they hold.
template <class S>
MLA_DEVICE void clear_absent_heads(const Item& item, S& s, i32 thread) {
    if (thread < item.heads && item.lse2(thread) == -negative_infinity()) {
        clear_row(s.q, kSlabsQk, thread);
        clear_row(s.dout, kSlabsV, thread);
    }
    fence_proxy_async();
}

enum NamedBarrier : i32 { DqStored = 1 };  // softmax among itself: dQ is in shared memory

// P and dS are masked after the exponent: keys that are not there are zeros, but exp2(-lse2) may be infinite.
template <class Plan, class S>
MLA_DEVICE void run_softmax_role(const Item& item, const Maps& maps, S& s, TmemAddr tmem, i32 thread) {
    const SparseBackwardParams& p = item.p;
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
    for (i32 slab = 0; slab < kSlabsQk; ++slab) {
        cp_async_bulk_tensor_3d_store(maps.dq, smem_addr(s.q) + slab * kPanelBytes, slab * kPanelColumns, item.head0,
                                      item.query);
    }
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_read();
}

// ---- Drain -----------------------------------------------------------------------------------------------------
// The place of a tile is free: this warp has what it wants of it in registers.
MLA_DEVICE void release_tmem(MBarrier& free, i32 thread) {
    tcgen05_fence_before_thread_sync();
    release(free, thread);
}

// Warpgroup `group` of the two takes every other tile of dims, and its share of the RoPE dims.
template <class Plan, class S>
MLA_DEVICE void run_drain_role(const Item& item, S& s, TmemAddr tmem, i32 group, i32 thread) {
    for (i32 tile = 0; tile < item.tiles; ++tile) {
        const typename Plan::Drain drain(item, tile, thread);
#pragma unroll
        for (i32 t = group; t < Plan::kTiles; t += kDrainGroups) {
            const i32 slot = t % Plan::kSlots;
            tmem_wait(s.dkv_full[slot], uses<Plan>(tile, t) & 1);
            drain.add_tile(tmem, t, [&] { release_tmem(s.dkv_free[slot], thread); });
        }
        if (kHasRope) {
            tmem_wait(s.rope_full, tile & 1);
            drain.add_rope(tmem, group, [&] { release_tmem(s.rope_free, thread); });
        }
    }
}

// Adds numbers that stand side by side in a row of the workspace. Deterministic additions are rounded first.
struct Adder {
    float* dkv;
    const float* rounders;
    i32 bound;
    i64 level_elems;

    MLA_DEVICE explicit Adder(const SparseBackwardParams& p) : dkv(p.dkv), rounders(p.rounders) {
        if (kDeterministic) {
            bound = __float_as_int(p.rounders[p.s_kv]);
            level_elems = (i64)p.s_kv * kHeadDimQk;
        }
    }

    MLA_DEVICE i32 rounder(i32 row) const { return __float_as_int(rounders[row]); }

    template <i32 kCount>
    MLA_DEVICE void add(i32 row, i32 rounder, i32 position, float (&x)[kCount]) const {
        static_assert(kCount == 2 || kCount == 4, "8 or 16 bytes");
        float* to = dkv + ((i64)row * kHeadDimQk + position);
        if (kDeterministic) {
            const ExactAddition exact{bound, rounder};
            float largest = 0.f;
#pragma unroll
            for (float number : x) largest = fmaxf(largest, fabsf(number));
            const i32 level = exact.level(largest);
#pragma unroll
            for (float& number : x) number = exact.round(number, level);
            to += level * level_elems;
        }
        if constexpr (kCount == 4) {
            red_add_v4(to, x[0], x[1], x[2], x[3], row >= 0);
        } else {
            red_add_v2(to, x[0], x[1], row >= 0);
        }
    }
};

// ---- Kernel ----------------------------------------------------------------------------------------------------
template <class Plan>
MLA_DEVICE void run_block(const SparseBackwardParams& p, const Maps& maps, Storage<Plan::kSlots>& s) {
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written
    const Item item(p);
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
    if (warp < 4) {
        setmaxnreg_inc<kRegsSoftmax>();
        run_softmax_role<Plan>(item, maps, s, tmem, thread);
    } else if (warp < kMmaWarp) {
        setmaxnreg_inc<kRegsDrain>();
        run_drain_role<Plan>(item, s, tmem, warp / 4 - 1, thread);
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
