// Attention of 64 query rows to the latent cache with mma.sync, for every GPU since Ampere.
//
//   S = Q K^T * scale           (64 x 576) (576 x 16) per step of 16 tokens
//   P = exp2(S log2(e) - m)     m: running maximum of each row
//   l = sum of P,  O = P V      (64 x 16) (16 x 512); V is K's first 512 columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// For dense decode, and for sparse attention: one-token pages, and o = sum p v / (sum p + exp2(sink - m)).
//
// Grid: x = row blocks of all KV heads, y = splits (attention/split_work.cuh). One block per SM iterates over the work
// items of its split. All eight warps do the same work, step by step:
//
//   scores   warp = 32 rows, a quarter of d      S(i+1), sent ->
//   values   warp = all rows, 64 columns                        O += P(i) V(i), first half     | second half
//   softmax  warp = 8 rows                                                      S(i+1) is there | P(i+1), written ->
//
// The value products thus hide the exchange of scores through shared memory. Each step has two barriers, arrived at
// early and waited for late: `sent` for every warp's partial scores, and `written` for P.
//
// Queries stay in registers as A fragments, a quarter of d in each warp: 64 rows of them would not fit into 99 KB. The
// rows of a fragment are permuted, so that a warp's first fragment row is its own 8 rows: it sends only the others.
#include "attention/mma/step_loader.cuh"
#include "attention/online_softmax.cuh"
#include "ptx/control.cuh"
#include "ptx/load.cuh"
#include "ptx/matrix.cuh"

// Keys have RoPE columns unless a variant says otherwise.
#ifndef MLA_HEAD_DIM_QK
#define MLA_HEAD_DIM_QK 576
#endif

namespace mla::attention::mma {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK;
constexpr i32 kSmemBytes = MLA_SMEM_KB * 1024;  // shared memory of a block
static_assert(is_head_dim_qk(kHeadDimQk), "with or without RoPE columns");

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kRows = 64, kRowTiles = kRows / kMmaRows;
constexpr i32 kStepTokens = 16, kStepTiles = kStepTokens / kMmaColumns;
constexpr i32 kQuarters = 4;  // of d; four warps score the same rows
constexpr i32 kScoreRows = kRows / (kWarps / kQuarters), kScoreTiles = kScoreRows / kMmaRows;
constexpr i32 kOwnRows = kRows / kWarps;                                    // of the softmax, a warp
constexpr i32 kScoreSteps = kHeadDimQk * (i32)sizeof(u16) / kSegmentBytes;  // products along d: one in each segment
static_assert(kScoreRows == kQuarters * kOwnRows, "each warp that scores some rows owns a quarter of them");
static_assert(kWarpColumns * (i32)sizeof(u16) == kSegmentBytes, "a warp's values are a segment of each row");
static_assert(kQuarters * kMmaDepth * (i32)sizeof(u16) == kSegmentBytes, "a segment has a product for each quarter");
static_assert(kStepTokens == kMmaDepth && kStepTiles == 2, "a step is one product along tokens");

constexpr i32 kOtherBytes = 3 * kWarps * kWarpThreads * 16 + 2 * kRows * kStepTokens * 2 + sizeof(TokenRows) + 3072;
constexpr i32 kOctetBytes = kHeadDimQk * (i32)sizeof(u16) * kOctetTokens;
using Ring = KeyRing<kHeadDimQk, (kSmemBytes - kOtherBytes) / kOctetBytes / 2 * 2, kStepTokens>;

// ---- Storage ---------------------------------------------------------------------------------------------------
struct Storage {
    KeySlots<Ring> keys;
    TokenRows rows;
    float4 partial[kWarps][kQuarters - 1][kWarpThreads];  // scores for a warp from each other one
    alignas(16) u32 p[2][kRowTiles][4][kWarpThreads];     // as A fragments; steps take turns
    float scale[2][kRows];                                // factor of earlier sums under a step's new maximum
    alignas(8) u8 rescales[2][kWarps];                    // 1: a warp's rows have such a factor
    // barrier   arrives (count)   waits       first phase
    // sent      half's warps (4)  the same    blocked
    // written   all warps (8)     all warps   blocked
    MBarrier sent[kWarps / kQuarters], written;
    Items items;
    float factor[kRows], row_max[kRows];
    i64 query_rows[kRows], out_rows[kRows];  // where the block's rows lie in a request, in elements
    i32 nonfinite_request;                   // the request with non-finite values that not all rows see
};
static_assert(sizeof(Storage) <= kSmemBytes, "shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_rows, kRows);

using Rows = Block<kRows>;

// The lane, pinned in a register. Values derived from it cost an instruction or two, while reading the special register
// would stall several times per step.
MLA_DEVICE i32 held_lane() {
    i32 lane = threadIdx.x % kWarpThreads;
    opaque(lane);
    __builtin_assume(lane >= 0 && lane < kWarpThreads);
    return lane;
}

// A thread's state of a work item, except the output.
struct Math {
    u32 q[kScoreSteps][kScoreTiles][4];
    float own[2 * kStepTiles];  // scores of its row, of the warp's 8, for four tokens: see token()
    float max, sum;             // of that row: running maximum; the thread's share of the sum
    i32 first_masked;           // first of the item's steps with tokens that some row does not see
    StepCursor<Ring> keys;      // of the step that is scored next
    StepLoader<Ring> loader;
    u32 phase = 0;  // of `sent` and `written`, which complete in turn, once a step
    i32 warp = uniform_warp(), lane = held_lane();
    SmemAddr first_keys, first_values;  // this lane's ldmatrix addresses of a step at the start of the ring

    MLA_DEVICE explicit Math(const Storage& s) {
        const i32 row = lane % 8;
        first_keys = smem_addr(s.keys.octets[lane / 16]) + Ring::offset(row, 2 * quarter() + lane / 8 % 2);
        const SmemAddr values = smem_addr(s.keys.octets[lane / 8 % 2]);
        i32 held = (i32)(values + Ring::offset(row, warp * kSegmentChunks + lane / 16)).value;
        opaque(held);  // not to be computed again in each step
        first_values = SmemAddr{(u32)held};
    }

    MLA_DEVICE i32 quarter() const { return (u32)warp % kQuarters; }  // of d
    MLA_DEVICE i32 half() const { return (u32)warp / kQuarters; }     // of the rows
    MLA_DEVICE i32 row() const { return warp * kOwnRows + lane / 4; }
    // Half of the lanes have the two pairs of tokens in the other order: so pairs are sent, and quadruples received,
    // without bank conflicts.
    MLA_DEVICE i32 flip() const { return lane / 8 % 2; }
    MLA_DEVICE i32 token(i32 i) const { return (i / 2 ^ flip()) * kMmaColumns + lane % 4 * 2 + i % 2; }
};

// ---- Scores ----------------------------------------------------------------------------------------------------
// Position c of the fragments, 8 rows each, holds those that warp c ^ quarter of the half owns.
MLA_DEVICE void load_queries(const Rows& block, const Storage& s, Math& math) {
    const u16* queries = block.p.q + block.item().request * block.p.q_stride_b_elems;
    i32 lane = math.lane;
    opaque(lane);  // no address is worth a register from item to item
#pragma unroll
    for (i32 c = 0; c < kQuarters; ++c) {
        const i32 row = math.half() * kScoreRows + (c ^ math.quarter()) * kOwnRows + lane / 4;
        const u16* from = queries + s.query_rows[row] + math.quarter() * kMmaDepth + lane % 4 * 2;
#pragma unroll
        for (i32 step = 0; step < kScoreSteps; ++step) {
#pragma unroll
            for (i32 k = 0; k < 2; ++k) {
                const u32 word = *reinterpret_cast<const u32*>(from + step * (kSegmentBytes / 2) + k * kMmaColumns);
                math.q[step][c / 2][c % 2 + 2 * k] = block.row0 + row < block.rows ? word : 0;
            }
        }
    }
}

using Scores = float[kScoreTiles][kStepTiles][4];

// S of the next step over the warp's quarter of d. All rows except the warp's own are sent.
MLA_DEVICE void score(Storage& s, Math& math, Scores& scores) {
    const SmemAddr keys = math.first_keys + (u32)math.keys.first * (u32)sizeof(s.keys.octets[0]);
#pragma unroll
    for (i32 i = 0; i < kScoreTiles * kStepTiles * 4; ++i) (&scores[0][0][0])[i] = 0.f;
    mbarrier_wait(step_barrier(s.keys, math.keys.first), math.keys.parity);
#pragma unroll
    for (i32 step = 0; step < kScoreSteps; ++step) {
        u32 k[4];
        ldmatrix_x4(k, keys + step * kSegmentBytes);
#pragma unroll
        for (i32 tile = 0; tile < kScoreTiles; ++tile) {
            mma_m16n8k16(Element{}, scores[tile][0], math.q[step][tile], k[0], k[1]);
            mma_m16n8k16(Element{}, scores[tile][1], math.q[step][tile], k[2], k[3]);
        }
    }
}

MLA_DEVICE void send(Storage& s, Math& math, const Scores& scores) {
#pragma unroll
    for (i32 i = 0; i < 2 * kStepTiles; ++i) {
        math.own[i] = math.flip() == 0 ? scores[0][i / 2][i % 2] : scores[0][1 - i / 2][i % 2];
    }
    i32 pair = math.lane * kStepTiles + math.flip();
    opaque(pair);  // no address is worth a register across the loop
#pragma unroll
    for (i32 c = 1; c < kQuarters; ++c) {
        const float (&of)[kStepTiles][4] = scores[c / 2];
        const i32 r = 2 * (c % 2), to = math.half() * kQuarters + (c ^ math.quarter());
#pragma unroll
        for (i32 n = 0; n < kStepTiles; ++n) {
            reinterpret_cast<float2*>(s.partial[to][c - 1])[pair ^ n] = make_float2(of[n][r], of[n][r + 1]);
        }
    }
    release(s.sent[math.half()], math.lane);
}

// ---- Softmax ---------------------------------------------------------------------------------------------------
using Partial = float4[kQuarters - 1];

MLA_DEVICE void load_partial(const Storage& s, const Math& math, Partial& x) {
    const SmemAddr mine = smem_addr(s.partial[math.warp]) + (u32)(math.lane * sizeof(float4));
#pragma unroll
    for (i32 i = 0; i < kQuarters - 1; ++i) x[i] = ld_shared_v4(mine + i * (i32)sizeof(s.partial[0][0]));
}

MLA_DEVICE void add_partial(Math& math, const Partial& x) {
#pragma unroll
    for (i32 i = 0; i < kQuarters - 1; ++i) {
        math.own[0] += x[i].x, math.own[1] += x[i].y, math.own[2] += x[i].z, math.own[3] += x[i].w;
    }
}

// The largest score of the thread's row, in base 2.
MLA_DEVICE float largest_score(const Rows& block, const Math& math) {
    const float (&x)[2 * kStepTiles] = math.own;
    return quad_max(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]))) * block.p.scale_log2;
}

// Moves the running maximum lazily (attention/online_softmax.cuh); returns the factor for earlier sums. Branch-free, so
// that the compiler can move products past it.
MLA_DEVICE float move_max(Math& math, float largest) {
    const float next = is_far_above(largest, math.max) ? largest : math.max;
    const float factor = next == math.max ? 1.f : ex2_approx(math.max - next);
    math.max = next;
    math.sum *= factor;
    return factor;
}

// P of the warp's rows, as A fragments of the product with values. Rounding each product, see kHugeMax, costs no
// more than a branch.
MLA_DEVICE void write_p(const Rows& block, Storage& s, Math& math, i32 buffer, float factor) {
    u32(&to)[4][kWarpThreads] = s.p[buffer][(u32)math.warp / 2];
#pragma unroll
    for (i32 pair = 0; pair < kStepTiles; ++pair) {
        const float p0 = ex2_approx(__fmul_rn(math.own[2 * pair], block.p.scale_log2) - math.max);
        const float p1 = ex2_approx(__fmul_rn(math.own[2 * pair + 1], block.p.scale_log2) - math.max);
        math.sum += p0 + p1;
        to[2 * (pair ^ math.flip()) + (u32)math.warp % 2][math.lane] = cvt_x2(Element{}, p0, p1);
    }
    if (math.lane % 4 == 0) s.scale[buffer][math.row()] = factor;
    const bool rescales = __any_sync(kFullWarp, factor != 1.f);
    if (math.lane == 0) s.rescales[buffer][math.warp] = rescales;
}

// ---- Values ----------------------------------------------------------------------------------------------------
using PFragments = u32[kRowTiles][4];

MLA_DEVICE void load_p(PFragments& p, const Storage& s, i32 buffer, i32 lane) {
    const SmemAddr from = smem_addr(s.p[buffer]) + (u32)(lane * kChunkBytes);
#pragma unroll
    for (i32 tile = 0; tile < kRowTiles; ++tile) ldmatrix_x4(p[tile], from + tile * (i32)sizeof(s.p[0][0]));
}

// This lane's address of V^T of the last step: the warp's first 16 columns. The others are 32 bytes apart, swizzled.
MLA_DEVICE SmemAddr value_addr(const Storage& s, const Math& math) {
    return math.first_values + (u32)math.keys.back(1) * (u32)sizeof(s.keys.octets[0]);
}

// V^T of the warp's columns 8 n to 8 n + 15.
MLA_DEVICE void load_values(u32 (&v)[4], SmemAddr values, i32 n) {
    ldmatrix_x4_trans(v, SmemAddr{values.value ^ (u32)(n * kChunkBytes)});
}

// O += P V of these columns.
MLA_DEVICE void add_values(const PFragments& p, const u32 (&v)[4], i32 n, Output<Element, kRowTiles>& out) {
#pragma unroll
    for (i32 tile = 0; tile < kRowTiles; ++tile) {
        mma_m16n8k16(Element{}, out.x[tile][n], p[tile], v[0], v[1]);
        mma_m16n8k16(Element{}, out.x[tile][n + 1], p[tile], v[2], v[3]);
    }
}

// ---- Steps -----------------------------------------------------------------------------------------------------
// True if some rows do not see all of step `step`.
MLA_DEVICE bool hides(const Storage& s, const Math& math, i32 step) {
    return (step >= math.first_masked) | (present_bits(s.rows, step) != kAllPresent);
}

// Scores of step `step` become -inf where a row does not see the token; so does a sum of such parts. Cold.
MLA_DEVICE void hide(const Rows& block, const Storage& s, const Math& math, i32 step, Scores& scores) {
    const u64 present = present_bits(s.rows, step);
    const i32 first = math.lane % 4 * 2, token = block.begin() + step * kStepTokens + first;
    u32 seen_bits = 0;
#pragma unroll 1
    for (i32 c = 0; c < kQuarters; ++c) {
        const i32 row = math.half() * kScoreRows + (c ^ math.quarter()) * kOwnRows + math.lane / 4;
        const SeenTokens seen = seen_tokens(block.p, block.item(), block.row0 + row);
#pragma unroll
        for (i32 i = 0; i < 2 * kStepTiles; ++i) {
            const i32 at = i / 2 * kMmaColumns + i % 2, place = first + at;
            const bool is_there = present >> (place / Ring::kWarpTokens * 8 + place % Ring::kWarpTokens) & 1;
            seen_bits |= (u32)(is_there && seen.contain(token + at)) << (c * 2 * kStepTiles + i);
        }
    }
#pragma unroll
    for (i32 c = 0; c < kQuarters; ++c) {
#pragma unroll
        for (i32 i = 0; i < 2 * kStepTiles; ++i) {
            float& score = scores[c / 2][i / 2][c % 2 * 2 + i % 2];
            if (!(seen_bits >> (c * 2 * kStepTiles + i) & 1)) score = negative_infinity();
        }
    }
}

// Values of step `step` that are not finite become 0 where not every row sees them, once all warps have scored them.
MLA_DEVICE void clean(const Rows& block, Storage& s, const Math& math, i32 step) {
    if (step < math.first_masked) return;
    __syncthreads();
    const i32 token = block.begin() + step * kStepTokens;
    if (clean_values<Element, Ring>(s.keys, math.keys.first, token, block.item().seen_by_all)) {
        s.nonfinite_request = block.item().request;
    }
}

// The true maximum, where it is wanted.
MLA_DEVICE void keep_row_max(const Rows& block, Storage& s, const Math& math, float largest) {
    if (block.p.max_logits == nullptr || math.lane % 4 != 0) return;
    s.row_max[math.row()] = fmaxf(s.row_max[math.row()], largest);
}

// The values of step `step`, and the scores of the next one.
MLA_DEVICE void run_step(const Rows& block, Storage& s, Math& math, Output<Element, kRowTiles>& out, i32 step,
                         i32 steps) {
    Scores scores;
    score(s, math, scores);
    const bool hides_some = hides(s, math, step + 1);
    // P of this step; also, the last partial scores have been received, and the values of the last step been read.
    mbarrier_wait(s.written, math.phase);
    if (hides_some) hide(block, s, math, step + 1, scores);
    const bool rescales = *reinterpret_cast<const u64*>(s.rescales[step & 1]) != 0;
    const SmemAddr values = value_addr(s, math);
    PFragments p;
    load_p(p, s, step & 1, math.lane);
    u32 v[4];
    load_values(v, values, 0);
    send(s, math, scores);
    if (rescales) out.rescale(s.scale[step & 1], math.lane);
    // Copies mix with the products, which leave room for them.
    const i32 free = math.keys.back(2);
    const StepCopies copies =
        math.loader.after(block, s.keys, s.rows, math.warp * kWarpThreads + math.lane, free, step, steps);
#pragma unroll
    for (i32 n = 0; n < kValueTiles / 2; n += 2) {
        add_values(p, v, n, out);
        load_values(v, values, n + 2);
#pragma unroll
        for (i32 round = n; round < (n == 0 ? 2 : math.loader.kRounds); ++round) math.loader.copy(copies, round);
    }
    if (copies.due) math.loader.finish(s.keys, free);
    math.phase ^= 1;
    // Work that the end of a step rarely needs, decided here so that the branch there waits for nothing.
    i32 seldom = (step + 1 >= math.first_masked) | StepLoader<Ring>::looks_up(step);
    opaque(seldom);
    mbarrier_wait(s.sent[math.half()], math.phase);
    // From here on no branch: sums and the softmax mix with the products.
    Partial partial;
    load_partial(s, math, partial);
    add_values(p, v, kValueTiles / 2, out);
    add_partial(math, partial);
    load_values(v, values, kValueTiles / 2 + 2);
    const float largest = largest_score(block, math), factor = move_max(math, largest);
    keep_row_max(block, s, math, largest);
    add_values(p, v, kValueTiles / 2 + 2, out);
    write_p(block, s, math, ~step & 1, factor);
    if (seldom != 0) {
        clean(block, s, math, step + 1);
        math.loader.look_up(block, s.rows, step, math.warp);
    }
    release(s.written, math.lane);
    math.keys.advance();
}

MLA_DEVICE void first_scores(const Rows& block, Storage& s, Math& math) {
    Scores scores;
    score(s, math, scores);
    if (hides(s, math, 0)) hide(block, s, math, 0, scores);
    send(s, math, scores);
    mbarrier_wait(s.sent[math.half()], math.phase);
    Partial partial;
    load_partial(s, math, partial);
    add_partial(math, partial);
    const float largest = largest_score(block, math), factor = move_max(math, largest);
    write_p(block, s, math, 0, factor);
    clean(block, s, math, 0);
    release(s.written, math.lane);
    keep_row_max(block, s, math, largest);
    math.keys.advance();
}

MLA_DEVICE void last_values(Storage& s, Math& math, Output<Element, kRowTiles>& out, i32 step) {
    mbarrier_wait(s.written, math.phase);
    math.phase ^= 1;
    PFragments p;
    load_p(p, s, step & 1, math.lane);
    if (*reinterpret_cast<const u64*>(s.rescales[step & 1]) != 0) out.rescale(s.scale[step & 1], math.lane);
    const SmemAddr values = value_addr(s, math);
#pragma unroll
    for (i32 n = 0; n < kValueTiles; n += 2) {
        u32 v[4];
        load_values(v, values, n);
        add_values(p, v, n, out);
    }
}

MLA_DEVICE void store_item(const Rows& block, Storage& s, const Math& math, Output<Element, kRowTiles>& out) {
    if (s.nonfinite_request == block.item().request) out.add_nonfinite(block, math.warp, math.lane);
    const float sum = quad_sum(math.sum);
    if (math.lane % 4 == 0) {
        s.factor[math.row()] = store_statistics(block, math.row(), math.max, sum, s.row_max[math.row()]);
    }
    __syncthreads();
    i32 lane = math.lane;
    opaque(lane);  // as in load_queries
    out.store(block, s.factor, math.warp, lane,
              [&](i32 row) { return block.item().request * block.p.out_stride_b_elems + s.out_rows[row]; });
}

MLA_DEVICE void run_item(const Rows& block, Storage& s, Math& math) {
    const i32 steps = max(0, ceil_div(block.end() - block.begin(), kStepTokens));
    math.loader.begin(block, s.keys, s.rows, math.keys, steps);
    if (math.lane % 4 == 0) s.row_max[math.row()] = negative_infinity();
    math.max = kLowestMax, math.sum = 0.f;
    math.first_masked = max(0, block.item().seen_by_all - block.begin()) / kStepTokens;
    Output<Element, kRowTiles> out;
    out.clear();
    if (steps > 0) {
        load_queries(block, s, math);
        first_scores(block, s, math);
#pragma unroll 1
        for (i32 step = 0; step + 1 < steps; ++step) run_step(block, s, math, out, step, steps);
        last_values(s, math, out, steps - 1);
    }
    store_item(block, s, math, out);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1) mla_attention_mma(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(kSegmentBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    if (threadIdx.x == 0) {
        init_keys(s.keys);
        for (MBarrier& sent : s.sent) mbarrier_init(sent, kQuarters);
        mbarrier_init(s.written, kWarps);
        s.nonfinite_request = -1;
    }
    griddepcontrol_wait();
    const Rows block(p, s.items);
    // Row offsets take divisions: done once, not at both ends of each item. `next` is a barrier.
    if (threadIdx.x < kRows) {
        const i32 row = min(block.row0 + (i32)threadIdx.x, block.rows - 1), group = p.h_q / p.h_kv;
        s.query_rows[threadIdx.x] =
            (row / group) * p.q_stride_s_elems + query_head(p, block.kv_head, row) * p.q_stride_h_elems;
        s.out_rows[threadIdx.x] = out_offset(p, 0, block.kv_head, row);
    }
    Math math(s);
    while (block.next()) run_item(block, s, math);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::attention::mma
