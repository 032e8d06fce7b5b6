// Sums with results independent of the order of additions: each number is first rounded to few enough bits that every
// partial sum is exact.
//
// fp32 adds multiples of a quantum exactly while the sum stays below 2^24 quanta, so the numbers of one sum are rounded
// to a quantum that leaves room for all of them. A single quantum would lose numbers that are small beside the largest
// possible one; hence there are kNumBins sums, each with a quantum 2^kBinBits below the previous one, and a number goes
// to the finest bin that can hold it. The reader adds up the bins in a fixed order.
//
//   bound        no number is larger in magnitude: a power of two
//   n            the most numbers that one sum can get
//   bin i        takes numbers up to bound / 2^(kBinBits i), as multiples of quantum_i
//   quantum_i    bound / 2^(kBinBits i) / 2^k,  with n 2^k <= 2^23
//
// A number x is rounded by at most half of max(2^(kBinBits - k) |x|, quantum_last).
// Source: pre-rounded summation (Demmel and Nguyen, "Fast reproducible floating-point summation", 2013).
#pragma once
#include "common/types.cuh"

namespace mla {
constexpr i32 kNumBins = 6;
constexpr i32 kBinBits = 4;
constexpr i32 kMantissaBits = 23;

MLA_DEVICE float max_magnitude(const float (&x)[2]) { return fmaxf(fabsf(x[0]), fabsf(x[1])); }
MLA_DEVICE float max_magnitude(const float (&x)[4]) {
    return fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
}

// The bins of one sum. (x + extractor) - extractor is x rounded to a multiple of the quantum if the extractor is 1.5 *
// 2^23 quanta; the extractors of the bins differ in their exponents only.
struct Bins {
    i32 bound;      // its bits as a float
    i32 extractor;  // of bin 0, likewise

    // The bin for numbers up to `magnitude`; bin 0 if that is not finite.
    MLA_DEVICE i32 index(float magnitude) const {
        const i32 steps = (bound - __float_as_int(magnitude)) >> (kMantissaBits + 2);
        return min(max(steps, 0), kNumBins - 1);
    }
    MLA_DEVICE float round(float x, i32 bin) const {
        const float e = __int_as_float(extractor - bin * (kBinBits << kMantissaBits));
        return (x + e) - e;
    }
    // Rounds numbers that go to the same bin; returns which.
    template <i32 kCount>
    MLA_DEVICE i32 round(float (&x)[kCount]) const {
        const i32 bin = index(max_magnitude(x));
#pragma unroll
        for (float& number : x) number = round(number, bin);
        return bin;
    }
};
static_assert(kBinBits == 4, "index() divides by shifting");
}  // namespace mla
