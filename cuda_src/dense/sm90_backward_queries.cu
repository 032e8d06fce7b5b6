// Gradients of queries of dense attention on Hopper.
//
//   S = Q K^T,   dP = dO V^T           (128 x d) (d x kTileKeys) per tile of keys
//   P = exp2(S scale_log2 - lse2)
//   dS = P (dP - delta)                stays in registers
//   dQ = scale dS K
//
// Grid: one block per SM, which takes work items, tiles of 128 queries of a head, in the order of dense/tiles.cuh. Each
// math warpgroup has 64 of the queries and all keys, from the first tile to the last: tiles that need a mask come last,
// when there has been time to inspect them. S and dP of a tile overlap with dQ of the previous one:
//
//   math_0  | S0 dP0 | dS 0 | dQ0 S1 dP1 | dS 1   | dQ1 S2 dP2 | dS 2   | dQ2 | store, next Q ...
//   math_1           | S0 dP0 | dS 0  | dQ0 S1 dP1 | dS 1   | dQ1 S2 dP2 | dS 2   | dQ2 | store ...
//   load    K0 V0 Q dO  K1 V1    K2          V2            next item: K V Q dO ...
//   clean   K2: keys that not every query sees become finite
//
// The warpgroups take turns issuing their matmuls, so that one computes exponentials while the other uses the tensor
// cores. Operands and results keep the caller's layout: their last 64 columns may be separate arrays.
//
// Each row is summed by one block in the order of the keys: the result is the same from run to run.
#include "common/limits.cuh"
#include "dense/backward_params.cuh"
#include "dense/sm90_rows.cuh"
#include "ptx/convert.cuh"
#include "tile/fragment.cuh"
#include "tile/product.cuh"
#include "tile/prologue.cuh"
#include "tile/ring.cuh"
#include "tile/warp.cuh"

namespace mla::dense {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK, kHeadDimV = MLA_HEAD_DIM_V;
constexpr i32 kTileKeys = MLA_TILE_KEYS;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps    regs   does
// math_0   0..3     232    queries 0 .. 63 of the tile
// math_1   4..7     232    queries 64 .. 127
// load     8        40     takes work items; all copies
// clean    9..11    40     keys that not every query sees become finite
constexpr i32 kMathWarpgroups = 2;
constexpr i32 kMathWarps = kMathWarpgroups * kWarpgroupWarps;
constexpr i32 kCleanWarps = kWarpgroupWarps - 1, kCleanThreads = kCleanWarps * kWarpThreads;
constexpr i32 kThreads = (kMathWarpgroups + 1) * kWarpgroupThreads;
constexpr i32 kLoadWarp = kMathWarps;
constexpr i32 kRegsMath = 232, kRegsLoad = 40;
static_assert(kMathWarpgroups * kRegsMath + kRegsLoad <= 3 * regs_at_entry(kThreads), "what the block has at entry");

constexpr i32 kKeyStages = 3, kValueStages = 2;
constexpr i32 kWorkSlots = 2;
constexpr i32 kPanelsQk = kHeadDimQk / kSw128Columns, kPanelsV = kHeadDimV / kSw128Columns;
constexpr u32 kQueryPanelBytes = kTileQueries * kSw128RowBytes, kKeyPanelBytes = kTileKeys * kSw128RowBytes;
constexpr i32 kScores = kTileKeys / 2, kSums = kHeadDimQk / 2;  // of a thread
constexpr i32 kKeySteps = kTileKeys / kMmaK;
static_assert(kTileQueries == kMathWarpgroups * kSw128Rows, "64 queries per warpgroup");
static_assert(kKeyPanelBytes % kSwizzleAtomBytes == 0 && kTileKeys % kMmaK == 0, "whole swizzle atoms and steps");

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier         arrives (count)            carries   waits         first phase
// work_full[s]    load (1)                   -         math, clean   blocked
// work_empty[s]   math, clean warps (11)     -         load          free
// q_full[w]       load (1)                   Q         math_w        blocked
// q_empty[w]      math_w warps (4)           -         load          free
// dout_full[w]    load (1)                   dO        math_w        blocked
// dout_empty[w]   math_w warps (4)           -         load          free
// k_raw[s]        load (1)                   K         clean         blocked
// k_full[s]       load (1)                   K         math          blocked
//          or clean (1), after k_raw         -
// k_empty[s]      math warps (8)             -         load          free
// v_full[s]       load (1)                   V         math          blocked
// v_empty[s]      math warps (8)             -         load          free
// exponentiated   math warps (a million: its phase never ends, so nobody need wait)
struct WorkSlot {
    QueryTile tile;
    i32 head;             // negative: no more work
    i32 first_nonfinite;  // of the keys that not every query sees; kNoKey
};
constexpr i32 kNoKey = 0x7fffffff;

struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kPanelsQk][kQueryPanelBytes];
    u8 dout[kPanelsV][kQueryPanelBytes];
    u8 k[kKeyStages][kPanelsQk][kKeyPanelBytes];
    u8 v[kValueStages][kPanelsV][kKeyPanelBytes];
    WorkSlot work[kWorkSlots];
    MBarrier work_full[kWorkSlots], work_empty[kWorkSlots];
    MBarrier q_full[kMathWarpgroups], q_empty[kMathWarpgroups], dout_full[kMathWarpgroups], dout_empty[kMathWarpgroups];
    MBarrier k_full[kKeyStages], k_empty[kKeyStages], k_raw[kKeyStages];
    MBarrier v_full[kValueStages], v_empty[kValueStages];
    MBarrier exponentiated;
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

enum NamedBarrier : i32 { Turn0 = 1, Turn1, Cleaned };

MLA_PREFILL_BACKWARD_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(tile_keys, kTileKeys);

MLA_DEVICE void init_storage(Storage& s) {
    init_ring(s.work_full, s.work_empty, 1, kMathWarps + kCleanWarps);
    init_ring(s.q_full, s.q_empty, 1, kWarpgroupWarps);
    init_ring(s.dout_full, s.dout_empty, 1, kWarpgroupWarps);
    init_ring(s.k_full, s.k_empty, 1, kMathWarps);
    init_ring(s.v_full, s.v_empty, 1, kMathWarps);
    for (MBarrier& raw : s.k_raw) mbarrier_init(raw, 1);
    mbarrier_init(s.exponentiated, kMaxArrivals);
    fence_mbarrier_init();
}

// ---- Load role -------------------------------------------------------------------------------------------------
struct Maps {
    RowSource q, k, v, dout;
};

struct Loader {
    const PrefillBackwardParams& p;
    Storage& s;
    const Maps& maps;
    RingPosition<kWorkSlots> work;
    RingPosition<kMathWarpgroups> q, dout;
    RingPosition<kKeyStages> k;
    RingPosition<kValueStages> v;

    // The next work item goes to the math and clean roles; its head, or -1.
    MLA_DEVICE i32 announce(i32 index, i32 num_tiles, QueryTile& tile) {
        work.wait_empty(s.work_empty);
        WorkSlot& slot = s.work[work.stage];
        const i32 head = find_item(p, index, num_tiles, tile, slot.tile);
        slot.head = head;
        slot.first_nonfinite = kNoKey;
        mbarrier_arrive(s.work_full[work.stage]);
        work.advance();
        return head;
    }

    // Loads the next warpgroup's queries.
    MLA_DEVICE void load_queries(i32 first_query, i32 head) {
        MBarrier& full = s.q_full[q.stage];
        q.wait_empty(s.q_empty);
        mbarrier_arrive_expect_tx(full, sizeof(s.q) / kMathWarpgroups);
        load_rows(s.q, full, maps.q, first_query, head, head, kEvictFirst, q.stage * kSw128Bytes);
        q.advance();
    }

    MLA_DEVICE void load_dout(i32 first_query, i32 head) {
        MBarrier& full = s.dout_full[dout.stage];
        dout.wait_empty(s.dout_empty);
        mbarrier_arrive_expect_tx(full, sizeof(s.dout) / kMathWarpgroups);
        load_rows(s.dout, full, maps.dout, first_query, head, head, kEvictFirst, dout.stage * kSw128Bytes);
        dout.advance();
    }

    MLA_DEVICE void load_keys(i32 first_key, i32 kv_head, bool whole) {
        MBarrier& full = whole ? s.k_full[k.stage] : s.k_raw[k.stage];
        k.wait_empty(s.k_empty);
        mbarrier_arrive_expect_tx(full, sizeof(s.k[0]));
        load_rows(s.k[k.stage], full, maps.k, first_key, kv_head, min(kv_head, p.k_rope_heads - 1), kEvictLast);
        k.advance();
    }

    MLA_DEVICE void load_values(i32 first_key, i32 kv_head) {
        MBarrier& full = s.v_full[v.stage];
        v.wait_empty(s.v_empty);
        mbarrier_arrive_expect_tx(full, sizeof(s.v[0]));
        load_rows(s.v[v.stage], full, maps.v, first_key, kv_head, kv_head, kEvictLast);
        v.advance();
    }

    MLA_DEVICE void load(const QueryTile& tile, i32 head) {
        const KeyTiles<kTileKeys> keys(tile);
        const i32 kv_head = head / (p.h_q / p.h_kv);
        if (keys.count == 0) return;
        load_keys(tile.first_key, kv_head, keys.whole > 0);
        load_values(tile.first_key, kv_head);
#pragma unroll 1
        for (i32 row = 0; row < kTileQueries; row += kSw128Rows) {  // the first come while the second are in use
            load_queries(tile.first_query + row, head);
            load_dout(tile.first_query + row, head);
        }
#pragma unroll 1
        for (i32 i = 1; i < keys.count; ++i) {
            load_keys(tile.first_key + i * kTileKeys, kv_head, i < keys.whole);
            load_values(tile.first_key + i * kTileKeys, kv_head);
        }
    }
};

// Called by one thread.
MLA_DEVICE void run_load_role(const PrefillBackwardParams& p, Storage& s, const Maps& maps) {
    Loader loader{p, s, maps, {}, {}, {}, {}, {}};
    const i32 num_tiles = p.schedule->num_tiles;
    i32 index = blockIdx.x;
#pragma unroll 1
    while (true) {
        QueryTile tile;
        const i32 head = loader.announce(index, num_tiles, tile);
        if (head < 0) break;
        loader.load(tile, head);
        index = gridDim.x + atomicAdd(&p.schedule->next_item, 1);
    }
}

// ---- Clean role ------------------------------------------------------------------------------------------------
// 0 * NaN is not 0: of keys that not every query sees, those past the end of the sequence among them, elements that
// are not finite become 0. Rows that do see the first of them, or a later one, have no finite gradient.
MLA_DEVICE void run_clean_role(Storage& s, i32 thread) {
    RingPosition<kWorkSlots> work;
    Ring<kKeyStages> raw;
    i32 stage = 0;
#pragma unroll 1
    while (true) {
        work.wait_full(s.work_full);
        WorkSlot& slot = s.work[work.stage];
        if (slot.head < 0) break;
        const KeyTiles<kTileKeys> keys(slot.tile);
        const i32 seen_by_all = slot.tile.seen_by_all();
        stage = (stage + keys.whole) % kKeyStages;
#pragma unroll 1
        for (i32 i = keys.whole; i < keys.count; ++i) {
            mbarrier_wait(s.k_raw[stage], raw.full_parity(stage));
            raw.advance(stage);
            const i32 first_key = i * kTileKeys;
            clean_rows<Element, kCleanThreads>(s.k[stage], max(0, seen_by_all - first_key), thread,
                                               [&](i32 row) { atomicMin(&slot.first_nonfinite, first_key + row); });
            fence_proxy_async();
            bar_sync(Cleaned, kCleanThreads);
            if (thread == 0) mbarrier_arrive(s.k_full[stage]);
            stage = (stage + 1) % kKeyStages;
        }
        release(s.work_empty[work.stage], thread);
        work.advance();
    }
}

// ---- Math role -------------------------------------------------------------------------------------------------
struct Math {
    float scores[kScores];  // S, then P
    float dp[kScores];
    float dq[kSums];
    u32 ds[kKeySteps][4];
    float lse2[kFragmentRows], delta[kFragmentRows];
    RingPosition<kWorkSlots> work;
    Ring<1> rows;                // of q and dout
    RingPosition<kKeyStages> k;  // of S
    RingPosition<kValueStages> v;
    i32 warpgroup, thread;

    // The first of the thread's two rows of the tile; the other is eight further on.
    MLA_DEVICE i32 row(i32 r) const { return warpgroup * kSw128Rows + fragment_row(thread) + 8 * r; }
};

// D = A B^T of the warpgroup's rows of A.
template <i32 kPanels>
MLA_DEVICE void start_product(const Math& math, float (&d)[kScores], const u8 (&a)[kPanels][kQueryPanelBytes],
                              const u8 (&b)[kPanels][kKeyPanelBytes]) {
    SmemDesc from = k_major_desc(smem_addr(a) + math.warpgroup * kSw128Bytes), with = k_major_desc(smem_addr(b));
    opaque(from.bits), opaque(with.bits);
    pin(d);
    wgmma_fence();
    multiply_abt<kPanels * kSw128MmaSteps, kQueryPanelBytes, kKeyPanelBytes>(Element{}, d, from, with);
    wgmma_commit_group();
}

// Starts dQ += dS K.
MLA_DEVICE void start_dq(Storage& s, Math& math, i32 stage) {
    SmemDesc b = make_desc(smem_addr(s.k[stage]), kKeyPanelBytes, kSwizzleAtomBytes);
    opaque(b.bits);
    pin(math.dq);
    wgmma_fence();
    multiply_ab<kSw128MmaSteps * kMnMajorStepBytes>(Element{}, math.dq, math.ds, b, true);
    wgmma_commit_group();
}

MLA_DEVICE void finish_dq(Storage& s, Math& math, i32 stage) {
    pin(math.dq);
#pragma unroll
    for (i32 step = 0; step < kKeySteps; ++step) pin(math.ds[step]);  // in use until now
    release(s.k_empty[stage], math.thread);
}

MLA_DEVICE void exponentiate(Math& math, float scale_log2) {
#pragma unroll
    for (i32 i = 0; i < kScores; ++i) {
        math.scores[i] = ex2_approx(fmaf(math.scores[i], scale_log2, -math.lse2[fragment_half(i)]));
    }
}

// The exponentials come before the wait for dP. The compiler would move that wait up past all of them, but not past a
// branch to an arrival, for which nobody waits.
MLA_DEVICE void hold_wait(Storage& s, Math& math, bool last) {
    if (last) release(s.exponentiated, math.thread);
}

// Hidden elements become 0 whatever they were: they may be NaN.
template <bool kMasked>
MLA_DEVICE void make_ds(Math& math, const QueryTile& tile, i32 first_key) {
    const i32 seen[kFragmentRows] = {tile.seen(math.row(0)) - first_key, tile.seen(math.row(1)) - first_key};
#pragma unroll
    for (i32 i = 0; i < kScores; ++i) {
        const i32 r = fragment_half(i);
        math.scores[i] *= math.dp[i] - math.delta[r];
        if (kMasked && fragment_column(math.thread, i) >= seen[r]) math.scores[i] = 0.f;
    }
#pragma unroll
    for (i32 i = 0; i < kScores; i += 2) {
        math.ds[i / 8][i % 8 / 2] = cvt_x2(Element{}, math.scores[i], math.scores[i + 1]);
    }
}

// Computes S, dP and dS of a tile of keys, and overlaps dQ of the previous one.
template <bool kFirst, bool kMasked>
MLA_DEVICE void step(const PrefillBackwardParams& p, Storage& s, Math& math, const QueryTile& tile, i32 keys,
                     bool last) {
    const i32 before = math.k.before();
    math.k.wait_full(s.k_full);
    math.v.wait_full(s.v_full);
    take_turn<Turn0>(math.warpgroup);
    if (!kFirst) start_dq(s, math, before);
    start_product(math, math.scores, s.q, s.k[math.k.stage]);
    if (kFirst) mbarrier_wait(s.dout_full[math.warpgroup], math.rows.full_parity(0));
    start_product(math, math.dp, s.dout, s.v[math.v.stage]);
    pass_turn<Turn0>(math.warpgroup);
    wgmma_wait_group<1>();
    pin(math.scores);
    if (!kFirst) finish_dq(s, math, before);
    if (last) release(s.q_empty[math.warpgroup], math.thread);
    exponentiate(math, p.scale_log2);
    hold_wait(s, math, last);
    wgmma_wait_group<0>();
    pin(math.dp);
    release(s.v_empty[math.v.stage], math.thread);
    if (last) release(s.dout_empty[math.warpgroup], math.thread);
    make_ds<kMasked>(math, tile, keys * kTileKeys);
    math.k.advance();
    math.v.advance();
}

// A tile that the other warpgroup sees.
MLA_DEVICE void skip(Storage& s, Math& math) {
    math.k.wait_full(s.k_full);
    math.v.wait_full(s.v_full);
    take_turn<Turn0>(math.warpgroup);
    pass_turn<Turn0>(math.warpgroup);
    release(s.k_empty[math.k.stage], math.thread);
    release(s.v_empty[math.v.stage], math.thread);
    math.k.advance();
    math.v.advance();
}

MLA_DEVICE void sum_tiles(const PrefillBackwardParams& p, Storage& s, Math& math, const QueryTile& tile,
                          const KeyTiles<kTileKeys>& keys) {
    const i32 count = ceil_div(seen_by_rows(tile, math.warpgroup * kSw128Rows, kSw128Rows), kTileKeys);
    mbarrier_wait(s.q_full[math.warpgroup], math.rows.full_parity(0));
    i32 i = 0;
    if (count > 0) {
        step<true, true>(p, s, math, tile, i++, count == 1);
#pragma unroll 1
        for (; i < keys.whole; ++i) step<false, false>(p, s, math, tile, i, i + 1 == count);
#pragma unroll 1
        for (; i < count; ++i) step<false, true>(p, s, math, tile, i, i + 1 == count);
        const i32 last = math.k.before();
        start_dq(s, math, last);
        if (i < keys.count) skip(s, math), ++i;
        wgmma_wait_group<0>();
        finish_dq(s, math, last);
    } else {
        mbarrier_wait(s.dout_full[math.warpgroup], math.rows.full_parity(0));
        release(s.q_empty[math.warpgroup], math.thread);
        release(s.dout_empty[math.warpgroup], math.thread);
    }
#pragma unroll 1
    for (; i < keys.count; ++i) skip(s, math);
    math.rows.advance(0);
}

MLA_DEVICE void load_row_values(const PrefillBackwardParams& p, Math& math, const QueryTile& tile, i32 head) {
    const i64 from = (i64)head * p.num_rows + tile.first_row;
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        math.lse2[r] = p.lse2[from + math.row(r)];
        math.delta[r] = p.delta[from + math.row(r)];
    }
}

// ---- Results ---------------------------------------------------------------------------------------------------
// A row without keys, whose lse2 is infinite, has no gradient; the gradient of a row that sees a non-finite key is NaN.
MLA_DEVICE void scale_sums(Math& math, const QueryTile& tile, float scale, i32 first_nonfinite) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const bool empty = math.lse2[r] == -negative_infinity();
        const float factor = tile.seen(math.row(r)) > first_nonfinite ? __uint_as_float(0x7fffffff) : scale;
#pragma unroll
        for (i32 i = 2 * r; i < kSums; i += 4) {
            math.dq[i] = empty ? 0.f : factor * math.dq[i];
            math.dq[i + 1] = empty ? 0.f : factor * math.dq[i + 1];
        }
    }
}

// Row r of the thread, by all lanes of its quad.
MLA_DEVICE void store_result(const PrefillBackwardParams& p, Math& math, const QueryTile& tile, i32 head, i32 r) {
    constexpr i32 kLast = kSw128Columns / 2, kFirst = kSums - kLast;
    const bool stored = math.row(r) < tile.queries;
    const i64 query = tile.first_query + math.row(r);
    u16* first = p.dq + query * p.dq_stride_s_elems + head * p.dq_stride_h_elems;
    u16* last = p.dq_rope + query * p.dq_rope_stride_s_elems + head * p.dq_rope_stride_h_elems + p.q_rope_column;
    store_row(Element{}, first, reinterpret_cast<float (&)[kFirst]>(math.dq), r, 1.f, stored, math.thread);
    store_row(Element{}, last, reinterpret_cast<float (&)[kLast]>(math.dq[kFirst]), r, 1.f, stored, math.thread);
}

MLA_DEVICE void run_math_role(const PrefillBackwardParams& p, Storage& s, i32 warpgroup, i32 thread) {
    Math math;
    math.warpgroup = warpgroup, math.thread = thread;
    if (warpgroup == 1) pass_turn<Turn0>(math.warpgroup);
#pragma unroll 1
    while (true) {
        math.work.wait_full(s.work_full);
        const WorkSlot& slot = s.work[math.work.stage];
        const i32 head = slot.head;
        if (head < 0) break;
        const QueryTile tile = slot.tile;
        const KeyTiles<kTileKeys> keys(tile);
#pragma unroll
        for (i32 i = 0; i < kSums; ++i) math.dq[i] = 0.f;
        load_row_values(p, math, tile, head);
        if (keys.count > 0) sum_tiles(p, s, math, tile, keys);
        scale_sums(math, tile, p.scale, slot.first_nonfinite);
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) store_result(p, math, tile, head, r);
        release(s.work_empty[math.work.stage], thread);
        math.work.advance();
    }
    if (warpgroup == 0) take_turn<Turn0>(math.warpgroup);  // the turn that the other one has passed on
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1) mla_dense_sm90_backward_queries(
    const __grid_constant__ PrefillBackwardParams p, const __grid_constant__ TensorMap q_map,
    const __grid_constant__ TensorMap q_rope_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap k_rope_map, const __grid_constant__ TensorMap v_map,
    const __grid_constant__ TensorMap dout_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    start_block([&] { init_storage(s); }, q_map, q_rope_map, k_map, k_rope_map, v_map, dout_map);
    const i32 warp = uniform_warp(), thread = threadIdx.x % kWarpgroupThreads;
    if (warp < kMathWarps) {
        setmaxnreg_inc<kRegsMath>();
        run_math_role(p, s, warp / kWarpgroupWarps, thread);
    } else {
        setmaxnreg_dec<kRegsLoad>();
        if (warp > kLoadWarp) {
            run_clean_role(s, thread - kWarpThreads);
        } else if (elect_one()) {
            constexpr i32 kLastColumnV = kHeadDimV - kSw128Columns;
            const Maps maps{{q_map, q_rope_map, p.q_rope_column},
                            {k_map, k_rope_map, p.k_rope_column},
                            {v_map, v_map, kLastColumnV},
                            {dout_map, dout_map, kLastColumnV}};
            run_load_role(p, s, maps);
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::dense
