// Gradients of sparse MLA with mma.sync, for every GPU since Ampere.
//
//   P  = exp2(scale log2(e) q k^T - lse2),   dS = P * (dO v^T - delta) * scale,   v = k[:512]
//   dq = dS k,   dkv += dS^T q, and in the first 512 columns P^T dO
//
// Grid: x = queries, and for each of them blocks of 32 heads. A block keeps the query's q and dO in shared memory, and
// walks over its list of keys in steps of 16 or 32:
//
//   scores   warp = 16 heads, half of the columns, of q k^T or dO v^T      parts -> shared memory
//   weights  thread = pairs of (head, key)                                 P, dS -> shared memory
//   dq       warp = all heads, 64 columns and 8 of RoPE                    sums stay in registers
//   dkv      warp = all keys of the step, the same columns                 added to memory
//   copies   one stage:  the next keys, once dq has read these, during dkv
//            two stages: the next keys, from the scores on
//
// A barrier of the block lies between the phases. P and dS are rounded to 16 bits; the contributions of 32 heads to a
// key are added to memory once.
#include "attention/shapes.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/reduce.cuh"
#include "sparse_backward/dkv_adder.cuh"
#include "sparse_backward/params.cuh"
#include "tile/fragment.cuh"
#include "tile/warp.cuh"

namespace mla::sparse_backward {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK;
constexpr bool kDeterministic = MLA_DETERMINISTIC;
constexpr i32 kSmemBytes = MLA_SMEM_KB * 1024;  // shared memory of a block
static_assert(is_head_dim_qk(kHeadDimQk), "with or without RoPE columns");

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kWarps = 8, kThreads = kWarps * kWarpThreads;
constexpr i32 kBlockHeads = 32;
constexpr bool kTwoStages = MLA_SMEM_KB >= 163;
constexpr i32 kStages = kTwoStages ? 2 : 1, kStepKeys = kTwoStages ? 32 : 16;
constexpr i32 kMmaRows = 16, kMmaColumns = 8, kMmaDepth = 16;  // of one product
constexpr i32 kHeadTiles = kBlockHeads / kMmaRows, kKeyTiles = kStepKeys / kMmaColumns;
constexpr i32 kKeySteps = kStepKeys / kMmaDepth;
constexpr i32 kHalves = kWarps / kHeadTiles / 2;  // of the columns, for the scores
constexpr i32 kChains = 4 / kKeyTiles;            // independent sums of a warp's scores are at least four
constexpr i32 kChunkBytes = 16, kChunkElems = 8, kSegmentChunks = 8;
constexpr i32 kWarpColumns = kHeadDimV / kWarps, kValueTiles = kWarpColumns / kMmaColumns;
constexpr bool kHasRope = kHeadDimQk > kHeadDimV;
static_assert(kHalves == 2, "halves");
static_assert(kWarpColumns == kSegmentChunks * kChunkElems, "a warp's columns are a swizzled segment");
static_assert(!kHasRope || kHeadDimQk - kHeadDimV == kWarps * kMmaColumns, "and one tile of the RoPE columns");
static_assert(kTileTokens % kStepKeys == 0, "lists are padded to whole steps");

// ---- Storage ---------------------------------------------------------------------------------------------------
// Rows of P and dS are one chunk longer than necessary, so that ldmatrix has no bank conflicts.
constexpr i32 kWeightBytes = kStepKeys * (i32)sizeof(u16) + kChunkBytes;

struct Storage {
    alignas(128) u8 q[kBlockHeads][kHeadDimQk * sizeof(u16)];
    u8 dout[kBlockHeads][kHeadDimV * sizeof(u16)];
    u8 k[kStages][kStepKeys][kHeadDimQk * sizeof(u16)];
    float4 parts[kWarps][kKeyTiles][kWarpThreads];  // of scores, as accumulators
    alignas(16) u8 p[kBlockHeads][kWeightBytes];
    alignas(16) u8 ds[kBlockHeads][kWeightBytes];
    i32 rows[2][kStepKeys];  // steps take turns: the next one's come while this one's are in use
    float lse2[kBlockHeads], delta[kBlockHeads];
};
static_assert(sizeof(Storage) <= kSmemBytes, "shared memory");

MLA_BACKWARD_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_heads, kBlockHeads);

struct Block {
    const BackwardParams& p;
    Storage& s;
    i64 query;
    i32 head0, heads;  // of the call; `heads` of them are the block's
    i32 warp = uniform_warp(), lane = threadIdx.x % kWarpThreads;

    // The lane as a value that the compiler cannot match with the previous phase's: addresses are recomputed, since
    // none is worth a register across the loop.
    MLA_DEVICE i32 opaque_lane() const {
        i32 same = lane;
        opaque(same);
        return same;
    }

    MLA_DEVICE bool is_live(i32 head) const { return s.lse2[head] != -negative_infinity(); }
};

// Byte offset of a chunk in a tile of rows. Chunk c of a segment of eight lies at c ^ (row % 8): ldmatrix, plain or
// transposed, has no bank conflicts.
template <i32 kColumns>
MLA_DEVICE u32 offset(i32 row, i32 chunk) {
    const i32 within = (chunk ^ row) & (kSegmentChunks - 1);
    return row * kColumns * (i32)sizeof(u16) + ((chunk & ~(kSegmentChunks - 1)) + within) * kChunkBytes;
}

// ---- Copies ----------------------------------------------------------------------------------------------------
MLA_DEVICE void load_statistics(const Block& block) {
    const BackwardParams& p = block.p;
    const i32 head = threadIdx.x;
    if (head >= kBlockHeads) return;
    const bool there = head < block.heads;
    const i64 at = block.query * p.h_q + block.head0 + head;
    block.s.lse2[head] = there ? p.lse2[at] : -negative_infinity();
    block.s.delta[head] = there ? p.delta[at] : 0.f;
}

// One row of each head. Heads without a gradient become zeros, since 0 * NaN is not 0.
template <i32 kColumns>
MLA_DEVICE void copy_heads(const Block& block, SmemAddr to, const u16* from, i64 stride) {
    constexpr i32 kHeadThreads = kThreads / kBlockHeads;
    const i32 head = threadIdx.x / kHeadThreads, first = threadIdx.x % kHeadThreads;
    const bool live = block.is_live(head);
    const u16* row = from + (live ? head : 0) * stride;
#pragma unroll
    for (i32 chunk = first; chunk < kColumns / kChunkElems; chunk += kHeadThreads) {
        cp_async_16(to + offset<kColumns>(head, chunk), row + chunk * kChunkElems, live);
    }
}

MLA_DEVICE void copy_query(const Block& block) {
    const BackwardParams& p = block.p;
    const u16* q = p.q + block.query * p.q_stride_s_elems + block.head0 * p.q_stride_h_elems;
    const u16* dout = p.dout + block.query * p.dout_stride_s_elems + block.head0 * p.dout_stride_h_elems;
    copy_heads<kHeadDimQk>(block, smem_addr(block.s.q), q, p.q_stride_h_elems);
    copy_heads<kHeadDimV>(block, smem_addr(block.s.dout), dout, p.dout_stride_h_elems);
}

// A thread's share of the copies of keys: every kKeyThreads-th chunk of one key.
struct KeyCopy {
    static constexpr i32 kKeyThreads = kThreads / kStepKeys;
    const i32* rows;  // the query's list
    i32 row;          // row of the next step to copy, read ahead
    i32 key = threadIdx.x / kKeyThreads, chunk = threadIdx.x % kKeyThreads;

    // kNoRow behind the end of the list.
    MLA_DEVICE void look_up(i32 step, i32 count) {
        const i32 at = step * kStepKeys + key;
        row = at < count ? rows[at] : kNoRow;
    }

    MLA_DEVICE void copy(const Block& block, i32 step) const {
        const bool present = row != kNoRow;
        const u16* from = block.p.kv + (present ? row : 0) * block.p.kv_stride_s_elems;
        const SmemAddr to = smem_addr(block.s.k[step % kStages]);
        if (chunk == 0) block.s.rows[step % 2][key] = row;
#pragma unroll
        for (i32 i = 0; i < kHeadDimQk / kChunkElems; i += kKeyThreads) {
            if (i + chunk >= kHeadDimQk / kChunkElems) break;
            cp_async_16(to + offset<kHeadDimQk>(key, i + chunk), from + (i + chunk) * kChunkElems, present);
        }
    }
};

// ---- Scores ----------------------------------------------------------------------------------------------------
template <i32 kColumns>
constexpr i32 kPartSteps = kColumns / kMmaDepth / kHalves;
// Fragments of q and dO kept in registers, up to the number that fits.
#if __CUDA_ARCH__ == 900
constexpr i32 kMostHeldSteps = kDeterministic ? 16 : 18;
#else
constexpr i32 kMostHeldSteps = 12;
#endif
constexpr i32 kHeldSteps = kTwoStages ? kMostHeldSteps : kPartSteps<kHeadDimQk>;

// A warp computes half of the columns of q k^T or dO v^T, for 16 heads and all keys of the step.
struct Part {
    i32 head_tile, half;
    bool of_dout;
    u32 held[kHeldSteps][4];  // of q or dO, over all steps

    MLA_DEVICE explicit Part(i32 warp)
        : head_tile(warp % kHeadTiles), half(warp / (2 * kHeadTiles)), of_dout(warp / kHeadTiles % 2) {}

    // Fragment `step` of the part.
    template <i32 kColumns>
    MLA_DEVICE void load(u32 (&a)[4], const u8* heads, i32 step, i32 lane) const {
        const i32 chunk = 2 * (half * kPartSteps<kColumns> + step);
        ldmatrix_x4(a, smem_addr(heads) + offset<kColumns>(head_tile * kMmaRows + lane % 16, chunk + lane / 16));
    }

    template <i32 kColumns>
    MLA_DEVICE void get(u32 (&a)[4], const u8* heads, i32 step, i32 lane) const {
        if (step >= kHeldSteps) return load<kColumns>(a, heads, step, lane);
#pragma unroll
        for (i32 i = 0; i < 4; ++i) a[i] = held[step][i];
    }

    template <i32 kColumns>
    MLA_DEVICE void hold(const u8* heads, i32 lane) {
#pragma unroll
        for (i32 step = 0; step < min(kHeldSteps, kPartSteps<kColumns>); ++step) {
            load<kColumns>(held[step], heads, step, lane);
        }
    }

    MLA_DEVICE void hold(const Storage& s, i32 lane) {
        if (of_dout) {
            hold<kHeadDimV>(s.dout[0], lane);
        } else {
            hold<kHeadDimQk>(s.q[0], lane);
        }
    }
};

template <i32 kColumns>
MLA_DEVICE void score(const Block& block, const Part& part, const u8* heads, const u8* keys) {
    const i32 lane = block.opaque_lane();
    float sums[kChains][kKeyTiles][4] = {};
    const i32 key = lane / 16 * kMmaColumns + lane % 8;
#pragma unroll
    for (i32 step = 0; step < kPartSteps<kColumns>; ++step) {
        const i32 chunk = 2 * (part.half * kPartSteps<kColumns> + step);
        u32 a[4];
        part.get<kColumns>(a, heads, step, lane);
#pragma unroll
        for (i32 n = 0; n < kKeyTiles; n += 2) {
            u32 b[4];
            ldmatrix_x4(b, smem_addr(keys) + offset<kHeadDimQk>(n * kMmaColumns + key, chunk + lane / 8 % 2));
            mma_m16n8k16(Element{}, sums[step % kChains][n], a, b[0], b[1]);
            mma_m16n8k16(Element{}, sums[step % kChains][n + 1], a, b[2], b[3]);
        }
    }
#pragma unroll
    for (i32 n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (i32 chain = 1; chain < kChains; ++chain) {
#pragma unroll
            for (i32 i = 0; i < 4; ++i) sums[0][n][i] += sums[chain][n][i];
        }
        const float (&x)[4] = sums[0][n];
        block.s.parts[block.warp][n][lane] = make_float4(x[0], x[1], x[2], x[3]);
    }
}

MLA_DEVICE void run_scores(const Block& block, const Part& part, i32 step) {
    const u8* keys = block.s.k[step % kStages][0];
    if (part.of_dout) {
        score<kHeadDimV>(block, part, block.s.dout[0], keys);
    } else {
        score<kHeadDimQk>(block, part, block.s.q[0], keys);
    }
}

// The warp that computes a part.
MLA_DEVICE constexpr i32 warp_of(i32 head_tile, bool of_dout, i32 half) {
    return head_tile + kHeadTiles * of_dout + 2 * kHeadTiles * half;
}

// ---- Weights ---------------------------------------------------------------------------------------------------
MLA_DEVICE float2 sum_of_parts(const Storage& s, i32 head_tile, bool of_dout, i32 n, i32 lane, i32 r) {
    const float2* low = reinterpret_cast<const float2*>(&s.parts[warp_of(head_tile, of_dout, 0)][n][lane]);
    const float2* high = reinterpret_cast<const float2*>(&s.parts[warp_of(head_tile, of_dout, 1)][n][lane]);
    return make_float2(low[r].x + high[r].x, low[r].y + high[r].y);
}

// P and dS of two neighbouring keys. Keys without a row, and heads without a gradient, have weights of 0.
MLA_DEVICE void store_weights(const Block& block, i32 head, i32 key, float2 score, float2 d_weight, i32 step) {
    Storage& s = block.s;
    const float lse2 = s.lse2[head], delta = s.delta[head];
    const i32* rows = &s.rows[step % 2][key];
    const bool live = block.is_live(head);
    const bool first = live && rows[0] != kNoRow, second = live && rows[1] != kNoRow;
    const float p0 = first ? ex2_approx(score.x * block.p.scale_log2 - lse2) : 0.f;
    const float p1 = second ? ex2_approx(score.y * block.p.scale_log2 - lse2) : 0.f;
    const float ds0 = first ? p0 * (d_weight.x - delta) * block.p.scale : 0.f;
    const float ds1 = second ? p1 * (d_weight.y - delta) * block.p.scale : 0.f;
    *reinterpret_cast<u32*>(s.p[head] + key * sizeof(u16)) = cvt_x2(Element{}, p0, p1);
    *reinterpret_cast<u32*>(s.ds[head] + key * sizeof(u16)) = cvt_x2(Element{}, ds0, ds1);
}

// A warp handles one row of each pair of an accumulator tile, for some tiles.
MLA_DEVICE void run_weights(const Block& block, i32 step) {
    constexpr i32 kUnits = kHeadTiles * kKeyTiles * kFragmentRows;
#pragma unroll
    for (i32 unit = block.warp; unit < kUnits; unit += kWarps) {
        const i32 r = unit % kFragmentRows, n = unit / kFragmentRows % kKeyTiles;
        const i32 head_tile = unit / (kFragmentRows * kKeyTiles);
        const float2 score = sum_of_parts(block.s, head_tile, false, n, block.lane, r);
        const float2 d_weight = sum_of_parts(block.s, head_tile, true, n, block.lane, r);
        const i32 head = head_tile * kMmaRows + block.lane / 4 + 8 * r, key = n * kMmaColumns + block.lane % 4 * 2;
        store_weights(block, head, key, score, d_weight, step);
    }
}

// ---- Products --------------------------------------------------------------------------------------------------
// A warp's part of dq for 16 heads: 64 columns, and 8 of the RoPE columns.
struct Dq {
    float x[kValueTiles][4], rope[4];

    MLA_DEVICE void clear() {
#pragma unroll
        for (i32 i = 0; i < kValueTiles * 4; ++i) (&x[0][0])[i] = 0.f;
#pragma unroll
        for (i32 i = 0; i < 4; ++i) rope[i] = 0.f;
    }
};

// Address of the first 16 of a warp's columns, transposed, of the first 16 rows. Further columns of the segment differ
// in a few address bits.
template <i32 kColumns>
MLA_DEVICE SmemAddr columns_of(const Block& block, const u8* rows, i32 lane) {
    return smem_addr(rows) + offset<kColumns>(lane % 16, block.warp * kSegmentChunks + lane / 16);
}

// B fragments of columns 8 n to 8 n + 15, of 16 rows from `row` on.
template <i32 kColumns>
MLA_DEVICE void load_columns(u32 (&b)[4], SmemAddr columns, i32 row, i32 n) {
    const SmemAddr from{columns.value ^ (u32)(n * kChunkBytes)};
    ldmatrix_x4_trans(b, from + row * kColumns * (i32)sizeof(u16));
}

// The 16 RoPE columns of the warp and its neighbour.
MLA_DEVICE void load_rope(u32 (&b)[4], const u8* rows, i32 row, const Block& block, i32 lane) {
    const i32 chunk = kHeadDimV / kChunkElems + (block.warp & ~1) + lane / 16;
    ldmatrix_x4_trans(b, smem_addr(rows) + offset<kHeadDimQk>(row + lane % 16, chunk));
}

// dS of 16 heads and 16 keys, as an A fragment.
MLA_DEVICE void load_weights(u32 (&a)[4], const u8* weights, i32 head, i32 key_step, i32 lane) {
    ldmatrix_x4(a, smem_addr(weights) + (u32)((head + lane % 16) * kWeightBytes + (2 * key_step + lane / 16) * 16));
}

// Loads them transposed: rows are keys.
MLA_DEVICE void load_weights_trans(u32 (&a)[4], const u8* weights, i32 head, i32 key_step, i32 lane) {
    const i32 row = head + lane / 16 * 8 + lane % 8, chunk = 2 * key_step + lane / 8 % 2;
    ldmatrix_x4_trans(a, smem_addr(weights) + (u32)(row * kWeightBytes + chunk * kChunkBytes));
}

MLA_DEVICE void run_dq(const Block& block, Dq (&dq)[kHeadTiles], i32 step) {
    const i32 lane = block.opaque_lane();
    const u8* keys = block.s.k[step % kStages][0];
    const SmemAddr columns = columns_of<kHeadDimQk>(block, keys, lane);
#pragma unroll
    for (i32 key_step = 0; key_step < kKeySteps; ++key_step) {
        const i32 key = key_step * kMmaDepth;
        u32 ds[kHeadTiles][4], b[4];
#pragma unroll
        for (i32 tile = 0; tile < kHeadTiles; ++tile) {
            load_weights(ds[tile], block.s.ds[0], tile * kMmaRows, key_step, lane);
        }
#pragma unroll
        for (i32 n = 0; n < kValueTiles; n += 2) {
            load_columns<kHeadDimQk>(b, columns, key, n);
#pragma unroll
            for (i32 tile = 0; tile < kHeadTiles; ++tile) {
                mma_m16n8k16(Element{}, dq[tile].x[n], ds[tile], b[0], b[1]);
                mma_m16n8k16(Element{}, dq[tile].x[n + 1], ds[tile], b[2], b[3]);
            }
        }
        if (!kHasRope) continue;
        load_rope(b, keys, key, block, lane);
        const u32 b0 = block.warp % 2 ? b[2] : b[0], b1 = block.warp % 2 ? b[3] : b[1];
#pragma unroll
        for (i32 tile = 0; tile < kHeadTiles; ++tile) mma_m16n8k16(Element{}, dq[tile].rope, ds[tile], b0, b1);
    }
}

// ---- dKV -------------------------------------------------------------------------------------------------------
// 32 columns at a time, of all keys: a fragment of q or dO serves them all, and additions mix with products.
constexpr i32 kGroupTiles = 4;
using Group = float[kGroupTiles][4];  // of 16 keys
using Adder = DkvAdder<kDeterministic, kHeadDimQk>;

// The step's weights, transposed: rows are keys.
struct Weights {
    u32 p[kHeadTiles][kKeySteps][4], ds[kHeadTiles][kKeySteps][4];

    MLA_DEVICE Weights(const Block& block, i32 lane) {
#pragma unroll
        for (i32 tile = 0; tile < kHeadTiles; ++tile) {
#pragma unroll
            for (i32 key_step = 0; key_step < kKeySteps; ++key_step) {
                load_weights_trans(p[tile][key_step], block.s.p[0], tile * kMmaRows, key_step, lane);
                load_weights_trans(ds[tile][key_step], block.s.ds[0], tile * kMmaRows, key_step, lane);
            }
        }
    }
};

// From sm_90 on a thread adds four numbers at once, in the order of dkv_position.
#if __CUDA_ARCH__ >= 900
// Quads exchange halves: one instruction adds 128 bytes to each of four rows.
MLA_DEVICE void add_group(const Adder& adder, const Group& sums, const i32* rows, i32 column, i32 lane) {
    const i32 quad = lane / 4;
    float x[kFragmentRows][2][4];
    exchange_quads(x, sums[0], quad % 2);
#pragma unroll
    for (i32 i = 0; i < kFragmentRows * 2; ++i) {
        const i32 row = rows[i / 2 * 8 + quad / 2 * 2 + i % 2];
        if (row == kNoRow) continue;
        adder.add(adder.at(row, column + quad % 2 * 16 + lane % 4 * 4), adder.extractor(row), x[i / 2][i % 2]);
    }
}

MLA_DEVICE void add_rope(const Adder& adder, const float (&sums)[2][4], const i32* rows, i32 column, i32 lane) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 row = rows[r * 8 + lane / 4];
        if (row == kNoRow) continue;
        float four[4] = {sums[0][2 * r], sums[0][2 * r + 1], sums[1][2 * r], sums[1][2 * r + 1]};
        adder.add(adder.at(row, column + lane % 4 * 4), adder.extractor(row), four);
    }
}
#else
template <i32 kTiles>
MLA_DEVICE void add_tiles(const Adder& adder, const float (&sums)[kTiles][4], const i32* rows, i32 column, i32 lane) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 row = rows[r * 8 + lane / 4];
        if (row == kNoRow) continue;
        const i32 extractor = adder.extractor(row);
#pragma unroll
        for (i32 n = 0; n < kTiles; ++n) {
            float two[2] = {sums[n][2 * r], sums[n][2 * r + 1]};
            adder.add(adder.at(row, column + n * kMmaColumns + lane % 4 * 2), extractor, two);
        }
    }
}

MLA_DEVICE void add_group(const Adder& adder, const Group& sums, const i32* rows, i32 column, i32 lane) {
    add_tiles(adder, sums, rows, column, lane);
}

MLA_DEVICE void add_rope(const Adder& adder, const float (&sums)[2][4], const i32* rows, i32 column, i32 lane) {
    add_tiles(adder, sums, rows, column, lane);
}
#endif

// Sums of 16 columns, from tile n on, += weights * rows of 16 heads, for all keys.
template <i32 kColumns>
MLA_DEVICE void add_heads(Group (&sums)[kKeySteps], i32 n, const u32 (&weights)[kKeySteps][4], SmemAddr columns,
                          i32 head, i32 first) {
    u32 b[4];
    load_columns<kColumns>(b, columns, head, first + n);
#pragma unroll
    for (i32 key_step = 0; key_step < kKeySteps; ++key_step) {
        mma_m16n8k16(Element{}, sums[key_step][n], weights[key_step], b[0], b[1]);
        mma_m16n8k16(Element{}, sums[key_step][n + 1], weights[key_step], b[2], b[3]);
    }
}

// 16 keys and 16 RoPE columns, so that a thread has four numbers of a row, as in the other columns. Two warps have the
// first and the second 16 of 32 keys; with 16 keys they take turns.
MLA_DEVICE void run_dkv_rope(const Block& block, const Adder& adder, i32 step, i32 lane) {
    const i32 key_step = (block.warp + step * (2 - kKeySteps)) % 2;
    if (key_step >= kKeySteps) return;
    float sums[2][4] = {};
#pragma unroll
    for (i32 tile = 0; tile < kHeadTiles; ++tile) {
        u32 ds[4], b[4];
        load_weights_trans(ds, block.s.ds[0], tile * kMmaRows, key_step, lane);
        load_rope(b, block.s.q[0], tile * kMmaRows, block, lane);
        mma_m16n8k16(Element{}, sums[0], ds, b[0], b[1]);
        mma_m16n8k16(Element{}, sums[1], ds, b[2], b[3]);
    }
    const i32* rows = &block.s.rows[step % 2][key_step * kMmaDepth];
    add_rope(adder, sums, rows, kHeadDimV + block.warp / 2 * 2 * kMmaColumns, lane);
}

MLA_DEVICE void run_dkv(const Block& block, i32 step) {
    const Storage& s = block.s;
    const i32 lane = block.opaque_lane();
    const Adder adder(block.p);
    const Weights weights(block, lane);
    const SmemAddr q = columns_of<kHeadDimQk>(block, s.q[0], lane),
                   dout = columns_of<kHeadDimV>(block, s.dout[0], lane);
    const i32* rows = s.rows[step % 2];
#pragma unroll
    for (i32 first = 0; first < kValueTiles; first += kGroupTiles) {
        Group sums[kKeySteps] = {};
#pragma unroll
        for (i32 n = 0; n < kGroupTiles; n += 2) {
#pragma unroll
            for (i32 tile = 0; tile < kHeadTiles; ++tile) {
                const i32 head = tile * kMmaRows;
                add_heads<kHeadDimQk>(sums, n, weights.ds[tile], q, head, first);
                add_heads<kHeadDimV>(sums, n, weights.p[tile], dout, head, first);
            }
        }
#pragma unroll
        for (i32 key_step = 0; key_step < kKeySteps; ++key_step) {
            const i32 column = block.warp * kWarpColumns + first * kMmaColumns;
            add_group(adder, sums[key_step], rows + key_step * kMmaDepth, column, lane);
        }
    }
    if (kHasRope) run_dkv_rope(block, adder, step, lane);
}

// ---- dq --------------------------------------------------------------------------------------------------------
MLA_DEVICE void store_dq(const Block& block, const Dq (&dq)[kHeadTiles]) {
    const BackwardParams& p = block.p;
    const i32 lane = block.lane;
#pragma unroll
    for (i32 i = 0; i < kHeadTiles * kFragmentRows; ++i) {
        const i32 tile = i / kFragmentRows, r = i % kFragmentRows;
        const i32 head = tile * kMmaRows + lane / 4 + 8 * r;
        const bool stored = head < block.heads;
        const float keep = block.is_live(head) ? 1.f : 0.f;
        u16* to = p.dq + block.query * p.dq_stride_s_elems + (block.head0 + head) * p.dq_stride_h_elems;
        float x[kValueTiles * 4], rope[2] = {dq[tile].rope[2 * r], dq[tile].rope[2 * r + 1]};
#pragma unroll
        for (i32 j = 0; j < kValueTiles * 4; ++j) x[j] = keep == 0.f ? 0.f : dq[tile].x[j / 4][j % 4];
        store_row(Element{}, to + block.warp * kWarpColumns, x, r, 1.f, stored, lane);
        if (kHasRope && stored) {
            u16* at = to + kHeadDimV + block.warp * kMmaColumns + lane % 4 * 2;
            *reinterpret_cast<u32*>(at) = keep == 0.f ? 0 : cvt_x2(Element{}, rope[0], rope[1]);
        }
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
// One step, and the copies of the next one, if there is one. Copies of this one have been asked for.
MLA_DEVICE void run_step(const Block& block, const Part& part, KeyCopy& copy, Dq (&dq)[kHeadTiles], i32 step,
                         i32 count) {
    const bool more = (step + 1) * kStepKeys < count;
    cp_async_wait_all();
    __syncthreads();  // the keys are stored; the last step's weights and the other stage have been read
    if (kTwoStages && more) {
        copy.copy(block, step + 1);
        copy.look_up(step + 2, count);
    }
    run_scores(block, part, step);
    __syncthreads();
    run_weights(block, step);
    __syncthreads();
    run_dq(block, dq, step);
    if (!kTwoStages && more) {
        __syncthreads();  // the keys have been read
        copy.copy(block, step + 1);
        copy.look_up(step + 2, count);
    }
    run_dkv(block, step);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_backward_mma(const __grid_constant__ BackwardParams p) {
    extern __shared__ __align__(128) u8 smem[];
    auto& s = *reinterpret_cast<Storage*>(smem);
    griddepcontrol_wait();
    const i32 head_blocks = ceil_div(p.h_q, kBlockHeads), head0 = (i32)blockIdx.x % head_blocks * kBlockHeads;
    const Block block{p, s, (i32)blockIdx.x / head_blocks, head0, min(kBlockHeads, p.h_q - head0)};
    const i32 count = p.counts[block.query];

    load_statistics(block);
    __syncthreads();
    copy_query(block);
    KeyCopy copy{p.rows + block.query * p.rows_stride_elems};
    copy.look_up(0, count);
    if (count > 0) copy.copy(block, 0);
    copy.look_up(1, count);

    cp_async_wait_all();
    __syncthreads();
    Part part(block.warp);
    part.hold(s, block.lane);
    Dq dq[kHeadTiles];
#pragma unroll
    for (i32 tile = 0; tile < kHeadTiles; ++tile) dq[tile].clear();
#pragma unroll 1
    for (i32 step = 0; step * kStepKeys < count; ++step) run_step(block, part, copy, dq, step, count);
    store_dq(block, dq);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::sparse_backward
