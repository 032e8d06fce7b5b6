// Sparse MLA decode from FP8 records on the CUDA cores of any GPU: the plain baseline.
//
//   s = q k^T * scale,   p = exp2(s log2(e) - m),   o = sum p v / (sum p + exp2(sink - m)),   lse = ln 2 (m + log2 sum
//   p)
//
// To the schedule each query is a request whose tokens are its list (sparse_decode/lists.cu).
//
// Grid: x = blocks of 8 heads, y = splits (attention/split_work.cuh). A block dequantises 16 tokens at a time:
//
//   all warps | fetch, dequantise 16 keys | scores: warp = head, two lanes per token | out: thread = 2 columns, 8 heads
//   |
//
// Keys are fp32 in shared memory: a scale that is no power of two costs nothing in precision.
#include "attention/generic_rows.cuh"
#include "ptx/control.cuh"
#include "sparse_decode/token_record.cuh"

namespace mla::sparse_decode {
using namespace attention;

// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;

using TokenRecord = MLA_RECORD;
constexpr i32 kChunks = TokenRecord::kLatentChunks + kRopeChunks;
constexpr i32 kHeadDimQk = kChunks * kRecordChunk;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kBlockM = kWarps;  // heads: one per warp
constexpr i32 kTokens = 16;      // of one step
constexpr i32 kLanesPerToken = kWarpThreads / kTokens;
constexpr i32 kKeyFloats = kHeadDimQk + 1;  // odd: lanes that read one column of all tokens hit different banks
static_assert(kTileTokens % kTokens == 0, "a tile is a whole number of steps");
static_assert(kHeadDimV == 2 * kThreads, "a thread has two columns of the output");

// ---- Storage ---------------------------------------------------------------------------------------------------
struct Storage {
    alignas(16) u16 q[kBlockM][kHeadDimQk];
    float k[kTokens][kKeyFloats];
    float p[kBlockM][kTokens];
    float scale[kBlockM];   // by which the step's new maximum rescales the output so far
    float factor[kBlockM];  // what the result is multiplied by
};
static_assert(sizeof(Storage) <= 48 * 1024, "static shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(block_m, kBlockM);
MLA_RECORD_FACT(TokenRecord);

struct Block {
    const DecodeParams& p;
    Storage& s;
    i32 split, kv_head;
    i32 row0, rows;
};

MLA_DEVICE RecordLayout token_layout() {
    RecordLayout layout{};
    layout.kind = kE4m3, layout.rope_kind = kBfloat16;
    layout.latent_chunks = TokenRecord::kLatentChunks, layout.rope_chunks = kRopeChunks;
    layout.group_chunks = TokenRecord::kGroupChunks, layout.scale_kind = TokenRecord::kScale;
    layout.rope_offset = TokenRecord::kRopeOffset;
    return layout;
}

// ---- One step --------------------------------------------------------------------------------------------------
MLA_DEVICE void fetch_query(const Block& block, i32 request, i32 warp, i32 lane) {
    const DecodeParams& p = block.p;
    const i32 head = block.row0 + warp;
    const u16* from = head < block.rows ? p.q + request * p.q_stride_b_elems + head * p.q_stride_h_elems : nullptr;
    copy_row<kHeadDimQk>(block.s.q[warp], from, lane);
}

MLA_DEVICE void fetch_keys(const Block& block, const WorkItem& item, i32 first, i32 end, i32 warp, i32 lane) {
    const TokenBytes* list = reinterpret_cast<const TokenBytes*>(block.p.block_table);
    list += item.request * block.p.table_stride_b_elems;
    const RecordLayout layout = token_layout();
    for (i32 i = warp; i < kTokens && first + i < end; i += kWarps) {
        const TokenBytes token = list[first + i];
        for (i32 chunk = lane; chunk < kChunks; chunk += kWarpThreads) {
            float x[kRecordChunk];
            load_token_chunk(layout, token, chunk, x);
#pragma unroll
            for (i32 j = 0; j < kRecordChunk; ++j) block.s.k[i][chunk * kRecordChunk + j] = x[j];
        }
    }
}

// The score of a token, in both of its lanes.
MLA_DEVICE float score_token(const Storage& s, i32 warp, i32 token, i32 half, bool counts) {
    float sum = 0.f;
    if (counts) {
        const u32* q = reinterpret_cast<const u32*>(s.q[warp]);
#pragma unroll 4
        for (i32 i = half; i < kHeadDimQk / 2; i += kLanesPerToken) {
            const float2 x = unpack<Element>(q[i]);
            sum = fmaf(x.x, s.k[token][2 * i], sum);
            sum = fmaf(x.y, s.k[token][2 * i + 1], sum);
        }
    }
    return sum + __shfl_xor_sync(kFullWarp, sum, kTokens);
}

// A token without weight is skipped, since 0 * NaN is not 0; it may also not have been fetched.
MLA_DEVICE void add_values(const Storage& s, float2 (&out)[kBlockM], i32 tokens, i32 thread) {
#pragma unroll
    for (i32 row = 0; row < kBlockM; ++row) {
        out[row].x *= s.scale[row];
        out[row].y *= s.scale[row];
    }
    for (i32 token = 0; token < tokens; ++token) {
        const float x = s.k[token][2 * thread], y = s.k[token][2 * thread + 1];
#pragma unroll
        for (i32 row = 0; row < kBlockM; ++row) {
            const float p = s.p[row][token];
            if (p != 0.f) {
                out[row].x = fmaf(p, x, out[row].x);
                out[row].y = fmaf(p, y, out[row].y);
            }
        }
    }
}

MLA_DEVICE void run_item(const Block& block, const WorkItem& item) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const i32 token = lane % kTokens, half = lane / kTokens;
    Row row;
    float2 out[kBlockM];
#pragma unroll
    for (i32 i = 0; i < kBlockM; ++i) out[i] = make_float2(0.f, 0.f);

    fetch_query(block, item.request, warp, lane);
    const i32 end = min(item.tile_end * kTileTokens, item.tokens);
    for (i32 first = item.tile_begin * kTileTokens; first < end; first += kTokens) {
        __syncthreads();  // the previous step's keys have been read
        fetch_keys(block, item, first, end, warp, lane);
        __syncthreads();
        const bool counts = first + token < end;
        const float score = score_token(block.s, warp, token, half, counts) * block.p.scale_log2;
        float scale;
        const float p = row.add(counts && half == 0 ? score : negative_infinity(), scale);
        if (half == 0) block.s.p[warp][token] = p;
        if (lane == 0) block.s.scale[warp] = scale;
        __syncthreads();
        add_values(block.s, out, min(kTokens, end - first), threadIdx.x);
    }
    store_result<Element>(block, item, row, out, warp, lane);
    __syncthreads();  // the next work item may overwrite the storage
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    mla_sparse_decode_generic(const __grid_constant__ DecodeParams p) {
    __shared__ Storage s;
    griddepcontrol_wait();
    Block block{p, s, (i32)blockIdx.y, 0, (i32)blockIdx.x * kBlockM, p.h_q};
    WorkItem item;
    for (WorkIterator walk(p, block.split); walk.next(p, item);) run_item(block, item);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::sparse_decode
