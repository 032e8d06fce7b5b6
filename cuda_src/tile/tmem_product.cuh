// Products of matrices in SW128 tiles by tcgen05, issued by one thread, and the signals that their operands have been
// read and their results written.
#pragma once
#include "tile/matrix_desc.cuh"
#include "tile/ring.cuh"

namespace mla {
// A wait for something in tensor memory.
MLA_DEVICE void tmem_wait(MBarrier& barrier, u32 parity) {
    mbarrier_wait(barrier, parity);
    tcgen05_fence_after_thread_sync();
}

// Frees columns of tensor memory: this warp has its share in registers.
MLA_DEVICE void release_tmem(MBarrier& free, i32 thread) {
    tcgen05_fence_before_thread_sync();
    release(free, thread);
}

// One product of K = 16, kRows x kColumns.
template <class Element, bool kWeightStationary, i32 kRows, i32 kColumns, Major kMajorA, Major kMajorB>
struct Product {
    TmemAddr d;

    MLA_DEVICE void operator()(MatrixDesc a, MatrixDesc b, bool accumulate) const {
        constexpr InstructionDesc kShape = make_instruction_desc<Element>(kRows, kColumns, kMajorA, kMajorB);
        if (kWeightStationary) {
            tcgen05_mma_ws_f16(d, a, b, kShape, accumulate);
        } else {
            tcgen05_mma_f16(d, a, b, kShape, accumulate);
        }
    }
};

// Along the columns of kSwTiles SW128 tiles of both operands, to a new sum. `ready` is called before each SW128 tile.
template <i32 kSwTiles, class Multiply, class Ready>
MLA_DEVICE void multiply_columns(MatrixDesc a, u32 a_sw_tile_bytes, MatrixDesc b, u32 b_sw_tile_bytes,
                                 Multiply multiply, Ready ready) {
    opaque(a);
    opaque(b);
#pragma unroll 1  // four products take longer than an iteration of the loop
    for (i32 sw_tile = 0; sw_tile < kSwTiles; ++sw_tile) {
        ready(sw_tile);
#pragma unroll
        for (i32 step = 0; step < kSw128MmaSteps; ++step) {
            const u32 bytes = step * kKMajorStepBytes;
            multiply(advance(a, sw_tile * a_sw_tile_bytes + bytes), advance(b, sw_tile * b_sw_tile_bytes + bytes),
                     sw_tile + step > 0);
        }
    }
}

// Multiplies in `steps` equal steps of each operand; the first one adds to the accumulator if `accumulate`.
template <class Multiply>
MLA_DEVICE void multiply_steps(MatrixDesc a, u32 a_step_bytes, MatrixDesc b, u32 b_step_bytes, i32 steps,
                               bool accumulate, Multiply multiply) {
    opaque(a);
    opaque(b);
    for (i32 step = 0; step < steps; ++step) {
        multiply(advance(a, step * a_step_bytes), advance(b, step * b_step_bytes), accumulate || step > 0);
    }
}
}  // namespace mla
