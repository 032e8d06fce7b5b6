// RoPE: a pair (x, y) becomes (x cos - y sin, y cos + x sin). Every operation is rounded: none is fused.
//
// A RoPE part of 64 elements is eight pieces, in eight neighbouring lanes. The elements of a pair are (2i, 2i + 1), in
// one piece, or (i, i + 32), four pieces apart. Its angle comes from tables, or from the token's position: a frequency
// is the pair's turns per token, in units of 2^-64 turns, so that a product modulo 2^64 is exact.
#pragma once
#include "common/types.cuh"
#include "tile/elements.cuh"

namespace mla {
constexpr i32 kRopePairs = 32;
constexpr i32 kRopePieces = 2 * kRopePairs / kChunkElems;
constexpr i32 kPieceOfOther = kRopePieces / 2;       // of pairs (i, i + 32): distance of the other element's piece
constexpr i32 kPairsOfPiece = kChunkElems / 2;       // (2i, 2i + 1)
constexpr float kRadians = 1.57079633f / (1 << 30);  // of 2^-32 turns
constexpr u32 kQuarterTurn = 1u << 30, kEighth = 1u << 29;  // in 2^-32 turns

MLA_DEVICE float turned(float x, float other, float cos, float sin) {
    return __fadd_rn(__fmul_rn(x, cos), __fmul_rn(other, sin));
}

MLA_DEVICE void turn_pair(float& x, float& y, float cos, float sin) {
    const float first = turned(x, y, cos, -sin);
    y = turned(y, x, cos, sin);
    x = first;
}

// Sine and cosine of an angle in 2^-32 turns: polynomials within an eighth of a turn, the same numbers on every GPU.
MLA_DEVICE void sin_cos(u32 turns, float& sin, float& cos) {
    const u32 quarter = (turns + kEighth) / kQuarterTurn;
    const float x = (float)(i32)(turns - quarter * kQuarterTurn) * kRadians, square = x * x;
    float s = fmaf(square, 2.75573192e-6f, -1.98412698e-4f), c = fmaf(square, 2.48015873e-5f, -1.38888889e-3f);
    s = fmaf(square, s, 8.33333333e-3f), c = fmaf(square, c, 4.16666667e-2f);
    s = fmaf(square, s, -0.166666667f), c = fmaf(square, c, -0.5f);
    s = fmaf(x * square, s, x), c = fmaf(square, c, 1.f);
    const bool swapped = quarter % 2 != 0;
    sin = swapped ? c : s, cos = swapped ? s : c;
    if (quarter / 2 % 2 != 0) sin = -sin;
    if ((quarter + 1) / 2 % 2 != 0) cos = -cos;
}

// Angles of the pairs of one piece; pairs (2i, 2i + 1) use the first four.
struct PieceAngles {
    float cos[kChunkElems], sin[kChunkElems];

    // From a token's rows of the tables.
    MLA_DEVICE void load(const float* cos_row, const float* sin_row, i32 piece, bool interleaved, bool aligned) {
        const i32 first = interleaved ? piece * kPairsOfPiece : piece % kPieceOfOther * kChunkElems;
        load_four(cos, cos_row + first, aligned), load_four(sin, sin_row + first, aligned);
        if (interleaved) return;
        load_four(cos + 4, cos_row + first + 4, aligned), load_four(sin + 4, sin_row + first + 4, aligned);
    }

    // From the token's position; `piece` is the lane's among the eight of a part. Called by whole warps.
    MLA_DEVICE void compute(i64 position, const i64* frequencies, i32 piece, bool interleaved) {
#pragma unroll
        for (i32 k = 0; k < kPairsOfPiece; ++k) {
            const u64 turns = (u64)position * (u64)frequencies[piece * kPairsOfPiece + k];
            sin_cos((u32)(turns >> 32), sin[k], cos[k]);
        }
        if (interleaved) return;
        const float c[4] = {cos[0], cos[1], cos[2], cos[3]}, s[4] = {sin[0], sin[1], sin[2], sin[3]};
#pragma unroll
        for (i32 k = 0; k < kChunkElems; ++k) {
            const i32 lane = piece % kPieceOfOther * 2 + k / kPairsOfPiece;
            cos[k] = __shfl_sync(kFullWarp, c[k % kPairsOfPiece], lane, kRopePieces);
            sin[k] = __shfl_sync(kFullWarp, s[k % kPairsOfPiece], lane, kRopePieces);
        }
    }

    // Turns a piece. Called by whole warps; consecutive lanes hold the eight pieces of each part.
    MLA_DEVICE void turn(float (&x)[kChunkElems], i32 piece, bool interleaved) const {
        if (interleaved) {
#pragma unroll
            for (i32 k = 0; k < kPairsOfPiece; ++k) turn_pair(x[2 * k], x[2 * k + 1], cos[k], sin[k]);
            return;
        }
#pragma unroll
        for (i32 k = 0; k < kChunkElems; ++k) {
            const float other = __shfl_xor_sync(kFullWarp, x[k], kPieceOfOther);
            x[k] = turned(x[k], other, cos[k], piece < kPieceOfOther ? -sin[k] : sin[k]);
        }
    }

   private:
    MLA_DEVICE static void load_four(float* to, const float* from, bool aligned) {
        if (aligned) {
            const float4 four = *reinterpret_cast<const float4*>(from);
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        } else {
#pragma unroll
            for (i32 i = 0; i < 4; ++i) to[i] = from[i];
        }
    }
};
}  // namespace mla
