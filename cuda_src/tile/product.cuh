// Products of matrices in SW128 tiles by a warpgroup (WGMMA): the loops over steps along the summed dimension. A step
// is 16 elements of 16 bits, or 32 of 8 bits.
//
//   multiply_abt    D = A B^T      S = Q K^T         sums over columns of A, columns of B
//   multiply_ab     D = A B        O = P V           columns of A, rows of B
//   multiply_atb    D = A^T B      dK = dS^T Q       rows of A, rows of B
//   multiply_atbt   D = A^T B^T    O^T = V^T P^T     rows of A, columns of B
//
// A and B are named as they lie in memory. An operand is the descriptor of its first step: `k_major_desc` if sums run
// over its columns, `mn_major_desc` if over its rows. Four steps further begins its next SW128 tile, kNextA or kNextB
// bytes on. A may also be fragments, in registers. With `accumulate` D is added to. As for a single instruction, the
// caller pins D, fences, commits and waits.
#pragma once
#include "tile/sw128.cuh"

namespace mla {
// Step `i` of an operand.
template <Major kMajor, u32 kNextBytes>
MLA_DEVICE SmemDesc step_desc(SmemDesc first, i32 i) {
    constexpr u32 kStepBytes = kMajor == Major::K ? kKMajorStepBytes : kMnMajorStepBytes;
    return advance(first, i / kSw128MmaSteps * kNextBytes + i % kSw128MmaSteps * kStepBytes);
}

template <i32 kSteps, Major kMajorA, u32 kNextA, Major kMajorB, u32 kNextB, class Element, class Sums>
MLA_DEVICE void multiply_steps(Element, Sums& d, SmemDesc a, SmemDesc b, bool accumulate) {
#pragma unroll
    for (i32 i = 0; i < kSteps; ++i) {
        wgmma_mma_async<kMajorA, kMajorB>(Element{}, d, step_desc<kMajorA, kNextA>(a, i),
                                          step_desc<kMajorB, kNextB>(b, i), accumulate || i > 0);
    }
}

template <Major kMajorB, u32 kNextB, class Element, class Sums, i32 kSteps>
MLA_DEVICE void multiply_steps(Element, Sums& d, const u32 (&a)[kSteps][4], SmemDesc b, bool accumulate) {
#pragma unroll
    for (i32 i = 0; i < kSteps; ++i) {
        wgmma_mma_async<Major::K, kMajorB>(Element{}, d, a[i], step_desc<kMajorB, kNextB>(b, i), accumulate || i > 0);
    }
}

template <i32 kSteps, u32 kNextA = kSw128Bytes, u32 kNextB = kNextA, class Element, class Sums>
MLA_DEVICE void multiply_abt(Element, Sums& d, SmemDesc a, SmemDesc b, bool accumulate = false) {
    multiply_steps<kSteps, Major::K, kNextA, Major::K, kNextB>(Element{}, d, a, b, accumulate);
}
template <u32 kNextB = kSw128Bytes, class Element, class Sums, i32 kSteps>
MLA_DEVICE void multiply_abt(Element, Sums& d, const u32 (&a)[kSteps][4], SmemDesc b, bool accumulate = false) {
    multiply_steps<Major::K, kNextB>(Element{}, d, a, b, accumulate);
}

template <i32 kSteps, u32 kNextA = kSw128Bytes, u32 kNextB = kSw128Bytes, class Element, class Sums>
MLA_DEVICE void multiply_ab(Element, Sums& d, SmemDesc a, SmemDesc b, bool accumulate = false) {
    multiply_steps<kSteps, Major::K, kNextA, Major::MN, kNextB>(Element{}, d, a, b, accumulate);
}
template <u32 kNextB = kSw128Bytes, class Element, class Sums, i32 kSteps>
MLA_DEVICE void multiply_ab(Element, Sums& d, const u32 (&a)[kSteps][4], SmemDesc b, bool accumulate = false) {
    multiply_steps<Major::MN, kNextB>(Element{}, d, a, b, accumulate);
}

template <i32 kSteps, u32 kNextA = kSw128Bytes, u32 kNextB = kSw128Bytes, class Element, class Sums>
MLA_DEVICE void multiply_atb(Element, Sums& d, SmemDesc a, SmemDesc b, bool accumulate = false) {
    multiply_steps<kSteps, Major::MN, kNextA, Major::MN, kNextB>(Element{}, d, a, b, accumulate);
}

template <i32 kSteps, u32 kNextA = kSw128Bytes, u32 kNextB = kSw128Bytes, class Element, class Sums>
MLA_DEVICE void multiply_atbt(Element, Sums& d, SmemDesc a, SmemDesc b, bool accumulate = false) {
    multiply_steps<kSteps, Major::MN, kNextA, Major::K, kNextB>(Element{}, d, a, b, accumulate);
}
}  // namespace mla
