// Additions of the main kernels to dKV in global memory; deterministic ones go to bins.
#pragma once
#include "ptx/reduce.cuh"
#include "sparse_backward/params.cuh"
#include "tile/binned_sum.cuh"

namespace mla::sparse_backward {
template <bool kDeterministic, i32 kHeadDimQk>
struct DkvAdder {
    float* dkv;
    const float* extractors;
    i32 bound;      // of the bins
    i64 bin_elems;  // from one bin to the next

    MLA_DEVICE explicit DkvAdder(const BackwardParams& p) : dkv(p.dkv), extractors(p.extractors) {
        if (kDeterministic) {
            bound = __float_as_int(p.extractors[p.s_kv]);
            bin_elems = (i64)p.s_kv * kHeadDimQk;
        }
    }

    // An element of the workspace, in bin 0.
    MLA_DEVICE float* at(i32 row, i32 position) const { return dkv + ((i64)row * kHeadDimQk + position); }
    // The extractor of a row's sums; none for kNoRow.
    MLA_DEVICE i32 extractor(i32 row) const { return kDeterministic && row >= 0 ? __float_as_int(extractors[row]) : 0; }

    // Adds neighbouring elements, `to` in bin 0, unless `wanted` is 0.
    template <i32 kCount>
    MLA_DEVICE void add(float* to, i32 extractor, float (&x)[kCount], i32 wanted) const {
        static_assert(kCount == 2 || kCount == 4, "8 or 16 bytes");
        if (kDeterministic) to += Bins{bound, extractor}.round(x) * bin_elems;
        if constexpr (kCount == 4) {
            red_add_v4(to, x[0], x[1], x[2], x[3], wanted);
        } else {
            red_add_v2(to, x[0], x[1], wanted);
        }
    }

    // Unconditional; pairs on any GPU.
    template <i32 kCount>
    MLA_DEVICE void add(float* to, i32 extractor, float (&x)[kCount]) const {
        static_assert(kCount == 2 || kCount == 4, "8 or 16 bytes");
        if (kDeterministic) to += Bins{bound, extractor}.round(x) * bin_elems;
        if constexpr (kCount == 4) {
            red_add_v4(to, x[0], x[1], x[2], x[3]);
        } else {
            red_add_x2(to, x[0], x[1]);
        }
    }
};
}  // namespace mla::sparse_backward
