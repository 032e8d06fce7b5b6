// Dense MLA decode on the CUDA cores of any GPU: the fallback where no faster kernel fits, and the plain baseline.
//
//   s = q k^T * scale,   p = exp2(s log2(e) - m),   o = sum p v / sum p,   lse = ln 2 (m + log2 sum p)
//
// Sparse attention too: pages of one token, and o = sum p v / (sum p + exp2(sink - m)).
//
// Grid: x = blocks of 8 query rows of all KV heads, y = parts of the schedule (attention/split_work.cuh).
// A block fetches 32 tokens at a time into shared memory:
//
//   all warps   | fetch 32 keys |  scores: warp = row, lane = token | out: thread = 2 columns, 8 rows | fetch ...
//
// Everything is fp32 after the load; P is not rounded. Any stride is honoured, a token at a time.
#include "attention/decode_output.cuh"
#include "attention/dtype_variant.cuh"
#include "ptx/control.cuh"
#include "tile/elements.cuh"
#include "tile/warp.cuh"

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kBlockM = kWarps;                 // rows: one a warp
constexpr i32 kTokens = kWarpThreads;           // of one step: one a lane
constexpr i32 kColumns = kHeadDimV / kThreads;  // of the output, a thread: 2
// An odd number of words a row: lanes that read the same column of 32 tokens meet 32 banks.
constexpr i32 kKeyElems = kHeadDimQk + 2;
static_assert(kTileTokens % kTokens == 0, "a tile is a whole number of steps");
static_assert(kColumns == 2, "a thread reads its columns as one word");

// ---- Storage ---------------------------------------------------------------------------------------------------
struct Storage {
    alignas(16) u16 q[kBlockM][kHeadDimQk];
    u16 k[kTokens][kKeyElems];
    alignas(16) float p[kBlockM][kTokens];
    float scale[kBlockM];   // what the step's new maximum does to the output so far
    float factor[kBlockM];  // what the result is multiplied by
};
static_assert(sizeof(Storage) <= 48 * 1024, "static shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(block_m, kBlockM);

struct Block {
    const DenseDecodeParams& p;
    Storage& s;
    i32 part, kv_head;
    i32 row0, rows;  // first row of the KV head in this block; rows of the KV head
};

// ---- Fetching --------------------------------------------------------------------------------------------------
MLA_DEVICE void fetch_query(const Block& block, i32 request, i32 warp, i32 lane) {
    const DenseDecodeParams& p = block.p;
    const i32 group = p.h_q / p.h_kv, row = block.row0 + warp;
    const u16* from = nullptr;
    if (row < block.rows) {
        from = p.q + request * p.q_stride_b_elems + (row / group) * p.q_stride_s_elems +
               (i64)(block.kv_head * group + row % group) * p.q_stride_h_elems;
    }
    copy_row<kHeadDimQk>(block.s.q[warp], from, lane);
}

// Returns the tokens whose page is in the pool (bit = token of the step), as far as this warp fetched them.
MLA_DEVICE u32 fetch_keys(const Block& block, const Fragment& fragment, i32 first, i32 warp, i32 lane) {
    u32 present = 0;
    for (i32 i = warp; i < kTokens; i += kWarps) {
        const u16* key = nullptr;
        if (first + i < fragment.tokens) key = cached_row(block.p, fragment.request, block.kv_head, first + i);
        copy_row<kHeadDimQk>(block.s.k[i], key, lane);
        present |= (u32)(key != nullptr) << i;
    }
    return present;
}

// ---- One step --------------------------------------------------------------------------------------------------
// One row's online softmax, by its warp. The maximum starts at a finite value: no difference of infinities.
constexpr float kLowestMax = -3.0e38f;

struct Row {
    float max = kLowestMax, sum = 0.f;

    // Takes one score a lane, gives the lane's probability and what the earlier ones are to be scaled by.
    MLA_DEVICE float add(float score, float& scale) {
        const float old_max = max;
        max = fmaxf(max, warp_max(score));
        scale = exp2f(old_max - max);
        const float p = exp2f(score - max);
        sum = sum * scale + warp_sum(p);
        return p;
    }
};

// A hidden token weighs exactly 0 and is passed over, since 0 * NaN is not 0.
MLA_DEVICE void add_values(const Storage& s, float2 (&out)[kBlockM], i32 thread) {
#pragma unroll
    for (i32 row = 0; row < kBlockM; ++row) {
        out[row].x *= s.scale[row];
        out[row].y *= s.scale[row];
    }
    for (i32 token = 0; token < kTokens; ++token) {
        const float2 v = unpack<Element>(reinterpret_cast<const u32*>(s.k[token])[thread]);
#pragma unroll
        for (i32 row = 0; row < kBlockM; ++row) {
            const float p = s.p[row][token];
            if (p != 0.f) {
                out[row].x = fmaf(p, v.x, out[row].x);
                out[row].y = fmaf(p, v.y, out[row].y);
            }
        }
    }
}

// ---- Result ----------------------------------------------------------------------------------------------------
MLA_DEVICE void store_columns(const Block& block, const Fragment& fragment, i32 row, i32 column, float2 x) {
    const DenseDecodeParams& p = block.p;
    if (fragment.slot != kWholeRequest) {
        float* to = p.partial_out + workspace_row(p, fragment.slot, block.kv_head, row) * kHeadDimV + column;
        *reinterpret_cast<float2*>(to) = x;
        return;
    }
    const i64 at = out_offset(p, fragment.request, block.kv_head, row) + column;
    if (p.out_is_fp32) {
        *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = x;
    } else {
        *reinterpret_cast<u32*>(static_cast<u16*>(p.out) + at) =
            (u32)Element::from_float(x.y) << 16 | Element::from_float(x.x);
    }
}

MLA_DEVICE void store_result(const Block& block, const Fragment& fragment, const Row& row_state,
                             const float2 (&out)[kBlockM], i32 warp, i32 lane) {
    const i32 my_row = block.row0 + warp;
    if (lane == 0 && my_row < block.rows) {
        const float max = row_state.max, sum = row_state.sum;
        const float lse2 = sum == 0.f ? negative_infinity() : max + log2f(sum);
        const float top = max == kLowestMax ? negative_infinity() : max;
        store_row_lse(block.p, fragment, block.kv_head, my_row, lse2);
        store_row_max(block.p, fragment, block.kv_head, my_row, with_nan_of(sum, top));
        block.s.factor[warp] = output_factor(block.p, fragment, block.kv_head, my_row, max, sum);
    }
    __syncthreads();
    for (i32 row = 0; row < min(kBlockM, block.rows - block.row0); ++row) {
        const float factor = block.s.factor[row];
        float2 x = out[0];
#pragma unroll
        for (i32 i = 1; i < kBlockM; ++i) {
            if (row == i) x = out[i];
        }
        store_columns(block, fragment, block.row0 + row, threadIdx.x * kColumns,
                      make_float2(x.x * factor, x.y * factor));
    }
}

MLA_DEVICE void run_fragment(const Block& block, const Fragment& fragment) {
    const DenseDecodeParams& p = block.p;
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const i32 visible = min(visible_tokens(p, block.row0 + warp, fragment.tokens), fragment.tokens);
    Row row;
    float2 out[kBlockM];
#pragma unroll
    for (i32 i = 0; i < kBlockM; ++i) out[i] = make_float2(0.f, 0.f);
    __shared__ u32 present;

    fetch_query(block, fragment.request, warp, lane);
    const i32 end = min(fragment.tile_end * kTileTokens, fragment.tokens);
    for (i32 first = fragment.tile_begin * kTileTokens; first < end; first += kTokens) {
        if (threadIdx.x == 0) present = 0;
        __syncthreads();  // also: the last step's keys are read
        const u32 fetched = fetch_keys(block, fragment, first, warp, lane);
        if (lane == 0) atomicOr(&present, fetched);
        __syncthreads();
        const bool counts = first + lane < visible && ((present >> lane) & 1);
        const float score =
            counts ? dot<Element>(block.s.q[warp], block.s.k[lane], kHeadDimQk) * p.scale_log2 : negative_infinity();
        float scale;
        block.s.p[warp][lane] = row.add(score, scale);
        if (lane == 0) block.s.scale[warp] = scale;
        __syncthreads();
        add_values(block.s, out, threadIdx.x);
    }
    store_result(block, fragment, row, out, warp, lane);
    __syncthreads();  // the next fragment may overwrite the storage
}

// Two blocks an SM: left to itself, the compiler aims at four and spills on some targets.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    mla_dense_decode_generic(const __grid_constant__ DenseDecodeParams p) {
    __shared__ Storage s;
    griddepcontrol_wait();
    const i32 rows = query_rows(p), row_blocks = ceil_div(rows, kBlockM);
    Block block{p, s, (i32)blockIdx.y, (i32)blockIdx.x / row_blocks, (i32)blockIdx.x % row_blocks * kBlockM, rows};
    Fragment fragment;
    for (FragmentWalk walk(p, block.part); walk.next(p, fragment);) run_fragment(block, fragment);
    griddepcontrol_launch_dependents();
}
