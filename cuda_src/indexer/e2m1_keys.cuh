// Index keys of 128 e2m1 numbers and four scales, one per 32 numbers: exponents of powers of two (ue8m0).
//
// A key becomes e4m3 numbers with one scale: the numbers of a group are multiplied by the group's scale over the key's
// largest scale, and by 2^6, which leaves room below. That is exact where the scales of a key are at most 2^14 apart;
// groups with a smaller scale become zeros. A NaN scale, 0xff, makes a group NaN.
//
// Source of the record: DeepGEMM's paged cache for its logits in FP4.
#pragma once
#include "common/types.cuh"

namespace mla::indexer {
constexpr i32 kE2m1Keys = 128, kE2m1Group = 32;
constexpr i32 kE2m1KeyBytes = kE2m1Keys / 2;
constexpr i32 kRaised = 6;  // exponent: 6 * 2^6 is the largest number
constexpr i32 kNanScale = 255;

struct E2m1Scales {
    u32 bytes;
    i32 largest;  // of those that are numbers

    MLA_DEVICE explicit E2m1Scales(u32 bytes) : bytes(bytes), largest(0) {
#pragma unroll
        for (i32 group = 0; group < 4; ++group) {
            if (of(group) != kNanScale) largest = max(largest, of(group));
        }
    }
    MLA_DEVICE i32 of(i32 group) const { return (i32)(bytes >> 8 * group & 0xff); }
    // 2^(largest - 127), which may be subnormal.
    MLA_DEVICE float power() const { return __uint_as_float(largest == 0 ? 1u << 22 : (u32)largest << 23); }
    // Factor of the key's e4m3 numbers.
    MLA_DEVICE float of_key() const { return power() * (1.f / (1 << kRaised)); }
};

// Bytes of e4m3 for the eight magnitudes of e2m1, times the group's share of the key's scale.
struct E2m1Table {
    u32 to3, to7;

    MLA_DEVICE E2m1Table(const E2m1Scales& scales, i32 group) {
        const i32 scale = scales.of(group), less = scales.largest - scale;
        to3 = 0x6c686000, to7 = 0x7c787470;  // 0, 32, 64, 96; 128, 192, 256, 384
        if (scale == kNanScale) {
            to3 = to7 = 0x7f7f7f7f;
        } else if (less < 12) {
            const u32 lower = less * 0x08080808u;
            to3 -= lower & 0xffffff00, to7 -= lower;
        } else {  // the least ones are subnormal
            to3 = less == 12 ? 0x0c080400 : less == 13 ? 0x06040200 : less == 14 ? 0x03020100 : 0;
            to7 = less == 12 ? 0x1c181410 : less == 13 ? 0x14100c08 : less == 14 ? 0x0c080604 : 0;
        }
    }
    // Eight numbers, the first one in the lowest bits.
    MLA_DEVICE uint2 to_e4m3(u32 codes) const {
        constexpr u32 kSigns = 0x80808080;
        const u32 sizes = codes & 0x77777777, shifted = codes << 4;
        return make_uint2(__byte_perm(to3, to7, sizes) | (__byte_perm(codes, shifted, 0x1504) & kSigns),
                          __byte_perm(to3, to7, sizes >> 16) | (__byte_perm(codes, shifted, 0x3726) & kSigns));
    }
};
}  // namespace mla::indexer
