// Copies pages within each layer of a pool, as on the first write to a page that sequences share.
//
// Grid: x = blocks that stride over pieces of 16 KB of all (pair, layer)s. The pairs are read on the device, so a
// replay of a captured launch reads them again. Pairs with a page outside the pool are skipped.
#include "common/facts.cuh"
#include "common/types.cuh"
#include "ptx/control.cuh"

namespace mla::cache {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kVectorBytes = 16;
constexpr i32 kLoads = 4;  // of a thread, in flight
constexpr i32 kPieceBytes = kThreads * kLoads * kVectorBytes;

// ---- Params ----------------------------------------------------------------------------------------------------
struct CacheCopyPagesParams {
    u8* pool;          // (num_layers, num_pages, page_bytes)
    const i32* pairs;  // (n, 2): from, to
    i64 layer_stride_bytes, page_stride_bytes;
    i64 pairs_stride_n_elems, pairs_stride_elems;
    i64 page_bytes;
    i32 n, num_layers, num_pages, aligned;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(CacheCopyPagesParams, layer_stride_bytes), MLA_OFFSET(CacheCopyPagesParams, n),
              (int)sizeof(CacheCopyPagesParams));
MLA_FACT(threads, kThreads);
MLA_FACT(piece_bytes, kPieceBytes);

// ---- One piece -------------------------------------------------------------------------------------------------
MLA_DEVICE void copy_vectors(u8* to, const u8* from, i64 begin, i64 end) {
    uint4 loaded[kLoads];
#pragma unroll
    for (i32 i = 0; i < kLoads; ++i) {
        const i64 at = begin + (i64)(i * kThreads + threadIdx.x) * kVectorBytes;
        if (at < end) loaded[i] = *reinterpret_cast<const uint4*>(from + at);
    }
#pragma unroll
    for (i32 i = 0; i < kLoads; ++i) {
        const i64 at = begin + (i64)(i * kThreads + threadIdx.x) * kVectorBytes;
        if (at < end) *reinterpret_cast<uint4*>(to + at) = loaded[i];
    }
}

MLA_DEVICE void copy_bytes(u8* to, const u8* from, i64 begin, i64 end) {
    for (i64 at = begin + threadIdx.x; at < end; at += kThreads) to[at] = from[at];
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_cache_copy_pages(const __grid_constant__ CacheCopyPagesParams p) {
    griddepcontrol_wait();
    const i64 pieces = (p.page_bytes + kPieceBytes - 1) / kPieceBytes;
    const i64 of_pair = pieces * p.num_layers;
    for (i64 work = blockIdx.x; work < of_pair * p.n; work += gridDim.x) {
        const i64 pair = work / of_pair, in_pair = work - pair * of_pair;
        const i32* pages = p.pairs + pair * p.pairs_stride_n_elems;
        const i32 source = pages[0], destination = pages[p.pairs_stride_elems];
        if ((u32)source >= (u32)p.num_pages || (u32)destination >= (u32)p.num_pages) continue;
        const i64 layer = in_pair / pieces, begin = (in_pair - layer * pieces) * kPieceBytes;
        const i64 end = min(begin + kPieceBytes, p.page_bytes);
        u8* base = p.pool + layer * p.layer_stride_bytes;
        u8* to = base + destination * p.page_stride_bytes;
        const u8* from = base + source * p.page_stride_bytes;
        if (p.aligned) {
            copy_vectors(to, from, begin, end);
        } else {
            copy_bytes(to, from, begin, end);
        }
    }
}
}  // namespace mla::cache
