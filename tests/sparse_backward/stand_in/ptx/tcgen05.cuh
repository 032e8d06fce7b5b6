// Stands in for cuda_src/ptx/tcgen05.cuh on any GPU: tensor memory is global memory, and a product is computed by the
// lanes of the warp that issues it, from the operands that its descriptors name.
//
// Written from the tables of the PTX ISA (descriptors, 9.7.16.4; layouts D to G of the data path, 9.7.16.10.5), and not
// from the encoders in cuda_src/tile. Products are done when they are issued: what this shows of a kernel is
// everything but the asynchrony of tcgen05.
#pragma once
#include "ptx/barrier.cuh"
#include "ptx/control.cuh"
#include "ptx/element.cuh"

namespace mla {
struct TmemAddr {
    u32 value;
    MLA_DEVICE TmemAddr lane(u32 lanes) const { return TmemAddr{value + (lanes << 16)}; }
    MLA_DEVICE TmemAddr column(u32 columns) const { return TmemAddr{value + columns}; }
};
struct MatrixDesc {
    u64 bits;
};
struct InstructionDesc {
    u32 bits;
};

// ---- Tensor memory -----------------------------------------------------------------------------------------------
constexpr i32 kStandInBlocks = 64;  // the largest grid
constexpr u32 kStandInBase = 96;    // nothing may rely on 0
__device__ float stand_in_tmem[kStandInBlocks][128][kStandInBase + 512];

// The cell `lanes` and `columns` from there.
MLA_DEVICE volatile float* cell(TmemAddr at, i32 lanes = 0, i32 columns = 0) {
    return &stand_in_tmem[blockIdx.x][(at.value >> 16) + lanes][(at.value & 0xffff) + columns];
}

template <u32 kColumns>
MLA_DEVICE void tcgen05_alloc(TmemAddr& slot) {
    slot = TmemAddr{kStandInBase};
}
MLA_DEVICE void tcgen05_relinquish_alloc_permit() {}
template <u32 kColumns>
MLA_DEVICE void tcgen05_dealloc(TmemAddr) {}

MLA_DEVICE void tcgen05_fence_before_thread_sync() {}
MLA_DEVICE void tcgen05_fence_after_thread_sync() {}
MLA_DEVICE void tcgen05_wait_ld() {}
MLA_DEVICE void tcgen05_wait_st() {}

// The whole warp issues, that is computes; its first lane speaks for it.
MLA_DEVICE bool elect_issuer() { return true; }
MLA_DEVICE void tcgen05_commit(MBarrier& barrier) {
    __syncwarp();
    if (threadIdx.x % kWarpThreads == 0) mbarrier_arrive(barrier);
    __syncwarp();
}

// ---- Operands ----------------------------------------------------------------------------------------------------
struct Operand {
    u32 start, leading, stride;
    bool mn_major;

    MLA_DEVICE Operand(MatrixDesc desc, bool mn_major)
        : start((u32)(desc.bits & 0x3fff) << 4),
          leading((u32)(desc.bits >> 16 & 0x3fff) << 4),
          stride((u32)(desc.bits >> 32 & 0x3fff) << 4),
          mn_major(mn_major) {}

    // 8 rows of 128 bytes: K-major they are M or N, else K. The swizzle works on the address.
    MLA_DEVICE u16 at(i32 mn, i32 k) const {
        const u32 offset = mn_major ? mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2
                                    : mn / 8 * stride + mn % 8 * 128 + k * 2;
        u32 address = start + offset;
        address ^= (address >> 7 & 7) << 4;
        u16 bits;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
        return bits;
    }
};

template <bool kWeightStationary>
MLA_DEVICE volatile float* cell_of(TmemAddr d, i32 rows, i32 columns, i32 row, i32 column) {
    if (rows == 128) return cell(d, row, column);
    if (!kWeightStationary) return cell(d, row / 16 * 32 + row % 16, column);
    const i32 groups = 128 / rows, share = columns / groups;  // of lanes; columns of each
    return cell(d, column / share * rows + row, column % share);
}

template <bool kWeightStationary>
MLA_DEVICE void multiply(TmemAddr d, MatrixDesc a_desc, MatrixDesc b_desc, InstructionDesc shape, bool accumulate) {
    const i32 rows = (shape.bits >> 24 & 31) * 16, columns = (shape.bits >> 17 & 63) * 8;
    const bool bf16 = (shape.bits >> 7 & 7) == 1;
    const Operand a(a_desc, shape.bits >> 15 & 1), b(b_desc, shape.bits >> 16 & 1);
    __syncwarp();
    for (i32 i = threadIdx.x % kWarpThreads; i < rows * columns; i += kWarpThreads) {
        const i32 row = i / columns, column = i % columns;
        volatile float* to = cell_of<kWeightStationary>(d, rows, columns, row, column);
        float sum = accumulate ? *to : 0.f;
#pragma unroll 1
        for (i32 k = 0; k < 16; ++k) {
            const u16 x = a.at(row, k), y = b.at(column, k);
            sum = bf16 ? fmaf(bfloat16::to_float(x), bfloat16::to_float(y), sum)
                       : fmaf(float16::to_float(x), float16::to_float(y), sum);
        }
        *to = sum;
    }
    __syncwarp();
}

MLA_DEVICE void tcgen05_mma_f16(TmemAddr d, MatrixDesc a, MatrixDesc b, InstructionDesc shape, bool accumulate) {
    multiply<false>(d, a, b, shape, accumulate);
}
MLA_DEVICE void tcgen05_mma_ws_f16(TmemAddr d, MatrixDesc a, MatrixDesc b, InstructionDesc shape, bool accumulate) {
    multiply<true>(d, a, b, shape, accumulate);
}

// ---- Loads -------------------------------------------------------------------------------------------------------
template <i32 kCount>
MLA_DEVICE void tcgen05_ld_16x256b(float (&r)[kCount], TmemAddr from) {
    const i32 thread = threadIdx.x % kWarpThreads;
    const volatile float* rows[2] = {cell(from, thread / 4, thread % 4 * 2),
                                     cell(from, thread / 4 + 8, thread % 4 * 2)};
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) r[i] = rows[i % 4 / 2][i / 4 * 8 + i % 2];
}
template <i32 kCount>
MLA_DEVICE void tcgen05_ld_32x32b(float (&r)[kCount], TmemAddr from) {
    const volatile float* row = cell(from, threadIdx.x % kWarpThreads);
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) r[i] = row[i];
}
template <i32 kCount>
MLA_DEVICE void pin_loaded(float (&)[kCount]) {}
}  // namespace mla
