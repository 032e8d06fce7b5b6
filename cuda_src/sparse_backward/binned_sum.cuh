// Additions whose sum does not depend on their order: each number is first rounded to so few bits that every sum is
// exact.
//
// fp32 adds multiples of a quantum exactly while the sum stays below 2^24 quanta. So the numbers for one sum are
// rounded to a quantum that leaves room for all of them. One quantum would lose the small numbers beside the largest
// possible one; hence there are kLevels sums, each with a quantum 2^kLevelBits below the one before, and a number goes
// to the finest level that holds it. Whoever reads the result adds up the levels, in their order.
//
//   bound          no number is larger: a power of two
//   n              numbers that one sum can get
//   level l        takes numbers up to bound / 2^(kLevelBits l), as multiples of quantum_l
//   quantum_l      bound / 2^(kLevelBits l) / 2^k,  with n 2^k <= 2^23
//
// A number of size x is rounded by at most half of max(2^(kLevelBits - k) x, quantum_last).
// Source: pre-rounded summation (Demmel and Nguyen, "Fast reproducible floating-point summation", 2013).
#pragma once
#include "common/types.cuh"

constexpr i32 kLevels = 6;
constexpr i32 kLevelBits = 4;
constexpr i32 kMantissaBits = 23;

// What it takes to round the numbers of one sum. x + rounder - rounder is x, rounded to a multiple of the quantum, when
// the rounder is 1.5 * 2^23 quanta; those of the levels differ in the exponent only.
struct ExactAddition {
    i32 bound;    // the bits of the float
    i32 rounder;  // the bits of level 0's

    // Level of a group of numbers whose largest size is `size`; 0 where that is not finite.
    MLA_DEVICE i32 level(float size) const {
        const i32 steps = (bound - __float_as_int(size)) >> (kMantissaBits + 2);
        return min(max(steps, 0), kLevels - 1);
    }
    MLA_DEVICE float round(float x, i32 level) const {
        const float r = __int_as_float(rounder - level * (kLevelBits << kMantissaBits));
        return (x + r) - r;
    }
};
static_assert(kLevelBits == 4, "level() divides by shifting");
