// Dense attention with mma.sync, for every GPU since Ampere: keys and values per head, over sequences one after
// another.
//
//   S = Q K^T * scale            (128 x d_qk) (d_qk x kTileKeys) per tile of keys
//   P = exp2(S log2(e) - m)      m: running row maximum
//   l = sum of P,  O = P V       P stays in registers
//   out = O / l,   lse = ln 2 (m + log2 l),   merged with an earlier state
//
// Grid: one block per SM, which takes work items, tiles of 128 queries of a head, in the order of dense/tiles.cuh. Two
// groups of four warps share the queries and process the tiles of keys alternately, the last one first. A warp has 32
// queries: each fragment of keys or values that it reads from shared memory serves two products. The groups do not wait
// for each other, so one computes exponentials while the other uses the tensor cores; at the end they merge.
//
//   group 0   | Q K5 | softmax 5 | P5 V5 | Q K3 | softmax 3 | P3 V3 | Q K1 | softmax 1 | P1 V1 | merge, 64 rows stored
//   copies    K5 V5    K3          |   V3           K1        |   V1
//   group 1   | Q K4 | softmax 4 | P4 V4 | Q K2 | softmax 2 | P2 V2 | Q K0 | softmax 0 | P0 V0 | merge, 64 rows stored
//
// Source: FlashAttention-2's schedule (2023). Here: two groups over the same queries, operands in pieces, masks.
#include "attention/online_softmax.cuh"
#include "common/limits.cuh"
#include "dense/mask.cuh"
#include "dense/result.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"
#include "tile/elements.cuh"
#include "tile/ring.cuh"
#include "tile/warp.cuh"

// A mask says which keys a query sees, if a variant says so.
#ifndef MLA_HAS_MASK
#define MLA_HAS_MASK 0
#endif

namespace mla::dense {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK, kHeadDimV = MLA_HEAD_DIM_V;
constexpr i32 kTileKeys = MLA_TILE_KEYS;
constexpr i32 kSmemBytes = MLA_SMEM_KB * 1024;  // shared memory of a block
constexpr bool kHasMask = MLA_HAS_MASK;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kGroups = 2, kGroupWarps = 4;
constexpr i32 kGroupThreads = kGroupWarps * kWarpThreads;
constexpr i32 kThreads = kGroups * kGroupThreads;
constexpr i32 kMmaRows = 16, kMmaColumns = 8, kMmaDepth = 16;  // of one product
constexpr i32 kWarpRows = kTileQueries / kGroupWarps, kRowTiles = kWarpRows / kMmaRows;
constexpr i32 kScores = kTileKeys / 2, kOut = kHeadDimV / 2;  // of a thread, for each of its tiles of 16 rows
constexpr i32 kKeySteps = kTileKeys / kMmaDepth;
constexpr i32 kChunkBytes = 16, kChunkElems = 8;
constexpr i32 kPanelColumns = kRopeColumns, kPanelBytes = 2 * kPanelColumns, kPanelChunks = kPanelBytes / kChunkBytes;
constexpr i32 kPanelSteps = kPanelColumns / kMmaDepth;
constexpr i32 kPanelsQk = kHeadDimQk / kPanelColumns, kPanelsV = kHeadDimV / kPanelColumns;
// The queries' last panel stays in registers where shared memory is short.
constexpr i32 kHeldPanels = MLA_HELD_PANELS, kQueryPanels = kPanelsQk - kHeldPanels;
constexpr i32 kHeldSteps = kHeldPanels * kPanelSteps;
static_assert(kRowTiles == kGroups, "each group stores one of a warp's two tiles of rows");
static_assert(kTileKeys % kMmaDepth == 0 && kTileKeys <= 64, "whole products; a row's mask is two words");
static_assert(kHeldPanels <= 1, "the last panel");

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier      arrives (count)                        waits       first phase
// k_full[g]    threads of g, with their copies (128)  warps of g  blocked
// k_empty[g]   warps of g (4)                         warps of g  blocked: a load always follows a release
// v_full[g]    threads of g, with their copies, or    warps of g  blocked
//              after they have looked at them (128)
// v_empty[g]   warps of g (4)                         warps of g  blocked
struct Keys {
    u8 k[kTileKeys][kPanelsQk * kPanelBytes];
    u8 v[kTileKeys][kPanelsV * kPanelBytes];
};

// Sums that a thread of one group sends to the same thread of the other.
struct Share {
    float4 out[kOut / 4][kThreads], rows[kThreads];
};

struct Storage {
    union {
        struct {
            alignas(kPanelBytes) u8 q[kTileQueries][kQueryPanels * kPanelBytes];
            Keys keys[kGroups];
        };
        Share share;  // once all is read
    };
    u32 mask[kHasMask ? kGroups : 1][kHasMask ? kTileQueries : 1][2];
    MBarrier k_full[kGroups], k_empty[kGroups], v_full[kGroups], v_empty[kGroups];
    QueryTile tile;
    i32 head;  // negative: no more work
    i32 kv_head;
    i32 nonfinite;  // 1: non-finite values were zeroed
    i32 next_item;
};
static_assert(sizeof(Storage) <= kSmemBytes, "shared memory");

MLA_PREFILL_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));

// Chunk c of a row lies at c ^ (row % 8) of its panel: ldmatrix, plain or transposed, has no bank conflicts.
template <i32 kPanels>
MLA_DEVICE u32 row_offset(i32 row, i32 chunk) {
    return row * kPanels * kPanelBytes + ((chunk ^ row) & (kPanelChunks - 1)) * kChunkBytes;
}

// `steps` products along the row further on.
MLA_DEVICE SmemAddr at_step(SmemAddr row, i32 step) {
    return SmemAddr{(row.value ^ (u32)(step % kPanelSteps * 2 * kChunkBytes)) + step / kPanelSteps * kPanelBytes};
}

// ---- Math ------------------------------------------------------------------------------------------------------
// A thread's state of a work item.
struct Math {
    float out[kRowTiles][kOut];
    u32 held[kHeldPanels == 0 ? 1 : kHeldSteps][kRowTiles][4];  // queries
    attention::RowState rows[kRowTiles];
    i32 seen;       // how many keys the warp's queries see, at most
    u32 phase = 0;  // of the group's barriers, which complete once a tile
    i32 group = uniform_warp() / kGroupWarps, warp = uniform_warp() % kGroupWarps;

    // Reread: values derived from them are not worth registers across the loop.
    MLA_DEVICE static i32 lane() { return own_lane(); }
    MLA_DEVICE i32 thread() const { return warp * kWarpThreads + lane(); }  // of the group
    // The thread's first query of the block in tile t of 16 rows; its other one is eight further on.
    MLA_DEVICE i32 row(i32 t, i32 lane) const { return warp * kWarpRows + t * kMmaRows + lane / 4; }
};

// ---- Copies ----------------------------------------------------------------------------------------------------
constexpr i32 kCopyRows = kGroupThreads / kPanelChunks;  // at once: eight threads have a row's panel

struct Rows {
    const u16 *first, *last;  // this thread's chunk of the first row; of the first panel, and of the last one
    i64 stride, last_stride;
};

// Copies `rows` rows, zeros from `present` on; the threads copy kStep rows at once.
template <i32 kPanels, i32 kCopiedPanels, i32 kStep, i32 kCount>
MLA_DEVICE void copy_rows(SmemAddr to, const Rows& from, i32 row, i32 present) {
#pragma unroll
    for (i32 i = 0; i < kCount / kStep; ++i) {
#pragma unroll
        for (i32 panel = 0; panel < kCopiedPanels; ++panel) {
            const bool last = panel + 1 == kPanels;
            const u16* chunk = last ? from.last + i * kStep * from.last_stride
                                    : from.first + i * kStep * from.stride + panel * kPanelColumns;
            cp_async_16(to + (i * kStep * kCopiedPanels + panel) * kPanelBytes, chunk, row + i * kStep < present);
        }
    }
}

// Called by all threads of the block. Rows past the last query are zeros.
MLA_DEVICE void load_queries(const PrefillParams& p, Storage& s) {
    constexpr i32 kStep = kThreads / kPanelChunks;
    const i32 row = threadIdx.x / kPanelChunks, chunk = threadIdx.x % kPanelChunks;
    const i64 query = s.tile.first_query + row;
    const Rows from{p.q + query * p.q_stride_s_elems + s.head * p.q_stride_h_elems + chunk * kChunkElems,
                    p.q_rope + query * p.q_rope_stride_s_elems + s.head * p.q_rope_stride_h_elems + p.q_rope_column +
                        chunk * kChunkElems,
                    p.q_stride_s_elems, p.q_rope_stride_s_elems};
    const SmemAddr to = smem_addr(s.q) + row_offset<kQueryPanels>(row, chunk);
    copy_rows<kPanelsQk, kQueryPanels, kStep, kTileQueries>(to, from, row, s.tile.queries);
}

// The last panel, as A fragments.
MLA_DEVICE void hold_queries(const PrefillParams& p, const Storage& s, Math& math) {
    const i32 lane = math.lane();
    const u16* from = p.q_rope + s.head * p.q_rope_stride_h_elems + p.q_rope_column + fragment_column(lane);
#pragma unroll
    for (i32 i = 0; i < 2 * kRowTiles; ++i) {
        const i32 row = math.row(i / 2, lane) + 8 * (i % 2);
        const u16* query = from + (i64)(s.tile.first_query + row) * p.q_rope_stride_s_elems;
#pragma unroll
        for (i32 k = 0; k < 2 * kHeldSteps; ++k) {
            math.held[k / 2][i / 2][i % 2 + k % 2 * 2] = ld_global_4(query + k * kMmaColumns, row < s.tile.queries);
        }
    }
}

// Tile `i` of the keys; keys past the last one that a query sees are zeros. By the threads of a group.
MLA_DEVICE void load_keys(const PrefillParams& p, Storage& s, const Math& math, i32 i) {
    const i32 thread = math.thread(), row = thread / kPanelChunks, chunk = thread % kPanelChunks;
    const i64 key = s.tile.first_key + i * kTileKeys + row;
    const Rows from{p.k + key * p.k_stride_s_elems + s.kv_head * p.k_stride_h_elems + chunk * kChunkElems,
                    p.k_rope + key * p.k_rope_stride_s_elems + s.kv_head * p.k_rope_stride_h_elems + p.k_rope_column +
                        chunk * kChunkElems,
                    p.k_stride_s_elems, p.k_rope_stride_s_elems};
    const SmemAddr to = smem_addr(s.keys[math.group].k) + row_offset<kPanelsQk>(row, chunk);
    copy_rows<kPanelsQk, kPanelsQk, kCopyRows, kTileKeys>(to, from, row, s.tile.seen_by_any() - i * kTileKeys);
}

// A query's bits for the tile, in the two words that have them.
MLA_DEVICE void load_mask(const PrefillParams& p, Storage& s, const Math& math, i32 i) {
    const i32 byte = i * kTileKeys / 32 * 4, row = math.thread();
    const u8* from = p.mask + (i64)(s.tile.first_query + row) * p.mask_stride_bytes + byte;
    const SmemAddr to = smem_addr(s.mask[math.group][row]);
#pragma unroll
    for (i32 word = 0; word < 2; ++word) {
        cp_async<4>(to + 4 * word, from + 4 * word, row < s.tile.queries && byte + 4 * word < p.mask_bytes);
    }
}

MLA_DEVICE void ask_for_keys(const PrefillParams& p, Storage& s, const Math& math, i32 i) {
    load_keys(p, s, math, i);
    if (kHasMask) load_mask(p, s, math, i);
    cp_async_mbarrier_arrive_noinc(s.k_full[math.group]);
}

// From which key on values may be hidden from a query that multiplies them. 0 * NaN is not 0.
MLA_DEVICE i32 trusted(const Storage& s) { return kHasMask ? 0 : s.tile.seen_by_all(); }
MLA_DEVICE bool is_trusted(const Storage& s, i32 i) {
    return trusted(s) >= min((i + 1) * kTileKeys, s.tile.seen_by_any());
}

MLA_DEVICE void ask_for_values(const PrefillParams& p, Storage& s, const Math& math, i32 i) {
    const i32 thread = math.thread(), row = thread / kPanelChunks, chunk = thread % kPanelChunks;
    const i32 present = s.tile.seen_by_any() - i * kTileKeys;
    const u16* first = p.v + (s.tile.first_key + i * kTileKeys + row) * p.v_stride_s_elems +
                       s.kv_head * p.v_stride_h_elems + chunk * kChunkElems;
    const Rows from{first, first + (kPanelsV - 1) * kPanelColumns, p.v_stride_s_elems, p.v_stride_s_elems};
    const SmemAddr to = smem_addr(s.keys[math.group].v) + row_offset<kPanelsV>(row, chunk);
    copy_rows<kPanelsV, kPanelsV, kCopyRows, kTileKeys>(to, from, row, present);
    if (is_trusted(s, i)) cp_async_mbarrier_arrive_noinc(s.v_full[math.group]);
}

// Each thread checks the values that it has copied itself: non-finite values become 0, and the rows that see them get
// them back at the end.
MLA_DEVICE void clean_values(Storage& s, const Math& math, i32 i) {
    if (is_trusted(s, i)) return;
    cp_async_wait_group<1>();  // all but the next keys
    const i32 thread = math.thread(), first = thread / kPanelChunks, chunk = thread % kPanelChunks;
    u8* at = &s.keys[math.group].v[0][0] + row_offset<kPanelsV>(first, chunk);
    bool found = false;
#pragma unroll 1
    for (i32 row = 0; row < kTileKeys; row += kCopyRows) {
        if (i * kTileKeys + first + row < trusted(s)) continue;
#pragma unroll
        for (i32 panel = 0; panel < kPanelsV; ++panel) {
            found |= zero_nonfinite<Element>(*reinterpret_cast<uint4*>(at + (row * kPanelsV + panel) * kPanelBytes));
        }
    }
    if (found) s.nonfinite = 1;
    mbarrier_arrive(s.v_full[math.group]);
}

// ---- Scores ----------------------------------------------------------------------------------------------------
using Scores = float[kRowTiles][kScores];

MLA_DEVICE void multiply(float (&d)[8], const u32 (&a)[4], const u32 (&b)[4]) {
    mma_m16n8k16(Element{}, reinterpret_cast<float (&)[4]>(d[0]), a, b[0], b[1]);
    mma_m16n8k16(Element{}, reinterpret_cast<float (&)[4]>(d[4]), a, b[2], b[3]);
}

// S of the group's tile of keys.
MLA_DEVICE void score(const Storage& s, const Math& math, Scores& scores) {
    const i32 lane = math.lane();
    const SmemAddr q = smem_addr(s.q) + row_offset<kQueryPanels>(math.warp * kWarpRows + lane % 16, lane / 16);
    const SmemAddr k =
        smem_addr(s.keys[math.group].k) + row_offset<kPanelsQk>(lane / 16 * kMmaColumns + lane % 8, lane / 8 % 2);
#pragma unroll
    for (i32 i = 0; i < kRowTiles * kScores; ++i) (&scores[0][0])[i] = 0.f;
#pragma unroll
    for (i32 step = 0; step < kHeadDimQk / kMmaDepth; ++step) {
        const i32 held = step - kQueryPanels * kPanelSteps;
        u32 a[kRowTiles][4];
#pragma unroll
        for (i32 t = 0; t < kRowTiles; ++t) {
            if (held < 0) ldmatrix_x4(a[t], at_step(q, step) + t * kMmaRows * kQueryPanels * kPanelBytes);
#pragma unroll
            for (i32 i = 0; i < 4 && held >= 0; ++i) a[t][i] = math.held[held][t][i];
        }
#pragma unroll
        for (i32 n = 0; n < kKeySteps; ++n) {
            u32 b[4];
            ldmatrix_x4(b, at_step(k, step) + n * kMmaDepth * kPanelsQk * kPanelBytes);
#pragma unroll
            for (i32 t = 0; t < kRowTiles; ++t) {
                multiply(reinterpret_cast<float (&)[8]>(scores[t][8 * n]), a[t], b);
            }
        }
    }
}

MLA_DEVICE void hide_unseen(const Storage& s, const Math& math, Scores& scores, i32 i) {
    const i32 lane = math.lane();
#pragma unroll
    for (i32 t = 0; t < kRowTiles; ++t) {
        const i32 seen[kFragmentRows] = {s.tile.seen(math.row(t, lane)) - i * kTileKeys,
                                         s.tile.seen(math.row(t, lane) + 8) - i * kTileKeys};
#pragma unroll
        for (i32 j = 0; j < kScores; ++j) {
            if (fragment_column(lane, j) >= seen[fragment_half(j)]) scores[t][j] = negative_infinity();
        }
    }
}

MLA_DEVICE void hide_masked(const Storage& s, const Math& math, Scores& scores, i32 i) {
    const i32 shift = i * kTileKeys % 32, lane = math.lane();
#pragma unroll
    for (i32 r = 0; r < 2 * kRowTiles; ++r) {
        const u32(&words)[2] = s.mask[math.group][math.row(r / 2, lane) + 8 * (r % 2)];
        const uint4 bits = make_uint4(__funnelshift_r(words[0], words[1], shift), words[1] >> shift, 0, 0);
        hide_scores(scores[r / 2], r % 2, bits, lane);
    }
}

// ---- Softmax and values ----------------------------------------------------------------------------------------
using PFragments = u32[kRowTiles][kKeySteps][4];  // P, as A fragments

// Moves the running maxima, and rescales earlier sums.
MLA_DEVICE void move_maxima(Math& math, const Scores& scores, const float (&scale_log2)[kFragmentRows]) {
#pragma unroll
    for (i32 t = 0; t < kRowTiles; ++t) {
        float of_tile[kFragmentRows], maxima[kFragmentRows];
        attention::tile_max(of_tile, scores[t], scale_log2);
        attention::lazy_max(maxima, math.rows[t], of_tile);
        attention::rescale(math.out[t], math.rows[t].move_max(maxima));
    }
}

MLA_DEVICE void add_values(const Storage& s, Math& math, const PFragments& weights) {
    const i32 lane = math.lane();
    const SmemAddr v = smem_addr(s.keys[math.group].v) + row_offset<kPanelsV>(lane % 16, lane / 16);
#pragma unroll
    for (i32 step = 0; step < kKeySteps; ++step) {
#pragma unroll
        for (i32 n = 0; n < kHeadDimV / kMmaDepth; ++n) {
            u32 b[4];
            ldmatrix_x4_trans(b, at_step(v, n) + step * kMmaDepth * kPanelsV * kPanelBytes);
#pragma unroll
            for (i32 t = 0; t < kRowTiles; ++t) {
                multiply(reinterpret_cast<float (&)[8]>(math.out[t][8 * n]), weights[t][step], b);
            }
        }
    }
}

// ---- Tiles -----------------------------------------------------------------------------------------------------
// Tile `i` of the keys, and the copies of the group's next one, if it is not below 0.
MLA_DEVICE void run_tile(const PrefillParams& p, Storage& s, Math& math, i32 i, bool whole) {
    const i32 next = i - kGroups;
    const bool sees = i * kTileKeys < math.seen;
    const float scale_log2[kFragmentRows] = {p.scale_log2, p.scale_log2};
    PFragments weights;
    mbarrier_wait(s.k_full[math.group], math.phase);
    if (sees) {
        Scores scores;
        score(s, math, scores);
        if (kHasMask) hide_masked(s, math, scores, i);
        release(s.k_empty[math.group], math.lane());
        if (!whole) hide_unseen(s, math, scores, i);
        move_maxima(math, scores, scale_log2);
#pragma unroll
        for (i32 t = 0; t < kRowTiles; ++t) {
            attention::exponentiate<Element>(weights[t], math.rows[t], scores[t], scale_log2);
        }
    } else {
        release(s.k_empty[math.group], math.lane());
    }
    mbarrier_wait(s.k_empty[math.group], math.phase);
    if (next >= 0) ask_for_keys(p, s, math, next);
    cp_async_commit_group();
    clean_values(s, math, i);
    mbarrier_wait(s.v_full[math.group], math.phase);
    if (sees) add_values(s, math, weights);
    release(s.v_empty[math.group], math.lane());
    mbarrier_wait(s.v_empty[math.group], math.phase);
    if (next >= 0) ask_for_values(p, s, math, next);
    cp_async_commit_group();
    math.phase ^= 1;
}

// ---- Results ---------------------------------------------------------------------------------------------------
// One tile of 16 rows of a warp, in this thread's part of it.
struct Result {
    float out[kOut];
    float max[kFragmentRows], sum[kFragmentRows];
    i32 first_row;

    MLA_DEVICE i32 row(i32 r) const { return first_row + 8 * r; }
};

// Group g gets the rows of tile g of both groups. By all threads of the block, which have read all keys and values.
MLA_DEVICE Result merge_groups(Storage& s, const Math& math) {
    const bool second = math.group == 1;
    const i32 own = threadIdx.x, other = own ^ kGroupThreads;
    Result result;
    result.first_row = math.row(math.group, math.lane());
#pragma unroll
    for (i32 i = 0; i < kOut; ++i) result.out[i] = second ? math.out[1][i] : math.out[0][i];
#pragma unroll
    for (i32 i = 0; i < kOut; i += 4) {
        const float *x = &math.out[0][i], *y = &math.out[1][i];
        s.share.out[i / 4][own] =
            make_float4(second ? x[0] : y[0], second ? x[1] : y[1], second ? x[2] : y[2], second ? x[3] : y[3]);
    }
    float sent[2 * kFragmentRows];
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        result.max[r] = second ? math.rows[1].max[r] : math.rows[0].max[r];
        result.sum[r] = second ? math.rows[1].sum[r] : math.rows[0].sum[r];
        sent[r] = second ? math.rows[0].max[r] : math.rows[1].max[r];
        sent[2 + r] = second ? math.rows[0].sum[r] : math.rows[1].sum[r];
    }
    s.share.rows[own] = make_float4(sent[0], sent[1], sent[2], sent[3]);
    __syncthreads();
    const float4 rows = s.share.rows[other];
    float factor[kFragmentRows];
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const float max = fmaxf(result.max[r], r == 0 ? rows.x : rows.y);
        const float mine = ex2_approx(result.max[r] - max);
        factor[r] = ex2_approx((r == 0 ? rows.x : rows.y) - max);
        result.max[r] = max;
        result.sum[r] = quad_sum(fmaf(result.sum[r], mine, factor[r] * (r == 0 ? rows.z : rows.w)));
#pragma unroll
        for (i32 i = 2 * r; i < kOut; i += 4) result.out[i] *= mine, result.out[i + 1] *= mine;
    }
#pragma unroll
    for (i32 i = 0; i < kOut; i += 4) {
        const float4 x = s.share.out[i / 4][other];
        result.out[i] = fmaf(x.x, factor[0], result.out[i]);
        result.out[i + 1] = fmaf(x.y, factor[0], result.out[i + 1]);
        result.out[i + 2] = fmaf(x.z, factor[1], result.out[i + 2]);
        result.out[i + 3] = fmaf(x.w, factor[1], result.out[i + 3]);
    }
    return result;
}

// Cold: the values that were taken away, for the rows that see them. Any multiple of an infinity is infinite.
MLA_DEVICE void add_nonfinite(const PrefillParams& p, const Storage& s, const Math& math, Result& result) {
#pragma unroll 1
    for (i32 key = trusted(s); key < s.tile.seen_by_any(); ++key) {
        const u16* values = p.v + (i64)(s.tile.first_key + key) * p.v_stride_s_elems + s.kv_head * p.v_stride_h_elems;
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            const i32 row = result.row(r);
            if (row >= s.tile.queries || key >= s.tile.seen(row)) continue;
            if (kHasMask && !mask_bit(p, s.tile.first_query + row, key)) continue;
#pragma unroll
            for (i32 i = 0; i < kOut; ++i) {
                if (fragment_half(i) != r) continue;
                const float x = Element::to_float(values[fragment_column(math.lane(), i)]);
                if (!(fabsf(x) <= kMaxFloat)) result.out[i] += x;
            }
        }
    }
}

// Row r of the thread, by all lanes of its quad.
template <i32 kRow>
MLA_DEVICE void store_result(const PrefillParams& p, const Storage& s, const Math& math, Result& result) {
    const bool stored = result.row(kRow) < s.tile.queries;
    const i64 query = s.tile.first_query + result.row(kRow);
    const RowResult weights =
        row_result(result.max[kRow], result.sum[kRow], stored ? earlier_lse(p, query, s.head) : negative_infinity());
    const i64 from = query * p.state_out_stride_s_elems + s.head * p.state_out_stride_h_elems;
    const i64 to = query * p.out_stride_s_elems + s.head * p.out_stride_h_elems;
    const bool merges = stored && weights.earlier != 0.f;
#pragma unroll
    for (i32 i = 2 * kRow; i < kOut; i += 4) {
        float2 x = make_float2(0.f, 0.f);
        if (merges) x = state_pair<Element>(p, from + fragment_column(math.lane(), i));
#pragma unroll
        for (i32 j = 0; j < 2; ++j) {
            const float own = weights.own == 0.f ? 0.f : weights.own * result.out[i + j];
            result.out[i + j] = merges ? fmaf(weights.earlier, j == 0 ? x.x : x.y, own) : own;
        }
    }
    if (!p.out_is_fp32) {
        store_row(Element{}, static_cast<u16*>(p.out) + to, result.out, kRow, 1.f, stored, math.lane());
    } else if (stored) {
#pragma unroll
        for (i32 i = 2 * kRow; i < kOut; i += 4) {
            float* at = static_cast<float*>(p.out) + to + fragment_column(math.lane(), i);
            *reinterpret_cast<float2*>(at) = make_float2(result.out[i], result.out[i + 1]);
        }
    }
    __syncwarp();  // the earlier log-sum-exp may be where the new one goes
    if (stored && math.lane() % 4 == 0) store_lse(p, query, s.head, weights.lse);
}

// ---- Items -----------------------------------------------------------------------------------------------------
MLA_DEVICE void attend(const PrefillParams& p, Storage& s, Math& math) {
    const i32 count = ceil_div(s.tile.seen_by_any(), kTileKeys), last = count - 1 - math.group;
    const i32 rows = min(s.tile.queries, (math.warp + 1) * kWarpRows);  // the warp's, and those before them
    math.seen = rows > math.warp * kWarpRows ? max(0, s.tile.seen(rows - 1)) : 0;
    if (count > 0) load_queries(p, s);
    cp_async_commit_group();
    if (last >= 0) ask_for_keys(p, s, math, last);
    cp_async_commit_group();
    if (last >= 0) ask_for_values(p, s, math, last);
    cp_async_commit_group();
    if (kHeldPanels != 0) hold_queries(p, s, math);
    cp_async_wait_group<2>();
    __syncthreads();  // the queries are stored
    const i32 whole = s.tile.seen_by_all() / kTileKeys;
#pragma unroll 1
    for (i32 i = last; i >= 0; i -= kGroups) run_tile(p, s, math, i, i < whole);
}

MLA_DEVICE void run_item(const PrefillParams& p, Storage& s, Math& math) {
#pragma unroll
    for (i32 t = 0; t < kRowTiles; ++t) {
        math.rows[t].reset();
#pragma unroll
        for (i32 i = 0; i < kOut; ++i) math.out[t][i] = 0.f;
    }
    attend(p, s, math);
    __syncthreads();  // all is read
    Result result = merge_groups(s, math);
    if (s.nonfinite) add_nonfinite(p, s, math, result);
    store_result<0>(p, s, math, result);
    store_result<1>(p, s, math, result);
}

// The next item; by one thread.
MLA_DEVICE void announce(const PrefillParams& p, Storage& s) {
    const i32 index = s.next_item, num_tiles = p.schedule->num_tiles;
    s.head = -1;
    s.nonfinite = 0;
    if (index >= num_tiles * p.h_q) return;
    const WorkItem item = work_item(p, index, num_tiles);
    s.tile = p.tiles[item.tile];
    s.head = item.head;
    s.kv_head = item.head / (p.h_q / p.h_kv);
    s.next_item = gridDim.x + atomicAdd(&p.schedule->next_item, 1);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1) mla_dense_mma(const __grid_constant__ PrefillParams p) {
    extern __shared__ __align__(kPanelBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    if (threadIdx.x == 0) {
        s.next_item = blockIdx.x;
        init_ring(s.k_full, s.k_empty, kGroupThreads, kGroupWarps);
        init_ring(s.v_full, s.v_empty, kGroupThreads, kGroupWarps);
    }
    griddepcontrol_wait();
    Math math;
#pragma unroll 1
    while (true) {
        if (threadIdx.x == 0) announce(p, s);
        __syncthreads();
        if (s.head < 0) break;
        run_item(p, s, math);
        __syncthreads();  // nobody reads this item any more
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::dense
