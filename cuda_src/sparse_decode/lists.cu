// Turns the indices of sparse decode into lists of tokens, one per query: where in memory each selected token lies.
//
// The entries of the first list that name a token come first, then those of the second one. An entry holds the
// addresses of the token's bytes and of its scales, so the attention kernel need not know of pages, or of two caches.
//
// Grid: x = queries. A block takes 128 entries at a time, and keeps their order.
#include "attention/record.cuh"
#include "common/facts.cuh"
#include "ptx/control.cuh"

namespace mla::sparse_decode {
using namespace attention;

constexpr i32 kThreads = 128;
constexpr i32 kWarps = kThreads / kWarpThreads;

// ---- Params ----------------------------------------------------------------------------------------------------
struct SparseDecodeListsParams {
    u8* cache;                     // pages
    const i32* indices;            // (b, s_q, topk): slots, page * page_size + token
    const i32* topk_length;        // (b,), or null: every entry counts
    u8* extra_cache;               // of the same record; or null
    const i32* extra_indices;      // (b, s_q, extra_topk), or null
    const i32* extra_topk_length;  // (b,), or null
    TokenBytes* lists;             // (b s_q, list_stride)
    i32* counts;                   // (b s_q,)
    i64 page_stride_bytes, token_stride_bytes, extra_page_stride_bytes, extra_token_stride_bytes;
    i64 indices_stride_b_elems, indices_stride_s_elems, indices_stride_k_elems;
    i64 extra_stride_b_elems, extra_stride_s_elems, extra_stride_k_elems;
    i64 topk_length_stride_elems, extra_topk_length_stride_elems;
    i64 list_stride;
    i32 s_q, topk, extra_topk;
    i32 num_pages, page_size, scales_offset, scales_stride;
    i32 extra_num_pages, extra_page_size, extra_scales_offset, extra_scales_stride;
    i32 padding;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(SparseDecodeListsParams, page_stride_bytes),
              MLA_OFFSET(SparseDecodeListsParams, s_q), (int)sizeof(SparseDecodeListsParams));
MLA_FACT(threads, kThreads);
MLA_FACT(entry_bytes, sizeof(TokenBytes));

// ---- One list --------------------------------------------------------------------------------------------------
struct Source {
    RecordLayout layout;
    u8* cache;
    const i32* indices;
    i64 stride_elems;
    i32 length;
};

// Appends the valid entries of a list; returns how many there are then. Called by all threads.
MLA_DEVICE i32 append_list(const Source& source, TokenBytes* list, i32 count, i32 (&warp_counts)[kWarps]) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    for (i32 first = 0; first < source.length; first += kThreads) {
        const i32 at = first + threadIdx.x;
        TokenBytes token{nullptr, nullptr};
        if (at < source.length) token = token_at(source.layout, source.cache, source.indices[at * source.stride_elems]);
        const u32 valid = __ballot_sync(kFullWarp, token.data != nullptr);
        if (lane == 0) warp_counts[warp] = __popc(valid);
        __syncthreads();
        i32 place = count + __popc(valid & ((1u << lane) - 1));
#pragma unroll
        for (i32 other = 0; other < kWarps; ++other) {
            if (other < warp) place += warp_counts[other];
            count += warp_counts[other];
        }
        if (token.data != nullptr) list[place] = token;
        __syncthreads();  // the counts have been read
    }
    return count;
}

MLA_DEVICE i32 clamped_length(const i32* lengths, i64 at, i32 topk) {
    return lengths == nullptr ? topk : max(0, min(lengths[at], topk));
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_sparse_decode_lists(const __grid_constant__ SparseDecodeListsParams p) {
    __shared__ i32 warp_counts[kWarps];
    griddepcontrol_wait();
    const i64 query = blockIdx.x, b = query / p.s_q, s = query - b * p.s_q;
    TokenBytes* list = p.lists + query * p.list_stride;
    Source source{};
    source.layout.page_stride = p.page_stride_bytes, source.layout.token_stride = p.token_stride_bytes;
    source.layout.num_pages = p.num_pages, source.layout.page_size = p.page_size;
    source.layout.scales_offset = p.scales_offset, source.layout.scales_stride = p.scales_stride;
    source.cache = p.cache;
    source.indices = p.indices + b * p.indices_stride_b_elems + s * p.indices_stride_s_elems;
    source.stride_elems = p.indices_stride_k_elems;
    source.length = clamped_length(p.topk_length, b * p.topk_length_stride_elems, p.topk);
    i32 count = append_list(source, list, 0, warp_counts);
    if (p.extra_indices != nullptr) {
        source.layout.page_stride = p.extra_page_stride_bytes, source.layout.token_stride = p.extra_token_stride_bytes;
        source.layout.num_pages = p.extra_num_pages, source.layout.page_size = p.extra_page_size;
        source.layout.scales_offset = p.extra_scales_offset, source.layout.scales_stride = p.extra_scales_stride;
        source.cache = p.extra_cache;
        source.indices = p.extra_indices + b * p.extra_stride_b_elems + s * p.extra_stride_s_elems;
        source.stride_elems = p.extra_stride_k_elems;
        source.length = clamped_length(p.extra_topk_length, b * p.extra_topk_length_stride_elems, p.extra_topk);
        count = append_list(source, list, count, warp_counts);
    }
    if (threadIdx.x == 0) p.counts[query] = count;
    griddepcontrol_launch_dependents();
}
}  // namespace mla::sparse_decode
