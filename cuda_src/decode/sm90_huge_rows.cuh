// Rows with huge scores, for the seesaw. Its loops over tiles have no instruction to spare for them and ignore them.
// Once all results are stored, the query warps, which are idle by then, recompute such rows in plain code.
//
// A branch in the loops costs 3 to 6 %; code for huge rows in the math warpgroups changes the instruction order of the
// loops, which costs 4 to 7 % (decode of 128 heads on an H200). A division here has the same effect, because its slow
// path is a call.
#pragma once
#include "attention/decode_output.cuh"
#include "attention/online_softmax.cuh"
#include "decode/sm90_load.cuh"
#include "tile/elements.cuh"
#include "tile/warp.cuh"

namespace mla::decode {
constexpr i32 kPairs = 4;  // pairs of columns per lane: the query warps have few registers
constexpr i32 kColumnsAtOnce = 2 * kPairs * kWarpThreads;

// How a row is computed again: its score with a key, by one thread, rounded as a product; and what becomes of two
// columns of its result before they are stored.
struct PlainRows {
    template <class Tile>
    MLA_DEVICE static float score(const DecodeParams& p, const WorkItem& item, i32 kv_head, i32 row, const u16* key) {
        const u16* const query = p.q + item.request * p.q_stride_b_elems + row / (p.h_q / p.h_kv) * p.q_stride_s_elems +
                                 (i64)query_head(p, kv_head, row) * p.q_stride_h_elems;
        return __fmul_rn(plain_dot<typename Tile::Element>(query, key, Tile::kHeadDimQk), p.scale_log2);
    }

    MLA_DEVICE static void turn(const DecodeParams&, const WorkItem&, i32, i32, float2&) {}
};

// A warp computes some columns of one row again. If the row is huge in this work item, they replace the stored result.
template <class Call, class Block>
MLA_DEVICE void redo_columns(const Block& block, const WorkItem& item, i32 row, i32 column, i32 lane) {
    using Element = typename Block::Tile::Element;
    using Work = typename Block::Work;
    const DecodeParams& p = block.p;
    const i32 end = min(item.tile_end * kTileTokens, item.tokens);
    float max = kLowestMax, sum = 0.f;
    float2 out[kPairs] = {};
#pragma unroll 1
    for (i32 first = item.tile_begin * kTileTokens; first < end; first += kWarpThreads) {
        const i32 token = first + lane;
        opaque(row);  // values derived from it are not worth registers
        const u16* const key = token < end ? cached_row(p, item.request, block.kv_head, token) : nullptr;
        float score = negative_infinity();
        if (key != nullptr && Work::sees(p, item, row, token)) {
            score = Call::template score<typename Block::Tile>(p, item, block.kv_head, row, key);
        }
        const float top = fmaxf(max, warp_max(score)), decay = ex2_approx(max - top), weight = ex2_approx(score - top);
        max = top, sum = fmaf(sum, decay, warp_sum(weight));
#pragma unroll
        for (float2& x : out) x = make_float2(x.x * decay, x.y * decay);
#pragma unroll 1
        for (i32 i = 0; i < kWarpThreads; ++i) {
            const float of_token = __shfl_sync(kFullWarp, weight, i);
            if (of_token == 0.f) continue;  // 0 * NaN is not 0
            const u64 values = __shfl_sync(kFullWarp, reinterpret_cast<u64>(key), i);
#pragma unroll
            for (i32 j = 0; j < kPairs; ++j) {
                const u32 pair = reinterpret_cast<const u32*>(values)[column / 2 + j * kWarpThreads];
                const float2 v = unpack<Element>(pair);
                out[j] = make_float2(fmaf(of_token, v.x, out[j].x), fmaf(of_token, v.y, out[j].y));
            }
        }
    }
    if (!is_huge(max)) return;
    if (column == 0) store_row_lse<Work>(p, item, block.kv_head, row, row_lse2(max, sum));
    if (item.partial_index == kNotSplit && p.attn_sink != nullptr) {
        const float sink = p.attn_sink[query_head(p, block.kv_head, row) * p.sink_stride_elems];
        sum += ex2_approx(__fmul_rn(sink, kLog2E) - max);
    }
    const float factor = rcp_approx(sum);
#pragma unroll
    for (i32 j = 0; j < kPairs; ++j) {
        const i32 at = column + j * 2 * kWarpThreads;
        float2 x = make_float2(out[j].x * factor, out[j].y * factor);
        Call::turn(p, item, row, at, x);
        store_columns<Element, Work>(p, item, block.kv_head, row, at, x);
    }
}
}  // namespace mla::decode
