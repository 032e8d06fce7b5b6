// A row of elements over the lanes of a warp: lane l has elements l, l + 32, ... For kernels of any GPU, which
// take one row at a time.
#pragma once
#include "ptx/element.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::loss {
template <i32 kMaxElems>
struct LaneRow {
    static constexpr i32 kItems = kMaxElems / kWarpThreads;
    static_assert(kMaxElems % kWarpThreads == 0, "whole warps");

    float x[kItems];

    MLA_DEVICE void clear() {
#pragma unroll
        for (i32 i = 0; i < kItems; ++i) x[i] = 0.f;
    }

    // value(bits) of the elements with the bits element(i); zeros beyond the row's end. Only loads depend on the end:
    // branches around more code would take registers.
    template <class Element, class Value>
    MLA_DEVICE void load_each(i32 elems, i32 lane, Element element, Value value) {
#pragma unroll
        for (i32 i = 0; i < kItems; ++i) {
            const i32 at = i * kWarpThreads + lane;
            u32 bits = 0;
            if (at < elems) bits = element(at);
            x[i] = value(bits);
        }
    }

    MLA_DEVICE void load(const u16* from, i32 elems, i32 lane) {
        load_each(elems, lane, [&](i32 at) { return from[at]; }, [](u32 bits) { return bfloat16::to_float(bits); });
    }
    MLA_DEVICE void load(const float* from, i32 elems, i32 lane) {
        load_each(
            elems, lane, [&](i32 at) { return __float_as_uint(from[at]); },
            [](u32 bits) { return __uint_as_float(bits); });
    }

    // In every lane.
    MLA_DEVICE float dot(const LaneRow& other) const {
        float sum = 0.f;
#pragma unroll
        for (i32 i = 0; i < kItems; ++i) sum = fmaf(x[i], other.x[i], sum);
        return warp_sum(sum);
    }

    MLA_DEVICE void scale(float factor) {
#pragma unroll
        for (i32 i = 0; i < kItems; ++i) x[i] *= factor;
    }

    MLA_DEVICE void add(float factor, const LaneRow& other) {
#pragma unroll
        for (i32 i = 0; i < kItems; ++i) x[i] = fmaf(factor, other.x[i], x[i]);
    }

    // store(element, value) for each element of the row.
    template <class Store>
    MLA_DEVICE void for_each(i32 elems, i32 lane, Store store) const {
#pragma unroll
        for (i32 i = 0; i < kItems; ++i) {
            const i32 at = i * kWarpThreads + lane;
            if (at < elems) store(at, x[i]);
        }
    }
};
}  // namespace mla::indexer::loss
