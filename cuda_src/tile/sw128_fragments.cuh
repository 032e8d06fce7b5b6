// 16-bit fragments of a warpgroup (A operands of WGMMA, one for each 16 columns) in an SW128 tile, and back. A warp has
// 16 of the SW128 tile's rows; of a transpose, 16 of its columns.
#pragma once
#include "ptx/barrier.cuh"
#include "ptx/matrix.cuh"
#include "tile/sw128.cuh"

namespace mla {
// Offset in the SW128 tile of this lane's row of step `step`, a 16x16 block, for ldmatrix and stmatrix.
MLA_DEVICE u32 matrix_offset(i32 thread, i32 step) {
    const i32 row = (thread / kWarpThreads) * 16 + thread % 16;
    return sw128_offset(row, step * 2 + (thread % kWarpThreads) / 16);
}

MLA_DEVICE void load_sw128(u32 (&fragment)[kSw128MmaSteps][4], const u8* sw_tile, i32 thread) {
#pragma unroll
    for (i32 step = 0; step < kSw128MmaSteps; ++step) {
        ldmatrix_x4(fragment[step], smem_addr(sw_tile) + matrix_offset(thread, step));
    }
}

// For WGMMA or a bulk copy to read, after a barrier.
MLA_DEVICE void store_sw128(u8* sw_tile, const u32 (&fragment)[kSw128MmaSteps][4], i32 thread) {
#pragma unroll
    for (i32 step = 0; step < kSw128MmaSteps; ++step) {
        stmatrix_x4(smem_addr(sw_tile) + matrix_offset(thread, step), fragment[step]);
    }
    fence_proxy_async();
}

// The transpose, 16 rows per step, of one or more SW128 tiles below each other.
template <i32 kSteps>
MLA_DEVICE void load_sw128_transposed(u32 (&fragment)[kSteps][4], const u8* sw_tiles, i32 thread) {
    const i32 warp = thread / kWarpThreads, lane = thread % kWarpThreads;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
        const i32 row = step * kMmaK + lane / 16 * 8 + lane % 8;
        ldmatrix_x4_trans(fragment[step], smem_addr(sw_tiles) + sw128_offset(row, 2 * warp + lane / 8 % 2));
    }
}
}  // namespace mla
