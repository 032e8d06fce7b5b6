// The matmuls of the mma.sync kernels for few rows, 16 or 32: scores and values of a step of 32 tokens.
//
// Queries stay in registers as A fragments: a warp scores 16 tokens over its quarter of d, and holds only that quarter.
// Partial scores are exchanged in shared memory. Keys are values, too, read by ldmatrix.trans; a warp accumulates 64
// columns.
#pragma once
#include "attention/mma/softmax.cuh"
#include "ptx/matrix.cuh"

namespace mla::attention::mma {
// Keys are 16-bit elements: Latent_ before segment kRopeStep_, Rope_ from there on.
template <class Latent_, class Rope_, i32 kRows_, i32 kHeadDimQk_, i32 kRopeStep_>
struct FewRows {
    using Latent = Latent_;
    using Rope = Rope_;
    static constexpr i32 kStepTokens = 32, kScoreTokens = 16;  // per step; scored by a warp
    static constexpr i32 kRows = kRows_, kRowTiles = kRows / kMmaRows;
    static constexpr i32 kHeadDimQk = kHeadDimQk_, kColumns = head_dim_v(kHeadDimQk);
    static constexpr i32 kScoreSteps = padded_row_bytes(kHeadDimQk) / kSegmentBytes;  // along d: one in each segment
    static constexpr bool kPadded = kScoreSteps * kSegmentBytes > kHeadDimQk*(i32)sizeof(u16);  // with zeros
    static constexpr i32 kRopeStep = kRopeStep_;
    using Softmax = SoftmaxLayout<kRows, kStepTokens>;
    using Queries = u32[kScoreSteps][kRowTiles][4];
    static_assert(kSegmentBytes % (kColumns / kWarps * (i32)sizeof(u16)) == 0,
                  "a warp's values are in one segment of each row");
    static_assert(kQuarters * kMmaDepth * (i32)sizeof(u16) == kSegmentBytes,
                  "a segment has a product for each quarter");
    static_assert(kWarps == kQuarters * (kStepTokens / kScoreTokens), "a warp scores 16 tokens over a quarter of d");

    MLA_DEVICE static i32 quarter(i32 warp) { return warp % kQuarters; }  // of d
    MLA_DEVICE static i32 half(i32 warp) { return warp / kQuarters; }     // of the step's tokens
};

// Two elements of a row. With kAnywhere it may start at any element, not at even ones only.
template <bool kAnywhere>
MLA_DEVICE u32 load_pair(const u16* from) {
    if (kAnywhere && reinterpret_cast<u64>(from) % sizeof(u32) != 0) return (u32)from[1] << 16 | from[0];
    return *reinterpret_cast<const u32*>(from);
}

// The block's rows, as A fragments; zeros past the KV head's rows, and in the columns that a row is padded by.
template <class C, bool kAnywhere, class Block>
MLA_DEVICE void load_queries(const Block& block, typename C::Queries& q, i32 warp, i32 lane) {
#pragma unroll
    for (i32 i = 0; i < 2 * C::kRowTiles; ++i) {
        const i32 row = i * 8 + lane / 4;
        const u16* from = block.query(row, C::quarter(warp) * kMmaDepth + lane % 4 * 2);
#pragma unroll
        for (i32 step = 0; step < C::kScoreSteps; ++step) {
            const i32 column = step * (kSegmentBytes / 2);
            const bool padding = C::kPadded && column + C::quarter(warp) * kMmaDepth >= C::kHeadDimQk;
#pragma unroll
            for (i32 k = 0; k < 2; ++k) {
                const u32 word = padding ? 0 : load_pair<kAnywhere>(from + column + k * kMmaColumns);
                q[step][i / 2][i % 2 + 2 * k] = block.row0 + row < block.rows ? word : 0;
            }
        }
    }
}

// Factors of 1 for a lane's scores, of rows 8 i + lane / 4.
struct NoFactors {
    MLA_DEVICE constexpr float operator[](i32) const { return 1.f; }
};

// S of the warp's 16 tokens, over its quarter of d, to shared memory. The step begins at octet `first` of `keys`.
template <class C, class Ring, class Keys, class Factors>
MLA_DEVICE void score(SoftmaxSlots<typename C::Softmax>& softmax, const Keys& slots, i32 first,
                      const typename C::Queries& q, const Factors& factors, i32 warp, i32 lane) {
    float scores[C::kRowTiles][2][4] = {};
    const i32 quarter = C::quarter(warp), half = C::half(warp);
    const i32 octet = Ring::position(first, 2 * half + lane / 16);
    const SmemAddr keys = smem_addr(slots.octets[octet]) + Ring::offset(lane % 8, 2 * quarter + lane / 8 % 2);
#pragma unroll
    for (i32 step = 0; step < C::kScoreSteps; ++step) {
        u32 k[4];
        ldmatrix_x4(k, keys + step * kSegmentBytes);
#pragma unroll
        for (i32 tile = 0; tile < C::kRowTiles; ++tile) {
            if (step < C::kRopeStep) {
                mma_m16n8k16(typename C::Latent{}, scores[tile][0], q[step][tile], k[0], k[1]);
                mma_m16n8k16(typename C::Latent{}, scores[tile][1], q[step][tile], k[2], k[3]);
            } else {
                mma_m16n8k16(typename C::Rope{}, scores[tile][0], q[step][tile], k[0], k[1]);
                mma_m16n8k16(typename C::Rope{}, scores[tile][1], q[step][tile], k[2], k[3]);
            }
        }
    }
#pragma unroll
    for (i32 i = 0; i < 2 * C::kRowTiles; ++i) {
        float* to = softmax.scores[quarter][8 * i + lane / 4] + half * C::kScoreTokens + lane % 4 * 2;
#pragma unroll
        for (i32 n = 0; n < 2; ++n) {
            const float* pair = scores[i / 2][n] + 2 * (i % 2);
            *reinterpret_cast<float2*>(to + n * kMmaColumns) = make_float2(pair[0] * factors[i], pair[1] * factors[i]);
        }
    }
}

// O += P V of the warp's columns.
template <class C, class Ring, class Keys, class Out>
MLA_DEVICE void add_values(const SoftmaxSlots<typename C::Softmax>& softmax, const Keys& slots, i32 first, Out& out,
                           i32 warp, i32 lane) {
    if (*reinterpret_cast<const u64*>(softmax.rescales) != 0) out.rescale(softmax.scale, lane);
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
        u32 p[C::kRowTiles][4];
#pragma unroll
        for (i32 tile = 0; tile < C::kRowTiles; ++tile) {
            ldmatrix_x4(p[tile], smem_addr(&softmax.p[tile * kMmaRows + lane % 16][half * 16 + lane / 16 * 8]));
        }
        const i32 octet = Ring::position(first, 2 * half + lane / 8 % 2), row = lane % 8;
        const i32 chunk = warp * Out::kValueTiles;  // of the warp's columns, the first
        const SmemAddr values =
            smem_addr(slots.octets[octet]) + (u32)(row * Ring::kRowBytes + chunk / kSegmentChunks * kSegmentBytes);
#pragma unroll
        for (i32 n = 0; n < Out::kValueTiles; n += 2) {
            u32 v[4];
            ldmatrix_x4_trans(v, values + (u32)((chunk % kSegmentChunks + n + lane / 16) ^ row) * kChunkBytes);
#pragma unroll
            for (i32 tile = 0; tile < C::kRowTiles; ++tile) {
                mma_m16n8k16(typename C::Latent{}, out.x[tile][n], p[tile], v[0], v[1]);
                mma_m16n8k16(typename C::Latent{}, out.x[tile][n + 1], p[tile], v[2], v[3]);
            }
        }
    }
}
}  // namespace mla::attention::mma
