// Turns the indices of sparse decode into lists of tokens, one per query: where in memory each selected token lies. And
// cuts the lists into splits.
//
// The entries of the first list that name a token come first, then those of the second one. An entry holds the
// addresses of the token's bytes and of its scales, so the attention kernel need not know of pages, or of two caches.
//
// The schedule does not wait for the lists: it takes every entry within `topk_length` for a token. Where many are not,
// splits are less even, and some have nothing to do.
//
// Grid: x = 1 + queries. Block 0 cuts; each of the others makes the list of a query, takes 4096 entries at a time, and
// keeps their order.
#include "attention/record.cuh"
#include "attention/split_schedule.cuh"
#include "common/facts.cuh"
#include "ptx/control.cuh"

namespace mla::sparse_decode {
using namespace attention;

constexpr i32 kThreads = kScheduleThreads;
constexpr i32 kWarps = kThreads / kWarpThreads;
static_assert(kWarps == kWarpThreads, "a lane per warp's count");
// All entries of a thread are asked for at once: with lists of up to 4096 entries, latencies follow one another once.
constexpr i32 kEntriesOfThread = 4;
constexpr i32 kEntriesOfWarp = kEntriesOfThread * kWarpThreads;
constexpr i32 kEntriesOfBlock = kEntriesOfWarp * kWarps;

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
    SchedulePoint* schedule;       // (num_splits + 1,)
    i64 page_stride_bytes, token_stride_bytes, extra_page_stride_bytes, extra_token_stride_bytes;
    i64 indices_stride_b_elems, indices_stride_s_elems, indices_stride_k_elems;
    i64 extra_stride_b_elems, extra_stride_s_elems, extra_stride_k_elems;
    i64 topk_length_stride_elems, extra_topk_length_stride_elems;
    i64 list_stride;
    i32 queries, s_q, topk, extra_topk;
    i32 num_splits, merge_cost;  // see attention/split_schedule.cuh
    i32 num_pages, page_size, scales_offset, scales_stride;
    i32 extra_num_pages, extra_page_size, extra_scales_offset, extra_scales_stride;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(SparseDecodeListsParams, page_stride_bytes),
              MLA_OFFSET(SparseDecodeListsParams, queries), (int)sizeof(SparseDecodeListsParams));
MLA_FACT(threads, kThreads);
MLA_FACT(entry_bytes, sizeof(TokenBytes));
MLA_FACT(max_splits, kMaxSplits);

// ---- Entries ---------------------------------------------------------------------------------------------------
// The indices of a query in one cache.
struct Source {
    RecordLayout layout;
    u8* cache;
    const i32* indices;
    i64 stride_elems;
    i32 length;  // entries that count

    // A slot is not negative as an i32 if it is one: its page and token are found without 64-bit divisions.
    MLA_DEVICE TokenBytes token(i32 at, i32 slot) const {
        if (at >= length || slot < 0 || slot >= (i64)layout.num_pages * layout.page_size) return {nullptr, nullptr};
        const u32 page = (u32)slot / (u32)layout.page_size, token = (u32)slot - page * layout.page_size;
        u8* from = cache + page * layout.page_stride;
        return {from + token * layout.token_stride, from + layout.scales_offset + (i64)token * layout.scales_stride};
    }
};

MLA_DEVICE i32 clamped_length(const i32* lengths, i64 at, i32 topk) {
    return lengths == nullptr ? topk : max(0, min(lengths[at], topk));
}

MLA_DEVICE Source first_source(const SparseDecodeListsParams& p, i64 b, i64 s) {
    Source source{};
    source.layout.page_stride = p.page_stride_bytes, source.layout.token_stride = p.token_stride_bytes;
    source.layout.num_pages = p.num_pages, source.layout.page_size = p.page_size;
    source.layout.scales_offset = p.scales_offset, source.layout.scales_stride = p.scales_stride;
    source.cache = p.cache;
    source.indices = p.indices + b * p.indices_stride_b_elems + s * p.indices_stride_s_elems;
    source.stride_elems = p.indices_stride_k_elems;
    source.length = clamped_length(p.topk_length, b * p.topk_length_stride_elems, p.topk);
    return source;
}

MLA_DEVICE Source extra_source(const SparseDecodeListsParams& p, i64 b, i64 s) {
    Source source{};
    source.layout.page_stride = p.extra_page_stride_bytes, source.layout.token_stride = p.extra_token_stride_bytes;
    source.layout.num_pages = p.extra_num_pages, source.layout.page_size = p.extra_page_size;
    source.layout.scales_offset = p.extra_scales_offset, source.layout.scales_stride = p.extra_scales_stride;
    source.cache = p.extra_cache;
    source.indices = p.extra_indices + b * p.extra_stride_b_elems + s * p.extra_stride_s_elems;
    source.stride_elems = p.extra_stride_k_elems;
    source.length = clamped_length(p.extra_topk_length, b * p.extra_topk_length_stride_elems, p.extra_topk);
    return source;
}

// ---- Lists -----------------------------------------------------------------------------------------------------
MLA_DEVICE void write_list(const SparseDecodeListsParams& p, i64 query, i32 (&warp_counts)[kWarps]) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const i64 b = query / p.s_q, s = query - b * p.s_q;
    const Source source = first_source(p, b, s), extra = extra_source(p, b, s);
    TokenBytes* list = p.lists + query * p.list_stride;
    const i32 total = p.topk + p.extra_topk;
    i32 count = 0;
#pragma unroll 1
    for (i32 first = 0; first < total; first += kEntriesOfBlock) {
        const i32 at0 = first + warp * kEntriesOfWarp + lane;
        i32 slots[kEntriesOfThread];
#pragma unroll
        for (i32 i = 0; i < kEntriesOfThread; ++i) {
            const i32 at = at0 + i * kWarpThreads;
            slots[i] = at < p.topk  ? source.indices[at * source.stride_elems]
                       : at < total ? extra.indices[(at - p.topk) * extra.stride_elems]
                                    : -1;
        }
        TokenBytes tokens[kEntriesOfThread];
        i32 places[kEntriesOfThread], found = 0;
#pragma unroll
        for (i32 i = 0; i < kEntriesOfThread; ++i) {
            const i32 at = at0 + i * kWarpThreads;
            tokens[i] = at < p.topk ? source.token(at, slots[i]) : extra.token(at - p.topk, slots[i]);
            const u32 valid = __ballot_sync(kFullWarp, tokens[i].data != nullptr);
            places[i] = found + __popc(valid & ((1u << lane) - 1));
            found += __popc(valid);
        }
        if (lane == 0) warp_counts[warp] = found;
        __syncthreads();
        const i32 of_warp = warp_counts[lane], before = warp_sum(lane < warp ? of_warp : 0);
#pragma unroll
        for (i32 i = 0; i < kEntriesOfThread; ++i) {
            if (tokens[i].data != nullptr) list[count + before + places[i]] = tokens[i];
        }
        count += warp_sum(of_warp);
        __syncthreads();  // the counts have been read
    }
    if (threadIdx.x == 0) p.counts[query] = count;
}

// ---- Schedule --------------------------------------------------------------------------------------------------
// The queries as a batch, see attention/split_schedule.cuh.
struct Batch {
    const SparseDecodeListsParams& p;
    SchedulePoint* schedule;
    i64 max_tokens;
    i32 b, num_splits, merge_cost;
    static constexpr i32 piece_cost = 0;  // has not been measured here

    MLA_DEVICE explicit Batch(const SparseDecodeListsParams& p)
        : p(p),
          schedule(p.schedule),
          max_tokens((i64)p.topk + p.extra_topk),
          b(p.queries),
          num_splits(p.num_splits),
          merge_cost(p.merge_cost) {}
    MLA_DEVICE u32 tokens(i32 query) const {
        const i64 b = query / p.s_q;
        return clamped_length(p.topk_length, b * p.topk_length_stride_elems, p.topk) +
               clamped_length(p.extra_topk_length, b * p.extra_topk_length_stride_elems, p.extra_topk);
    }
};

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_decode_lists(const __grid_constant__ SparseDecodeListsParams p) {
    __shared__ ScheduleStorage schedule;
    __shared__ i32 warp_counts[kWarps];
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();  // whoever follows waits for the end of this kernel
    if (blockIdx.x == 0) {
        write_schedule(Batch(p), schedule);
    } else {
        write_list(p, blockIdx.x - 1, warp_counts);
    }
}
}  // namespace mla::sparse_decode
