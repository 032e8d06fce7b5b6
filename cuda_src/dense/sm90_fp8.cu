// Dense attention on Hopper with both products in FP8, over queries, keys and values in e4m3.
//
//   S = Q K^T * scale            (128 x 192) (192 x 128) per tile of keys
//   P = 2^(8 + S log2(e) - m)    m: the tile's maximum of the row; in e4m3, in registers
//   O += 2^(m - r) (P V)         r: the row's reference; P V in two sums of 64 keys
//   l += 2^(m - r) (P 1)         by the same products
//   out = O / l,   lse = ln 2 (r - 8 + log2 of the sum of P before it is rounded)
//
// Grid, work items, tiles and turns are as in dense/sm90.cu. The tensor cores cut sums of e4m3 products off after 13
// fraction bits, so each of their sums is short, and float32 adds the sums: two halves of a tile's keys times two
// halves of the columns are four short products. Each reuses the registers of the one before, during the exponentials
// of the next tile:
//
//   math    | Q K1 | softmax 1 ..........................| Q K0 | ...
//                  | P2 V2 .. | P2 V2 .. | P2 V2 .. | P2 V2 |     halves of keys, halves of columns
//   turn    V1: transposed (dense/fp8_values.cuh), and NaN that not every query sees becomes 0
//
// Source: FlashAttention-3's schedule (2024) and its idea that the order of keys is free; DeepGEMM's idea that sums
// leave the tensor cores before they lose bits. Here the tensor cores also sum the weights, and each tile's weights
// have their own maximum.
#include "attention/online_softmax.cuh"
#include "common/limits.cuh"
#include "dense/fp8_params.cuh"
#include "dense/fp8_values.cuh"
#include "dense/result.cuh"
#include "dense/sm90_huge_rows.cuh"
#include "dense/sm90_rows.cuh"
#include "ptx/wgmma_n72.cuh"
#include "tile/fragment.cuh"
#include "tile/prologue.cuh"
#include "tile/ring.cuh"
#include "tile/sw64.cuh"
#include "tile/warp.cuh"

namespace mla::dense {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Code = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK, kHeadDimV = MLA_HEAD_DIM_V;
constexpr i32 kTileKeys = MLA_TILE_KEYS;
static_assert(kHeadDimQk == kSw128ByteColumns + kSw64ByteColumns, "a panel of 128 columns, and one of 64");
static_assert(kHeadDimV == kValueColumns && kTileKeys == kValueKeys, "what is transposed at once");

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps    regs   does
// math_0   0..3     216    queries 0 .. 63 of the tile
// math_1   4..7     216    queries 64 .. 127
// load     8        72     takes work items; all copies
// turn     9..11    72     transposes values; rows with huge scores
constexpr i32 kMathWarpgroups = 2;
constexpr i32 kMathWarps = kMathWarpgroups * kWarpgroupWarps;
constexpr i32 kTurnWarps = kWarpgroupWarps - 1, kTurnThreads = kTurnWarps * kWarpThreads;
constexpr i32 kThreads = (kMathWarpgroups + 1) * kWarpgroupThreads;
constexpr i32 kLoadWarp = kMathWarps;
constexpr i32 kRegsMath = 216, kRegsLoad = 72;
static_assert(kMathWarpgroups * kRegsMath + kRegsLoad <= 3 * regs_at_entry(kThreads), "what the block has at entry");

constexpr i32 kStages = 2;
constexpr i32 kWorkSlots = 2;
constexpr u32 kQueryBytes = kTileQueries * kSw128RowBytes, kQueryRopeBytes = kTileQueries * kSw64RowBytes;
constexpr u32 kKeyBytes = kTileKeys * kSw128RowBytes, kKeyRopeBytes = kTileKeys * kSw64RowBytes;
constexpr i32 kScores = kTileKeys / 2;  // of a thread
constexpr i32 kColumnHalves = 2;        // of values
constexpr i32 kOut = kSw128Rows / 2;    // of a thread and half
constexpr i32 kSums = kOut + 4;         // the second half's product has the sum of weights, too
constexpr i32 kKeySteps = kTileKeys / kMmaKBytes, kStepScores = kScores / kKeySteps;
constexpr i32 kHalfSteps = kKeySteps / 2;  // summed by the tensor cores
constexpr u32 kHalfBytes = kHalfSteps * kMmaKBytes;

constexpr float kWeightLog2 = 8.f;      // P at a tile's largest score: e4m3 has no more than 448
constexpr float kReferenceLog2 = 64.f;  // a reference follows maxima that are so much larger, which float32 bears

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier         arrives (count)            carries   waits         first phase
// work_full[s]    load (1)                   -         math, turn    blocked
// work_done[s]    math warps (8)             -         turn          blocked
// work_empty[s]   turn warps (3)             -         load          free
// q_full[w]       load (1)                   Q         math_w        blocked
// q_empty[w]      math_w warps (4)           -         load          free
// k_full[s]       load (1)                   K         math          blocked
// k_empty[s]      math warps (8)             -         load          free
// v_full[s]       load (1)                   V         turn          blocked
// v_empty[s]      turn warps (3)             -         load          free
// turned_full[s]  turn warps (3)             -         math          blocked
// turned_empty[s] math warps (8)             -         turn          free
// exponentiated   math warps (a million: its phase never ends, so nobody need wait)
struct WorkSlot {
    QueryTile tile;
    i32 head;  // negative: no more work
    i32 nonfinite;
    ItemScales scales;
};

struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kQueryBytes];
    alignas(kSwizzleAtomBytes) u8 k[kStages][kKeyBytes];
    alignas(kSwizzleAtomBytes) u8 v[kStages][kValueBytes];
    alignas(kSwizzleAtomBytes) u8 turned[kStages][kTransposedBytes];
    u8 q_rope[kQueryRopeBytes];
    u8 k_rope[kStages][kKeyRopeBytes];
    WorkSlot work[kWorkSlots];
    MBarrier work_full[kWorkSlots], work_done[kWorkSlots], work_empty[kWorkSlots];
    MBarrier q_full[kMathWarpgroups], q_empty[kMathWarpgroups];
    MBarrier k_full[kStages], k_empty[kStages];
    MBarrier v_full[kStages], v_empty[kStages];
    MBarrier turned_full[kStages], turned_empty[kStages];
    MBarrier exponentiated;
    HugeRows huge[kWorkSlots];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

enum NamedBarrier : i32 { Turn0 = 1, Turn1 };

MLA_PREFILL_FP8_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(tile_keys, kTileKeys);

MLA_DEVICE void init_storage(Storage& s) {
    init_ring(s.work_full, s.work_empty, 1, kTurnWarps);
    for (MBarrier& done : s.work_done) mbarrier_init(done, kMathWarps);
    init_ring(s.q_full, s.q_empty, 1, kWarpgroupWarps);
    init_ring(s.k_full, s.k_empty, 1, kMathWarps);
    init_ring(s.v_full, s.v_empty, 1, kTurnWarps);
    init_ring(s.turned_full, s.turned_empty, kTurnWarps, kMathWarps);
    mbarrier_init(s.exponentiated, kMaxArrivals);
    fence_mbarrier_init();
}

// ---- Load role -------------------------------------------------------------------------------------------------
struct Maps {
    const TensorMap &q, &q_rope, &k, &k_rope, &v;
};

struct Loader {
    const PrefillFp8Params& p;
    Storage& s;
    const Maps& maps;
    RingPosition<kWorkSlots> work;
    RingPosition<kMathWarpgroups> q;
    RingPosition<kStages> k, v;

    MLA_DEVICE i32 group() const { return p.h_q / p.h_kv; }

    // The next work item goes to the other roles; its head, or -1.
    MLA_DEVICE i32 announce(i32 index, i32 num_tiles, QueryTile& tile) {
        work.wait_empty(s.work_empty);
        WorkSlot& slot = s.work[work.stage];
        const i32 head = find_item(p, index, num_tiles, tile, slot.tile);
        slot.head = head;
        slot.nonfinite = 0;
        s.huge[work.stage].clear();
        if (head >= 0) slot.scales = item_scales(p, tile.first_query, head / group());
        mbarrier_arrive(s.work_full[work.stage]);
        work.advance();
        return head;
    }

    // Each warpgroup's on their own.
    MLA_DEVICE void load_queries(const QueryTile& tile, i32 head) {
#pragma unroll
        for (i32 half = 0; half < kMathWarpgroups; ++half) {
            MBarrier& full = s.q_full[half];
            const i32 first = tile.first_query + half * kSw128Rows;
            q.wait_empty(s.q_empty);
            mbarrier_arrive_expect_tx(full, kSw128Bytes + kSw64Bytes);
            cp_async_bulk_tensor_3d(smem_addr(s.q) + half * kSw128Bytes, maps.q, full, 0, first, head, kEvictFirst);
            cp_async_bulk_tensor_3d(smem_addr(s.q_rope) + half * kSw64Bytes, maps.q_rope, full, p.q_rope_column, first,
                                    head, kEvictFirst);
            q.advance();
        }
    }

    MLA_DEVICE void load_keys(i32 first_key, i32 kv_head) {
        MBarrier& full = s.k_full[k.stage];
        k.wait_empty(s.k_empty);
        mbarrier_arrive_expect_tx(full, kKeyBytes + kKeyRopeBytes);
        cp_async_bulk_tensor_3d(smem_addr(s.k[k.stage]), maps.k, full, 0, first_key, kv_head, kEvictLast);
        cp_async_bulk_tensor_3d(smem_addr(s.k_rope[k.stage]), maps.k_rope, full, p.k_rope_column, first_key,
                                min(kv_head, p.k_rope_heads - 1), kEvictLast);
        k.advance();
    }

    MLA_DEVICE void load_values(i32 first_key, i32 kv_head) {
        MBarrier& full = s.v_full[v.stage];
        v.wait_empty(s.v_empty);
        mbarrier_arrive_expect_tx(full, kValueBytes);
        cp_async_bulk_tensor_3d(smem_addr(s.v[v.stage]), maps.v, full, 0, first_key, kv_head, kEvictLast);
        v.advance();
    }

    MLA_DEVICE void load(const QueryTile& tile, i32 head) {
        const KeyTiles<kTileKeys> keys(tile);
        const i32 kv_head = head / group();
        if (keys.count == 0) return;
        const i32 last = keys.count - 1;
#pragma unroll 1
        for (i32 i = last; i >= 0; --i) {
            load_keys(tile.first_key + i * kTileKeys, kv_head);
            load_values(tile.first_key + i * kTileKeys, kv_head);
            if (i == last) load_queries(tile, head);  // once the warpgroups are done with the last item's queries
        }
    }
};

// Called by one thread.
MLA_DEVICE void run_load_role(const PrefillFp8Params& p, Storage& s, const Maps& maps) {
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

// ---- Rows with huge scores -------------------------------------------------------------------------------------
// Interface for dense/sm90_huge_rows.cuh: what it reads of a work item, and where its results go.
MLA_DEVICE u32 half_pair(const PrefillFp8Params& p, float x, float y) {
    return p.out_is_fp16 ? cvt_x2(float16{}, x, y) : cvt_x2(bfloat16{}, x, y);
}

MLA_DEVICE float plain_dot(const u8* a, const u8* b, i32 columns) {
    float sum = 0.f;
#pragma unroll 1
    for (i32 i = 0; i < columns / 2; ++i) {
        const float2 x = cvt_f32_x2_e4m3(reinterpret_cast<const u16*>(a)[i]);
        const float2 y = cvt_f32_x2_e4m3(reinterpret_cast<const u16*>(b)[i]);
        sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
    }
    return sum;
}

struct Operands {
    static constexpr i32 kColumns = kHeadDimV;
    const PrefillFp8Params& p;
    i32 head;
    const ItemScales& scales;

    MLA_DEVICE i32 kv_head() const { return head / (p.h_q / p.h_kv); }
    MLA_DEVICE u32 visible(i64 query, i32 key, bool present) const { return ~0u; }

    MLA_DEVICE float score(i32 query, i32 key) const {
        const CodeRow q = query_codes(p, query, head), k = key_codes(p, key, kv_head());
        const float sum = plain_dot(q.first, k.first, kSw128ByteColumns) + plain_dot(q.last, k.last, kRopeColumns);
        return __fmul_rn(sum, scales.score_log2);
    }

    template <class Sums>
    MLA_DEVICE void add_values(Sums& sums, float weight, i32 key, i32 lane) const {
        const u8* values = code_bytes(p.v) + key * p.v_stride_s_elems + kv_head() * p.v_stride_h_elems + 2 * lane;
#pragma unroll
        for (i32 j = 0; j < Sums::kPairs; ++j) {
            const float2 x = cvt_f32_x2_e4m3(*reinterpret_cast<const u16*>(values + j * 2 * kWarpThreads));
            sums.out[j] = make_float2(fmaf(weight, x.x, sums.out[j].x), fmaf(weight, x.y, sums.out[j].y));
        }
    }

    template <class Sums>
    MLA_DEVICE void store(const Sums& sums, i64 query, i32 lane) const {
        const RowResult result = row_result(sums.max, sums.sum, negative_infinity());
        const i64 to = query * p.out_stride_s_elems + head * p.out_stride_h_elems + 2 * lane;
#pragma unroll
        for (i32 j = 0; j < Sums::kPairs; ++j) {
            const float factor = result.own * scales.value;
            store_pair(to + j * 2 * kWarpThreads, sums.out[j].x * factor, sums.out[j].y * factor);
        }
        if (lane == 0) store_lse(p, query, head, result.lse);
    }

   private:
    MLA_DEVICE void store_pair(i64 at, float x, float y) const {
        if (p.out_is_fp32) {
            *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = make_float2(x, y);
        } else {
            *reinterpret_cast<u32*>(static_cast<u16*>(p.out) + at) = half_pair(p, x, y);
        }
    }
};

// ---- Turn role -------------------------------------------------------------------------------------------------
// 0 * NaN is not 0: of keys that not every query sees, those past the end of the sequence among them, NaN becomes 0,
// and the math role stores it in the results of queries that do see it.
struct Turner {
    const PrefillFp8Params& p;
    Storage& s;
    i32 thread;
    RingCount<kWorkSlots> work;
    RingCount<kStages> tiles;  // of both rings: a stage of one goes to the same stage of the other

    // Returns true if there was NaN in one of the keys from `first` on.
    MLA_DEVICE bool turn(i32 first) {
        tiles.wait_full(s.v_full);
        tiles.wait_empty(s.turned_empty);
        const SmemAddr from = smem_addr(s.v[tiles.stage()]), to = smem_addr(s.turned[tiles.stage()]);
        const i32 lane = own_lane();
        bool found = false;
#pragma unroll 1
        for (i32 group = thread / kWarpThreads; group < kTurnedGroups; group += kTurnWarps) {
            found |= transpose_group(from, to, group, first, lane);
        }
        return found;
    }

    MLA_DEVICE void release_tile() {
        fence_proxy_async();
        release(s.turned_full[tiles.stage()], thread);
        release(s.v_empty[tiles.stage()], thread);
        tiles.advance();
    }

    // Recomputes rows of the last item with huge scores.
    MLA_DEVICE void redo_huge_rows() {
        RingCount<kWorkSlots> before{work.count - 1};
        before.wait_full(s.work_done);
        const WorkSlot& slot = s.work[before.stage()];
        dense::redo_huge_rows<kTurnWarps>(Operands{p, slot.head, slot.scales}, slot.tile, s.huge[before.stage()],
                                          thread / kWarpThreads, own_lane());
        release(s.work_empty[before.stage()], thread);
    }

    // The first tile of values, which the math role waits for, comes before the huge rows. `count` may be 0.
    MLA_DEVICE void run_item(WorkSlot& slot, i32 count) {
        i32 first = slot.tile.seen_by_all() - (count - 1) * kTileKeys;  // first key that not every query sees
        bool redone = work.count == 0;
#pragma unroll 1
        for (i32 i = count - 1; i >= 0 || !redone; --i, first += kTileKeys) {
            if (i >= 0 && turn(first)) slot.nonfinite = 1;
            if (i >= 0) release_tile();
            if (!redone) redo_huge_rows();
            redone = true;
        }
    }
};

MLA_DEVICE void run_turn_role(const PrefillFp8Params& p, Storage& s, i32 thread) {
    Turner turner{p, s, thread};
    for (auto& stage : s.turned) store_ones<kTurnThreads>(stage, thread);
#pragma unroll 1
    while (true) {
        turner.work.wait_full(s.work_full);
        WorkSlot& slot = s.work[turner.work.stage()];
        const bool ends = slot.head < 0;
        turner.run_item(slot, ends ? 0 : KeyTiles<kTileKeys>(slot.tile).count);
        if (ends) break;
        turner.work.advance();
    }
}

// ---- Math role -------------------------------------------------------------------------------------------------
struct Math {
    float scores[kScores];
    float out[kColumnHalves][kOut];  // relative to `reference`
    u32 weights[kKeySteps][4];       // P
    // Two rows per thread. All but `sum`, the thread's share, are equal in the four lanes of a quad.
    float reference[kFragmentRows];  // base 2
    float sum[kFragmentRows], rounded_sum[kFragmentRows];
    float factor[kFragmentRows];  // of the tile with weights in P
    RingCount<kWorkSlots> work;
    Ring<1> q;
    RingCount<kStages> k, v;
    i32 warpgroup, thread;

    // The first of the thread's two rows of the tile; the other is eight further on.
    MLA_DEVICE i32 row(i32 r) const { return warpgroup * kSw128Rows + fragment_row(thread) + 8 * r; }

    MLA_DEVICE void reset() {
#pragma unroll
        for (auto& half : out) {
#pragma unroll
            for (float& x : half) x = 0.f;
        }
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            reference[r] = attention::kLowestMax;
            sum[r] = rounded_sum[r] = 0.f;
        }
    }
};

// Starts S = Q K^T.
MLA_DEVICE void start_scores(Storage& s, Math& math) {
    SmemDesc a = k_major_desc(smem_addr(s.q) + math.warpgroup * kSw128Bytes);
    SmemDesc b = k_major_desc(smem_addr(s.k[math.k.stage()]));
    SmemDesc a_rope = sw64_desc(smem_addr(s.q_rope) + math.warpgroup * kSw64Bytes);
    SmemDesc b_rope = sw64_desc(smem_addr(s.k_rope[math.k.stage()]));
    opaque(a.bits), opaque(b.bits), opaque(a_rope.bits), opaque(b_rope.bits);
    pin(math.scores);
    wgmma_fence();
#pragma unroll
    for (i32 at = 0; at < kSw128ByteColumns; at += kMmaKBytes) {
        wgmma_mma_async(Code{}, math.scores, advance(a, at), advance(b, at), at > 0);
    }
#pragma unroll
    for (i32 at = 0; at < kSw64ByteColumns; at += kMmaKBytes) {
        wgmma_mma_async(Code{}, math.scores, advance(a_rope, at), advance(b_rope, at), true);
    }
    wgmma_commit_group();
}

MLA_DEVICE void finish_scores(Storage& s, Math& math, bool last) {
    pin(math.scores);
    release(s.k_empty[math.k.stage()], math.thread);
    if (last) release(s.q_empty[math.warpgroup], math.thread);
    math.k.advance();
}

// Starts half `kKeyHalf` of the keys of P V, for half `kColumnHalf` of the columns; the second has the sum of weights.
// Both are summed in the same registers: others for each would be too many, and the compiler would move `out` about.
template <i32 kKeyHalf, i32 kColumnHalf>
MLA_DEVICE void start_values(Storage& s, Math& math, float (&sums)[kSums]) {
    SmemDesc b =
        k_major_desc(smem_addr(s.turned[math.v.stage()]) + (kColumnHalf * kSw128Bytes + kKeyHalf * kHalfBytes));
    opaque(b.bits);
    pin(sums);
    wgmma_fence();
#pragma unroll
    for (i32 i = 0; i < kHalfSteps; ++i) {
        const SmemDesc of_step = advance(b, i * kMmaKBytes);
        if constexpr (kColumnHalf == 1) {
            wgmma_e4m3_n72(sums, math.weights[kKeyHalf * kHalfSteps + i], of_step, i > 0);
        } else {
            float (&first)[kOut] = reinterpret_cast<float (&)[kOut]>(sums);
            wgmma_mma_async(Code{}, first, math.weights[kKeyHalf * kHalfSteps + i], of_step, i > 0);
        }
    }
    wgmma_commit_group();
}

template <i32 kKeyHalf, i32 kColumnHalf>
MLA_DEVICE void add_values(Math& math, float (&sums)[kSums]) {
    pin(sums);
    if (kColumnHalf == 1) {  // in use until now
#pragma unroll
        for (i32 i = 0; i < kHalfSteps; ++i) pin(math.weights[kKeyHalf * kHalfSteps + i]);
    }
#pragma unroll
    for (i32 i = 0; i < kOut; ++i) {
        math.out[kColumnHalf][i] = fmaf(sums[i], math.factor[fragment_half(i)], math.out[kColumnHalf][i]);
    }
#pragma unroll
    for (i32 r = 0; kColumnHalf == 1 && r < kFragmentRows; ++r) {
        math.rounded_sum[r] = fmaf(sums[kOut + 2 * r], math.factor[r], math.rounded_sum[r]);
    }
}

MLA_DEVICE void release_values(Storage& s, Math& math) {
    release(s.turned_empty[math.v.stage()], math.thread);
    math.v.advance();
}

// Exponentials come before the wait for a product. The compiler would move that wait up past all of them, but not past
// a branch to an arrival, for which nobody waits.
MLA_DEVICE void hold_wait(Storage& s, Math& math, bool last) {
    if (last) release(s.exponentiated, math.thread);
}

MLA_DEVICE void mask_scores(Math& math, const QueryTile& tile, i32 first_key) {
    const i32 seen[kFragmentRows] = {tile.seen(math.row(0)) - first_key, tile.seen(math.row(1)) - first_key};
#pragma unroll
    for (i32 i = 0; i < kScores; ++i) {
        if (fragment_column(math.thread, i) >= seen[fragment_half(i)]) math.scores[i] = negative_infinity();
    }
}

// A row's maximum is taken in several chains, since one would take longer than the exponentials.
constexpr i32 kChains = 4;
MLA_DEVICE constexpr i32 chain_of(i32 i) { return i / 4 % 2 * 2 + i % 2; }

// The tile whose weights are being computed: its rows' maxima in base 2, and the thread's sums of weights.
struct TileSoftmax {
    float top[kFragmentRows];
    float sums[kFragmentRows][2];
};

MLA_DEVICE TileSoftmax begin_softmax(const Math& math, float scale_log2) {
    TileSoftmax tile;
    float chains[kFragmentRows][kChains];
#pragma unroll
    for (i32 i = 0; i < kScores; ++i) {
        float& chain = chains[fragment_half(i)][chain_of(i)];
        chain = i < kFragmentRows * kChains ? math.scores[i] : fmaxf(chain, math.scores[i]);
    }
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const float top = fmaxf(fmaxf(chains[r][0], chains[r][1]), fmaxf(chains[r][2], chains[r][3]));
        tile.top[r] = fmaxf(quad_max(top) * scale_log2, kFirstMax);
        tile.sums[r][0] = tile.sums[r][1] = 0.f;
    }
    return tile;
}

// The scores of 32 keys become weights, which are not rounded yet.
template <i32 kStep>
MLA_DEVICE void exponentiate(Math& math, TileSoftmax& tile, float scale_log2) {
#pragma unroll
    for (i32 i = kStep * kStepScores; i < (kStep + 1) * kStepScores; ++i) {
        const i32 r = fragment_half(i);
        math.scores[i] = ex2_approx(fmaf(math.scores[i], scale_log2, kWeightLog2 - tile.top[r]));
        tile.sums[r][i / 4 % 2] += math.scores[i];
    }
}

template <i32 kStep>
MLA_DEVICE void pack_weights(Math& math) {
#pragma unroll
    for (i32 j = 0; j < 4; ++j) {
        const float* of = math.scores + kStep * kStepScores + j / 2 * 8 + j % 2 * 2;
        math.weights[kStep][j] = cvt_e4m3_x2(of[0], of[1]) | cvt_e4m3_x2(of[4], of[5]) << 16;
    }
}

// Once the sums of all tiles before are in `out`.
MLA_DEVICE void end_softmax(Math& math, const TileSoftmax& tile) {
    float decay[kFragmentRows];
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const float before = math.reference[r];
        const float moved = tile.top[r] > before + kReferenceLog2 ? tile.top[r] : before;
        decay[r] = ex2_approx(before - moved);
        math.factor[r] = ex2_approx(tile.top[r] - moved);
        math.sum[r] = fmaf(tile.sums[r][0] + tile.sums[r][1], math.factor[r], math.sum[r] * decay[r]);
        math.reference[r] = moved;
    }
    if (!__any_sync(kFullWarp, decay[0] != 1.f || decay[1] != 1.f)) return;
#pragma unroll
    for (i32 half = 0; half < kColumnHalves; ++half) {
#pragma unroll
        for (i32 i = 0; i < kOut; ++i) math.out[half][i] *= decay[fragment_half(i)];
    }
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) math.rounded_sum[r] *= decay[r];
}

// The last tile of keys.
MLA_DEVICE void first_step(Storage& s, Math& math, const QueryTile& tile, i32 keys, float scale_log2) {
    math.k.wait_full(s.k_full);
    take_turn<Turn0>(math.warpgroup);
    start_scores(s, math);
    pass_turn<Turn0>(math.warpgroup);
    wgmma_wait_group<0>();
    finish_scores(s, math, keys == 0);
    mask_scores(math, tile, keys * kTileKeys);
    TileSoftmax softmax = begin_softmax(math, scale_log2);
    exponentiate<0>(math, softmax, scale_log2), pack_weights<0>(math);
    exponentiate<1>(math, softmax, scale_log2), pack_weights<1>(math);
    exponentiate<2>(math, softmax, scale_log2), pack_weights<2>(math);
    exponentiate<3>(math, softmax, scale_log2), pack_weights<3>(math);
    end_softmax(math, softmax);
}

// Computes the scores of a tile of keys, and overlaps the values of the previous one.
template <bool kEnds>
MLA_DEVICE void step(Storage& s, Math& math, const QueryTile& tile, i32 keys, float scale_log2) {
    float sums[kSums];  // of one product after another
    const bool last = keys == 0;
    math.k.wait_full(s.k_full);
    take_turn<Turn0>(math.warpgroup);
    start_scores(s, math);
    math.v.wait_full(s.turned_full);
    start_values<0, 0>(s, math, sums);
    pass_turn<Turn0>(math.warpgroup);
    wgmma_wait_group<1>();
    finish_scores(s, math, last);
    if (kEnds) mask_scores(math, tile, keys * kTileKeys);
    TileSoftmax softmax = begin_softmax(math, scale_log2);
    hold_wait(s, math, last);
    wgmma_wait_group<0>();
    add_values<0, 0>(math, sums);
    start_values<0, 1>(s, math, sums);
    exponentiate<0>(math, softmax, scale_log2);
    hold_wait(s, math, last);
    wgmma_wait_group<0>();
    add_values<0, 1>(math, sums);
    start_values<1, 0>(s, math, sums);
    pack_weights<0>(math);
    exponentiate<1>(math, softmax, scale_log2), pack_weights<1>(math);
    hold_wait(s, math, last);
    wgmma_wait_group<0>();
    add_values<1, 0>(math, sums);
    start_values<1, 1>(s, math, sums);
    exponentiate<2>(math, softmax, scale_log2);
    hold_wait(s, math, last);
    wgmma_wait_group<0>();
    add_values<1, 1>(math, sums);
    release_values(s, math);
    pack_weights<2>(math);
    exponentiate<3>(math, softmax, scale_log2), pack_weights<3>(math);
    end_softmax(math, softmax);
}

// The values of the first tile of keys.
MLA_DEVICE void last_step(Storage& s, Math& math) {
    float sums[kSums];
    math.v.wait_full(s.turned_full);
    start_values<0, 0>(s, math, sums);
    wgmma_wait_group<0>();
    add_values<0, 0>(math, sums);
    start_values<0, 1>(s, math, sums);
    wgmma_wait_group<0>();
    add_values<0, 1>(math, sums);
    start_values<1, 0>(s, math, sums);
    wgmma_wait_group<0>();
    add_values<1, 0>(math, sums);
    start_values<1, 1>(s, math, sums);
    wgmma_wait_group<0>();
    add_values<1, 1>(math, sums);
    release_values(s, math);
}

// Skips a tile that only the other warpgroup sees.
MLA_DEVICE void skip_keys(Storage& s, Math& math) {
    math.k.wait_full(s.k_full);
    take_turn<Turn0>(math.warpgroup);
    pass_turn<Turn0>(math.warpgroup);
    release(s.k_empty[math.k.stage()], math.thread);
    math.k.advance();
}
MLA_DEVICE void skip_values(Storage& s, Math& math) {
    math.v.wait_full(s.turned_full);
    release_values(s, math);
}

// Without a row, or rows that see a key.
MLA_DEVICE void stand_by(Storage& s, Math& math, i32 tiles) {
    release(s.q_empty[math.warpgroup], math.thread);
#pragma unroll 1
    for (i32 i = 0; i < tiles; ++i) skip_keys(s, math), skip_values(s, math);
}

MLA_DEVICE void attend(Storage& s, Math& math, const QueryTile& tile, const KeyTiles<kTileKeys>& keys,
                       float scale_log2) {
    mbarrier_wait(s.q_full[math.warpgroup], math.q.full_parity(0));
    math.q.advance(0);
    const i32 seen = seen_by_rows(tile, math.warpgroup * kSw128Rows, kSw128Rows);
    if (seen == 0) return stand_by(s, math, keys.count);
    const bool skips = seen <= (keys.count - 1) * kTileKeys;  // one, as there are no more rows than keys in a tile
    i32 i = keys.count - 1 - skips;
    if (skips) skip_keys(s, math);
    first_step(s, math, tile, i--, scale_log2);
    if (skips) skip_values(s, math);
#pragma unroll 1
    for (; i >= keys.whole; --i) step<true>(s, math, tile, i, scale_log2);
#pragma unroll 1
    for (; i >= 0; --i) step<false>(s, math, tile, i, scale_log2);
    last_step(s, math);
}

// ---- Results ---------------------------------------------------------------------------------------------------
MLA_DEVICE void store_four(const PrefillFp8Params& p, i64 at, float x0, float x1, float x2, float x3) {
    if (p.out_is_fp32) {
        *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = make_float4(x0, x1, x2, x3);
        return;
    }
    *reinterpret_cast<uint2*>(static_cast<u16*>(p.out) + at) = make_uint2(half_pair(p, x0, x1), half_pair(p, x2, x3));
}

// Row r of the thread, by all lanes of its quad.
template <i32 kRow>
MLA_DEVICE void store_result(const PrefillFp8Params& p, Storage& s, Math& math, const QueryTile& tile, i32 head,
                             float value_scale) {
    const float sum = quad_sum(math.sum[kRow]);
    i32 row = math.row(kRow);
    opaque(row);  // otherwise the loops over tiles would have no registers left
    if (row >= tile.queries) return;
    if (has_huge_scores(math.reference[kRow], sum, tile, row)) return s.huge[math.work.stage()].note(row);
    const i64 query = tile.first_query + row;
    const i64 to = query * p.out_stride_s_elems + head * p.out_stride_h_elems;
    const float factor = sum == 0.f ? 0.f : value_scale / math.rounded_sum[kRow];
#pragma unroll
    for (i32 half = 0; half < kColumnHalves; ++half) {
#pragma unroll
        for (i32 i = 2 * kRow; i < kOut; i += 8) {
            const float* x = math.out[half] + i;
            store_four(p, to + value_column(math.thread, half, i), x[0] * factor, x[4] * factor, x[1] * factor,
                       x[5] * factor);
        }
    }
    const float lse = sum == 0.f ? negative_infinity() : (math.reference[kRow] - kWeightLog2 + log2f(sum)) * kLn2;
    if (math.thread % 4 == 0) store_lse(p, query, head, lse);
}

// Cold: NaN values that the turn role has zeroed, for the rows that see them; overwrites the same thread's stores.
MLA_DEVICE void store_nan(const PrefillFp8Params& p, const Math& math, const QueryTile& tile, i32 head) {
    const i32 kv_head = head / (p.h_q / p.h_kv);
    const float nan = e4m3_value(kE4m3Nan);
#pragma unroll 1
    for (i32 key = tile.seen_by_all(); key < tile.seen_by_any(); ++key) {
        const u8* values = reinterpret_cast<const u8*>(p.v) + (i64)(tile.first_key + key) * p.v_stride_s_elems +
                           kv_head * p.v_stride_h_elems;
#pragma unroll 1
        for (i32 i = 0; i < kColumnHalves * kOut; ++i) {
            const i32 row = math.row(fragment_half(i)), column = value_column(math.thread, i / kOut, i % kOut);
            if (row >= tile.queries || key >= tile.seen(row) || (values[column] & 0x7f) != kE4m3Nan) continue;
            const i64 to = (i64)(tile.first_query + row) * p.out_stride_s_elems + head * p.out_stride_h_elems + column;
            if (p.out_is_fp32) {
                static_cast<float*>(p.out)[to] = nan;
            } else {
                static_cast<u16*>(p.out)[to] = p.out_is_fp16 ? float16::from_float(nan) : bfloat16::from_float(nan);
            }
        }
    }
}

MLA_DEVICE void run_math_role(const PrefillFp8Params& p, Storage& s, i32 warpgroup, i32 thread) {
    Math math;
    math.warpgroup = warpgroup, math.thread = thread;
    if (warpgroup == 1) pass_turn<Turn0>(math.warpgroup);
#pragma unroll 1
    while (true) {
        math.work.wait_full(s.work_full);
        const WorkSlot& slot = s.work[math.work.stage()];
        if (slot.head < 0) break;
        const QueryTile& tile = slot.tile;
        const KeyTiles<kTileKeys> keys(tile);
        math.reset();
        if (keys.count > 0) attend(s, math, tile, keys, slot.scales.score_log2);
        const i32 head = slot.head;
        const float value_scale = slot.scales.value;
        store_result<0>(p, s, math, tile, head, value_scale);
        store_result<1>(p, s, math, tile, head, value_scale);
        if (slot.nonfinite) store_nan(p, math, tile, head);
        release(s.work_done[math.work.stage()], thread);
        math.work.advance();
    }
    if (warpgroup == 0) take_turn<Turn0>(math.warpgroup);  // the turn that the other one has passed on
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_dense_sm90_fp8(const __grid_constant__ PrefillFp8Params p, const __grid_constant__ TensorMap q_map,
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
            run_turn_role(p, s, thread - kWarpThreads);
        } else if (elect_one()) {
            run_load_role(p, s, Maps{q_map, q_rope_map, k_map, k_rope_map, v_map});
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::dense
