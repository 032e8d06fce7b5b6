// Gradients of sparse MLA on the CUDA cores of any GPU: the fallback where no faster kernel fits.
//
//   P  = exp2(scale log2(e) q k^T - lse2),   dS = P * (dO v^T - delta) * scale,   v = k[:512]
//   dq = dS k,   dkv += dS^T q, and in the first 512 columns P^T dO
//
// Grid: x = queries, and for each of them blocks of 8 heads. A block fetches 16 of the query's keys at a time:
//
//   fetch 16 keys | P, dS: warp = head, half a warp computes q k^T, the other dO v^T | dq, dkv: thread = 2 columns
//
// Everything is fp32 after the load; P and dS are not rounded. What 8 heads contribute to a key is added to memory
// once.
#include "ptx/control.cuh"
#include "sparse_backward/params.cuh"
#include "tile/binned_sum.cuh"
#include "tile/elements.cuh"

namespace mla::sparse_backward {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK;
constexpr bool kDeterministic = MLA_DETERMINISTIC;
static_assert(is_head_dim_qk(kHeadDimQk), "with or without RoPE columns");

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = kHeadDimQk / 2;  // one per 2 columns
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kBlockHeads = 8;  // one per warp; a ninth warp has columns only
constexpr i32 kKeys = kWarpThreads / 2;
// An odd number of words per row: lanes that read the same column of 16 keys hit 16 banks. The two halves of a warp
// read words of q and dO at once: one word more keeps those in different banks, too.
constexpr i32 kKeyElems = kHeadDimQk + 2;
constexpr i32 kDoutElems = kHeadDimV + 2;
static_assert(kWarps >= kBlockHeads, "a warp for each head");

// ---- Storage ---------------------------------------------------------------------------------------------------
struct Storage {
    alignas(16) u16 q[kBlockHeads][kHeadDimQk];
    u16 dout[kBlockHeads][kDoutElems];
    u16 k[kKeys][kKeyElems];
    float p[kBlockHeads][kKeys];
    float ds[kBlockHeads][kKeys];
    i32 rows[kKeys];
};
static_assert(sizeof(Storage) <= 48 * 1024, "static shared memory");

MLA_BACKWARD_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(block_heads, kBlockHeads);

struct Block {
    const BackwardParams& p;
    Storage& s;
    i64 query;
    i32 head0, heads;

    MLA_DEVICE i64 statistics_row(i32 head) const { return query * p.h_q + head0 + head; }
};

// Returns true if a head has a gradient at all: a head with an infinite lse has none, whatever its rows contain.
MLA_DEVICE bool is_live(const Block& block, i32 head) {
    return head < block.heads && block.p.lse2[block.statistics_row(head)] != -negative_infinity();
}

// ---- Fetching --------------------------------------------------------------------------------------------------
// Heads without a gradient become zeros, since 0 * NaN is not 0.
MLA_DEVICE void fetch_query(const Block& block, i32 warp, i32 lane) {
    const BackwardParams& p = block.p;
    for (i32 head = warp; head < kBlockHeads; head += kWarps) {
        const bool live = is_live(block, head);
        const i64 at = block.head0 + head;
        const u16* q = p.q + block.query * p.q_stride_s_elems + at * p.q_stride_h_elems;
        const u16* dout = p.dout + block.query * p.dout_stride_s_elems + at * p.dout_stride_h_elems;
        copy_row<kHeadDimQk>(block.s.q[head], live ? q : nullptr, lane);
        copy_row<kHeadDimV>(block.s.dout[head], live ? dout : nullptr, lane);
    }
}

MLA_DEVICE void fetch_keys(const Block& block, const i32* rows, i32 keys, i32 warp, i32 lane) {
    for (i32 i = warp; i < kKeys; i += kWarps) {
        const i32 row = i < keys ? rows[i] : kNoRow;
        copy_row<kHeadDimQk>(block.s.k[i], row == kNoRow ? nullptr : block.p.kv + row * block.p.kv_stride_s_elems,
                             lane);
        if (lane == 0) block.s.rows[i] = row;
    }
}

// ---- P and dS --------------------------------------------------------------------------------------------------
struct Statistics {
    float lse2, delta;
};

// One head, by its warp: lane i of the lower half has the score of key i, lane i of the upper half its dP.
MLA_DEVICE void make_weights(const Block& block, const Statistics& statistics, i32 head, i32 lane) {
    Storage& s = block.s;
    const i32 key = lane % kKeys;
    const bool is_score = lane < kKeys;
    float x = dot<Element>(is_score ? s.q[head] : s.dout[head], s.k[key], kHeadDimV);
    if (is_score) x += dot<Element>(s.q[head] + kHeadDimV, s.k[key] + kHeadDimV, kHeadDimQk - kHeadDimV);
    const float d_weight = __shfl_down_sync(kFullWarp, x, kKeys);
    if (!is_score) return;
    const bool counts = s.rows[key] != kNoRow && statistics.lse2 != -negative_infinity();
    const float weight = counts ? exp2f(x * block.p.scale_log2 - statistics.lse2) : 0.f;
    s.p[head][key] = weight;
    s.ds[head][key] = counts ? weight * (d_weight - statistics.delta) * block.p.scale : 0.f;
}

// ---- Products --------------------------------------------------------------------------------------------------
// A thread's 2 columns, kept over all keys: q and dO as loaded, and the sums of dq.
struct Columns {
    u32 q[kBlockHeads], dout[kBlockHeads];
    float2 dq[kBlockHeads];
};

MLA_DEVICE void load_columns(Columns& columns, const Storage& s, i32 thread) {
#pragma unroll
    for (i32 head = 0; head < kBlockHeads; ++head) {
        columns.q[head] = reinterpret_cast<const u32*>(s.q[head])[thread];
        columns.dout[head] = thread < kHeadDimV / 2 ? reinterpret_cast<const u32*>(s.dout[head])[thread] : 0;
        columns.dq[head] = make_float2(0.f, 0.f);
    }
}

MLA_DEVICE void add_scaled(float2& sum, float factor, const float2& x) {
    sum.x = fmaf(factor, x.x, sum.x);
    sum.y = fmaf(factor, x.y, sum.y);
}

MLA_DEVICE void add_to_memory(const BackwardParams& p, i32 row, i32 column, float2 x) {
    float* to = p.dkv + (i64)row * kHeadDimQk + column;
    if (kDeterministic) {
        const Bins bins{__float_as_int(p.extractors[p.s_kv]), __float_as_int(p.extractors[row])};
        const i32 bin = bins.index(fmaxf(fabsf(x.x), fabsf(x.y)));
        x = make_float2(bins.round(x.x, bin), bins.round(x.y, bin));
        to += bin * ((i64)p.s_kv * kHeadDimQk);
    }
    atomicAdd(to, x.x);
    atomicAdd(to + 1, x.y);
}

// A weight of exactly 0 is skipped, since 0 * NaN is not 0.
MLA_DEVICE void add_products(const Block& block, Columns& columns, i32 keys, i32 thread) {
    const Storage& s = block.s;
    for (i32 key = 0; key < keys; ++key) {
        const float2 k = unpack<Element>(reinterpret_cast<const u32*>(s.k[key])[thread]);
        float2 dkv = make_float2(0.f, 0.f);
#pragma unroll
        for (i32 head = 0; head < kBlockHeads; ++head) {
            const float ds = s.ds[head][key];
            if (ds != 0.f) add_scaled(columns.dq[head], ds, k);
            add_scaled(dkv, ds, unpack<Element>(columns.q[head]));
            add_scaled(dkv, s.p[head][key], unpack<Element>(columns.dout[head]));
        }
        add_to_memory(block.p, s.rows[key], 2 * thread, dkv);
    }
}

MLA_DEVICE void store_dq(const Block& block, const Columns& columns, i32 thread) {
    const BackwardParams& p = block.p;
#pragma unroll
    for (i32 head = 0; head < kBlockHeads; ++head) {
        if (head >= block.heads) break;
        u16* to = p.dq + block.query * p.dq_stride_s_elems + (block.head0 + head) * p.dq_stride_h_elems;
        const float2 x = columns.dq[head];
        reinterpret_cast<u32*>(to)[thread] = (u32)Element::from_float(x.y) << 16 | Element::from_float(x.x);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    mla_sparse_backward_generic(const __grid_constant__ BackwardParams p) {
    __shared__ Storage s;
    griddepcontrol_wait();
    const i32 thread = threadIdx.x, lane = thread % kWarpThreads, warp = thread / kWarpThreads;
    const i32 head_blocks = ceil_div(p.h_q, kBlockHeads), head0 = (i32)blockIdx.x % head_blocks * kBlockHeads;
    const Block block{p, s, blockIdx.x / head_blocks, head0, min(kBlockHeads, p.h_q - head0)};
    const i32* rows = p.rows + block.query * p.rows_stride_elems;
    const i32 count = p.counts[block.query];

    fetch_query(block, warp, lane);
    Statistics statistics{-negative_infinity(), 0.f};
    if (warp < kBlockHeads && is_live(block, warp)) {
        const i64 at = block.statistics_row(warp);
        statistics = Statistics{p.lse2[at], p.delta[at]};
    }
    __syncthreads();
    Columns columns;
    load_columns(columns, s, thread);
    for (i32 first = 0; first < count; first += kKeys) {
        const i32 keys = min(kKeys, count - first);
        __syncthreads();  // the previous step's keys and weights have been read
        fetch_keys(block, rows + first, keys, warp, lane);
        __syncthreads();
        if (warp < kBlockHeads) make_weights(block, statistics, warp, lane);
        __syncthreads();
        add_products(block, columns, keys, thread);
    }
    store_dq(block, columns, thread);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::sparse_backward
