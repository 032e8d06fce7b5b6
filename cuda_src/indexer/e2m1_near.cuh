// Tables of e2m1 keys (indexer/e2m1_keys.cuh) with nearly equal scales: none of their e4m3 numbers is subnormal, so a
// group's table is the largest scale's table with smaller exponents, in four instructions.
#pragma once
#include "indexer/e2m1_keys.cuh"

namespace mla::indexer {
constexpr i32 kNear = 12;  // differences of scales from which on there are subnormal numbers

// Returns true if all scales of a key are numbers, and near each other.
MLA_DEVICE bool are_near(const E2m1Scales& scales) {
    i32 most = 0;
#pragma unroll
    for (i32 group = 0; group < 4; ++group) most = max(most, scales.of(group));
    const u32 less = most * 0x01010101u - scales.bytes;
    return most != kNanScale && ((less | less + 0x01010101u * (0x80 - kNear)) & 0x80808080) == 0;
}

// The tables of a key's groups, whatever its scales ...
struct E2m1Tables {
    E2m1Scales scales;

    MLA_DEVICE explicit E2m1Tables(const E2m1Scales& scales) : scales(scales) {}
    MLA_DEVICE E2m1Table of(i32 group) const { return E2m1Table(scales, group); }
};

// ... and of near ones.
struct E2m1NearTables {
    u32 lower;  // a byte for each group: what its exponents are less, eight for each power of two

    MLA_DEVICE explicit E2m1NearTables(const E2m1Scales& scales)
        : lower((scales.largest * 0x01010101u - scales.bytes) << 3) {}
    MLA_DEVICE E2m1Table of(i32 group) const {
        E2m1Table table(E2m1Scales(0), 0);                       // of the largest scale
        table.to3 -= __byte_perm(lower, 0, 0x1110 * group + 4);  // zero stays
        table.to7 -= __byte_perm(lower, 0, 0x1111 * group);
        return table;
    }
};
}  // namespace mla::indexer
