// Dense attention on Hopper: keys and values per head, over sequences that lie one after another.
//
//   S = Q K^T * scale            (128 x d_qk) (d_qk x kTileKeys) per tile of keys
//   P = exp2(S log2(e) - m)      m: the row's reference, near its running maximum
//   l = sum of P,  O = P V       P stays in registers
//   out = O / l,   lse = ln 2 (m + log2 l),   merged with an earlier state
//
// Grid: one block per SM, which takes work items, tiles of 128 queries of a head, in the order of dense/tiles.cuh. Each
// math warpgroup has 64 of the queries and all keys, from the last tile to the first, so that the tiles that need a
// mask come first. The scores of a tile overlap with the previous tile's product with its values:
//
//   math_0  | Q K2 | softmax 2 | Q K1, P2 V2 | softmax 1 | Q K0, P1 V1 | softmax 0 | P0 V0 | store, next Q ...
//   math_1         | Q K2 | softmax 2  | Q K1, P2 V2 | softmax 1   | Q K0, P1 V1 | softmax 0 | P0 V0 | ...
//   load    K2 V2 Q  K1                  K0 V1                V0      next item: K V Q ...
//   clean   V2: values that not every query sees become finite
//
// Only an item's first tiles look for maxima. After them the reference moves if weights become large. If weights
// overflow, the item runs again and looks for maxima in all tiles.
//
// The warpgroups take turns issuing their matmuls, so that one computes exponentials while the other uses the tensor
// cores. Operands need no copies: the last 64 columns of queries and keys have tensor maps of their own, and rows may
// have the stride of a projection that makes keys and values at once.
//
// Source: FlashAttention-3's schedule (2024). Here: operands in pieces, tiles that end with their sequence, the merge.
#include "attention/online_softmax.cuh"
#include "common/limits.cuh"
#include "dense/generic_rows.cuh"
#include "dense/mask.cuh"
#include "dense/one_sequence.cuh"
#include "dense/result.cuh"
#include "dense/sm90_huge_rows.cuh"
#include "dense/sm90_rows.cuh"
#include "ptx/load.cuh"
#include "tile/elements.cuh"
#include "tile/fragment.cuh"
#include "tile/product.cuh"
#include "tile/prologue.cuh"
#include "tile/ring.cuh"
#include "tile/sw128.cuh"
#include "tile/warp.cuh"

// A mask says which keys a query sees, if a variant says so.
#ifndef MLA_HAS_MASK
#define MLA_HAS_MASK 0
#endif

namespace mla::dense {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK, kHeadDimV = MLA_HEAD_DIM_V;
constexpr i32 kTileKeys = MLA_TILE_KEYS;  // the largest size that fits twice
constexpr bool kHasMask = MLA_HAS_MASK;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps    regs   does
// math_0   0..3     224    queries 0 .. 63 of the tile
// math_1   4..7     224    queries 64 .. 127
// load     8        56     takes work items; all copies
// clean    9..11    56     values that not every query sees become finite; rows with huge scores
constexpr i32 kMathWarpgroups = 2;
constexpr i32 kMathWarps = kMathWarpgroups * kWarpgroupWarps;
constexpr i32 kCleanWarps = kWarpgroupWarps - 1, kCleanThreads = kCleanWarps * kWarpThreads;
constexpr i32 kThreads = (kMathWarpgroups + 1) * kWarpgroupThreads;
constexpr i32 kLoadWarp = kMathWarps;
constexpr i32 kRegsMath = 224, kRegsLoad = 56;
static_assert(kMathWarpgroups * kRegsMath + kRegsLoad <= 3 * regs_at_entry(kThreads), "what the block has at entry");

constexpr i32 kStages = 2;
constexpr i32 kWorkSlots = 2;
constexpr i32 kPanelsQk = kHeadDimQk / kSw128Columns, kPanelsV = kHeadDimV / kSw128Columns;
constexpr u32 kQueryPanelBytes = kTileQueries * kSw128RowBytes, kKeyPanelBytes = kTileKeys * kSw128RowBytes;
constexpr i32 kScores = kTileKeys / 2, kOut = kHeadDimV / 2;  // of a thread
constexpr i32 kKeySteps = kTileKeys / kMmaK;
// With enough registers, math threads hold the queries' last panel: its products then read only keys from shared
// memory.
constexpr bool kHoldsPanel = kHeadDimV <= 128 && !kHasMask;
constexpr i32 kSharedPanels = kPanelsQk - kHoldsPanel;
static_assert(kTileQueries == kMathWarpgroups * kSw128Rows, "64 queries per warpgroup");
static_assert(kTileKeys >= kSw128Rows, "a warpgroup leaves out one tile at most");
static_assert(kKeyPanelBytes % kSwizzleAtomBytes == 0 && kTileKeys % kMmaK == 0, "whole swizzle atoms and steps");

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier         arrives (count)            carries   waits         first phase
// work_full[s]    load (1)                   -         math, clean   blocked
// work_done[s]    math warps (8)             -         clean         blocked
// work_empty[s]   clean warps (3)            -         load          free
// q_full[w]       load (1)                   Q         math_w        blocked
// q_empty[w]      math_w warps (4)           -         load          free
// k_full[s]       load (1)                   K         math          blocked
// k_empty[s]      math warps (8)             -         load          free
// v_raw[s]        load (1)                   V         clean         blocked
// v_full[s]       load (1)                   V         math          blocked
//          or clean (1), after v_raw         -
// v_empty[s]      math warps (8)             -         load          free
// exponentiated   math warps (a million: its phase never ends, so nobody need wait)
// mask_full       clean warps (3)            -         math          blocked
// mask_empty      math warps (8)             -         clean         free
struct WorkSlot {
    QueryTile tile;
    i32 head;  // negative: no more work
    i32 nonfinite;
};

// For each slot: ...
struct Repeats {
    alignas(u64) u8 wanted[kWorkSlots][kMathWarps];  // ... 1 if a warp requests its item again, ...
    bool again[kWorkSlots];                          // ... and true if it comes again

    // All warps' flags of a slot, as one word.
    MLA_DEVICE u64& wanted_by_any(i32 slot) { return *reinterpret_cast<u64*>(wanted[slot]); }
};

struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kPanelsQk][kQueryPanelBytes];
    u8 k[kStages][kPanelsQk][kKeyPanelBytes];
    u8 v[kStages][kPanelsV][kKeyPanelBytes];
    WorkSlot work[kWorkSlots];
    MBarrier work_full[kWorkSlots], work_done[kWorkSlots], work_empty[kWorkSlots];
    MBarrier q_full[kMathWarpgroups], q_empty[kMathWarpgroups];
    MBarrier k_full[kStages], k_empty[kStages];
    MBarrier v_full[kStages], v_empty[kStages], v_raw[kStages];
    MBarrier exponentiated;
    MBarrier mask_full[1], mask_empty[1];
    HugeRows huge[kWorkSlots];
    Repeats repeats;
    OneSequence one;  // the load role's, which lacks registers for it, if there is no schedule
    uint4 mask[kHasMask ? kTileQueries : 1];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

enum NamedBarrier : i32 { Turn0 = 1, Turn1, Cleaned };

MLA_PREFILL_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(tile_keys, kTileKeys);

MLA_DEVICE void init_storage(Storage& s) {
    init_ring(s.work_full, s.work_empty, 1, kCleanWarps);
    for (MBarrier& done : s.work_done) mbarrier_init(done, kMathWarps);
    init_ring(s.q_full, s.q_empty, 1, kWarpgroupWarps);
    init_ring(s.k_full, s.k_empty, 1, kMathWarps);
    init_ring(s.v_full, s.v_empty, 1, kMathWarps);
    for (MBarrier& raw : s.v_raw) mbarrier_init(raw, 1);
    mbarrier_init(s.exponentiated, kMaxArrivals);
    if (kHasMask) init_ring(s.mask_full, s.mask_empty, kCleanWarps, kMathWarps);
    for (i32 slot = 0; slot < kWorkSlots; ++slot) s.repeats.wanted_by_any(slot) = 0;
    fence_mbarrier_init();
}

// An item whose sums became NaN or infinite runs again, with maxima of all tiles and all values cleaned. Its first pass
// takes values that a mask hides as they are, since few are not finite.
MLA_DEVICE bool comes_again(const Storage& s, i32 slot) { return s.repeats.again[slot]; }

// ---- Load role -------------------------------------------------------------------------------------------------
struct Maps {
    RowSource q, k, v;
};

// Work item from the tile order, without a schedule.
MLA_DEVICE i32 find_item(const PrefillParams& p, i32 index, const OneSequence& one, QueryTile& tile, QueryTile& slot) {
    if (index >= one.all_tiles * p.h_q) return -1;
    const WorkItem item = work_item(p, index, one.all_tiles);
    tile = one.tile(p, item.tile);
    slot = tile;
    return item.head;
}

struct Loader {
    const PrefillParams& p;
    Storage& s;
    const Maps& maps;
    RingPosition<kWorkSlots> work;
    RingPosition<kMathWarpgroups> q;
    RingPosition<kStages> k, v;

    MLA_DEVICE bool wants_repeat(i32 slot) { return s.repeats.wanted_by_any(slot) != 0 && !s.repeats.again[slot]; }

    // Returns true if the next slot has an item that must come again; or, with no other work left, the slot before it,
    // whose item then moves.
    MLA_DEVICE bool repeats(bool no_work) {
        const i32 slot = work.stage, other = work.before();
        static_assert(kWorkSlots == 2, "there is one other slot");
        work.wait_empty(s.work_empty);
        if (wants_repeat(slot)) return true;
        if (!no_work) return false;
        mbarrier_wait(s.work_done[other], work.ring.empty_parity(other));
        if (!wants_repeat(other)) return false;
        s.work[slot] = s.work[other];
        s.repeats.wanted_by_any(slot) = s.repeats.wanted_by_any(other);
        s.repeats.wanted_by_any(other) = 0;
        return true;
    }

    // The next work item goes to the math and clean roles; its head, or -1.
    MLA_DEVICE i32 announce(i32 index, i32 num_tiles, QueryTile& tile, bool again) {
        work.wait_empty(s.work_empty);
        WorkSlot& slot = s.work[work.stage];
        if (again) tile = slot.tile;
        i32 head = slot.head;
        if (!again && p.schedule != nullptr) {
            head = find_item(p, index, num_tiles, tile, slot.tile);
        } else if (!again) {
            head = find_item(p, index, s.one, tile, slot.tile);
        }
        slot.head = head;
        slot.nonfinite = 0;
        s.huge[work.stage].clear();
        s.repeats.again[work.stage] = again;
        if (!again) s.repeats.wanted_by_any(work.stage) = 0;
        mbarrier_arrive(s.work_full[work.stage]);
        work.advance();
        return head;
    }

    // Loads each warpgroup's queries separately: the first ones arrive while the second warpgroup works on the last
    // item.
    MLA_DEVICE void load_queries(const QueryTile& tile, i32 head) {
#pragma unroll
        for (i32 half = 0; half < kMathWarpgroups; ++half) {
            q.wait_empty(s.q_empty);
            mbarrier_arrive_expect_tx(s.q_full[half], sizeof(s.q) / kMathWarpgroups);
            load_rows(s.q, s.q_full[half], maps.q, tile.first_query + half * kSw128Rows, head, head, kEvictFirst,
                      half * kSw128Bytes);
            q.advance();
        }
    }

    MLA_DEVICE void load_keys(i32 first_key, i32 kv_head) {
        MBarrier& full = s.k_full[k.stage];
        k.wait_empty(s.k_empty);
        mbarrier_arrive_expect_tx(full, sizeof(s.k[0]));
        load_rows(s.k[k.stage], full, maps.k, first_key, kv_head, min(kv_head, p.k_rope_heads - 1), kEvictLast);
        k.advance();
    }

    MLA_DEVICE void load_values(i32 first_key, i32 kv_head, bool whole) {
        MBarrier& full = whole ? s.v_full[v.stage] : s.v_raw[v.stage];
        v.wait_empty(s.v_empty);
        mbarrier_arrive_expect_tx(full, sizeof(s.v[0]));
        load_rows(s.v[v.stage], full, maps.v, first_key, kv_head, kv_head, kEvictLast);
        v.advance();
    }

    MLA_DEVICE void load(const QueryTile& tile, i32 head) {
        const KeyTiles<kTileKeys> keys(tile, comes_again(s, work.before()));
        const i32 kv_head = head / (p.h_q / p.h_kv);
        if (keys.count == 0) return;
        const i32 last = keys.count - 1;
        // Keys arrive a tile ahead of values, except for the last tile's, so that there is time to inspect its values.
#pragma unroll 1
        for (i32 k = last, v = last; v >= 0; --k) {
            if (k >= 0) load_keys(tile.first_key + k * kTileKeys, kv_head);
            if (k == last - 1) continue;
            load_values(tile.first_key + v * kTileKeys, kv_head, v < keys.whole);
            if (v == last) load_queries(tile, head);
            --v;
        }
    }
};

// Called by one thread.
MLA_DEVICE void run_load_role(const PrefillParams& p, Storage& s, const Maps& maps) {
    Loader loader{p, s, maps, {}, {}, {}, {}};
    const bool scheduled = p.schedule != nullptr;
    if (!scheduled) s.one.find(p);
    const i32 num_tiles = scheduled ? p.schedule->num_tiles : s.one.all_tiles;
    i32 index = blockIdx.x, turn = 0;
#pragma unroll 1
    while (true) {
        QueryTile tile;
        const bool again = loader.repeats(index >= num_tiles * p.h_q);
        const i32 head = loader.announce(index, num_tiles, tile, again);
        if (head < 0) break;
        loader.load(s.work[loader.work.before()].tile, head);
        if (again) continue;
        index = scheduled ? (i32)gridDim.x + atomicAdd(&p.schedule->next_item, 1) : item_of_turn(++turn);
    }
}

// ---- Rows with huge scores -------------------------------------------------------------------------------------
// Interface for dense/sm90_huge_rows.cuh: what it reads of a work item, and where its results go.
struct Operands {
    static constexpr i32 kColumns = kHeadDimV;
    const PrefillParams& p;
    i32 head;

    MLA_DEVICE i32 kv_head() const { return head / (p.h_q / p.h_kv); }

    // The mask's bits of 32 keys from `key` on.
    MLA_DEVICE u32 visible(i64 query, i32 key, bool present) const {
        if (!kHasMask) return ~0u;
        return ld_global_4(p.mask + query * p.mask_stride_bytes + key / 8, present && key / 8 < p.mask_bytes);
    }

    MLA_DEVICE float score(i32 query, i32 key) const {
        const Row<Element, kHeadDimQk> q = query_row<Element, kHeadDimQk>(p, query, head);
        const Row<Element, kHeadDimQk> k = key_row<Element, kHeadDimQk>(p, key, kv_head());
        float sum = plain_dot<Element>(q.first, k.first, q.kFirstColumns);
        sum += plain_dot<Element>(q.last, k.last, kRopeColumns);
        return __fmul_rn(sum, p.scale_log2);
    }

    template <class Sums>
    MLA_DEVICE void add_values(Sums& sums, float weight, i32 key, i32 lane) const {
        const u16* values = p.v + (i64)key * p.v_stride_s_elems + kv_head() * p.v_stride_h_elems + 2 * lane;
#pragma unroll
        for (i32 j = 0; j < Sums::kPairs; ++j) {
            const float2 x = unpack_pair(values + j * 2 * kWarpThreads);
            sums.out[j] = make_float2(fmaf(weight, x.x, sums.out[j].x), fmaf(weight, x.y, sums.out[j].y));
        }
    }

    template <class Sums>
    MLA_DEVICE void store(const Sums& sums, i64 query, i32 lane) const {
        const RowResult result = row_result(sums.max, sums.sum, earlier_lse(p, query, head));
        const i64 from = query * p.state_out_stride_s_elems + head * p.state_out_stride_h_elems + 2 * lane;
        const i64 to = query * p.out_stride_s_elems + head * p.out_stride_h_elems + 2 * lane;
#pragma unroll
        for (i32 j = 0; j < Sums::kPairs; ++j) {
            float2 x = make_float2(0.f, 0.f);
            if (result.own != 0.f) x = make_float2(result.own * sums.out[j].x, result.own * sums.out[j].y);
            if (result.earlier != 0.f) {
                const float2 state = state_pair<Element>(p, from + j * 2 * kWarpThreads);
                x = make_float2(fmaf(result.earlier, state.x, x.x), fmaf(result.earlier, state.y, x.y));
            }
            store_pair(to + j * 2 * kWarpThreads, x);
        }
        __syncwarp();  // the earlier log-sum-exp may be where the new one goes
        if (lane == 0) store_lse(p, query, head, result.lse);
    }

   private:
    MLA_DEVICE static float2 unpack_pair(const u16* from) {
        return unpack<Element>(*reinterpret_cast<const u32*>(from));
    }
    MLA_DEVICE void store_pair(i64 at, float2 x) const {
        if (p.out_is_fp32) {
            *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = x;
        } else {
            *reinterpret_cast<u32*>(static_cast<u16*>(p.out) + at) = cvt_x2(Element{}, x.x, x.y);
        }
    }
};

// ---- Clean role ------------------------------------------------------------------------------------------------
// A tile of the mask, read while the math role still has the one before.
MLA_DEVICE void store_mask(const PrefillParams& p, Storage& s, RingPosition<1>& mask, const QueryTile& tile, i32 keys,
                           i32 thread) {
    constexpr i32 kRows = ceil_div(kTileQueries, kCleanThreads);
    uint4 words[kRows];
#pragma unroll
    for (i32 i = 0; i < kRows; ++i) {
        const i32 row = thread + i * kCleanThreads;
        words[i] = mask_words<kTileKeys>(p, tile.first_query + row, keys, row < tile.queries);
    }
    mask.wait_empty(s.mask_empty);
#pragma unroll
    for (i32 i = 0; i < kRows; ++i) {
        const i32 row = thread + i * kCleanThreads;
        if (row < kTileQueries) s.mask[row] = words[i];
    }
    release(s.mask_full[0], thread);
    mask.advance();
}

// 0 * NaN is not 0: of keys that not every query sees, those past the end of the sequence among them, finite elements
// stay, the others become 0, and the math role adds them to the queries that do see them.
struct Cleaner {
    const PrefillParams& p;
    Storage& s;
    i32 thread;
    RingPosition<kWorkSlots> work;
    RingPosition<1> mask;
    Ring<kStages> raw;
    i32 stage = 0;

    MLA_DEVICE void clean(WorkSlot& slot, i32 tile, i32 trusted) {
        if (kHasMask) store_mask(p, s, mask, slot.tile, tile, thread);
        mbarrier_wait(s.v_raw[stage], raw.full_parity(stage));
        raw.advance(stage);
        bool found = false;
        clean_rows<Element, kCleanThreads>(s.v[stage], max(0, trusted - tile * kTileKeys), thread,
                                           [&](i32 row) { found = true; });
        if (found) slot.nonfinite = 1;
        fence_proxy_async();
        bar_sync(Cleaned, kCleanThreads);
        if (thread == 0) mbarrier_arrive(s.v_full[stage]);
        stage = (stage + 1) % kStages;
    }

    // Recomputes rows of the last item with huge scores.
    MLA_DEVICE void redo_huge_rows() {
        const i32 before = work.before();
        mbarrier_wait(s.work_done[before], work.ring.empty_parity(before));
        const WorkSlot& slot = s.work[before];
        dense::redo_huge_rows<kCleanWarps>(Operands{p, slot.head}, slot.tile, s.huge[before], thread / kWarpThreads,
                                           thread % kWarpThreads);
        release(s.work_empty[before], thread);
    }

    MLA_DEVICE void clean_values(WorkSlot& slot) {
        const bool again = comes_again(s, work.stage);
        const KeyTiles<kTileKeys> keys(slot.tile, again);
        const i32 trusted = again ? 0 : slot.tile.seen_by_all();
#pragma unroll 1
        for (i32 i = keys.count - 1; i >= keys.whole; --i) clean(slot, i, trusted);
    }

    // Passes on tiles whose values need no cleaning.
    MLA_DEVICE void pass_whole_tiles(const WorkSlot& slot) {
        const KeyTiles<kTileKeys> keys(slot.tile, comes_again(s, work.stage));
#pragma unroll 1
        for (i32 i = keys.whole - 1; kHasMask && i >= 0; --i) store_mask(p, s, mask, slot.tile, i, thread);
        stage = (stage + keys.whole) % kStages;
    }
};

MLA_DEVICE void run_clean_role(const PrefillParams& p, Storage& s, i32 thread) {
    Cleaner cleaner{p, s, thread, {}, {}, {}};
    bool first = true;
#pragma unroll 1
    while (true) {
        cleaner.work.wait_full(s.work_full);
        WorkSlot& slot = s.work[cleaner.work.stage];
        const bool ends = slot.head < 0;
        if (!ends) cleaner.clean_values(slot);
        if (!first) cleaner.redo_huge_rows();  // later than the values that the math role waits for
        if (ends) break;
        cleaner.pass_whole_tiles(slot);
        cleaner.work.advance();
        first = false;
    }
}

// ---- Math role -------------------------------------------------------------------------------------------------
struct Math {
    float scores[kScores];
    float out[kOut];
    u32 weights[kKeySteps][4];          // P
    u32 last_panel[kSw128MmaSteps][4];  // of the queries, if held
    attention::RowState rows;
    RingPosition<kWorkSlots> work;
    Ring<1> q;
    RingPosition<1> mask;
    RingPosition<kStages> k, v;
    i32 warpgroup, thread;

    // The first of the thread's two rows of the tile; the other is eight further on.
    MLA_DEVICE i32 row(i32 r) const { return warpgroup * kSw128Rows + fragment_row(thread) + 8 * r; }
};

// Starts S = Q K^T.
MLA_DEVICE void start_scores(Storage& s, Math& math) {
    SmemDesc a = k_major_desc(smem_addr(s.q) + math.warpgroup * kSw128Bytes);
    SmemDesc b = k_major_desc(smem_addr(s.k[math.k.stage]));
    opaque(a.bits), opaque(b.bits);
    pin(math.scores);
    wgmma_fence();
    multiply_abt<kSharedPanels * kSw128MmaSteps, kQueryPanelBytes, kKeyPanelBytes>(Element{}, math.scores, a, b);
    if constexpr (kHoldsPanel) {
        multiply_abt(Element{}, math.scores, math.last_panel, advance(b, kSharedPanels * kKeyPanelBytes), true);
    }
    wgmma_commit_group();
}

// Starts O += P V.
MLA_DEVICE void start_values(Storage& s, Math& math) {
    SmemDesc b = make_desc(smem_addr(s.v[math.v.stage]), kKeyPanelBytes, kSwizzleAtomBytes);
    opaque(b.bits);
    pin(math.out);
    wgmma_fence();
    multiply_ab<kSw128MmaSteps * kMnMajorStepBytes>(Element{}, math.out, math.weights, b, true);
    wgmma_commit_group();
}

MLA_DEVICE void finish_scores(Storage& s, Math& math, bool last) {
    pin(math.scores);
    release(s.k_empty[math.k.stage], math.thread);
    if (last) release(s.q_empty[math.warpgroup], math.thread);
    math.k.advance();
}

// The exponentials come before the wait for the product with values. The compiler would move that wait up past all of
// them, but not past a branch to an arrival, for which nobody waits.
MLA_DEVICE void hold_wait(Storage& s, Math& math, bool last) {
    if (last) release(s.exponentiated, math.thread);
}

MLA_DEVICE void finish_values(Storage& s, Math& math) {
    wgmma_wait_group<0>();
    pin(math.out);
#pragma unroll
    for (i32 step = 0; step < kKeySteps; ++step) pin(math.weights[step]);  // in use until now
    release(s.v_empty[math.v.stage], math.thread);
    math.v.advance();
}

MLA_DEVICE void mask_scores(Math& math, const QueryTile& tile, i32 first_key) {
    const i32 seen[kFragmentRows] = {tile.seen(math.row(0)) - first_key, tile.seen(math.row(1)) - first_key};
#pragma unroll
    for (i32 i = 0; i < kScores; ++i) {
        if (fragment_column(math.thread, i) >= seen[fragment_half(i)]) math.scores[i] = negative_infinity();
    }
}

MLA_DEVICE void read_mask(Storage& s, Math& math, uint4 (&bits)[kFragmentRows]) {
    math.mask.wait_full(s.mask_full);
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) bits[r] = s.mask[math.row(r)];
    release(s.mask_empty[0], math.thread);
    math.mask.advance();
}

// A row's maximum and sum are taken in several chains, since one would take longer than the exponentials.
constexpr i32 kChains = 4;
MLA_DEVICE constexpr i32 chain_of(i32 i) { return i / 4 % 2 * 2 + i % 2; }

// The scores' maxima, in base 2 after `scale_log2`; equal in the four lanes of a quad.
MLA_DEVICE void tile_max(float (&to)[kFragmentRows], const float (&scores)[kScores], float scale_log2) {
    float chains[kFragmentRows][kChains];
#pragma unroll
    for (i32 i = 0; i < kScores; ++i) {
        float& chain = chains[fragment_half(i)][chain_of(i)];
        chain = i < kFragmentRows * kChains ? scores[i] : fmaxf(chain, scores[i]);
    }
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        to[r] = quad_max(fmaxf(fmaxf(chains[r][0], chains[r][1]), fmaxf(chains[r][2], chains[r][3]))) * scale_log2;
    }
}

// Turns scores into weights relative to the references; `of_tile` are the thread's sums of them.
MLA_DEVICE void weigh(Math& math, float (&of_tile)[kFragmentRows], float scale_log2) {
    float sums[kFragmentRows][kChains] = {};
#pragma unroll
    for (i32 i = 0; i < kScores; ++i) {
        const i32 r = fragment_half(i);
        math.scores[i] = ex2_approx(fmaf(math.scores[i], scale_log2, -math.rows.max[r]));
        sums[r][chain_of(i)] += math.scores[i];
    }
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) of_tile[r] = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
}

// Moves the references towards the tile's maxima first, and counts the weights in the rows' sums.
MLA_DEVICE attention::RowScale weigh_below_maxima(Math& math, float scale_log2) {
    float tile_maxima[kFragmentRows], maxima[kFragmentRows], of_tile[kFragmentRows];
    tile_max(tile_maxima, math.scores, scale_log2);
    attention::lazy_max(maxima, math.rows, tile_maxima);
    const attention::RowScale scale = math.rows.move_max(maxima);
    weigh(math, of_tile, scale_log2);
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) math.rows.sum[r] += of_tile[r];
    return scale;
}

// Limit of a thread's sum in a tile without maxima. A reference moves where a sum exceeds it, so weights are as small
// as with a lazy maximum.
constexpr float kLargestSum = 256.f;
static_assert(kLargestSum == 1 << (i32)attention::kLazyMaxLog2, "the limit of a lazy maximum");

MLA_DEVICE bool any_large(const float (&of_tile)[kFragmentRows]) {
    return __any_sync(kFullWarp, fmaxf(of_tile[0], of_tile[1]) > kLargestSum);
}

// Cold: moves the references of rows with large sums to the tile's maxima. A row with a weight whose inverse would be
// subnormal gets an infinite sum instead.
constexpr float kMostLog2 = 126.f;
MLA_DEVICE void lower_weights(Math& math, float (&of_tile)[kFragmentRows]) {
    float largest[kFragmentRows];
    tile_max(largest, math.scores, 1.f);
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const bool is_large = quad_max(of_tile[r]) > kLargestSum;
        const float log2 = is_large ? lg2_approx(largest[r]) : 0.f, by = ex2_approx(-log2);
        math.rows.max[r] += log2, of_tile[r] *= by;
        math.rows.sum[r] = log2 < kMostLog2 ? math.rows.sum[r] * by : -negative_infinity();
#pragma unroll
        for (i32 i = 2 * r; i < kScores; i += 4) math.scores[i] *= by, math.scores[i + 1] *= by;
#pragma unroll
        for (i32 i = 2 * r; i < kOut; i += 4) math.out[i] *= by, math.out[i + 1] *= by;
    }
}

MLA_DEVICE void pack_weights(Math& math) {
#pragma unroll
    for (i32 i = 0; i < kScores; i += 2) {
        math.weights[i / 8][i % 8 / 2] = cvt_x2(Element{}, math.scores[i], math.scores[i + 1]);
    }
}

// The last tile of keys.
MLA_DEVICE void first_step(const PrefillParams& p, Storage& s, Math& math, const QueryTile& tile, i32 keys) {
    math.k.wait_full(s.k_full);
    take_turn<Turn0>(math.warpgroup);
    start_scores(s, math);
    pass_turn<Turn0>(math.warpgroup);
    uint4 seen[kFragmentRows];
    if (kHasMask) read_mask(s, math, seen);
    wgmma_wait_group<0>();
    finish_scores(s, math, keys == 0);
    mask_scores(math, tile, keys * kTileKeys);
    for (i32 r = 0; kHasMask && r < kFragmentRows; ++r) hide_scores(math.scores, r, seen[r], math.thread);
    weigh_below_maxima(math, p.scale_log2);
    hold_wait(s, math, keys == 0);
    pack_weights(math);
}

// Computes the scores of a tile of keys, and overlaps the values of the previous one. Without kFindsMaxima, all rows
// see all keys of the tile and have a reference.
template <bool kFindsMaxima>
MLA_DEVICE void step(const PrefillParams& p, Storage& s, Math& math, const QueryTile& tile, i32 keys) {
    math.k.wait_full(s.k_full);
    take_turn<Turn0>(math.warpgroup);
    start_scores(s, math);
    math.v.wait_full(s.v_full);
    start_values(s, math);
    pass_turn<Turn0>(math.warpgroup);
    uint4 seen[kFragmentRows];
    if (kHasMask) read_mask(s, math, seen);
    wgmma_wait_group<1>();
    finish_scores(s, math, keys == 0);
    if (kFindsMaxima) mask_scores(math, tile, keys * kTileKeys);
    for (i32 r = 0; kHasMask && r < kFragmentRows; ++r) hide_scores(math.scores, r, seen[r], math.thread);
    if constexpr (kFindsMaxima || kHasMask) {
        const attention::RowScale scale = weigh_below_maxima(math, p.scale_log2);
        hold_wait(s, math, keys == 0);
        finish_values(s, math);
        attention::rescale(math.out, scale);
    } else {
        float of_tile[kFragmentRows];
        weigh(math, of_tile, p.scale_log2);
        hold_wait(s, math, keys == 0);
        finish_values(s, math);
        if (any_large(of_tile)) lower_weights(math, of_tile);
        math.rows.sum[0] += of_tile[0], math.rows.sum[1] += of_tile[1];
    }
    pack_weights(math);
}

// Skips a tile that only the other warpgroup sees.
MLA_DEVICE void skip_keys(Storage& s, Math& math) {
    math.k.wait_full(s.k_full);
    take_turn<Turn0>(math.warpgroup);
    pass_turn<Turn0>(math.warpgroup);
    release(s.k_empty[math.k.stage], math.thread);
    math.k.advance();
    uint4 seen[kFragmentRows];
    if (kHasMask) read_mask(s, math, seen);
}
MLA_DEVICE void skip_values(Storage& s, Math& math) {
    math.v.wait_full(s.v_full);
    release(s.v_empty[math.v.stage], math.thread);
    math.v.advance();
}

// Without a row, or rows that see a key.
MLA_DEVICE void stand_by(Storage& s, Math& math, i32 tiles) {
    release(s.q_empty[math.warpgroup], math.thread);
#pragma unroll 1
    for (i32 i = 0; i < tiles; ++i) skip_keys(s, math), skip_values(s, math);
}

MLA_DEVICE void attend(const PrefillParams& p, Storage& s, Math& math, const QueryTile& tile,
                       const KeyTiles<kTileKeys>& keys) {
    mbarrier_wait(s.q_full[math.warpgroup], math.q.full_parity(0));
    math.q.advance(0);
    const i32 seen = seen_by_rows(tile, math.warpgroup * kSw128Rows, kSw128Rows);
    if (seen == 0) return stand_by(s, math, keys.count);
    if constexpr (kHoldsPanel) {
        load_sw128(math.last_panel, s.q[kSharedPanels] + math.warpgroup * kSw128Bytes, math.thread);
    }
    const bool skips = seen <= (keys.count - 1) * kTileKeys;  // one, as there are no more rows than keys in a tile
    i32 i = keys.count - 1 - skips;
    if (skips) skip_keys(s, math);
    first_step(p, s, math, tile, i--);
    if (skips) skip_values(s, math);
    // The first whole tile is the first one that every row is sure to see.
    const i32 with_maxima = max(0, keys.whole - (keys.whole < keys.count));
#pragma unroll 1
    for (; i >= with_maxima; --i) step<true>(p, s, math, tile, i);
#pragma unroll 1
    for (; i >= 0; --i) step<false>(p, s, math, tile, i);
    math.v.wait_full(s.v_full);
    start_values(s, math);
    finish_values(s, math);
}

// ---- Results ---------------------------------------------------------------------------------------------------
// Cold: the non-finite values that the clean role has zeroed, for the rows that see them. Any multiple of an infinity
// is infinite.
MLA_DEVICE void add_nonfinite(const PrefillParams& p, Storage& s, Math& math, const QueryTile& tile, i32 kv_head) {
    const i32 trusted = comes_again(s, math.work.stage) ? 0 : tile.seen_by_all();
#pragma unroll 1
    for (i32 key = trusted / kTileKeys * kTileKeys; key < tile.seen_by_any(); ++key) {
        if (key < trusted) continue;
        const u16* values = p.v + (i64)(tile.first_key + key) * p.v_stride_s_elems + kv_head * p.v_stride_h_elems;
#pragma unroll
        for (i32 i = 0; i < kOut; ++i) {
            if (key >= tile.seen(math.row(fragment_half(i)))) continue;
            if (kHasMask && !mask_bit(p, min(tile.first_query + math.row(fragment_half(i)), p.s_q - 1), key)) continue;
            const float x = Element::to_float(values[fragment_column(math.thread, i)]);
            if (!(fabsf(x) <= kMaxFloat)) math.out[i] += x;
        }
    }
}

// Returns true if the warp stores no result now: on the first pass if a row's sum of weights is not finite, or with a
// mask its output. The warp then asks for the item again, and stores on the second pass.
MLA_DEVICE bool stores_nothing(Storage& s, const Math& math, const QueryTile& tile) {
    u8& wanted = s.repeats.wanted[math.work.stage][math.warpgroup * kWarpgroupWarps + math.thread / kWarpThreads];
    if (__any_sync(kFullWarp, s.repeats.again[math.work.stage])) return !__any_sync(kFullWarp, wanted);
    bool finite = true;
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) finite &= math.row(r) >= tile.queries || math.rows.sum[r] <= kMaxFloat;
#pragma unroll
    for (i32 i = 0; kHasMask && i < kOut; ++i) {
        finite &= math.row(fragment_half(i)) >= tile.queries || fabsf(math.out[i]) <= kMaxFloat;
    }
    if (__all_sync(kFullWarp, finite)) return false;
    wanted = 1;
    return true;
}

// Row r of the thread, by all lanes of its quad.
template <i32 kRow>
MLA_DEVICE void store_result(const PrefillParams& p, Storage& s, Math& math, const QueryTile& tile, i32 head) {
    i32 row = math.row(kRow);
    if (kHeadDimV <= 128) opaque(row);  // otherwise the loops over tiles would use other registers and instructions
    const float sum = quad_sum(math.rows.sum[kRow]);
    const bool is_huge = row < tile.queries && has_huge_scores(math.rows.max[kRow], sum, tile, row);
    const bool stored = row < tile.queries && !is_huge;
    if (is_huge) s.huge[math.work.stage].note(row);
    const i64 query = tile.first_query + row;
    const RowResult result =
        row_result(math.rows.max[kRow], sum, stored ? earlier_lse(p, query, head) : negative_infinity());
    const i64 from = query * p.state_out_stride_s_elems + head * p.state_out_stride_h_elems;
    const i64 to = query * p.out_stride_s_elems + head * p.out_stride_h_elems;
    const bool merges = stored && result.earlier != 0.f;
#pragma unroll
    for (i32 i = 2 * kRow; i < kOut; i += 4) {
        float2 x = make_float2(0.f, 0.f);
        if (merges) x = state_pair<Element>(p, from + fragment_column(math.thread, i));
#pragma unroll
        for (i32 j = 0; j < 2; ++j) {
            const float own = result.own == 0.f ? 0.f : result.own * math.out[i + j];
            math.out[i + j] = merges ? fmaf(result.earlier, j == 0 ? x.x : x.y, own) : own;
        }
    }
    if (!p.out_is_fp32) {
        store_row(Element{}, static_cast<u16*>(p.out) + to, math.out, kRow, 1.f, stored, math.thread);
    } else if (stored) {
#pragma unroll
        for (i32 i = 2 * kRow; i < kOut; i += 4) {
            float* at = static_cast<float*>(p.out) + to + fragment_column(math.thread, i);
            *reinterpret_cast<float2*>(at) = make_float2(math.out[i], math.out[i + 1]);
        }
    }
    __syncwarp();  // the earlier log-sum-exp may be where the new one goes
    if (stored && math.thread % 4 == 0) store_lse(p, query, head, result.lse);
}

MLA_DEVICE void run_math_role(const PrefillParams& p, Storage& s, i32 warpgroup, i32 thread) {
    Math math;
    math.warpgroup = warpgroup, math.thread = thread;
    if (warpgroup == 1) pass_turn<Turn0>(math.warpgroup);
#pragma unroll 1
    while (true) {
        math.work.wait_full(s.work_full);
        const WorkSlot& slot = s.work[math.work.stage];
        if (slot.head < 0) break;
        const QueryTile copy = slot.tile;
        const QueryTile& tile = kHasMask ? slot.tile : copy;  // the mask needs the registers of a copy
        const KeyTiles<kTileKeys> keys(tile, comes_again(s, math.work.stage));
        math.rows.reset(kFirstMax);
#pragma unroll
        for (i32 i = 0; i < kOut; ++i) math.out[i] = 0.f;
        if (keys.count > 0) attend(p, s, math, tile, keys);
        const i32 head = slot.head;
        if (!stores_nothing(s, math, tile)) {
            if (slot.nonfinite) add_nonfinite(p, s, math, tile, head / (p.h_q / p.h_kv));
            store_result<0>(p, s, math, tile, head);
            store_result<1>(p, s, math, tile, head);
        }
        release(s.work_done[math.work.stage], thread);
        math.work.advance();
    }
    if (warpgroup == 0) take_turn<Turn0>(math.warpgroup);  // the turn that the other one has passed on
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_dense_sm90(const __grid_constant__ PrefillParams p, const __grid_constant__ TensorMap q_map,
                   const __grid_constant__ TensorMap q_rope_map, const __grid_constant__ TensorMap k_map,
                   const __grid_constant__ TensorMap k_rope_map, const __grid_constant__ TensorMap v_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    start_block([&] { init_storage(s); }, q_map, q_rope_map, k_map, k_rope_map, v_map);
    const i32 warp = uniform_warp(), thread = threadIdx.x % kWarpgroupThreads;
    if (warp < kMathWarps) {
        setmaxnreg_inc<kRegsMath>();
        run_math_role(p, s, warp / kWarpgroupWarps, thread);
    } else {
        setmaxnreg_dec<kRegsLoad>();
        if (warp > kLoadWarp) {
            run_clean_role(p, s, thread - kWarpThreads);
        } else if (elect_one()) {
            const Maps maps{{q_map, q_rope_map, p.q_rope_column},
                            {k_map, k_rope_map, p.k_rope_column},
                            {v_map, v_map, kHeadDimV - kSw128Columns}};
            run_load_role(p, s, maps);
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::dense
