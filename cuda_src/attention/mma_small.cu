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
// Queries stay in registers as A fragments: a warp needs its quarter of d only, so shared memory is left to the keys,
// and a block of 99 KB has most of it in flight. Keys are values, too, read by ldmatrix.trans. Rows of 288 columns are
// padded to whole segments of 64.
#include "attention/mma/few_rows.cuh"
#include "attention/prefetch_inputs.cuh"
#include "ptx/control.cuh"

// Keys have RoPE columns unless a variant says otherwise.
#ifndef MLA_HEAD_DIM_QK
#define MLA_HEAD_DIM_QK 576
#endif

namespace mla::attention::mma {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK;
constexpr i32 kSmemBytes = MLA_SMEM_KB * 1024;  // what a block may have
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
    i32 nonfinite_request;  // whose values that not all rows see were not all finite
};
static_assert(sizeof(Storage) <= kSmemBytes, "shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_rows, Few::kRows);

// What a thread holds of a work item.
struct Math {
    Few::Queries q;
    RingCursor<Ring> keys;
    KeyLoader<Ring> loader;
    SoftmaxRow<Few::Softmax> row;
    i32 warp = uniform_warp(), lane = threadIdx.x % kWarpThreads;
};

// ---- Kernel ----------------------------------------------------------------------------------------------------
MLA_DEVICE void run_item(const Rows& block, Storage& s, Math& math) {
    const i32 begin = block.begin(), steps = max(0, ceil_div(block.end() - begin, Few::kStepTokens));
    math.loader.begin(block);
    math.loader.fill(block, s.keys, steps);
    if (steps > 0) load_queries<Few, false>(block, math.q, math.warp, math.lane);
    math.row.begin();
    Output<Element, Few::kRowTiles, Few::kColumns> out;
    out.clear();
#pragma unroll 1
    for (i32 step = 0; step < steps; ++step) {
        const i32 token = begin + step * Few::kStepTokens;
        mbarrier_wait(math.keys.full(s.keys), math.keys.parity);
        score<Few, Ring>(s.softmax, s.keys, math.keys.first, math.q, NoFactors{}, math.warp, math.lane);
        __syncthreads();  // the scores are there; the values of the last step have been read
        const bool asks = math.loader.may_ask(steps, step);
        if (asks) math.loader.ask_step(block, s.keys);
        const bool masked = token + Few::kStepTokens > block.item().seen_by_all;
        math.row.add_step(Element{}, block, s.softmax, token, masked,
                          present_bits<Ring>(s.keys, math.keys.first, math.row.first_token()));
        if (masked &&
            clean_values<Element, Ring, Few::kColumns>(s.keys, math.keys.first, token, block.item().seen_by_all)) {
            s.nonfinite_request = block.item().request;
        }
        __syncthreads();  // P is there
        add_values<Few, Ring>(s.softmax, s.keys, math.keys.first, out, math.warp, math.lane);
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
    clear_padding(s.keys);
    prefetch_inputs<ScheduledWork, Few::kScoreSteps>(p);
    griddepcontrol_wait();
    const Rows block(p, s.items);
    Math math;
    while (block.next()) run_item(block, s, math);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::attention::mma
