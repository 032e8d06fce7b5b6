// Dense MLA decode on the CUDA cores of any GPU: the fallback where no faster kernel fits, and the plain baseline.
//
//   s = q k^T * scale,   p = exp2(s log2(e) - m),   o = sum p v / sum p,   lse = ln 2 (m + log2 sum p)
//
// Also for sparse attention: one-token pages, and o = sum p v / (sum p + exp2(sink - m)).
//
// Grid: x = blocks of 8 query rows of all KV heads, y = splits (attention/split_work.cuh).
// A block fetches 32 tokens at a time into shared memory:
//
//   all warps   | fetch 32 keys |  scores: warp = row, lane = token | out: thread = 2 columns, 8 rows | fetch ...
//
// With optional inputs (attention/query_groups.cuh) a split holds groups of queries.
//
// Everything is fp32 after the load; P is not rounded. Any token stride is supported.
#include "attention/generic_rows.cuh"
#include "ptx/control.cuh"
#include "tile/elements.cuh"

// Dense decode names no width.
#ifndef MLA_HEAD_DIM_QK
#define MLA_HEAD_DIM_QK 576
#endif

namespace mla::attention {
// ---- Variant ---------------------------------------------------------------------------------------------------
#ifdef MLA_FORMS
using Params = DecodeFormParams;
using Work = GroupedWork;
MLA_DECODE_FORM_FACTS();
#else
using Params = DecodeParams;
using Work = ScheduledWork;
MLA_DECODE_FACTS();
#endif

using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK;
static_assert(is_head_dim_qk(kHeadDimQk) || is_narrow_head_dim_qk(kHeadDimQk), "with or without RoPE columns");
constexpr i32 kColumnThreads = head_dim_v(kHeadDimQk) / 2;  // threads with two output columns each
// An odd number of words per row: lanes that read the same column of 32 tokens hit 32 banks.
constexpr i32 kKeyElems = kHeadDimQk + 2;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kBlockM = kWarps;                 // rows: one per warp
constexpr i32 kTokens = kWarpThreads;           // of one step: one per lane
constexpr i32 kColumns = kHeadDimV / kThreads;  // of the output, per thread: 2; narrower values are of some threads
static_assert(kTileTokens % kTokens == 0, "a tile is a whole number of steps");
static_assert(kColumns == 2, "a thread reads its columns as one word");

// ---- Storage ---------------------------------------------------------------------------------------------------
struct Storage {
    alignas(16) u16 q[kBlockM][kHeadDimQk];
    u16 k[kTokens][kKeyElems];
    alignas(16) float p[kBlockM][kTokens];
    float scale[kBlockM];   // by which the step's new maximum rescales the output so far
    float factor[kBlockM];  // factor of the result
};

struct Block {
    const DecodeParams& p;
    Storage& s;
    i32 split, kv_head;
    i32 row0, rows;  // first row of the KV head in this block; rows of the KV head
};

static_assert(sizeof(Storage) <= 48 * 1024, "static shared memory");
MLA_FACT(threads, kThreads);
MLA_FACT(block_m, kBlockM);

// ---- Fetching --------------------------------------------------------------------------------------------------
MLA_DEVICE void fetch_query(const Block& block, const WorkItem& item, i32 warp, i32 lane) {
    const DecodeParams& p = block.p;
    const i32 group = p.h_q / p.h_kv, row = block.row0 + warp;
    if constexpr (Work::kForms) {
        const GroupItem& of_group = GroupedWork::of(item);
        SplitRow from{nullptr, nullptr};
        if (row < block.rows - of_group.lacking_rows) from = split_query_row(p, of_group, block.kv_head, row);
        copy_row<kHeadDimV>(block.s.q[warp], from.latent, lane);
        if constexpr (kHeadDimQk > kHeadDimV) copy_row<kHeadDimRope>(block.s.q[warp] + kHeadDimV, from.rope, lane);
        return;
    }
    const u16* from = nullptr;
    if (row < block.rows) {
        from = p.q + item.request * p.q_stride_b_elems + (row / group) * p.q_stride_s_elems +
               (i64)(block.kv_head * group + row % group) * p.q_stride_h_elems;
    }
    copy_row<kHeadDimQk>(block.s.q[warp], from, lane);
}

// True if some row sees a token of the request.
template <class Work>
MLA_DEVICE bool is_wanted(const WorkItem& item, i32 token) {
    if constexpr (Work::kForms) return Work::of(item).first_token <= token;
    return true;
}

// Returns the tokens whose page is in the pool (bit = token of the step), as far as this warp fetched them.
MLA_DEVICE u32 fetch_keys(const Block& block, const WorkItem& item, i32 first, i32 warp, i32 lane) {
    u32 present = 0;
    for (i32 i = warp; i < kTokens; i += kWarps) {
        const u16* key = nullptr;
        if (first + i < item.tokens && is_wanted<Work>(item, first + i)) {
            key = cached_row(block.p, item.request, block.kv_head, first + i);
        }
        copy_row<kHeadDimQk>(block.s.k[i], key, lane);
        present |= (u32)(key != nullptr) << i;
    }
    return present;
}

// ---- One step --------------------------------------------------------------------------------------------------
// A hidden token has a weight of exactly 0 and is skipped, since 0 * NaN is not 0.
MLA_DEVICE void add_values(const Storage& s, float2 (&out)[kBlockM], i32 thread) {
#pragma unroll
    for (i32 row = 0; row < kBlockM; ++row) {
        out[row].x *= s.scale[row];
        out[row].y *= s.scale[row];
    }
    if (thread >= kColumnThreads) return;
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

// A template: so the compiler places `present` behind the kernel's storage, and not before it, which costs registers.
template <class Work>
MLA_DEVICE void run_item(const Block& block, const WorkItem& item) {
    const DecodeParams& p = block.p;
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const SeenTokens seen = seen_tokens(p, item, block.row0 + warp);
    Row row;
    float2 out[kBlockM];
#pragma unroll
    for (i32 i = 0; i < kBlockM; ++i) out[i] = make_float2(0.f, 0.f);

    __shared__ u32 present;

    fetch_query(block, item, warp, lane);
    const i32 end = min(item.tile_end * kTileTokens, item.tokens);
    for (i32 first = item.tile_begin * kTileTokens; first < end; first += kTokens) {
        if (threadIdx.x == 0) present = 0;
        __syncthreads();  // the previous step's keys have been read
        const u32 fetched = fetch_keys(block, item, first, warp, lane);
        if (lane == 0) atomicOr(&present, fetched);
        __syncthreads();
        const bool counts = first + lane < item.tokens && ((present >> lane) & 1) &&
                            sees<Work>(p, item, seen, block.row0 + warp, first + lane);
        const float score = counts ? __fmul_rn(dot<Element>(block.s.q[warp], block.s.k[lane], kHeadDimQk), p.scale_log2)
                                   : negative_infinity();
        float scale;
        block.s.p[warp][lane] = row.add(score, scale);
        if (lane == 0) block.s.scale[warp] = scale;
        __syncthreads();
        add_values(block.s, out, threadIdx.x);
    }
    store_result<Element, Work, kColumnThreads>(block, item, row, out, warp, lane);
    __syncthreads();  // the next work item may overwrite the storage
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
// Two blocks per SM: without the bound the compiler aims at four and spills on some targets.
extern "C" __global__ void __launch_bounds__(kThreads, 2) mla_attention_generic(const __grid_constant__ Params p) {
    __shared__ Storage s;
    griddepcontrol_wait();
    const i32 rows = query_rows(p), row_blocks = ceil_div(rows, kBlockM);
    Block block{p, s, (i32)blockIdx.y, (i32)blockIdx.x / row_blocks, (i32)blockIdx.x % row_blocks * kBlockM, rows};
    Work::HeldItem item;
    for (WorkIteratorOf<Work> walk(p, block.split); walk.next(p, item);) run_item<Work>(block, item);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::attention
