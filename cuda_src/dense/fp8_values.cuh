// e4m3 values on Hopper, as stored in memory and as the tensor cores read them.
//
// O = P V sums over keys, and WGMMA reads 8-bit operands contiguous along the sum: so V is transposed in shared memory,
// by otherwise idle warps. ldmatrix.trans and two byte permutes make rows of 16 keys (tile/byte_fragments.cuh),
// stmatrix stores them. Keys then have the order of the score accumulator, so that P stays in registers, four of a
// thread's scores per word. Even columns come before odd ones in each 16 rows, so that no access has bank conflicts and
// a thread's four results of 16 columns are neighbours: `value_column`.
//
//   row n of V^T        16 C + 8 e + m       is column   16 C + 2 m + e         C < 8, e < 2, m < 8
//   byte p of a row     16 h + 4 c + i       is key      16 h + 8 (i / 2) + 2 c + i % 2
//
// Eight rows of ones follow the 128 rows: their products are the sums of the rounded weights, with the same lost bits.
#pragma once
#include "ptx/control.cuh"
#include "tile/byte_fragments.cuh"

namespace mla::dense {
constexpr i32 kValueColumns = 128, kValueKeys = 128;  // of a tile
constexpr u32 kValueBytes = kValueKeys * kSw128RowBytes;
constexpr u32 kTransposedBytes = kValueBytes + kSwizzleAtomBytes;  // with eight rows of ones
constexpr i32 kTurnedGroups = kValueColumns / kWarpColumns;
constexpr i32 kValueSteps = kValueKeys / kMmaKBytes;
constexpr u32 kOnes = 0x38383838;

// Called by thread `thread` of kThreads.
template <i32 kThreads>
MLA_DEVICE void store_ones(u8 (&transposed)[kTransposedBytes], i32 thread) {
    constexpr i32 kOnesChunks = kSwizzleAtomBytes / sizeof(uint4);
    for (i32 i = thread; i < kOnesChunks; i += kThreads) {
        reinterpret_cast<uint4*>(transposed + kValueBytes)[i] = make_uint4(kOnes, kOnes, kOnes, kOnes);
    }
}

// 0x80 in each byte that is NaN.
MLA_DEVICE u32 nan_bytes(u32 codes) { return ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u; }

// NaN of keys from `first` on becomes 0; the word's keys are 2 c + {0, 1, 8, 9} of 16. Whether there was any.
MLA_DEVICE bool hide_nan(u32& word, i32 first, i32 lane) {
    u32 hidden = 0;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
        if (2 * (lane % 4) + 8 * (i / 2) + i % 2 >= first) hidden |= 0xffu << 8 * i;
    }
    const u32 nan = nan_bytes(word) & hidden;
    word &= ~((nan >> 7) * 0xffu);
    return nan != 0;
}

// Columns 16 C to 16 C + 15 of a tile, by a warp. NaN of keys from `first` on becomes 0; whether there was any, in this
// lane.
MLA_DEVICE bool transpose_group(SmemAddr from, SmemAddr to, i32 group, i32 first, i32 lane) {
    u32 words[kValueSteps][4];
    const SmemAddr source = from + sw128_offset(lane, group);
#pragma unroll
    for (i32 step = 0; step < kValueSteps; ++step) load_bytes_transposed(words[step], source, step, false);
    bool found = false;
    if (first < kValueKeys) {
        u32 any = 0;
#pragma unroll
        for (i32 step = 0; step < kValueSteps; ++step) {
#pragma unroll
            for (i32 j = 0; j < 4; ++j) any |= nan_bytes(words[step][j]);
        }
        if (__any_sync(kFullWarp, any != 0)) {
            opaque(first);  // the hidden bits of each word would be computed in advance, for all groups at once
#pragma unroll
            for (i32 step = 0; step < kValueSteps; ++step) {
#pragma unroll
                for (i32 j = 0; j < 4; ++j) {
                    found |= hide_nan(words[step][j], first - step * kMmaKBytes - j / 2 * 16, lane);
                }
            }
        }
    }
    const i32 row = group * kWarpColumns + lane % 16;  // matrices: even columns, odd ones; then of the next 16 keys
#pragma unroll
    for (i32 step = 0; step < kValueSteps; ++step) {
        stmatrix_x4(to + sw128_offset(row, 2 * step + lane / 16), words[step]);
    }
    return found;
}

// The column of element i of a thread's accumulator over rows 64 `block` to 64 `block` + 63 of V^T. Elements i, i + 4,
// i + 1 and i + 5, for an i that is a multiple of 8 or 2 more than one, are four neighbours.
MLA_DEVICE i32 value_column(i32 thread, i32 block, i32 i) {
    return block * kSw128Rows + i / 8 * kWarpColumns + thread % 4 * 4 + i % 2 * 2 + i / 4 % 2;
}
}  // namespace mla::dense
