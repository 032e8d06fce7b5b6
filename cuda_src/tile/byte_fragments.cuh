// Fragments of bytes for products of 8-bit elements, made from tiles of 128 bytes a row without a transposition pass.
//
// WGMMA reads 8-bit operands with the sum's dimension contiguous, but in an SW128 tile of tokens x columns the columns
// are. ldmatrix transposes in units of 16 bits: from four 8 x 8 matrices, tokens x pairs of columns, a thread receives
// the bytes of two columns, 2g and 2g + 1, and of the tokens 2c and 2c + 1 of each matrix (g = lane / 4, c = lane % 4).
// Two byte permutes separate the columns, which become rows g and g + 8 of the fragment. Its position p = 16 h + 4 c +
// i along the sum then stands for token 16 h + 8 (i / 2) + 2 c + i % 2: the other operand has the same order, which is
// the order of an accumulator's columns (`store_byte_words`).
#pragma once
#include "ptx/barrier.cuh"
#include "ptx/matrix.cuh"
#include "tile/sw64.cuh"

namespace mla {
constexpr i32 kMmaKBytes = 32;  // depth of one wgmma of 8-bit elements
constexpr i32 kSw128ByteColumns = kSw128RowBytes;
constexpr i32 kSw64ByteColumns = kSw64RowBytes;

// Columns of 16 bytes that a warp transposes, and so of the result's rows that it has in a 64-row product.
constexpr i32 kWarpColumns = 16;

// Offset in an SW128 tile of this lane's row for `load_bytes_transposed`: rows are tokens 0 to 31, chunk `warp`.
MLA_DEVICE u32 byte_matrix_offset(i32 warp, i32 lane) { return sw128_offset(lane, warp); }

// Rows 16 w to 16 w + 15 of an operand A whose columns are 32 tokens: warp w's 16 of the tile's columns. `from` is the
// address at `byte_matrix_offset`. The fragment covers the tokens of `step` among the tile's 64, and the `upper` or
// lower half of its 128 columns.
MLA_DEVICE void load_bytes_transposed(u32 (&fragment)[4], SmemAddr from, i32 step, bool upper) {
    constexpr u32 kUpperChunks = 4 << 4;  // chunk c + 4 lies at (c + 4) ^ (r % 8) = (c ^ (r % 8)) ^ 4
    const SmemAddr at{upper ? from.value ^ kUpperChunks : from.value};
    u32 pairs[4];
    ldmatrix_x4_trans(pairs, at + step * kMmaKBytes * kSw128RowBytes);
    fragment[0] = __byte_perm(pairs[0], pairs[1], 0x6420);
    fragment[1] = __byte_perm(pairs[0], pairs[1], 0x7531);
    fragment[2] = __byte_perm(pairs[2], pairs[3], 0x6420);
    fragment[3] = __byte_perm(pairs[2], pairs[3], 0x7531);
}

// Stores a warp's 16 rows of 64 bytes to a half SW128 tile. Word 2 i + r of a thread are the four bytes of its row r
// (two, eight apart) at positions 16 i + 4 (lane % 4): columns 16 i + 2 (lane % 4) + {0, 1, 8, 9} of an accumulator.
// For WGMMA to read after a proxy fence and a barrier.
MLA_DEVICE void store_byte_words(SmemAddr tile, const u32 (&words)[8], i32 warp, i32 lane) {
    const i32 row = warp * 16 + lane % 16;
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {  // matrices: rows 0-7 and 8-15 of chunk 2 i, then of chunk 2 i + 1
        stmatrix_x4(tile + sw64_offset(row, 2 * i + lane / 16),
                    {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]});
    }
}
}  // namespace mla
