// From fp32 sums in the workspace to the gradient of the keys' last columns that all heads share, in the order of the
// heads where each has its own.
#pragma once
#include "dense/backward_params.cuh"
#include "ptx/element.cuh"

namespace mla::dense {
constexpr i32 kDkRopeThreads = 256;
constexpr i32 kDkRopeLaneColumns = 4;
constexpr i32 kDkRopeKeyLanes = kRopeColumns / kDkRopeLaneColumns;
constexpr i32 kDkRopeBlockKeys = kDkRopeThreads / kDkRopeKeyLanes;

// Converts kDkRopeBlockKeys keys. Called by the threads of one block.
template <class Element>
MLA_DEVICE void convert_dk_rope(const PrefillBackwardParams& p, i32 block, i32 thread) {
    const i64 key = (i64)block * kDkRopeBlockKeys + thread / kDkRopeKeyLanes;
    if (key >= p.s_kv) return;
    const i32 column = thread % kDkRopeKeyLanes * kDkRopeLaneColumns;
    const i32 parts = p.dk_rope_sums_stride_h_elems == 0 ? 1 : p.h_kv;
    const float* from = p.dk_rope_sums + key * p.dk_rope_sums_stride_s_elems + column;
    float sums[kDkRopeLaneColumns] = {};
#pragma unroll 8
    for (i32 head = 0; head < parts; ++head) {
        const float4 x = *reinterpret_cast<const float4*>(from + head * p.dk_rope_sums_stride_h_elems);
        sums[0] += x.x, sums[1] += x.y, sums[2] += x.z, sums[3] += x.w;
    }
    u16* to = p.dk_rope + key * p.dk_rope_stride_s_elems + p.k_rope_column + column;
#pragma unroll
    for (i32 i = 0; i < kDkRopeLaneColumns; ++i) to[i] = Element::from_float(sums[i]);
}
}  // namespace mla::dense
