// Attention of up to 32 query rows to the latent cache with mma.sync, for every GPU since Ampere.
//
//   S = Q K^T * scale           (rows x d_qk) (d_qk x 32) per step of 32 tokens
//   P = exp2(S log2(e) - m)     m: running maximum of each row
//   l = sum of P,  O = P V      (rows x 32) (32 x d_v); V is K's first d_v columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// For dense decode, and for sparse attention: one-token pages, and o = sum p v / (sum p + exp2(sink - m)).
//
// Grid: x = row blocks of all KV heads, y = splits (attention/split_work.cuh). One block per SM iterates over the work
// items of its split. All eight warps do the same work, 32 tokens at a time, between two barriers:
//
//   scores   warp = 16 tokens, a quarter of d  | Q K^T  |         |          | Q K^T of the next step
//   softmax  thread = 2 or 4 tokens of a row   |        | max, P  |          |
//   values   warp = 64 columns, or 32 of 256   |        |         | O += P V |
//   loads    all threads, cp.async             |        | the step that takes the place of the last one ->
//
// Queries stay in registers as A fragments: a warp needs only its quarter of d, so shared memory is left to the keys,
// and a block of 99 KB has most of it in flight. Keys are values, too, read by ldmatrix.trans. Rows of 288 columns are
// padded to whole segments of 64.
#include "attention/mma/few_rows.cuh"
#include "attention/prefetch_inputs.cuh"
#include "ptx/control.cuh"
#include "ptx/load.cuh"

// Keys have RoPE columns unless a variant says otherwise.
#ifndef MLA_HEAD_DIM_QK
#define MLA_HEAD_DIM_QK 576
#endif

namespace mla::attention::mma {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK;
constexpr i32 kSmemBytes = MLA_SMEM_KB * 1024;  // shared memory of a block
static_assert(is_head_dim_qk(kHeadDimQk) || is_narrow_head_dim_qk(kHeadDimQk), "with or without RoPE columns");

// ---- Budget ----------------------------------------------------------------------------------------------------
using Rows = Block<MLA_BLOCK_ROWS>;
using Few = FewRows<Element, Element, MLA_BLOCK_ROWS, kHeadDimQk, 0>;
constexpr i32 kOtherBytes = sizeof(SoftmaxSlots<Few::Softmax>) + 1024;  // barriers and small things, too
constexpr i32 kOctetBytes = padded_row_bytes(kHeadDimQk) * kOctetTokens;
using Ring = KeyRing<kHeadDimQk, (kSmemBytes - kOtherBytes) / kOctetBytes, Few::kStepTokens>;

// ---- Storage ---------------------------------------------------------------------------------------------------
struct Storage {
    KeySlots<Ring> keys;
    SoftmaxSlots<Few::Softmax> softmax;
    Items items;
    float factor[Few::kRows];
    i32 nonfinite_request;  // the request with non-finite values that not all rows see
};
static_assert(sizeof(Storage) <= kSmemBytes, "shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_rows, Few::kRows);

using Out = Output<Element, Few::kRowTiles, Few::kColumns>;

// A thread's state.
struct Math {
    Few::Queries q;
    RingCursor<Ring> keys;
    KeyLoader<Ring> loader;
    SoftmaxRow<Few::Softmax> row;
    i32 warp = uniform_warp(), lane = threadIdx.x % kWarpThreads;
    // In shared memory, where this lane reads keys, values and P, and writes scores; the first two of the ring's start.
    SmemAddr first_keys, first_values, p, scores;

    MLA_DEVICE Math(const Rows& block, Storage& s) : loader(block, s.keys) {
        const i32 row = lane % 8, chunk = warp * Out::kValueTiles;  // of the warp's columns, the first
        first_keys = held(smem_addr(s.keys.octets[0]) + Ring::offset(row, 2 * Few::quarter(warp) + lane / 8 % 2));
        first_values = held(smem_addr(s.keys.octets[0]) + Ring::offset(row, chunk + lane / 16));
        p = held(smem_addr(&s.softmax.p[lane % kMmaRows][lane / 16 * 8]));
        scores = held(smem_addr(&s.softmax.scores[Few::quarter(warp)][lane / 4][token()]));
    }

    MLA_DEVICE i32 token() const { return Few::half(warp) * Few::kScoreTokens + lane % 4 * 2; }
};

// ---- Products --------------------------------------------------------------------------------------------------
// With one row tile, two sums along d take turns, as a product waits for the previous one into the same sum.
constexpr i32 kSums = Few::kRowTiles == 1 ? 2 : 1;
using Scores = float[kSums][Few::kRowTiles][2][4];

// Product `i` of the scores of the warp's 16 tokens, over its quarter of d.
MLA_DEVICE void score(const Math& math, SmemAddr keys, i32 i, Scores& scores) {
    u32 k[4];
    ldmatrix_x4(k, keys + i * kSegmentBytes);
#pragma unroll
    for (i32 tile = 0; tile < Few::kRowTiles; ++tile) {
        float (&sums)[2][4] = scores[i % kSums][tile];
        mma_m16n8k16(Element{}, sums[0], math.q[i][tile], k[0], k[1]);
        mma_m16n8k16(Element{}, sums[1], math.q[i][tile], k[2], k[3]);
    }
}

using PFragments = u32[2][Few::kRowTiles][4];  // of each half of the tokens
constexpr i32 kValueSteps = Out::kValueTiles;  // of 16 columns and 16 tokens each

// O += P V, step `i` of kValueSteps.
MLA_DEVICE void add_values(const PFragments& p, const SmemAddr (&values)[2], i32 i, Out& out) {
    const i32 half = i / (kValueSteps / 2), n = i % (kValueSteps / 2) * 2;
    u32 v[4];
    ldmatrix_x4_trans(v, SmemAddr{values[half].value ^ (u32)(n * kChunkBytes)});
#pragma unroll
    for (i32 tile = 0; tile < Few::kRowTiles; ++tile) {
        mma_m16n8k16(Element{}, out.x[tile][n], p[half][tile], v[0], v[1]);
        mma_m16n8k16(Element{}, out.x[tile][n + 1], p[half][tile], v[2], v[3]);
    }
}

constexpr u32 kOctet = sizeof(KeySlots<Ring>::octets[0]);

// The scores of the step at octet `first`, summed over the warp's quarter of d, into shared memory.
MLA_DEVICE void score_step(const Math& math, i32 first) {
    const SmemAddr keys =
        math.first_keys + (u32)Ring::within(first, 2 * Few::half(math.warp) + math.lane / 16) * kOctet;
    Scores scores = {};
#pragma unroll
    for (i32 i = 0; i < Few::kScoreSteps; ++i) score(math, keys, i, scores);
#pragma unroll
    for (i32 i = 0; i < 2 * Few::kRowTiles; ++i) {
#pragma unroll
        for (i32 n = 0; n < 2; ++n) {
            float pair[2];
#pragma unroll
            for (i32 k = 0; k < 2; ++k) {
                pair[k] = scores[0][i / 2][n][2 * (i % 2) + k];
                if (kSums > 1) pair[k] += scores[kSums - 1][i / 2][n][2 * (i % 2) + k];
            }
            const u32 at = (8 * i * Few::Softmax::kPitch + n * kMmaColumns) * sizeof(float);
            st_shared_v2(math.scores + at, make_float2(pair[0], pair[1]));
        }
    }
}

// The values of the step at octet `first`.
MLA_DEVICE void add_step(Storage& s, const Math& math, i32 first, Out& out) {
    SmemAddr values[2];
    PFragments p;
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
        values[half] = math.first_values + (u32)Ring::within(first, 2 * half + math.lane / 8 % 2) * kOctet;
#pragma unroll
        for (i32 tile = 0; tile < Few::kRowTiles; ++tile) {
            ldmatrix_x4(p[half][tile], math.p + (u32)(tile * sizeof(s.softmax.p[0]) * kMmaRows + half * 32));
        }
    }
#pragma unroll
    for (i32 i = 0; i < kValueSteps; ++i) add_values(p, values, i, out);
}

// ---- Steps -----------------------------------------------------------------------------------------------------
// P of a step whose scores are stored, once all threads have read the previous P.
MLA_DEVICE void weigh(const Rows& block, Storage& s, Math& math, i32 token, bool asks) {
    SoftmaxRow<Few::Softmax>::Scores x;
    // A ring of parts of steps has few bytes on their way: its copies come first.
    if (!Ring::kWholeSteps && asks) math.loader.ask_step(block, s.keys);
    math.row.load_scores(x, s.softmax);
    if (Ring::kWholeSteps && asks) math.loader.ask_step(block, s.keys);  // the place of the last step
    const bool masked = token + Few::kStepTokens > block.item().seen_by_all;
    math.row.add_scores(Element{}, block, s.softmax, x, token, masked,
                        present_bits<Few::Softmax::kTokens>(s.keys, math.keys.first, math.row.first_token()),
                        block.p.scale_log2);
    if (masked &&
        clean_values<Element, Ring, Few::kColumns>(s.keys, math.keys.first, token, block.item().seen_by_all)) {
        s.nonfinite_request = block.item().request;
    }
}

// Adds the values of a step whose P is stored, and computes the scores of the next one.
MLA_DEVICE void multiply_step(Storage& s, Math& math, Out& out, bool is_last) {
    const i32 step = math.keys.first;
    math.keys.advance();
    if (*reinterpret_cast<const u64*>(s.softmax.rescales) != 0) out.rescale(s.softmax.scale, math.lane);
    add_step(s, math, step, out);
    if (is_last) return;
    mbarrier_wait(math.keys.full(s.keys), math.keys.parity);
    score_step(math, math.keys.first);
}

MLA_DEVICE void run_item(const Rows& block, Storage& s, Math& math) {
    const i32 begin = block.begin(), steps = max(0, ceil_div(block.end() - begin, Few::kStepTokens));
    math.loader.begin(block);
    math.loader.fill(block, s.keys, steps);
    math.row.begin();
    Out out;
    out.clear();
    if (steps > 0) {
        load_queries<Few, false>(block, math.q, math.warp, math.lane);
        mbarrier_wait(math.keys.full(s.keys), math.keys.parity);
        score_step(math, math.keys.first);
    }
#pragma unroll 1
    for (i32 step = 0; step < steps; ++step) {
        __syncthreads();  // scores are stored; the last step's values have been read
        const bool asks = math.loader.may_ask(steps, step);
        weigh(block, s, math, begin + step * Few::kStepTokens, asks);
        __syncthreads();  // P is stored
        if (asks) math.loader.look_up();
        multiply_step(s, math, out, step + 1 == steps);
    }
    if (s.nonfinite_request == block.item().request) out.add_nonfinite(block, math.warp, math.lane);
    const float sum = math.row.whole_sum();
    if (math.row.is_first()) {
        s.factor[math.row.row()] = store_statistics(block, math.row.row(), math.row.max, sum, math.row.row_max);
    }
    __syncthreads();
    out.store(block, s.factor, math.warp, math.lane);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_attention_mma_small(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(kSegmentBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    if (threadIdx.x == 0) {
        init_keys(s.keys);
        s.nonfinite_request = -1;
    }
    clear_padding(s.keys);
    prefetch_inputs<ScheduledWork, Few::kScoreSteps>(p);
    griddepcontrol_wait();
    const Rows block(p, s.items);
    Math math(block, s);
    while (block.next()) run_item(block, s, math);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::attention::mma
