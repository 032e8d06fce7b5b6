// 16-bit fragments of a warpgroup (A operands of WGMMA, one for each 16 columns) in a panel, and back. A warp has 16 of
// the panel's rows; of a transpose, 16 of its columns.
#pragma once
#include "ptx/barrier.cuh"
#include "ptx/matrix.cuh"
#include "tile/panel.cuh"

// Where this lane's row of step `step`, a 16x16 block, stands in the panel, for ldmatrix and stmatrix.
MLA_DEVICE u32 matrix_offset(i32 thread, i32 step) {
    const i32 row = (thread / kWarpThreads) * 16 + thread % 16;
    return panel_offset(row, step * 2 + (thread % kWarpThreads) / 16);
}

MLA_DEVICE void load_panel(u32 (&fragment)[kPanelMmaSteps][4], const u8* panel, i32 thread) {
#pragma unroll
    for (i32 step = 0; step < kPanelMmaSteps; ++step) {
        ldmatrix_x4(fragment[step], smem_addr(panel) + matrix_offset(thread, step));
    }
}

// For WGMMA or a bulk copy to read, after a barrier.
MLA_DEVICE void store_panel(u8* panel, const u32 (&fragment)[kPanelMmaSteps][4], i32 thread) {
#pragma unroll
    for (i32 step = 0; step < kPanelMmaSteps; ++step) {
        stmatrix_x4(smem_addr(panel) + matrix_offset(thread, step), fragment[step]);
    }
    fence_proxy_async();
}

// The transpose, of 16 rows of the panel, or of those below it, a step.
template <i32 kSteps>
MLA_DEVICE void load_transposed(u32 (&fragment)[kSteps][4], const u8* panels, i32 thread) {
    const i32 warp = thread / kWarpThreads, lane = thread % kWarpThreads;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
        const i32 row = step * kMmaK + lane / 16 * 8 + lane % 8;
        ldmatrix_x4_trans(fragment[step], smem_addr(panels) + panel_offset(row, 2 * warp + lane / 8 % 2));
    }
}
