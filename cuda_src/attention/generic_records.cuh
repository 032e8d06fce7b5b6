// Attention to FP8 records on the CUDA cores of any GPU, for the kernels that differ in where a request's tokens lie.
//
// A block has 8 query rows and dequantises 16 tokens at a time:
//
//   all warps | fetch, dequantise 16 keys | scores: warp = row, two lanes per token | out: thread = 2 columns, 8 rows |
//
// Keys are fp32 in shared memory: a scale that is no power of two costs nothing in precision.
#pragma once
#include "attention/generic_rows.cuh"
#include "attention/record_tokens.cuh"
#include "attention/split_work.cuh"
#include "ptx/control.cuh"

namespace mla::attention {
// ---- Variant ---------------------------------------------------------------------------------------------------
// Choices of a kernel. Tokens_ is one of attention/record_tokens.cuh.
template <class Element_, class TokenRecord_, class Tokens_>
struct GenericRecords {
    using Element = Element_;
    using TokenRecord = TokenRecord_;
    using Tokens = Tokens_;
    static constexpr i32 kHeadDimQk = kKeyColumns<TokenRecord>;
    static constexpr i32 kChunks = kHeadDimQk / kRecordChunk;
    static constexpr i32 kKeyFloats = kHeadDimQk + 1;  // odd: lanes that read one column of all tokens hit other banks
};

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kGenericThreads = 256;
constexpr i32 kGenericWarps = kGenericThreads / kWarpThreads;
constexpr i32 kGenericRows = kGenericWarps;  // query rows: one per warp
constexpr i32 kGenericTokens = 16;           // tokens per step
constexpr i32 kLanesPerToken = kWarpThreads / kGenericTokens;
static_assert(kTileTokens % kGenericTokens == 0, "a tile is a whole number of steps");
static_assert(kHeadDimV == 2 * kGenericThreads, "a thread has two columns of the output");

// ---- Storage ---------------------------------------------------------------------------------------------------
template <class C>
struct GenericStorage {
    alignas(16) u16 q[kGenericRows][C::kHeadDimQk];
    float k[kGenericTokens][C::kKeyFloats];
    float p[kGenericRows][kGenericTokens];
    bool present[kGenericTokens];  // false: no such token
    float scale[kGenericRows];     // by which the step's new maximum rescales the output so far
    float factor[kGenericRows];    // factor of the result
};

template <class C>
struct GenericBlock : RowBlock<kGenericRows, typename C::Tokens::Work> {
    using Rows = RowBlock<kGenericRows, typename C::Tokens::Work>;
    GenericStorage<C>& s;

    MLA_DEVICE GenericBlock(const DecodeParams& p, GenericStorage<C>& s) : Rows(p), s(s) {}
};

// ---- One step --------------------------------------------------------------------------------------------------
template <class C>
MLA_DEVICE void fetch_query(const GenericBlock<C>& block, const WorkItem& item, i32 warp, i32 lane) {
    using Work = typename C::Tokens::Work;
    const DecodeParams& p = block.p;
    const i32 row = block.row0 + warp;
    const bool exists = row < block.rows_of(item);
    if constexpr (Work::kForms) {
        SplitRow from{nullptr, nullptr};
        if (exists) from = split_query_row(p, Work::of(item), block.kv_head, row);
        copy_row<kHeadDimV>(block.s.q[warp], from.latent, lane);
        if constexpr (C::kHeadDimQk > kHeadDimV) copy_row<kHeadDimRope>(block.s.q[warp] + kHeadDimV, from.rope, lane);
    } else {
        const u16* from = exists ? C::Tokens::query_row(p, item.request, block.kv_head, row) : nullptr;
        copy_row<C::kHeadDimQk>(block.s.q[warp], from, lane);
    }
}

template <class C>
MLA_DEVICE void fetch_keys(const GenericBlock<C>& block, const typename C::Tokens::Work::HeldItem& item, i32 first,
                           i32 end, i32 warp, i32 lane) {
    using TokenRecord = typename C::TokenRecord;
    const RecordLayout usual = token_layout<TokenRecord>(), compact = token_layout<typename TokenRecord::Compact>();
    for (i32 i = warp; i < kGenericTokens && first + i < end; i += kGenericWarps) {
        const auto place = C::Tokens::place(block.p, item, first + i);
        const TokenBytes token = C::Tokens::template bytes<TokenRecord>(block.p, item, first + i, place);
        if (lane == 0) block.s.present[i] = token.data != nullptr;
        if (token.data == nullptr) continue;
        const RecordLayout& layout =
            C::Tokens::template is_compact<TokenRecord>(block.p, item, first + i) ? compact : usual;
        for (i32 chunk = lane; chunk < C::kChunks; chunk += kWarpThreads) {
            float x[kRecordChunk];
            load_token_chunk(layout, token, chunk, x);
#pragma unroll
            for (i32 j = 0; j < kRecordChunk; ++j) block.s.k[i][chunk * kRecordChunk + j] = x[j];
        }
    }
}

// The score of a token, in both of its lanes.
template <class C>
MLA_DEVICE float score_token(const GenericStorage<C>& s, i32 warp, i32 token, i32 half, bool counts) {
    float sum = 0.f;
    if (counts) {
        const u32* q = reinterpret_cast<const u32*>(s.q[warp]);
#pragma unroll 4
        for (i32 i = half; i < C::kHeadDimQk / 2; i += kLanesPerToken) {
            const float2 x = unpack<typename C::Element>(q[i]);
            sum = fmaf(x.x, s.k[token][2 * i], sum);
            sum = fmaf(x.y, s.k[token][2 * i + 1], sum);
        }
    }
    return sum + __shfl_xor_sync(kFullWarp, sum, kGenericTokens);
}

// A token without weight is skipped, since 0 * NaN is not 0; it may also not have been fetched.
template <class C>
MLA_DEVICE void add_values(const GenericStorage<C>& s, float2 (&out)[kGenericRows], i32 tokens, i32 thread) {
#pragma unroll
    for (i32 row = 0; row < kGenericRows; ++row) {
        out[row].x *= s.scale[row];
        out[row].y *= s.scale[row];
    }
    for (i32 token = 0; token < tokens; ++token) {
        const float x = s.k[token][2 * thread], y = s.k[token][2 * thread + 1];
#pragma unroll
        for (i32 row = 0; row < kGenericRows; ++row) {
            const float p = s.p[row][token];
            if (p != 0.f) {
                out[row].x = fmaf(p, x, out[row].x);
                out[row].y = fmaf(p, y, out[row].y);
            }
        }
    }
}

template <class C>
MLA_DEVICE void run_item(const GenericBlock<C>& block, const typename C::Tokens::Work::HeldItem& item) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const i32 token = lane % kGenericTokens, half = lane / kGenericTokens;
    Row row;
    float2 out[kGenericRows];
#pragma unroll
    for (i32 i = 0; i < kGenericRows; ++i) out[i] = make_float2(0.f, 0.f);

    fetch_query(block, item, warp, lane);
    const SeenTokens seen = seen_tokens(block.p, item, block.row0 + warp);
    const i32 end = min(item.tile_end * kTileTokens, item.tokens);
    for (i32 first = item.tile_begin * kTileTokens; first < end; first += kGenericTokens) {
        __syncthreads();  // the previous step's keys have been read
        fetch_keys(block, item, first, end, warp, lane);
        __syncthreads();
        const bool counts = first + token < end && block.s.present[token] &&
                            sees<typename C::Tokens::Work>(block.p, item, seen, block.row0 + warp, first + token);
        const float score = __fmul_rn(score_token(block.s, warp, token, half, counts), block.p.scale_log2);
        float scale;
        const float p = row.add(counts && half == 0 ? score : negative_infinity(), scale);
        if (half == 0) block.s.p[warp][token] = p;
        if (lane == 0) block.s.scale[warp] = scale;
        __syncthreads();
        add_values(block.s, out, min(kGenericTokens, end - first), threadIdx.x);
    }
    if constexpr (kHasValueScale<typename C::TokenRecord>) {
#pragma unroll
        for (float2& x : out) x = make_float2(x.x * block.p.value_scale, x.y * block.p.value_scale);
    }
    store_result<typename C::Element, typename C::Tokens::Work>(block, item, row, out, warp, lane);
    __syncthreads();  // the next work item may overwrite the storage
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
template <class C>
MLA_DEVICE void run_generic_records(const DecodeParams& p, GenericStorage<C>& s) {
    griddepcontrol_wait();
    const GenericBlock<C> block(p, s);
    typename C::Tokens::Work::HeldItem item;
    for (WorkIteratorOf<typename C::Tokens::Work> walk(p, block.split); walk.next(p, item);) run_item(block, item);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::attention

// Facts of a variant, in addition to the facts of its operation; for use in a namespace that uses this one.
#define MLA_GENERIC_RECORDS_FACTS(Records)                                               \
    static_assert(sizeof(GenericStorage<Records>) <= 48 * 1024, "static shared memory"); \
    MLA_FACT(threads, kGenericThreads);                                                  \
    MLA_FACT(block_m, kGenericRows);                                                     \
    MLA_RECORD_FACT(Records::TokenRecord)
