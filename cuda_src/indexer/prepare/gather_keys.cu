// Reads index keys of a paged cache, gathered by slot: codes and scales unchanged, or keys in e2m1 as e4m3 codes with
// one scale (indexer/e2m1_keys.cuh).
//
// Grid: x = keys. Eight lanes share a key; each writes up to 16 bytes of its codes, and the first one its scale. Slots
// outside the pool give zeros.
#include "common/facts.cuh"
#include "indexer/e2m1_keys.cuh"
#include "ptx/control.cuh"

namespace mla::indexer::prepare {

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kLanes = 8;  // of a key
constexpr i32 kKeys = kThreads / kLanes;
constexpr i32 kChunkBytes = 16;

// ---- Params ----------------------------------------------------------------------------------------------------
struct GatherKeysParams {
    const u8* cache;  // (num_pages, page_size * (d + 4)): the codes of a page, then its scales; or d / 2 + 4
    const u8* slots;  // (n,), i32 or i64
    u8* codes;        // (n, d)
    float* k_scale;   // (n,)
    i64 slots_stride_bytes, page_stride_bytes, codes_stride_elems, k_scale_stride_elems;
    i32 n, num_pages, page_size, d, slots_are_64;
    i32 keys_are_e2m1;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(GatherKeysParams, slots_stride_bytes), MLA_OFFSET(GatherKeysParams, n),
              (int)sizeof(GatherKeysParams));
MLA_FACT(threads, kThreads);
MLA_FACT(keys_per_block, kKeys);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_indexer_prepare_gather_keys(const __grid_constant__ GatherKeysParams p) {
    griddepcontrol_wait();
    const i64 i = (i64)blockIdx.x * kKeys + threadIdx.x / kLanes;
    const i32 lane = threadIdx.x % kLanes;
    if (i >= p.n) return;
    const u8* from = p.slots + i * p.slots_stride_bytes;
    const i64 slot = p.slots_are_64 ? *reinterpret_cast<const i64*>(from) : (i64) * reinterpret_cast<const i32*>(from);
    const bool found = slot >= 0 && slot < (i64)p.num_pages * p.page_size;
    const i64 page = found ? slot / p.page_size : 0, at = found ? slot - page * p.page_size : 0;
    const u8* codes = p.cache + page * p.page_stride_bytes;
    if (p.keys_are_e2m1) {
        uint4 keys = make_uint4(0, 0, 0, 0);
        float scale = 0.f;
        if (found) {
            const uint2 pairs = reinterpret_cast<const uint2*>(codes + at * kE2m1KeyBytes)[lane];
            const E2m1Scales scales(reinterpret_cast<const u32*>(codes + (i64)p.page_size * kE2m1KeyBytes)[at]);
            const E2m1Table table(scales, lane * kChunkBytes / kE2m1Group);
            const uint2 low = table.to_e4m3(pairs.x), high = table.to_e4m3(pairs.y);
            keys = make_uint4(low.x, low.y, high.x, high.y);
            scale = scales.of_key();
        }
        reinterpret_cast<uint4*>(p.codes + i * p.codes_stride_elems)[lane] = keys;
        if (lane == 0) p.k_scale[i * p.k_scale_stride_elems] = scale;
        return;
    }
    if (lane < p.d / kChunkBytes) {
        const uint4* chunk = reinterpret_cast<const uint4*>(codes + at * p.d) + lane;
        reinterpret_cast<uint4*>(p.codes + i * p.codes_stride_elems)[lane] = found ? *chunk : make_uint4(0, 0, 0, 0);
    }
    if (lane == 0) {
        const float* scale = reinterpret_cast<const float*>(codes + (i64)p.page_size * p.d) + at;
        p.k_scale[i * p.k_scale_stride_elems] = found ? *scale : 0.f;
    }
}
}  // namespace mla::indexer::prepare
