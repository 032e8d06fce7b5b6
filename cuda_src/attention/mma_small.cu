// Attention of up to 32 query rows to the latent cache with mma.sync, for every GPU since Ampere.
//
//   S = Q K^T * scale           (rows x 576) (576 x 32) per step of 32 tokens
//   P = exp2(S log2(e) - m)     m: running maximum of each row
//   l = sum of P,  O = P V      (rows x 32) (32 x 512); V is K's first 512 columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// For dense decode, and for sparse attention: one-token pages, and o = sum p v / (sum p + exp2(sink - m)).
//
// Grid: x = row blocks of all KV heads, y = splits (attention/split_work.cuh). One block per SM iterates over the work
// items of its split. All eight warps do the same work, 32 tokens at a time, between two barriers:
//
//   scores   warp = 16 tokens, a quarter of d  | Q K^T  |         |          | Q K^T of the next step
//   softmax  thread = 2 or 4 tokens of a row   |        | max, P  |          |
//   values   warp = 64 columns                 |        |         | O += P V |
//   loads    all threads, cp.async             |        | the step that takes the place of the last one ->
//
// Queries stay in registers as A fragments: a warp needs its quarter of d only, so shared memory is left to the keys,
// and a block of 99 KB has most of it in flight. Keys are values, too, read by ldmatrix.trans.
#include "attention/mma/softmax.cuh"
#include "ptx/control.cuh"
#include "ptx/matrix.cuh"

// Keys have RoPE columns unless a variant says otherwise.
#ifndef MLA_HEAD_DIM_QK
#define MLA_HEAD_DIM_QK 576
#endif

namespace mla::attention::mma {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kRows = MLA_BLOCK_ROWS, kHeadDimQk = MLA_HEAD_DIM_QK;
constexpr i32 kSmemBytes = MLA_SMEM_KB * 1024;  // what a block may have
static_assert(is_head_dim_qk(kHeadDimQk), "with or without RoPE columns");

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kStepTokens = 32;
constexpr i32 kRowTiles = kRows / kMmaRows;
constexpr i32 kScoreTokens = 16;                                            // of a warp
constexpr i32 kScoreSteps = kHeadDimQk * (i32)sizeof(u16) / kSegmentBytes;  // products along d: one in each segment
static_assert(kWarpColumns * (i32)sizeof(u16) == kSegmentBytes, "a warp's values are a segment of each row");
static_assert(kQuarters * kMmaDepth * (i32)sizeof(u16) == kSegmentBytes, "a segment has a product for each quarter");
static_assert(kWarps == kQuarters * (kStepTokens / kScoreTokens), "a warp scores 16 tokens over a quarter of d");

using Softmax = SoftmaxLayout<kRows, kStepTokens>;
constexpr i32 kOtherBytes = sizeof(SoftmaxSlots<Softmax>) + 1024;  // barriers and small things, too
constexpr i32 kOctetBytes = kHeadDimQk * (i32)sizeof(u16) * kOctetTokens;
using Ring = KeyRing<kHeadDimQk, (kSmemBytes - kOtherBytes) / kOctetBytes, kStepTokens>;

// ---- Storage ---------------------------------------------------------------------------------------------------
struct Storage {
    KeySlots<Ring> keys;
    SoftmaxSlots<Softmax> softmax;
    Items items;
    float factor[kRows];
    i32 nonfinite_request;  // whose values that not all rows see were not all finite
};
static_assert(sizeof(Storage) <= kSmemBytes, "shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_rows, kRows);

using Rows = Block<kRows>;

// What a thread holds of a work item.
struct Math {
    u32 q[kScoreSteps][kRowTiles][4];
    RingCursor<Ring> keys;
    KeyLoader<Ring> loader;
    SoftmaxRow<Softmax> row;
    i32 warp = uniform_warp(), lane = threadIdx.x % kWarpThreads;

    MLA_DEVICE i32 quarter() const { return warp % kQuarters; }  // of d
    MLA_DEVICE i32 half() const { return warp / kQuarters; }     // of the step's tokens
};

// ---- Scores ----------------------------------------------------------------------------------------------------
// The block's rows, as A fragments; past the KV head's rows, zeros.
MLA_DEVICE void load_queries(const Rows& block, Math& math) {
#pragma unroll
    for (i32 i = 0; i < 2 * kRowTiles; ++i) {
        const i32 row = i * 8 + math.lane / 4;
        const u16* from = block.query(row, math.quarter() * kMmaDepth + math.lane % 4 * 2);
#pragma unroll
        for (i32 step = 0; step < kScoreSteps; ++step) {
#pragma unroll
            for (i32 k = 0; k < 2; ++k) {
                const u32 word = *reinterpret_cast<const u32*>(from + step * (kSegmentBytes / 2) + k * kMmaColumns);
                math.q[step][i / 2][i % 2 + 2 * k] = block.row0 + row < block.rows ? word : 0;
            }
        }
    }
}

// S of the warp's 16 tokens, over its quarter of d, to shared memory.
MLA_DEVICE void score(Storage& s, const Math& math) {
    float scores[kRowTiles][2][4] = {};
    const i32 lane = math.lane, octet = Ring::position(math.keys.first, 2 * math.half() + lane / 16);
    const SmemAddr keys = smem_addr(s.keys.octets[octet]) + Ring::offset(lane % 8, 2 * math.quarter() + lane / 8 % 2);
#pragma unroll
    for (i32 step = 0; step < kScoreSteps; ++step) {
        u32 k[4];
        ldmatrix_x4(k, keys + step * kSegmentBytes);
#pragma unroll
        for (i32 tile = 0; tile < kRowTiles; ++tile) {
            mma_m16n8k16(Element{}, scores[tile][0], math.q[step][tile], k[0], k[1]);
            mma_m16n8k16(Element{}, scores[tile][1], math.q[step][tile], k[2], k[3]);
        }
    }
#pragma unroll
    for (i32 i = 0; i < 2 * kRowTiles; ++i) {
        float* to = s.softmax.scores[math.quarter()][8 * i + lane / 4] + math.half() * kScoreTokens + lane % 4 * 2;
#pragma unroll
        for (i32 n = 0; n < 2; ++n) {
            const float* pair = scores[i / 2][n] + 2 * (i % 2);
            *reinterpret_cast<float2*>(to + n * kMmaColumns) = make_float2(pair[0], pair[1]);
        }
    }
}

// ---- Values ----------------------------------------------------------------------------------------------------
// O += P V of the warp's columns.
MLA_DEVICE void add_values(Storage& s, const Math& math, Output<Element, kRowTiles>& out) {
    const i32 lane = math.lane;
    if (*reinterpret_cast<const u64*>(s.softmax.rescales) != 0) out.rescale(s.softmax.scale, lane);
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
        u32 p[kRowTiles][4];
#pragma unroll
        for (i32 tile = 0; tile < kRowTiles; ++tile) {
            ldmatrix_x4(p[tile], smem_addr(&s.softmax.p[tile * kMmaRows + lane % 16][half * 16 + lane / 16 * 8]));
        }
        const i32 octet = Ring::position(math.keys.first, 2 * half + lane / 8 % 2), row = lane % 8;
        const SmemAddr values =
            smem_addr(s.keys.octets[octet]) + (u32)(row * Ring::kRowBytes + math.warp * kSegmentBytes);
#pragma unroll
        for (i32 n = 0; n < kValueTiles; n += 2) {
            u32 v[4];
            ldmatrix_x4_trans(v, values + (u32)((n + lane / 16) ^ row) * kChunkBytes);
#pragma unroll
            for (i32 tile = 0; tile < kRowTiles; ++tile) {
                mma_m16n8k16(Element{}, out.x[tile][n], p[tile], v[0], v[1]);
                mma_m16n8k16(Element{}, out.x[tile][n + 1], p[tile], v[2], v[3]);
            }
        }
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
MLA_DEVICE void run_item(const Rows& block, Storage& s, Math& math) {
    const i32 begin = block.begin(), steps = max(0, ceil_div(block.end() - begin, kStepTokens));
    math.loader.begin(block);
    math.loader.fill(block, s.keys, steps);
    if (steps > 0) load_queries(block, math);
    math.row.begin();
    Output<Element, kRowTiles> out;
    out.clear();
#pragma unroll 1
    for (i32 step = 0; step < steps; ++step) {
        const i32 token = begin + step * kStepTokens;
        mbarrier_wait(math.keys.full(s.keys), math.keys.parity);
        score(s, math);
        __syncthreads();  // the scores are there; the values of the last step have been read
        const bool asks = math.loader.may_ask(steps, step);
        if (asks) math.loader.ask_step(block, s.keys);
        const bool masked = token + kStepTokens > block.item().seen_by_all;
        math.row.add_step(Element{}, block, s.softmax, token, masked,
                          present_bits<Ring>(s.keys, math.keys.first, math.row.first_token()));
        if (masked && clean_values<Element, Ring>(s.keys, math.keys.first, token, block.item().seen_by_all)) {
            s.nonfinite_request = block.item().request;
        }
        __syncthreads();  // P is there
        add_values(s, math, out);
        if (asks) math.loader.look_up(block);
        math.keys.advance();
    }
    if (s.nonfinite_request == block.item().request) out.add_nonfinite(block, math.warp, math.lane);
    const float sum = math.row.whole_sum();
    if (math.row.is_first()) {
        s.factor[math.row.row()] = store_statistics(block, math.row.row(), math.row.max, sum, math.row.row_max);
    }
    __syncthreads();
    out.store(block, s.factor, math.warp, math.lane);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_attention_mma_small(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(kSegmentBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    if (threadIdx.x == 0) {
        init_keys(s.keys);
        s.nonfinite_request = -1;
    }
    griddepcontrol_wait();
    const Rows block(p, s.items);
    Math math;
    while (block.next()) run_item(block, s, math);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::attention::mma
