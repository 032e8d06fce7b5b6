// Parts specific to FP8 dense decode on Blackwell: keys, queries and P in e4m3 (decode/sm100_fp8.cu).
#pragma once
#include "attention/fp8_query_rows.cuh"
#include "attention/head_results.cuh"
#include "attention/rounded_weights.cuh"
#include "attention/sm90/tile.cuh"
#include "tile/byte_fragments.cuh"

namespace mla::decode::sm100 {
using namespace attention;
using namespace attention::sm90;

// ---- Variant ---------------------------------------------------------------------------------------------------
// A tile of 64 tokens of e4m3: four SW128 tiles of latent columns, and a fifth one that is half RoPE columns, half
// zeros.
struct CodeTile {
    static constexpr bool kCodes = true;
    static constexpr i32 kStages = 4, kSwTileColumns = kSw128ByteColumns, kMmaColumns = kMmaKBytes;
    static constexpr i32 kHeadDimQk = kMaxHeadDimQk;
    static constexpr i32 kSwTilesLatent = kHeadDimV / kSw128ByteColumns, kSwTilesRope = 1;
    static constexpr i32 kSwTilesQk = kSwTilesLatent + kSwTilesRope;
    static constexpr u32 kTileBytes = kSwTilesQk * kSw128Bytes;

    // The i-th SW128 tile in the order of arrival: 4, 0..3.
    MLA_DEVICE static constexpr i32 sw_tile_in_order(i32 i) { return i == 0 ? kSwTilesLatent : i - 1; }
};

// P = 2^(4 + S - m) in e4m3, at most 2^8 since m follows the maximum when it is more than 2^4 larger. What lies below
// 2^-14 of the row's largest weight so far is 0.
constexpr float kCodeWeightLog2 = 4.f, kCodeLazyMaxLog2 = 4.f;
static_assert(kCodeWeightLog2 + kCodeLazyMaxLog2 <= 8.f, "e4m3 has numbers up to 448");

// ---- Of each row -----------------------------------------------------------------------------------------------
// In shared memory, of keys that are codes only.
template <class C, bool kCodes = C::kCodes>
struct CodeRows {};
template <class C>
struct CodeRows<C, true> {
    float q_factors[C::kStagesQ][C::kBlockRows];  // factors of the scores of Q's rows
    float rounded_sums[kWarpgroupWarps][C::kBlockRows];
};

// A softmax thread's.
template <class C, bool kCodes = C::kCodes>
struct CodeState {};
template <class C>
struct CodeState<C, true> {
    RingPosition<C::kStagesQ> q_at;
    HeadValues<C::kBlockRows> rounded_sum;  // of the rounded weights in P; the divisor of O
};

// ---- Query role ------------------------------------------------------------------------------------------------
template <i32 kRows>
struct CodeQueryPlace {
    MLA_DEVICE static u32 offset(i32 row, i32 at) {
        constexpr i32 kOfSwTile = kSw128ByteColumns / kChunkElems;
        return at / kOfSwTile * kHeadSwTileBytes<kRows> + sw128_offset(row, at % kOfSwTile / 2) + at % 2 * 8;
    }
};

// Rows of a warp in flight before the first one is stored.
constexpr i32 kQueryRowsTogether = 4;

// A warp's rows from `first` on, `warps` apart.
template <class Query, class Block>
MLA_DEVICE void store_query_rows(const Block& block, i32 request, i32 stage, i32 first, i32 warps, i32 lane) {
    constexpr i32 kRows = Block::kRows;
    const float of_cache = cache_scale(block.params());
    typename Fp8QueryType<Query>::template RowOfLane<CodeQueryPlace<kRows>> rows[kQueryRowsTogether];
#pragma unroll
    for (i32 i = 0; i < kQueryRowsTogether; ++i) {
        const i32 row = first + i * warps, of_head = block.row0 + row;
        const bool present = row < kRows && of_head < block.rows;
        rows[i].load(present ? fp8_query_row<Query>(block, request, of_head) : nullptr, lane);
    }
#pragma unroll
    for (i32 i = 0; i < kQueryRowsTogether; ++i) {
        const i32 row = first + i * warps, of_head = block.row0 + row;
        if (row >= kRows) break;
        float factor = rows[i].template store<Query>(block.s.q[stage][0], row, lane) * of_cache;
        if (lane != 0) continue;
        if (kIsCoded<Query> && of_head < block.rows) {
            factor *= query_row_scale(block.params(), request, block.kv_head, of_head);
        }
        block.s.q_factors[stage][row] = factor;
    }
}

template <class Query, i32 kThreads, class Block>
MLA_DEVICE void run_code_query_role(const Block& block, i32 thread) {
    constexpr i32 kWarps = kThreads / kWarpThreads;
    auto& s = block.s;
    RingPosition<Block::Config::kStagesQ> at;
    WorkItem item;
    for (auto walk = block.items(); walk.next(block.p, item);) {
        if (item.tile_begin >= item.tile_end) continue;
        at.wait_empty(s.q_empty);
#pragma unroll 1
        for (i32 row = thread / kWarpThreads; row < Block::kRows; row += kQueryRowsTogether * kWarps) {
            store_query_rows<Query>(block, item.request, at.stage, row, kWarps, thread % kWarpThreads);
        }
        fence_proxy_async();
        mbarrier_arrive(s.q_full[at.stage]);
        at.advance();
    }
}

// ---- Softmax ---------------------------------------------------------------------------------------------------
// Products of codes become scores. The last tile of a work item releases Q.
template <class Storage, class Math>
MLA_DEVICE void scale_scores(Storage& s, Math& math, const WorkItem& item, i32 tile, i32 thread) {
    auto& at = math.codes.q_at;
    if (tile == item.tile_begin) at.wait_full(s.q_full);
    own_factors<Math::kRows>(s.q_factors[at.stage], thread).multiply(math.scores);
    if (tile + 1 < item.tile_end) return;
    release(s.q_empty[at.stage], thread);
    at.advance();
}

// HeadState::move_max for weights in e4m3.
template <class Math, class Maxima>
MLA_DEVICE auto move_code_maxima(Math& math, const Maxima& warps, float scale_log2, i32 thread) {
    HeadValues<Math::kRows> scale;
    auto& heads = math.heads;
#pragma unroll
    for (i32 k = 0; k < kHeadsOfThread<Math::kRows>; ++k) {
        const float tile = max_of_warps(warps, kth_head(k, thread)) * scale_log2;
        const float to = is_far_above(tile, heads.max.value[k], kCodeLazyMaxLog2) ? tile : heads.max.value[k];
        scale.value[k] = ex2_approx(heads.max.value[k] - to);
        heads.sum.value[k] *= scale.value[k], math.codes.rounded_sum.value[k] *= scale.value[k];
        heads.max.value[k] = to;
    }
    return scale;
}

// Four lanes that differ in bits 2 and 3 have four bytes each: byte j of lane i becomes byte i of lane j.
MLA_DEVICE u32 transpose_bytes(u32 word, i32 lane) {
    const bool odd = lane & 4, upper = lane & 8;
    word = __byte_perm(word, __shfl_xor_sync(kFullWarp, word, 4), odd ? 0x3715 : 0x6240);
    return __byte_perm(word, __shfl_xor_sync(kFullWarp, word, 8), upper ? 0x3276 : 0x5410);
}

// P^T from registers to [row][token] in shared memory, 64 bytes of each row of an SW128 tile. A thread's two tokens of
// two rows become four tokens of one row, a word.
template <class Math>
MLA_DEVICE void store_code_weights(Math& math, u8* p, float scale_log2, i32 thread) {
    const i32 lane = thread % kWarpThreads, of_four = lane / 4 % 4;
    const i32 first_row = fragment_column(lane) + of_four % 2, byte = of_four / 2 * 8 + lane / 16 * 4;
    auto &sum = math.heads.sum, &rounded_sum = math.codes.rounded_sum;
#pragma unroll
    for (i32 i = 0; i < Math::kRows / 2; i += 4) {
        float x[4];
#pragma unroll
        for (i32 j = 0; j < 4; ++j) {
            x[j] = ex2_approx(__fmul_rn(math.scores[i + j], scale_log2) + (kCodeWeightLog2 - math.heads.max.of(i + j)));
            sum.value[head_number(i + j)] += x[j];
        }
        const u32 codes[2] = {cvt_e4m3_x2(x[0], x[1]), cvt_e4m3_x2(x[2], x[3])};
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
            const float2 rounded = cvt_f32_x2_e4m3(codes[h]);
            rounded_sum.value[head_number(i)] += rounded.x, rounded_sum.value[head_number(i + 1)] += rounded.y;
        }
        const u32 word = transpose_bytes(codes[0] | codes[1] << 16, lane);
        *reinterpret_cast<u32*>(p + sw128_offset(i * 2 + first_row, thread / kWarpThreads) + byte) = word;
    }
    fence_proxy_async();
}

// 0 * NaN is not 0: NaN becomes 0 in tokens that not every row of the block sees, and absent tokens become zeros. A row
// that sees NaN is NaN by its score. The proxy fence after P covers these writes, too.
MLA_DEVICE void sanitize_codes(u8* keys, const WorkItem& item, i32 tile, i32 thread) {
    const i32 first = max(item.seen_by_all - tile * kTileTokens, 0), end = item.tokens - tile * kTileTokens;
    if (first >= kTileTokens) return;
    for (i32 i = thread; i < (kTileTokens - first) * kSw128Chunks; i += kWarpgroupThreads) {
        const i32 row = first + i / kSw128Chunks;
#pragma unroll
        for (i32 sw_tile = 0; sw_tile < CodeTile::kSwTilesLatent; ++sw_tile) {
            uint4& chunk =
                *reinterpret_cast<uint4*>(keys + sw_tile * kSw128Bytes + sw128_offset(row, i % kSw128Chunks));
            chunk = row < end ? without_nan(chunk) : make_uint4(0, 0, 0, 0);
        }
    }
}

// ---- Results ---------------------------------------------------------------------------------------------------
// Called by one thread per row: its factor and log-sum-exp. O is divided by the sum of the weights that formed it.
template <class Block>
MLA_DEVICE void finish_code_row(const Block& block, const WorkItem& item,
                                const float (&sums)[kWarpgroupWarps][Block::kRows], i32 row) {
    if (row >= Block::kRows) return;
    const DecodeParams& p = block.p;
    auto& s = block.s;
    const i32 of_head = block.row0 + row;
    s.stats.factor[row] = 0.f;
    if (of_head >= block.rows) return;
    float sum = 0.f, rounded = 0.f;
#pragma unroll
    for (i32 warp = 0; warp < kWarpgroupWarps; ++warp) sum += sums[warp][row], rounded += s.rounded_sums[warp][row];
    const float max = s.stats.max[row] - kCodeWeightLog2;
    s.stats.factor[row] = rounded_output_factor(p, item, block.kv_head, of_head, max, sum, rounded) *
                          (p.value_scale * cache_scale(block.params()));
    store_row_lse(p, item, block.kv_head, of_head, row_lse2(max, sum));
}
}  // namespace mla::decode::sm100
