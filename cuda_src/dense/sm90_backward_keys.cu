// Gradients of keys and values of dense attention on Hopper, and each key tile's contribution to the queries'
// gradients.
//
//   S^T = K Q^T,   dP^T = V dO^T         (128 x d) (d x 64) per tile of queries
//   P^T = exp2(S^T scale_log2 - lse2)    stays in registers
//   dS^T = P^T (dP^T - delta)            to shared memory
//   dV += P^T dO,   dK += dS^T Q         stay in registers over all queries
//   dQ += dS K                           (64 x 128) (128 x d_qk), added to global memory; not if deterministic
//
// Grid: one block per SM, which takes work items, tiles of 128 keys of a KV head, in the order of dense/tiles.cuh. Each
// math warpgroup has 64 of the keys, their rows of all products, and half of the columns of dQ. Tiles of queries that
// need a mask come last, when there has been time to inspect them:
//
//   both math | S1, dK0 | P | dP1, dV1 | dS | dQ1, dK1 | stage, add | S2, dK1 | P | dP2, dV2 | dS | dQ2, dK2 | ...
//   load        Q2 dO2                                               Q3 dO3
//   clean       K, Q and dO of tiles with a mask: non-finite elements become 0
//
// The second product of each pair runs while the next operand is computed from the first: most of the previous tile's
// dK during P, dV during dS, the rest of dK during the additions. Both warpgroups are in the same part, as each needs
// the other's dS.
//
// Source: FlashAttention's backward (2022), and the transposed products of its kernels for Hopper (2024). Here operands
// and results keep the caller's layout, in pieces; tiles end with their sequence; dK's product is cut in two; sums of
// dQ are in the order of accumulators.
#include "common/limits.cuh"
#include "dense/backward_params.cuh"
#include "dense/sm90_rows.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/reduce.cuh"
#include "tile/elements.cuh"
#include "tile/fragment.cuh"
#include "tile/product.cuh"
#include "tile/prologue.cuh"
#include "tile/ring.cuh"
#include "tile/sw128.cuh"
#include "tile/warp.cuh"

namespace mla::dense {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK, kHeadDimV = MLA_HEAD_DIM_V;
constexpr bool kSumsDq = MLA_SUM_DQ;  // else another kernel makes dQ, and sums of heads

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps    regs   does
// math_0   0..3     240    keys 0 .. 63 of the tile
// math_1   4..7     240    keys 64 .. 127
// load     8        24     takes work items; all copies
// clean    9..11    24     makes finite what a mask hides
constexpr i32 kMathWarpgroups = 2;
constexpr i32 kMathWarps = kMathWarpgroups * kWarpgroupWarps, kMathThreads = kMathWarps * kWarpThreads;
constexpr i32 kCleanWarps = kWarpgroupWarps - 1, kCleanThreads = kCleanWarps * kWarpThreads;
constexpr i32 kThreads = (kMathWarpgroups + 1) * kWarpgroupThreads;
constexpr i32 kLoadWarp = kMathWarps;
constexpr i32 kRegsMath = 240, kRegsLoad = 24;
constexpr i32 kLoadsAtOnce = 2;  // of a thread of the clean role, limited by registers
static_assert(kMathWarpgroups * kRegsMath + kRegsLoad <= 3 * regs_at_entry(kThreads), "what the block has at entry");

constexpr i32 kStepQueries = kSw128Rows;  // of a tile of queries here
constexpr i32 kStages = 2;
constexpr i32 kWorkSlots = 2;
constexpr i32 kLastItemsHere = 2;                  // fewer than usual: the sums of that many heads exceed the L2
constexpr i32 kGradientBuffers = kSumsDq ? 1 : 2;  // of dS^T
constexpr i32 kDkStepsEarly = kSumsDq ? 1 : 0;     // steps of dK's product during the additions to dQ
constexpr i32 kPanelsQk = kHeadDimQk / kSw128Columns, kPanelsV = kHeadDimV / kSw128Columns;
constexpr u32 kQueryPanelBytes = kSw128Bytes, kKeyPanelBytes = kKeyTileKeys * kSw128RowBytes;
constexpr i32 kScores = kStepQueries / 2, kSumsK = kHeadDimQk / 2, kSumsV = kHeadDimV / 2;  // of a thread
constexpr i32 kColumnsQ = kHeadDimQk / kMathWarpgroups, kSumsQ = kColumnsQ / 2;
static_assert(kKeyTileKeys == kMathWarpgroups * kSw128Rows, "64 keys per warpgroup");

// Panels are stored with the last one second. So each warpgroup's columns of dQ are a panel of its own, plus half of
// the third if there is one.
constexpr i32 kLastSlot = 1;
MLA_DEVICE constexpr i32 slot_of(i32 panel) {
    return panel == kPanelsQk - 1 ? kLastSlot : panel < kLastSlot ? panel : panel + 1;
}
static_assert(kPanelsQk == 2 || kPanelsQk == 3, "a panel, or one and a half, per warpgroup");

// ---- Work ------------------------------------------------------------------------------------------------------
// The query tiles of a work item, counted from the sequence's first query: [first, end). In [whole, whole_end) all
// queries see all keys of the item, and the item has a full tile of keys. These tiles come first.
struct QueryTiles {
    i32 first, end, whole, whole_end;

    MLA_DEVICE explicit QueryTiles(const KeyTile& tile)
        : first(tile.first_to_see_any() / kStepQueries), end(ceil_div(tile.queries, kStepQueries)) {
        whole = ceil_div(tile.first_to_see_all(), kStepQueries);
        whole_end = tile.keys == kKeyTileKeys ? max(whole, tile.queries / kStepQueries) : whole;
        if (tile.seers() == 0) end = first;
    }

    MLA_DEVICE i32 count() const { return end - first; }
    MLA_DEVICE i32 wholes() const { return count() > 0 ? whole_end - whole : 0; }
    // The n-th in the order of work.
    MLA_DEVICE i32 at(i32 n) const {
        if (n < wholes()) return whole + n;
        const i32 masked = first + n - wholes();
        return masked < whole ? masked : masked + wholes();
    }
};

struct WorkSlot {
    KeyTile tile;
    QueryTiles queries;
    i32 kv_head;         // negative: no more work
    i32 head, head_end;  // of its queries
    u32 kv_parity;
    u32 nonfinite_keys[kKeyTileKeys / kWarpThreads];  // a bit for each
    i32 nonfinite_dout;
};

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier         arrives (count)            carries         waits         first phase
// work_full[s]    load (1)                   -               math, clean   blocked
// work_empty[s]   math, clean warps (11)     -               load          free
// k_raw           load (1)                   K               clean         blocked
// k_full          clean (1), after k_raw     -               math          blocked
//          or load (1), without dQ           K
// v_full          load (1)                   V               math          blocked
// kv_empty        math warps (8)             -               load          free
// raw[s]          load (1)                   Q to delta, dO  clean         blocked
// q_full[s]       load (1)                   Q, lse2, delta  math          blocked
//          or clean (1), after raw           -
// q_empty[s]      math warps (8)             -               load          free
// dout_full[s]    load (1)                   dO              math          blocked
//          or clean (1), after raw           -
// dout_empty[s]   math warps (8)             -               load          free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 k[kPanelsQk][kKeyPanelBytes];
    u8 v[kPanelsV][kKeyPanelBytes];
    u8 q[kStages][kPanelsQk][kQueryPanelBytes];
    u8 dout[kStages][kPanelsV][kQueryPanelBytes];
    u8 ds[kGradientBuffers][kMathWarpgroups][kSw128Bytes];           // dS^T
    float staging[kSumsDq ? kMathWarps : 1][kRowGroup * kColumnsQ];  // of dQ, on its way
    float lse2[kStages][kStepQueries];
    float delta[kStages][kStepQueries];
    WorkSlot work[kWorkSlots];
    MBarrier work_full[kWorkSlots], work_empty[kWorkSlots];
    MBarrier k_raw[1], k_full[1], v_full[1], kv_empty[1];
    MBarrier raw[kStages], q_full[kStages], q_empty[kStages], dout_full[kStages], dout_empty[kStages];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

enum NamedBarrier : i32 { Gradients = 1, OwnGradients0, OwnGradients1, GradientsRead, Cleaned };

MLA_PREFILL_BACKWARD_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(tile_keys, kKeyTileKeys);
MLA_FACT(tile_queries, kStepQueries);

MLA_DEVICE void init_storage(Storage& s) {
    init_ring(s.work_full, s.work_empty, 1, kMathWarps + kCleanWarps);
    init_ring(s.k_full, s.kv_empty, 1, kMathWarps);
    init_ring(s.q_full, s.q_empty, 1, kMathWarps);
    init_ring(s.dout_full, s.dout_empty, 1, kMathWarps);
    mbarrier_init(s.k_raw[0], 1);
    mbarrier_init(s.v_full[0], 1);
    for (MBarrier& raw : s.raw) mbarrier_init(raw, 1);
    fence_mbarrier_init();
}

// ---- Load role -------------------------------------------------------------------------------------------------
struct Maps {
    RowSource q, k, v, dout;
};

// load_rows() in the order of slots.
template <u32 kPanelBytes>
MLA_DEVICE void load_slots(u8 (&to)[kPanelsQk][kPanelBytes], MBarrier& full, const RowSource& from, i32 first_row,
                           i32 head, i32 last_head, u64 l2_policy) {
#pragma unroll
    for (i32 panel = 0; panel < kPanelsQk; ++panel) {
        const bool last = panel + 1 == kPanelsQk;
        cp_async_bulk_tensor_3d(smem_addr(to[slot_of(panel)]), last ? from.last_map : from.map, full,
                                last ? from.last_column : panel * kSw128Columns, first_row, last ? last_head : head,
                                l2_policy);
    }
}

// Rereads the item's data from the slot, because registers are scarce.
struct Loader {
    const PrefillBackwardParams& p;
    Storage& s;
    const Maps& maps;
    RingCount<kWorkSlots> work;
    RingCount<1> kv;
    RingCount<kStages> queries;

    // Announces the next work item to the math and clean roles; null: there is none.
    MLA_DEVICE const WorkSlot* announce(i32 index) {
        work.wait_empty(s.work_empty);
        WorkSlot& slot = s.work[work.stage()];
        const i32 num_tiles = p.key_schedule->num_tiles;
        const bool there = index < num_tiles * p.h_kv;
        slot.kv_head = -1;
        if (there) {
            i32 heads = p.h_kv;
            opaque(heads);  // values derived from it then need no register across the loop
            const i32 last_items = kLastItemsHere * num_blocks();
            const WorkItem item = work_item(heads, p.kv_heads_at_once, index, num_tiles, last_items);
            const i32 group = p.h_q / heads;
            slot.kv_head = item.head;
            slot.head = item.head * group;
            slot.head_end = slot.head + group;
            slot.kv_parity = kv.full_parity();
            for (u32& keys : slot.nonfinite_keys) keys = 0;
            slot.nonfinite_dout = 0;
            slot.tile = p.key_tiles[item.tile];
            slot.queries = QueryTiles(slot.tile);
        }
        mbarrier_arrive(s.work_full[work.stage()]);
        work.advance();
        return there ? &slot : nullptr;
    }

    MLA_DEVICE void load_keys(const WorkSlot& item) {
        MBarrier& full = kSumsDq ? s.k_raw[0] : s.k_full[0];
        kv.wait_empty(s.kv_empty);
        kv.advance();
        mbarrier_arrive_expect_tx(full, sizeof(s.k));
        load_slots(s.k, full, maps.k, item.tile.first_key, item.kv_head, min(item.kv_head, p.k_rope_heads - 1),
                   kEvictFirst);
        mbarrier_arrive_expect_tx(s.v_full[0], sizeof(s.v));
        load_rows(s.v, s.v_full[0], maps.v, item.tile.first_key, item.kv_head, item.kv_head, kEvictFirst);
    }

    // The n-th tile of queries, of a head.
    MLA_DEVICE void load_queries(const WorkSlot& item, i32 n, i32 head) {
        constexpr u32 kBytesQ = sizeof(s.q[0]) + sizeof(s.lse2[0]) + sizeof(s.delta[0]), kBytesDout = sizeof(s.dout[0]);
        const i32 stage = queries.stage();
        const bool whole = n < item.queries.wholes();
        MBarrier& q_full = whole ? s.q_full[stage] : s.raw[stage];
        queries.wait_empty(s.q_empty);
        const i32 first = item.queries.at(n) * kStepQueries, query = item.tile.first_query + first;
        mbarrier_arrive_expect_tx(q_full, whole ? kBytesQ : kBytesQ + kBytesDout);
        load_slots(s.q[stage], q_full, maps.q, query, head, head, kEvictLast);
        const i64 row = (i64)head * p.num_rows + item.tile.first_row + first;
        cp_async_bulk(smem_addr(s.lse2[stage]), p.lse2 + row, sizeof(s.lse2[0]), q_full);
        cp_async_bulk(smem_addr(s.delta[stage]), p.delta + row, sizeof(s.delta[0]), q_full);
        MBarrier& dout_full = whole ? s.dout_full[stage] : s.raw[stage];
        queries.wait_empty(s.dout_empty);
        if (whole) mbarrier_arrive_expect_tx(dout_full, kBytesDout);
        load_rows(s.dout[stage], dout_full, maps.dout, query, head, head, kEvictLast);
        queries.advance();
    }

    MLA_DEVICE void load(const WorkSlot& item) {
#pragma unroll 1
        for (i32 head = item.head; head < item.head_end; ++head) {
#pragma unroll 1
            for (i32 n = 0; n < item.queries.count(); ++n) {
                load_queries(item, n, head);
                if (n == 0 && head == item.head) load_keys(item);
            }
        }
    }
};

// Called by one thread.
MLA_DEVICE void run_load_role(const PrefillBackwardParams& p, Storage& s, const Maps& maps) {
    Loader loader{p, s, maps, {}, {}, {}};
    i32 index = blockIdx.x;
#pragma unroll 1
    while (const WorkSlot* item = loader.announce(index)) {
        loader.load(*item);
        index = num_blocks() + atomicAdd(&p.key_schedule->next_item, 1);
    }
}

// ---- Clean role ------------------------------------------------------------------------------------------------
// 0 * NaN is not 0: in tiles with a mask, all that is multiplied by P or dS becomes finite. Instead, the scores of such
// a key are NaN, or lse2 of such a query. Where dO is not finite, delta is not, and the math role adds it to dV.
MLA_DEVICE float not_a_number() { return __int_as_float(0x7fffffff); }

// Called by all clean threads, once they have cleaned.
MLA_DEVICE void announce_clean(MBarrier& full, i32 thread) {
    fence_proxy_async();
    bar_sync(Cleaned, kCleanThreads);
    if (thread == 0) mbarrier_arrive(full);
}

MLA_DEVICE void run_clean_role(Storage& s, i32 thread) {
    RingCount<kWorkSlots> work;
    Ring<kStages> raw;
    i32 stage = 0;
#pragma unroll 1
    while (true) {
        work.wait_full(s.work_full);
        WorkSlot& slot = s.work[work.stage()];
        if (slot.kv_head < 0) break;
        const QueryTiles& tiles = slot.queries;
        if (kSumsDq && tiles.count() > 0) {
            mbarrier_wait(s.k_raw[0], slot.kv_parity);
            clean_rows<Element, kCleanThreads, kLoadsAtOnce>(
                s.k, tiles.wholes() < tiles.count() ? 0 : kKeyTileKeys, thread,
                [&](i32 row) { atomicOr(&slot.nonfinite_keys[row / kWarpThreads], 1u << row % kWarpThreads); });
            announce_clean(s.k_full[0], thread);
        }
#pragma unroll 1
        for (i32 head = slot.head; head < slot.head_end; ++head) {
            stage = (stage + tiles.wholes()) % kStages;
#pragma unroll 1
            for (i32 n = tiles.wholes(); n < tiles.count(); ++n) {
                mbarrier_wait(s.raw[stage], raw.full_parity(stage));
                raw.advance(stage);
                clean_rows<Element, kCleanThreads, kLoadsAtOnce>(s.q[stage], 0, thread,
                                                                 [&](i32 row) { s.lse2[stage][row] = not_a_number(); });
                announce_clean(s.q_full[stage], thread);
                clean_rows<Element, kCleanThreads, kLoadsAtOnce>(s.dout[stage], 0, thread,
                                                                 [&](i32) { slot.nonfinite_dout = 1; });
                announce_clean(s.dout_full[stage], thread);
                stage = (stage + 1) % kStages;
            }
        }
        release(s.work_empty[work.stage()], thread);
        work.advance();
    }
}

// ---- Math role -------------------------------------------------------------------------------------------------
struct Math {
    float dk[kSumsK];
    float dv[kSumsV];
    u32 weights[kSw128MmaSteps][4];
    i32 counts = 0;  // of items, in two bits, and of tiles of queries: there is no register for each
    i32 index;       // of the thread

    MLA_DEVICE RingCount<kWorkSlots> work() const { return {(u32)counts % 4}; }
    MLA_DEVICE RingCount<kStages> queries() const { return {(u32)counts / 4}; }
    MLA_DEVICE void next_item() { counts = (counts & ~3) | ((counts + 1) & 3); }
    MLA_DEVICE void next_queries() { counts += 4; }
    MLA_DEVICE i32 warpgroup() const { return index / kWarpgroupThreads; }
    MLA_DEVICE i32 thread() const { return index % kWarpgroupThreads; }
    // The first of the thread's two rows of the tile; the other is eight further on.
    MLA_DEVICE i32 row(i32 r) const { return warpgroup() * kSw128Rows + fragment_row(thread()) + 8 * r; }
};

// A warp-uniform value, moved to a uniform register.
MLA_DEVICE i32 uniform(i32 x) { return (i32)__reduce_or_sync(kFullWarp, (u32)x); }

// The queries, counted from the tile's first, that see the thread's two keys: [from, to).
struct Seers {
    i32 from[kFragmentRows], to[kFragmentRows];

    MLA_DEVICE Seers(const Math& math, const KeyTile& tile, i32 first_query) {
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            from[r] = tile.diagonal + math.row(r) - first_query;
            to[r] = math.row(r) < tile.keys ? tile.queries - first_query : 0;
        }
    }
    MLA_DEVICE bool sees(i32 column, i32 r) const { return column >= from[r] && column < to[r]; }
};

// The operands of a tile's products, except the first product and dK: built together, since each costs a reduction over
// the warp.
struct Operands {
    SmemDesc v, dout, dout_rows;     // dP^T = V dO^T, dV += P^T dO
    SmemDesc ds_columns, k_columns;  // dQ = dS K

    MLA_DEVICE Operands(Storage& s, const Math& math, i32 stage) {
        constexpr u32 kThird = 2 * kKeyPanelBytes, kHalf = kSw128RowBytes / 2;
        const i32 w = math.warpgroup();
        v = uniform(k_major_desc(smem_addr(s.v) + w * kSw128Bytes));
        dout = uniform(k_major_desc(smem_addr(s.dout[stage])));
        dout_rows = uniform(mn_major_desc(smem_addr(s.dout[stage])));
        if (!kSumsDq) return;
        // A panel of the warpgroup's own, and half of the third one if there is one.
        const u32 next = w == 0 ? kThird : kThird - (kKeyPanelBytes - kHalf);
        ds_columns = uniform(mn_major_desc(smem_addr(s.ds[0])));
        k_columns = uniform(make_desc(smem_addr(s.k[w]), next, kSwizzleAtomBytes));
    }
};

// Starts D = A B^T of the warpgroup's rows of A.
template <i32 kColumns>
MLA_DEVICE void start_product(float (&d)[kScores], SmemDesc a, SmemDesc b) {
    pin(d);
    wgmma_fence();
    multiply_abt<kColumns / kMmaK, kKeyPanelBytes, kQueryPanelBytes>(Element{}, d, a, b);
    wgmma_commit_group();
}

MLA_DEVICE void start_scores(Storage& s, const Math& math, float (&scores)[kScores], i32 stage) {
    start_product<kHeadDimQk>(scores, uniform(k_major_desc(smem_addr(s.k) + math.warpgroup() * kSw128Bytes)),
                              uniform(k_major_desc(smem_addr(s.q[stage]))));
}

MLA_DEVICE void start_dv(Math& math, const Operands& of) {
    pin(math.dv);
    wgmma_fence();
    multiply_ab(Element{}, math.dv, math.weights, of.dout_rows, true);
    wgmma_commit_group();
}

// Starts steps of dK += dS^T Q with the operands of `stage`.
template <i32 kFrom, i32 kTo>
MLA_DEVICE void start_dk(Storage& s, Math& math, i32 stage) {
    const SmemDesc ds = uniform(k_major_desc(smem_addr(s.ds[stage % kGradientBuffers][math.warpgroup()])));
    const SmemDesc q = uniform(mn_major_desc(smem_addr(s.q[stage])));
    pin(math.dk);
    wgmma_fence();
    multiply_ab<kTo - kFrom>(Element{}, math.dk, advance(ds, kFrom * kKMajorStepBytes),
                             advance(q, kFrom * kMnMajorStepBytes), true);
}

MLA_DEVICE void start_dq(float (&dq)[kSumsQ], const Operands& of) {
    pin(dq);
    wgmma_fence();
    multiply_atb<kKeyTileKeys / kMmaK>(Element{}, dq, of.ds_columns, of.k_columns);
    wgmma_commit_group();
}

// The warpgroup's part of dS^T is stored.
MLA_DEVICE void sync_warpgroup(const Math& math) {
    if (math.warpgroup() == 0) {
        bar_sync(OwnGradients0, kWarpgroupThreads);
    } else {
        bar_sync(OwnGradients1, kWarpgroupThreads);
    }
}

// Keys of the thread that are not finite score NaN.
MLA_DEVICE void poison_scores(const Math& math, float (&scores)[kScores], const WorkSlot& item) {
    const u32 keys = item.nonfinite_keys[math.row(0) / kWarpThreads] >> math.row(0) % kWarpThreads;
    if (keys == 0) return;
#pragma unroll
    for (i32 i = 0; i < kScores; ++i) {
        if (keys >> 8 * fragment_half(i) & 1) scores[i] = not_a_number();
    }
}

// A number of each of the thread's queries, two of every eight.
struct QueryValues {
    float2 of[kStepQueries / 8];

    MLA_DEVICE QueryValues(const float (&values)[kStepQueries], i32 thread) {
#pragma unroll
        for (i32 i = 0; i < kStepQueries / 8; ++i) of[i] = load(values, i, thread);
    }
    MLA_DEVICE static float2 load(const float (&values)[kStepQueries], i32 i, i32 thread) {
        return *reinterpret_cast<const float2*>(values + 8 * i + fragment_column(thread));
    }
};

// P^T in 16 bits, from S^T. What is hidden becomes 0 whatever it was: there may be NaN in it, and in lse2.
template <bool kMasked>
MLA_DEVICE void make_weights(Math& math, const float (&scores)[kScores], const QueryValues& lse2, const Seers& seers,
                             float scale_log2) {
#pragma unroll
    for (i32 i = 0; i < kScores; i += 4) {
        const i32 column = fragment_column(math.thread(), i);
        const float2 less = lse2.of[i / 4];
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            float low = ex2_approx(fmaf(scores[i + 2 * r], scale_log2, -less.x));
            float high = ex2_approx(fmaf(scores[i + 2 * r + 1], scale_log2, -less.y));
            if (kMasked) {
                low = seers.sees(column, r) ? low : 0.f;
                high = seers.sees(column + 1, r) ? high : 0.f;
            }
            math.weights[i / 8][i % 8 / 2 + r] = cvt_x2(Element{}, low, high);
        }
    }
}

// Never does anything: no two numbers are all ones. But ptxas would move the exponentials past the start of the next
// product, for which there are no registers, unless a branch that needs them lies between.
MLA_DEVICE void keep_weights_here(const Math& math) {
    u32 common = ~0u;
#pragma unroll
    for (i32 i = 0; i < kSw128MmaSteps; ++i) {
#pragma unroll
        for (i32 j = 0; j < 4; ++j) common &= math.weights[i][j];
    }
    if (__any_sync(kFullWarp, common == ~0u)) __trap();
}

// dS^T of 16 queries in 16 bits, from P^T and dP^T.
template <bool kMasked>
MLA_DEVICE void make_gradients(u32 (&to)[4], const Math& math, const float* dp, i32 step, float2 (&delta)[2],
                               const Seers& seers) {
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
        const i32 r = i % 2, column = fragment_column(math.thread(), 8 * step + 2 * i);
        const float2 weights = unpack<Element>(math.weights[step][i]);
        float low = weights.x * (dp[2 * i] - delta[i / 2].x), high = weights.y * (dp[2 * i + 1] - delta[i / 2].y);
        if (kMasked) {
            low = seers.sees(column, r) ? low : 0.f;
            high = seers.sees(column + 1, r) ? high : 0.f;
        }
        to[i] = cvt_x2(Element{}, low, high);
    }
}

MLA_DEVICE void load_delta(const Storage& s, const Math& math, float2 (&delta)[2], i32 step, i32 stage) {
    delta[0] = QueryValues::load(s.delta[stage], 2 * step, math.thread());
    delta[1] = QueryValues::load(s.delta[stage], 2 * step + 1, math.thread());
}

// To shared memory. delta is loaded a step ahead: each store is a barrier to the compiler's own order.
template <bool kMasked>
MLA_DEVICE void store_gradients(Storage& s, const Math& math, const float (&dp)[kScores], float2 (&delta)[2],
                                const Seers& seers, i32 stage) {
    const SmemAddr to = smem_addr(s.ds[stage % kGradientBuffers][math.warpgroup()]);
#pragma unroll
    for (i32 step = 0; step < kSw128MmaSteps; ++step) {
        u32 words[4];
        make_gradients<kMasked>(words, math, dp + 8 * step, step, delta, seers);
        if (step + 1 < kSw128MmaSteps) load_delta(s, math, delta, step + 1, stage);
        stmatrix_x4(to + matrix_offset(math.thread(), step), words);
    }
    fence_proxy_async();
}

// Adds the warp's 16 rows of dQ, 6 KB that lie together, once they are in shared memory.
MLA_DEVICE void add_dq(Storage& s, const Math& math, const float (&dq)[kSumsQ], float* sums) {
    constexpr i32 kBlock = 4 * kWarpThreads, kBlocks = kSumsQ / 4, kPanelBlocks = kSw128Columns / 8;
    float* staging = s.staging[math.index / kWarpThreads];
    const i32 lane = math.thread() % kWarpThreads, w = math.warpgroup();
    float *panel = staging + w * (kBlocks - kPanelBlocks) * kBlock + lane * 4,
          *half = staging + (1 - w) * kPanelBlocks * kBlock + lane * 4;
    if (elect_one()) cp_async_bulk_wait_read();
    __syncwarp();
#pragma unroll
    for (i32 i = 0; i < kBlocks; ++i) {
        float* to = i < kPanelBlocks ? panel + i * kBlock : half + (i - kPanelBlocks) * kBlock;
        *reinterpret_cast<float4*>(to) = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    fence_proxy_async();
    __syncwarp();
    if (sums != nullptr && elect_one()) {
        cp_reduce_async_bulk_add(sums + w * kBlocks * kBlock, smem_addr(staging), sizeof(s.staging[0]));
        cp_async_bulk_commit_group();
    }
}

MLA_DEVICE void finish_dv(Storage& s, Math& math, i32 stage) {
    pin(math.dv);
#pragma unroll
    for (i32 i = 0; i < kSw128MmaSteps; ++i) pin(math.weights[i]);  // in use until now
    release(s.dout_empty[stage], math.thread());
}

MLA_DEVICE void finish_dk(Storage& s, Math& math, i32 stage) {
    pin(math.dk);
    release(s.q_empty[stage], math.thread());
}

// Address of the warp's rows of a query tile in the sums of dQ; null if they are beyond the sequence's end.
MLA_DEVICE float* dq_sums(const PrefillBackwardParams& p, const Math& math, const WorkSlot& item, i32 n, i32 head) {
    const i32 row = item.queries.at(n) * kStepQueries + uniform(math.thread() / kWarpThreads) * kRowGroup;
    if (row >= item.tile.queries) return nullptr;
    return p.dq_sums + ((i64)head * p.num_rows + item.tile.first_row + row) * kHeadDimQk;
}

// The n-th tile of queries of a head. The rest of the previous tile's dK product runs during P, and part of this tile's
// is left to the next one. `first`: there is no previous tile.
template <bool kMasked>
MLA_DEVICE void step(const PrefillBackwardParams& p, Storage& s, Math& math, i32 n, i32 head, bool first) {
    opaque(math.index);  // otherwise the compiler keeps all addresses in registers across the loop
    const WorkSlot& item = s.work[math.work().stage()];
    const i32 stage = math.queries().stage(), before = (stage + kStages - 1) % kStages;
    const Seers seers(math, item.tile, kMasked ? item.queries.at(n) * kStepQueries : 0);
    float products[kScores];
    math.queries().wait_full(s.q_full);
    start_scores(s, math, products, stage);
    if (!first) start_dk<kDkStepsEarly, kSw128MmaSteps>(s, math, before);
    wgmma_fence();  // of the branch, too
    wgmma_commit_group();
    const Operands of(s, math, stage);
    const QueryValues lse2(s.lse2[stage], math.thread());
    wgmma_wait_group<1>();
    pin(products);
    if (kSumsDq) poison_scores(math, products, item);
    make_weights<kMasked>(math, products, lse2, seers, p.scale_log2);
    keep_weights_here(math);
    math.queries().wait_full(s.dout_full);
    start_product<kHeadDimV>(products, of.v, of.dout);
    start_dv(math, of);
    opaque(math.index);  // as above
    wgmma_wait_group<2>();
    if (!first) finish_dk(s, math, before);
    opaque(math.index);  // as above: NVRTC 13.0 spills otherwise
    float2 delta[2];
    load_delta(s, math, delta, 0, stage);
    wgmma_wait_group<1>();
    pin(products);
    if (kSumsDq) bar_sync(GradientsRead, kMathThreads);
    store_gradients<kMasked>(s, math, products, delta, seers, stage);
    wgmma_wait_group<0>();
    finish_dv(s, math, stage);
    if constexpr (!kSumsDq) {
        sync_warpgroup(math);
    } else {
        float dq[kSumsQ];
        bar_sync(Gradients, kMathThreads);
        start_dq(dq, of);
        start_dk<0, kDkStepsEarly>(s, math, stage);
        wgmma_commit_group();
        opaque(math.index);
        float* sums = dq_sums(p, math, item, n, head);
        wgmma_wait_group<1>();
        pin(dq);
        add_dq(s, math, dq, sums);
    }
    math.next_queries();
}

// dK's product that the last step has left.
MLA_DEVICE void last_step(Storage& s, Math& math) {
    const i32 stage = (math.queries().stage() + kStages - 1) % kStages;
    start_dk<kDkStepsEarly, kSw128MmaSteps>(s, math, stage);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    finish_dk(s, math, stage);
}

// Cold: the non-finite elements of dO that the clean role has zeroed, for the keys that see them. Any multiple of an
// infinity is infinite.
MLA_DEVICE void add_nonfinite(const PrefillBackwardParams& p, Math& math, const WorkSlot& item) {
#pragma unroll 1
    for (i32 n = item.queries.wholes() * kStepQueries; n < item.queries.count() * kStepQueries; ++n) {
        const i32 query = item.queries.at(n / kStepQueries) * kStepQueries + n % kStepQueries;
        const Seers seers(math, item.tile, query);
#pragma unroll 1
        for (i32 head = item.head; head < item.head_end; ++head) {
            const u16* from = p.dout + (i64)(item.tile.first_query + query) * p.dout_stride_s_elems +
                              head * p.dout_stride_h_elems + fragment_column(math.thread());
            if (query >= item.tile.queries) break;
#pragma unroll
            for (i32 i = 0; i < kSumsV; ++i) {
                const float x = Element::to_float(from[i / 4 * 8 + i % 2]);
                if (seers.sees(0, fragment_half(i)) && !(fabsf(x) <= kMaxFloat)) math.dv[i] += x;
            }
        }
    }
}

// ---- Results ---------------------------------------------------------------------------------------------------
// The columns of dK that were slot `slot`.
MLA_DEVICE float (&sums_of(Math& math, i32 slot))
    [kSw128Columns / 2] { return reinterpret_cast<float (&)[kSw128Columns / 2]>(math.dk[slot * (kSw128Columns / 2)]); }

// The last columns, where all heads share them: to their sum, or, deterministic, to be summed.
MLA_DEVICE void add_last_columns(float* to, const float (&d)[kSw128Columns / 2], i32 r, i32 thread) {
#pragma unroll
    for (i32 i = 2 * r; i < kSw128Columns / 2; i += 4) {
        float* at = to + fragment_column(thread, i);
        if (!kSumsDq) {
            *reinterpret_cast<float2*>(at) = make_float2(d[i], d[i + 1]);
        } else {
            red_add_v2(at, d[i], d[i + 1], 1);
        }
    }
}

// Row r of the thread, by all lanes of its quad. dK is scaled.
MLA_DEVICE void store_result(const PrefillBackwardParams& p, Math& math, const KeyTile& tile, i32 kv_head, i32 r) {
    const bool stored = math.row(r) < tile.keys;
    const i64 key = tile.first_key + math.row(r);
    store_row(Element{}, p.dv + key * p.dv_stride_s_elems + kv_head * p.dv_stride_h_elems, math.dv, r, 1.f, stored,
              math.thread());
    u16* dk = p.dk + key * p.dk_stride_s_elems + kv_head * p.dk_stride_h_elems;
#pragma unroll
    for (i32 panel = 0; panel < kPanelsQk - 1; ++panel) {
        store_row(Element{}, dk + panel * kSw128Columns, sums_of(math, slot_of(panel)), r, 1.f, stored, math.thread());
    }
    if (p.dk_rope_sums == nullptr) {
        u16* last = p.dk_rope + key * p.dk_rope_stride_s_elems + kv_head * p.dk_rope_stride_h_elems + p.k_rope_column;
        store_row(Element{}, last, sums_of(math, kLastSlot), r, 1.f, stored, math.thread());
    } else if (stored) {
        add_last_columns(p.dk_rope_sums + key * p.dk_rope_sums_stride_s_elems + kv_head * p.dk_rope_sums_stride_h_elems,
                         sums_of(math, kLastSlot), r, math.thread());
    }
}

MLA_DEVICE void sum_tiles(const PrefillBackwardParams& p, Storage& s, Math& math, const WorkSlot& item) {
    mbarrier_wait(s.k_full[0], item.kv_parity);
    mbarrier_wait(s.v_full[0], item.kv_parity);
    const i32 wholes = uniform(item.queries.wholes()), count = uniform(item.queries.count()), start = math.counts;
#pragma unroll 1
    for (i32 head = item.head; head < item.head_end; ++head) {
        i32 n = 0;
#pragma unroll 1
        for (; n < wholes; ++n) step<false>(p, s, math, n, head, math.counts == start);
#pragma unroll 1
        for (; n < count; ++n) step<true>(p, s, math, n, head, math.counts == start);
    }
    last_step(s, math);
    release(s.kv_empty[0], math.thread());
}

MLA_DEVICE void run_math_role(const PrefillBackwardParams& p, Storage& s, i32 index) {
    Math math;
    math.index = index;
#pragma unroll 1
    while (true) {
        math.work().wait_full(s.work_full);
        const WorkSlot& slot = s.work[math.work().stage()];
        if (slot.kv_head < 0) break;
#pragma unroll
        for (i32 i = 0; i < kSumsK; ++i) math.dk[i] = 0.f;
#pragma unroll
        for (i32 i = 0; i < kSumsV; ++i) math.dv[i] = 0.f;
        if (slot.queries.count() > 0) sum_tiles(p, s, math, slot);
        if (slot.nonfinite_dout) add_nonfinite(p, math, slot);
#pragma unroll
        for (i32 i = 0; i < kSumsK; ++i) math.dk[i] *= p.scale;
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) store_result(p, math, slot.tile, slot.kv_head, r);
        release(s.work_empty[math.work().stage()], math.thread());
        math.next_item();
    }
    if (kSumsDq && elect_one()) cp_async_bulk_wait_group();
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_dense_sm90_backward_keys(const __grid_constant__ PrefillBackwardParams p,
                                 const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap q_rope_map,
                                 const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap k_rope_map,
                                 const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    start_block([&] { init_storage(s); }, q_map, q_rope_map, k_map, k_rope_map, v_map, dout_map);
    const i32 warp = uniform_warp();
    if (warp < kMathWarps) {
        setmaxnreg_inc<kRegsMath>();
        run_math_role(p, s, threadIdx.x);
    } else {
        setmaxnreg_dec<kRegsLoad>();
        if (warp > kLoadWarp) {
            run_clean_role(s, threadIdx.x - kThreads + kCleanThreads);
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
