// Dense attention on Hopper: keys and values per head, over sequences that lie one after another.
//
//   S = Q K^T * scale            (128 x d_qk) (d_qk x kTileKeys) per tile of keys
//   P = exp2(S log2(e) - m)      m: running row maximum
//   l = sum of P,  O = P V       P stays in registers
//   out = O / l,   lse = ln 2 (m + log2 l),   merged with an earlier state
//
// Grid: one block per SM, which takes work items, tiles of 128 queries of a head, in the order of dense/params.cuh.
// Each math warpgroup has 64 of the queries and all keys, from the last tile to the first, so that the tiles that need
// a mask come first. The scores of a tile are computed beside the product of the tile before with its values:
//
//   math_0  | Q K2 | softmax 2 | Q K1, P2 V2 | softmax 1 | Q K0, P1 V1 | softmax 0 | P0 V0 | store, next Q ...
//   math_1         | Q K2 | softmax 2  | Q K1, P2 V2 | softmax 1   | Q K0, P1 V1 | softmax 0 | P0 V0 | ...
//   load    Q K2     K1 V2               K0 V1                V0      next item: Q K V ...
//   clean   V2: what not every query sees becomes finite
//
// The warpgroups take turns with issuing their products, so that one has its exponentials while the other has the
// tensor cores. Operands come as they lie: the last 64 columns of queries and keys have tensor maps of their own, and
// rows may be apart as in the output of a projection that makes keys and values at once.
//
// Source: FlashAttention-3's schedule (2024). Here: operands in pieces, tiles that end with their sequence, the merge.
#include "attention/online_softmax.cuh"
#include "common/limits.cuh"
#include "dense/result.cuh"
#include "ptx/copy.cuh"
#include "ptx/load.cuh"
#include "tile/fragment.cuh"
#include "tile/nonfinite.cuh"
#include "tile/product.cuh"
#include "tile/prologue.cuh"
#include "tile/ring.cuh"
#include "tile/sw128.cuh"
#include "tile/warp.cuh"

namespace mla::dense {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK, kHeadDimV = MLA_HEAD_DIM_V;
constexpr i32 kTileKeys = MLA_TILE_KEYS;  // as many as fit twice

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps    regs   does
// math_0   0..3     232    queries 0 .. 63 of the tile
// math_1   4..7     232    queries 64 .. 127
// load     8        40     takes work items; all copies
// clean    9..11    40     values that not every query sees become finite
constexpr i32 kMathWarpgroups = 2;
constexpr i32 kMathWarps = kMathWarpgroups * kWarpgroupWarps, kMathThreads = kMathWarps * kWarpThreads;
constexpr i32 kCleanWarps = kWarpgroupWarps - 1, kCleanThreads = kCleanWarps * kWarpThreads;
constexpr i32 kThreads = (kMathWarpgroups + 1) * kWarpgroupThreads;
constexpr i32 kLoadWarp = kMathWarps;
constexpr i32 kRegsMath = 232, kRegsLoad = 40;
static_assert(kMathWarpgroups * kRegsMath + kRegsLoad <= 3 * regs_at_entry(kThreads), "what the block has at entry");

constexpr i32 kStages = 2;
constexpr i32 kWorkSlots = 2;
constexpr i32 kPanelsQk = kHeadDimQk / kSw128Columns, kPanelsV = kHeadDimV / kSw128Columns;
constexpr u32 kQueryPanelBytes = kTileQueries * kSw128RowBytes, kKeyPanelBytes = kTileKeys * kSw128RowBytes;
constexpr i32 kScores = kTileKeys / 2, kOut = kHeadDimV / 2;  // of a thread
constexpr i32 kKeySteps = kTileKeys / kMmaK;
static_assert(kRopeColumns == kSw128Columns, "the last columns are a panel");
static_assert(kTileQueries == kMathWarpgroups * kSw128Rows, "64 queries per warpgroup");
static_assert(kKeyPanelBytes % kSwizzleAtomBytes == 0 && kTileKeys % kMmaK == 0, "whole swizzle atoms and steps");

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier         arrives (count)            carries   waits         first phase
// work_full[s]    load (1)                   -         math, clean   blocked
// work_empty[s]   math, clean warps (11)     -         load          free
// q_full          load (1)                   Q         math          blocked
// q_empty         math warps (8)             -         load          free
// k_full[s]       load (1)                   K         math          blocked
// k_empty[s]      math warps (8)             -         load          free
// v_raw[s]        load (1)                   V         clean         blocked
// v_full[s]       load (1)                   V         math          blocked
//          or clean (1), after v_raw         -
// v_empty[s]      math warps (8)             -         load          free
struct WorkSlot {
    QueryTile tile;
    i32 head;  // negative: no more work
    i32 nonfinite;
};

struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kPanelsQk][kQueryPanelBytes];
    u8 k[kStages][kPanelsQk][kKeyPanelBytes];
    u8 v[kStages][kPanelsV][kKeyPanelBytes];
    WorkSlot work[kWorkSlots];
    MBarrier work_full[kWorkSlots], work_empty[kWorkSlots];
    MBarrier q_full[1], q_empty[1];
    MBarrier k_full[kStages], k_empty[kStages];
    MBarrier v_full[kStages], v_empty[kStages], v_raw[kStages];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

enum NamedBarrier : i32 { Turn0 = 1, Turn1, Cleaned };

MLA_PREFILL_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(tile_keys, kTileKeys);

MLA_DEVICE void init_storage(Storage& s) {
    init_ring(s.work_full, s.work_empty, 1, kMathWarps + kCleanWarps);
    init_ring(s.q_full, s.q_empty, 1, kMathWarps);
    init_ring(s.k_full, s.k_empty, 1, kMathWarps);
    init_ring(s.v_full, s.v_empty, 1, kMathWarps);
    for (MBarrier& raw : s.v_raw) mbarrier_init(raw, 1);
    fence_mbarrier_init();
}

// The tiles of keys of a work item, from the last to the first.
struct KeyTiles {
    i32 count;
    i32 whole;  // of these, the first ones: all queries see all of their keys

    MLA_DEVICE explicit KeyTiles(const QueryTile& tile)
        : count(ceil_div(tile.seen_by_any(), kTileKeys)), whole(min(count, tile.seen_by_all() / kTileKeys)) {}
};

// ---- Load role -------------------------------------------------------------------------------------------------
struct Maps {
    const TensorMap &q, &q_rope, &k, &k_rope, &v;
};

struct Loader {
    const PrefillParams& p;
    Storage& s;
    const Maps& maps;
    RingPosition<kWorkSlots> work;
    RingPosition<1> q;
    RingPosition<kStages> k, v;

    // The next work item goes to the math and clean roles; its head, or -1.
    MLA_DEVICE i32 announce(i32 index, i32 num_tiles, QueryTile& tile) {
        work.wait_empty(s.work_empty);
        WorkSlot& slot = s.work[work.stage];
        i32 head = -1;
        if (index < num_tiles * p.h_q) {
            const WorkItem item = work_item(p, index, num_tiles);
            tile = p.tiles[item.tile];
            head = item.head;
            slot.tile = tile;
        }
        slot.head = head;
        slot.nonfinite = 0;
        mbarrier_arrive(s.work_full[work.stage]);
        work.advance();
        return head;
    }

    MLA_DEVICE void load_queries(const QueryTile& tile, i32 head) {
        q.wait_empty(s.q_empty);
        mbarrier_arrive_expect_tx(s.q_full[0], sizeof(s.q));
#pragma unroll
        for (i32 panel = 0; panel < kPanelsQk; ++panel) {
            const bool last = panel + 1 == kPanelsQk;
            cp_async_bulk_tensor_3d(smem_addr(s.q[panel]), last ? maps.q_rope : maps.q, s.q_full[0],
                                    last ? p.q_rope_column : panel * kSw128Columns, tile.first_query, head,
                                    kEvictFirst);
        }
        q.advance();
    }

    MLA_DEVICE void load_keys(i32 first_key, i32 kv_head) {
        MBarrier& full = s.k_full[k.stage];
        k.wait_empty(s.k_empty);
        mbarrier_arrive_expect_tx(full, sizeof(s.k[0]));
#pragma unroll
        for (i32 panel = 0; panel < kPanelsQk; ++panel) {
            const bool last = panel + 1 == kPanelsQk;
            cp_async_bulk_tensor_3d(smem_addr(s.k[k.stage][panel]), last ? maps.k_rope : maps.k, full,
                                    last ? p.k_rope_column : panel * kSw128Columns, first_key,
                                    last ? min(kv_head, p.k_rope_heads - 1) : kv_head, kEvictLast);
        }
        k.advance();
    }

    MLA_DEVICE void load_values(i32 first_key, i32 kv_head, bool whole) {
        MBarrier& full = whole ? s.v_full[v.stage] : s.v_raw[v.stage];
        v.wait_empty(s.v_empty);
        mbarrier_arrive_expect_tx(full, sizeof(s.v[0]));
#pragma unroll
        for (i32 panel = 0; panel < kPanelsV; ++panel) {
            cp_async_bulk_tensor_3d(smem_addr(s.v[v.stage][panel]), maps.v, full, panel * kSw128Columns, first_key,
                                    kv_head, kEvictLast);
        }
        v.advance();
    }

    MLA_DEVICE void load(const QueryTile& tile, i32 head) {
        const KeyTiles keys(tile);
        const i32 kv_head = head / (p.h_q / p.h_kv);
        if (keys.count == 0) return;
        load_queries(tile, head);
        load_keys(tile.first_key + (keys.count - 1) * kTileKeys, kv_head);
#pragma unroll 1
        for (i32 i = keys.count - 1; i >= 0; --i) {
            if (i > 0) load_keys(tile.first_key + (i - 1) * kTileKeys, kv_head);
            load_values(tile.first_key + i * kTileKeys, kv_head, i < keys.whole);
        }
    }
};

// By one thread.
MLA_DEVICE void run_load_role(const PrefillParams& p, Storage& s, const Maps& maps) {
    Loader loader{p, s, maps, {}, {}, {}, {}};
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
// 0 * NaN is not 0: of keys that not every query sees, those past the end of the sequence among them, finite elements
// stay, the others become 0, and the math role adds them to the queries that do see them. True if there was one.
MLA_DEVICE bool clean_values(u8 (&values)[kPanelsV][kKeyPanelBytes], i32 first, i32 thread) {
    bool found = false;
#pragma unroll 1
    for (i32 i = thread; i < (kTileKeys - first) * kSw128Chunks; i += kCleanThreads) {
        const u32 at = sw128_offset(first + i / kSw128Chunks, i % kSw128Chunks);
#pragma unroll 2
        for (i32 panel = 0; panel < kPanelsV; ++panel) {
            uint4& chunk = *reinterpret_cast<uint4*>(values[panel] + at);
            uint4 clean = chunk;
            if (!zero_nonfinite<Element>(clean)) continue;
            chunk = clean;
            found = true;
        }
    }
    return found;
}

MLA_DEVICE void run_clean_role(Storage& s, i32 thread) {
    RingPosition<kWorkSlots> work;
    Ring<kStages> raw;
    i32 stage = 0;
#pragma unroll 1
    while (true) {
        work.wait_full(s.work_full);
        WorkSlot& slot = s.work[work.stage];
        if (slot.head < 0) break;
        const KeyTiles keys(slot.tile);
        const i32 seen_by_all = slot.tile.seen_by_all();
#pragma unroll 1
        for (i32 i = keys.count - 1; i >= keys.whole; --i) {
            mbarrier_wait(s.v_raw[stage], raw.full_parity(stage));
            raw.advance(stage);
            if (clean_values(s.v[stage], max(0, seen_by_all - i * kTileKeys), thread)) slot.nonfinite = 1;
            fence_proxy_async();
            bar_sync(Cleaned, kCleanThreads);
            if (thread == 0) mbarrier_arrive(s.v_full[stage]);
            stage = (stage + 1) % kStages;
        }
        stage = (stage + keys.whole) % kStages;
        release(s.work_empty[work.stage], thread);
        work.advance();
    }
}

// ---- Math role -------------------------------------------------------------------------------------------------
struct Math {
    float scores[kScores];
    float out[kOut];
    u32 weights[kKeySteps][4];  // P
    attention::RowState rows;
    RingPosition<kWorkSlots> work;
    RingPosition<1> q;
    RingPosition<kStages> k, v;
    i32 warpgroup, thread;

    // The first of the thread's two rows of the tile; the other is eight further on.
    MLA_DEVICE i32 row(i32 r) const { return warpgroup * kSw128Rows + fragment_row(thread) + 8 * r; }
};

// The warpgroups issue their products in turn, the first one first.
MLA_DEVICE void take_turn(const Math& math) { bar_sync(math.warpgroup == 0 ? Turn0 : Turn1, kMathThreads); }
MLA_DEVICE void pass_turn(const Math& math) { bar_arrive(math.warpgroup == 0 ? Turn1 : Turn0, kMathThreads); }

// Starts S = Q K^T.
MLA_DEVICE void start_scores(Storage& s, Math& math) {
    SmemDesc a = k_major_desc(smem_addr(s.q) + math.warpgroup * kSw128Bytes);
    SmemDesc b = k_major_desc(smem_addr(s.k[math.k.stage]));
    opaque(a.bits), opaque(b.bits);
    pin(math.scores);
    wgmma_fence();
    multiply_abt<kHeadDimQk / kMmaK, kQueryPanelBytes, kKeyPanelBytes>(Element{}, math.scores, a, b);
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

MLA_DEVICE void finish_scores(Storage& s, Math& math) {
    pin(math.scores);
    release(s.k_empty[math.k.stage], math.thread);
    math.k.advance();
}

// After the exponentials: the branch keeps them before the wait for the product with values, which the compiler would
// begin first otherwise.
MLA_DEVICE void release_queries(Storage& s, Math& math, bool last) {
    if (last) release(s.q_empty[0], math.thread);
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

// The scores become weights relative to the running maximum, and count in the rows' sums.
MLA_DEVICE attention::RowScale exponentiate(Math& math, float scale_log2) {
    const float scales[kFragmentRows] = {scale_log2, scale_log2};
    float tile_maxima[kFragmentRows], maxima[kFragmentRows];
    attention::tile_max(tile_maxima, math.scores, scales);
    attention::lazy_max(maxima, math.rows, tile_maxima);
    const attention::RowScale scale = math.rows.move_max(maxima);
#pragma unroll
    for (i32 i = 0; i < kScores; ++i) {
        const i32 r = fragment_half(i);
        math.scores[i] = ex2_approx(fmaf(math.scores[i], scale_log2, -math.rows.max[r]));
        math.rows.sum[r] += math.scores[i];
    }
    return scale;
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
    take_turn(math);
    start_scores(s, math);
    pass_turn(math);
    wgmma_wait_group<0>();
    finish_scores(s, math);
    mask_scores(math, tile, keys * kTileKeys);
    exponentiate(math, p.scale_log2);
    release_queries(s, math, keys == 0);
    pack_weights(math);
}

// The scores of a tile of keys, beside the values of the tile before it.
template <bool kMasked>
MLA_DEVICE void step(const PrefillParams& p, Storage& s, Math& math, const QueryTile& tile, i32 keys) {
    math.k.wait_full(s.k_full);
    math.v.wait_full(s.v_full);
    take_turn(math);
    start_scores(s, math);
    start_values(s, math);
    pass_turn(math);
    wgmma_wait_group<1>();
    finish_scores(s, math);
    if (kMasked) mask_scores(math, tile, keys * kTileKeys);
    const attention::RowScale scale = exponentiate(math, p.scale_log2);
    release_queries(s, math, keys == 0);
    finish_values(s, math);
    pack_weights(math);
    attention::rescale(math.out, scale);
}

// ---- Results ---------------------------------------------------------------------------------------------------
// Cold: what the clean role has taken away, for the rows that see it. Any multiple of an infinity is infinite.
MLA_DEVICE void add_nonfinite(const PrefillParams& p, Math& math, const QueryTile& tile, i32 kv_head) {
#pragma unroll 1
    for (i32 key = tile.seen_by_all() / kTileKeys * kTileKeys; key < tile.seen_by_any(); ++key) {
        if (key < tile.seen_by_all()) continue;
        const u16* values = p.v + (i64)(tile.first_key + key) * p.v_stride_s_elems + kv_head * p.v_stride_h_elems;
#pragma unroll
        for (i32 i = 0; i < kOut; ++i) {
            if (key >= tile.seen(math.row(fragment_half(i)))) continue;
            const float x = Element::to_float(values[fragment_column(math.thread, i)]);
            if (!(fabsf(x) <= kMaxFloat)) math.out[i] += x;
        }
    }
}

// Row r of the thread, by all lanes of its quad.
template <i32 kRow>
MLA_DEVICE void store_result(const PrefillParams& p, Math& math, const QueryTile& tile, i32 head) {
    const bool stored = math.row(kRow) < tile.queries;
    const i64 query = tile.first_query + math.row(kRow);
    const RowResult result = row_result(math.rows.max[kRow], quad_sum(math.rows.sum[kRow]),
                                        stored ? earlier_lse(p, query, head) : negative_infinity());
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
    if (warpgroup == 1) pass_turn(math);
#pragma unroll 1
    while (true) {
        math.work.wait_full(s.work_full);
        const WorkSlot& slot = s.work[math.work.stage];
        if (slot.head < 0) break;
        const QueryTile tile = slot.tile;
        const KeyTiles keys(tile);
        math.rows.reset();
#pragma unroll
        for (i32 i = 0; i < kOut; ++i) math.out[i] = 0.f;
        if (keys.count > 0) {
            math.q.wait_full(s.q_full);
            math.q.advance();
            i32 i = keys.count - 1;
            first_step(p, s, math, tile, i--);
#pragma unroll 1
            for (; i >= keys.whole; --i) step<true>(p, s, math, tile, i);
#pragma unroll 1
            for (; i >= 0; --i) step<false>(p, s, math, tile, i);
            math.v.wait_full(s.v_full);
            start_values(s, math);
            finish_values(s, math);
        }
        const i32 head = slot.head;
        if (slot.nonfinite) add_nonfinite(p, math, tile, head / (p.h_q / p.h_kv));
        store_result<0>(p, math, tile, head);
        store_result<1>(p, math, tile, head);
        release(s.work_empty[math.work.stage], thread);
        math.work.advance();
    }
    if (warpgroup == 0) take_turn(math);  // that the other one has passed on
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
            run_clean_role(s, thread - kWarpThreads);
        } else if (elect_one()) {
            run_load_role(p, s, Maps{q_map, q_rope_map, k_map, k_rope_map, v_map});
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::dense
