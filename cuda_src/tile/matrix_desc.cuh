// Descriptors of tcgen05 products, from named fields. Operands lie in SW128 tiles: rows of 64 columns of 16-bit
// elements in the 128-byte swizzle of tile/sw128.cuh, which an SW128 tile of 64 rows is.
// An SW128 tile serves both as a K-major operand (the product sums over its columns) and as an MN-major one (over its
// rows).
#pragma once
#include "ptx/control.cuh"
#include "ptx/tcgen05.cuh"
#include "tile/sw128.cuh"

namespace mla {
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-matrix-descriptors
// Shared-memory descriptor: start at bits 0 to 13, leading offset 16 to 29, stride offset 32 to 45, all in 16 bytes;
// 0b001 at 46; the swizzle at 61.
constexpr u64 kMatrixDescVersion = 1ull << 46;
constexpr u64 kMatrixDescSwizzle128 = 2ull << 61;

MLA_DEVICE MatrixDesc make_matrix_desc(SmemAddr start, u32 leading_bytes, u32 stride_bytes) {
    return MatrixDesc{(u64)((start.value & 0x3ffffu) >> 4) | (u64)(leading_bytes >> 4) << 16 |
                      (u64)(stride_bytes >> 4) << 32 | kMatrixDescVersion | kMatrixDescSwizzle128};
}

// Rows are M or N, columns are K. The leading offset is not used.
MLA_DEVICE MatrixDesc k_major_matrix(SmemAddr sw_tile) { return make_matrix_desc(sw_tile, 16, kSwizzleAtomBytes); }

// Rows are K, columns are M or N; the next 64 of them are in the next SW128 tile, `sw_tile_bytes` further.
MLA_DEVICE MatrixDesc mn_major_matrix(SmemAddr sw_tile, u32 sw_tile_bytes) {
    return make_matrix_desc(sw_tile, sw_tile_bytes, kSwizzleAtomBytes);
}

// The descriptor `bytes` further on; shared memory ends before the address field does.
MLA_DEVICE MatrixDesc advance(MatrixDesc desc, u32 bytes) {
    return MatrixDesc{(desc.bits & 0xffffffff00000000ull) | (u64)((u32)desc.bits + (bytes >> 4))};
}

// Keeps the compiler from holding all sums of start and step in registers across a loop; the upper half is constant.
MLA_DEVICE void opaque(MatrixDesc& desc) {
    i32 low = (i32)desc.bits;
    opaque(low);
    desc.bits = (desc.bits & 0xffffffff00000000ull) | (u32)low;
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-matrix-descriptors
// Instruction descriptor of 16-bit operands and fp32 sums.
MLA_DEVICE constexpr u32 type_code(bfloat16) { return 1; }
MLA_DEVICE constexpr u32 type_code(float16) { return 0; }

template <class Element>
MLA_DEVICE constexpr InstructionDesc make_instruction_desc(u32 m, u32 n, Major a, Major b) {
    return InstructionDesc{1u << 4 | type_code(Element{}) << 7 | type_code(Element{}) << 10 | (u32)a << 15 |
                           (u32)b << 16 | n / 8 << 17 | m / 16 << 24};
}

// e4m3 operands: their number in `kind::f8f6f4` equals float16's in `kind::f16`.
MLA_DEVICE constexpr InstructionDesc make_e4m3_instruction_desc(u32 m, u32 n, Major a = Major::K, Major b = Major::K) {
    return make_instruction_desc<float16>(m, n, a, b);
}
}  // namespace mla
