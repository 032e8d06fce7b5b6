// Reads tokens of a paged cache as rows of numbers: dequantises, rounds once, gathers by slot.
//
// Grid: x = rows, one warp each; a lane has 16 consecutive elements, and some lanes 16 more. A slot outside of the pool
// gives a row of zeros. Without slots row i is slot i: the sparse forward makes rows of a whole cache so.
#include "attention/record.cuh"
#include "common/facts.cuh"
#include "ptx/control.cuh"

namespace mla::cache {
using namespace attention;

constexpr i32 kThreads = 128;
constexpr i32 kWarps = kThreads / kWarpThreads;

// ---- Params ----------------------------------------------------------------------------------------------------
struct CacheGatherParams {
    const u8* cache;  // pages
    const u8* slots;  // (n,), i32 or i64; null: row i is slot i
    u8* rows;         // (n, 16 (latent_chunks + rope_chunks)), `element`
    i64 slots_stride_bytes, rows_stride_bytes;
    i64 page_stride_bytes, token_stride_bytes;
    i32 n, num_pages, page_size;
    i32 element, slots_are_64;
    i32 kind, rope_kind, latent_chunks, rope_chunks, group_chunks, scale_kind;
    i32 rope_offset, scales_offset, scales_stride;
    float kv_scale;
    i32 padding;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(CacheGatherParams, slots_stride_bytes), MLA_OFFSET(CacheGatherParams, n),
              MLA_OFFSET(CacheGatherParams, kv_scale), (int)sizeof(CacheGatherParams));
MLA_FACT(threads, kThreads);
MLA_FACT(rows_per_block, kWarps);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) mla_cache_gather(const __grid_constant__ CacheGatherParams p) {
    griddepcontrol_wait();
    const i32 lane = threadIdx.x % kWarpThreads;
    const i64 i = (i64)blockIdx.x * kWarps + threadIdx.x / kWarpThreads;
    if (i >= p.n) return;
    const RecordLayout layout = MLA_RECORD_LAYOUT(p);
    i64 at = i;
    if (p.slots != nullptr) {
        const u8* slot = p.slots + i * p.slots_stride_bytes;
        at = p.slots_are_64 ? *reinterpret_cast<const i64*>(slot) : (i64) * reinterpret_cast<const i32*>(slot);
    }
    const TokenBytes token = token_at(layout, const_cast<u8*>(p.cache), at);
    u8* row = p.rows + i * p.rows_stride_bytes;
    const i32 element_bytes = p.element == kFloat32 ? 4 : 2;
    for (i32 chunk = lane; chunk < p.latent_chunks + p.rope_chunks; chunk += kWarpThreads) {
        float x[kRecordChunk];
#pragma unroll
        for (float& value : x) value = 0.f;
        if (token.data != nullptr) load_token_chunk(layout, token, chunk, x);
        store_chunk(row + chunk * kRecordChunk * element_bytes, x, p.element);
    }
}
}  // namespace mla::cache
