// Writes tokens to a paged cache: see cache/append.cuh.
//
// Grid: x = tokens, two for each warp.
#include "cache/append.cuh"
#include "common/facts.cuh"
#include "ptx/control.cuh"

namespace mla::cache {

// ---- Params ----------------------------------------------------------------------------------------------------
struct CacheAppendParams {
    const u8* latent;     // (n, 16 latent_chunks), `element`
    const u8* rope;       // (n, 16 rope_chunks), `element`; or null
    u8* cache;            // pages
    const u8* slots;      // (n,), i32 or i64
    const float* cos;     // (max_position, 32), or null
    const float* sin;     // (max_position, 32), or null
    const u8* positions;  // (n,), i32 or i64; or null
    i64 latent_stride_bytes, rope_stride_bytes, slots_stride_bytes, positions_stride_bytes;
    i64 cos_stride_elems, sin_stride_elems;
    i64 page_stride_bytes, token_stride_bytes;
    i32 n, num_pages, page_size, max_position;
    i32 element, slots_are_64, positions_are_64, interleaved, power_of_2;
    i32 kind, rope_kind, latent_chunks, rope_chunks, group_chunks, scale_kind;
    i32 rope_offset, scales_offset, scales_stride;
    float kv_scale;
    i32 padding;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(CacheAppendParams, latent_stride_bytes), MLA_OFFSET(CacheAppendParams, n),
              MLA_OFFSET(CacheAppendParams, kv_scale), (int)sizeof(CacheAppendParams));
MLA_FACT(threads, kAppendThreads);
MLA_FACT(tokens_per_block, kAppendWarps* kTokens);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kAppendThreads, 8)
    mla_cache_append(const __grid_constant__ CacheAppendParams p) {
    const i32 lane = threadIdx.x % kWarpThreads;
    const i64 first = ((i64)blockIdx.x * kAppendWarps + threadIdx.x / kWarpThreads) * kTokens;
    const TableRotation rotation{p.cos,
                                 p.sin,
                                 p.positions,
                                 p.cos_stride_elems,
                                 p.sin_stride_elems,
                                 p.positions_stride_bytes,
                                 p.max_position,
                                 p.positions_are_64,
                                 p.interleaved};
    prefetch_tokens(p, rotation, first, lane);
    griddepcontrol_wait();
    append_tokens(p, rotation, RopeRows{nullptr, 0}, first, lane);
}
}  // namespace mla::cache
