// The indexer's selection on Hopper for a few next tokens of sequences, in one launch: logits of keys in pages of 64,
// and their exact top-k.
//
//   logit[s] = scale[s] * sum_h weights[h] * max(q[h] . key[s], 0)        indices = the k largest logits, ascending
//
// Grid: a cluster of kClusterBlocks blocks for each token. A block takes a contiguous share of the token's pages, whose
// logits stay in its shared memory as keys of the selection.
//
//   all    | length, block table | pages, queries under way | products, sums: keys | digits of T | votes | indices
//
// There are no roles. A warp starts one of the first kStages pages; warpgroups take pages in turn, and refill the
// stages that they have read.
//
// The logits have the bits of indexer/logits/sm90_paged.cu, and the selection the order of indexer/topk/select.cu: the
// result does not depend on which of them runs.
#include "common/facts.cuh"
#include "common/limits.cuh"
#include "indexer/select/cluster_select.cuh"
#include "indexer/sm90_key_rows.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/load.cuh"
#include "tile/product.cuh"

namespace mla::indexer::select {
// ---- Budget ----------------------------------------------------------------------------------------------------
using Element = float8_e4m3fn;
constexpr i32 kClusterBlocks = 16;
constexpr i32 kMathWarpgroups = 4;
constexpr i32 kThreads = kMathWarpgroups * kWarpgroupThreads, kWarps = kThreads / kWarpThreads;
constexpr i32 kWarpgroupBarrier = 1;  // the first of kMathWarpgroups

constexpr i32 kBlockHeads = 64;  // of a token: columns of its products
constexpr i32 kHeadDim = kSw128RowBytes;
constexpr i32 kPageKeys = kSw128Rows;
constexpr u32 kCodeBytes = kSw128Bytes, kScaleBytes = kPageKeys * sizeof(float);
constexpr i32 kScaleRow = kCodeBytes / kScaleBytes;  // the last row of a page, in rows of kScaleBytes
constexpr i32 kMmaSteps = kHeadDim / kKMajorStepBytes;
constexpr u32 kQueryBytes = kBlockHeads * kSw128RowBytes;
constexpr i32 kStages = kWarps;
constexpr i32 kMaxKeys = 8192, kMaxPages = kMaxKeys / kPageKeys;      // of a block
constexpr i32 kProducts = kBlockHeads / 2, kPairs = kBlockHeads / 8;  // of a thread: products, pairs of weights
static_assert(kStages % kMathWarpgroups == 0, "a stage is always the same warpgroup's");

// ---- Params ----------------------------------------------------------------------------------------------------
// Strides are in elements, of the cache in bytes.
struct SelectParams {
    const float* weights;    // (b, tokens, heads)
    const i32* ends;         // (b,), or (b, tokens)
    const i32* block_table;  // (b, max_pages)
    const u8* cache;         // (num_pages, bytes of kPageKeys keys)
    i32* indices;            // (b * tokens, k)
    i32* counts;             // (b * tokens,)
    i64 weights_stride_block_elems, weights_stride_token_elems, weights_stride_head_elems;
    i64 ends_stride_block_elems, ends_stride_token_elems;
    i64 table_stride_block_elems, table_stride_page_elems;
    i64 page_stride_bytes;
    i64 indices_stride_q_elems, counts_stride_elems;
    i32 block_tokens, num_keys, end_of_last;  // end_of_last: each token before a sequence's last sees one key less
    i32 heads, num_pages;
    i32 k, in_cache, keep_first, keep_last;  // in_cache: indices are places in the cache
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(SelectParams, weights_stride_block_elems),
              MLA_OFFSET(SelectParams, block_tokens), (int)sizeof(SelectParams));
MLA_FACT(threads, kThreads);
MLA_FACT(cluster, kClusterBlocks);
MLA_FACT(max_keys, kClusterBlocks* kMaxKeys);

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier     arrives (count)    carries                     waits           first phase
// q_full      all (1)            queries                     all             blocked
// k_full[s]   warp s, then the   kCodeBytes + kScaleBytes    its warpgroup   blocked
//             warpgroup (1)
using Select = ClusterSelect<kClusterBlocks, kThreads, kMaxKeys>;

struct Storage {
    alignas(kSwizzleAtomBytes) u8 k[kStages][kCodeBytes];
    u8 q[kQueryBytes];
    float scales[kStages][kPageKeys];
    Select::Keys select;
    float weights[kBlockHeads];
    i32 pages[kMaxPages];  // as they stand in the table
    MBarrier q_full, k_full[kStages];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");
MLA_FACT(smem_bytes, sizeof(Storage));

// ---- A token ---------------------------------------------------------------------------------------------------
// Its keys, and this block's share of their pages. Values from the device are hostile: clamped.
struct Token {
    const SelectParams& p;
    i32 row, sequence, token;
    i32 end;
    i32 first_page, pages;

    MLA_DEVICE Token(const SelectParams& p, i32 row)
        : p(p), row(row), sequence(row / p.block_tokens), token(row % p.block_tokens) {}

    MLA_DEVICE const i32* length() const {
        return p.ends + sequence * p.ends_stride_block_elems + token * p.ends_stride_token_elems;
    }
    MLA_DEVICE void find_share(i32 rank, i32 length) {
        end = max(length, 0);
        if (p.end_of_last) end -= p.block_tokens - 1 - token;
        end = min(max(end, 0), p.num_keys);
        const i32 all = ceil_div(end, kPageKeys), share = ceil_div(all, kClusterBlocks);
        first_page = min(rank * share, all);
        pages = min(share, all - first_page);
    }
    MLA_DEVICE const i32* table(i32 page) const {
        return p.block_table + sequence * p.table_stride_block_elems + page * p.table_stride_page_elems;
    }
    MLA_DEVICE bool keeps(i32 s) const { return s < p.keep_first || end - s <= p.keep_last; }
    MLA_DEVICE void put(i32 n, i32 s, i32 page) const {
        const i32 index = p.in_cache ? place_in_cache(page, kPageKeys, s % kPageKeys) : s;
        p.indices[row * p.indices_stride_q_elems + n] = index;
    }
};

// All keys, if there are no more than k; no logit is computed.
MLA_DEVICE void select_all(const Token& token, i32 rank) {
    const SelectParams& p = token.p;
    for (i32 n = rank * kThreads + (i32)threadIdx.x; n < p.k; n += kClusterBlocks * kThreads) {
        if (n < token.end) {
            token.put(n, n, p.in_cache ? *token.table(n / kPageKeys) : 0);
        } else {
            p.indices[token.row * p.indices_stride_q_elems + n] = -1;
        }
    }
}

// ---- Loads -----------------------------------------------------------------------------------------------------
struct Maps {
    const TensorMap &q, &codes, &scales;

    MLA_DEVICE void prefetch() const {
        prefetch_tensormap(q);
        prefetch_tensormap(codes);
        prefetch_tensormap(scales);
    }
};

// Brings the length and the block table into L2 before an earlier kernel is done, which may yet write them there: a
// line for each thread of the cluster. Then a page for each warp: only prefetches depend on what is read here, past L1.
MLA_DEVICE void prefetch_inputs(Token token, i32 rank, i32 warp) {
    constexpr i32 kLineElems = 128 / sizeof(i32);
    const SelectParams& p = token.p;
    const i32 page = (rank * kThreads + (i32)threadIdx.x) * kLineElems;
    if (p.table_stride_page_elems == 1 && page < p.num_keys / kPageKeys) prefetch_global_l2(token.table(page));
    token.find_share(rank, (i32)ld_global_l2_4(token.length(), true));
    if (threadIdx.x % kWarpThreads != 0 || warp >= token.pages || token.end <= p.k) return;
    const u32 at = ld_global_l2_4(token.table(token.first_page + warp), true);
    if (at < (u32)p.num_pages) cp_async_bulk_prefetch_l2(p.cache + at * p.page_stride_bytes, kCodeBytes + kScaleBytes);
}

// A page outside the pool lies outside the tensor for certain: its codes and scales become zeros.
MLA_DEVICE void load_page(Storage& s, const Maps& maps, i32 num_pages, i32 stage, i32 page) {
    MBarrier& full = s.k_full[stage];
    const i32 at = (u32)page < (u32)num_pages ? page : -1;
    mbarrier_arrive_expect_tx(full, kCodeBytes + kScaleBytes);
    cp_async_bulk_tensor_3d(smem_addr(s.k[stage]), maps.codes, full, 0, 0, at, kEvictFirst);
    cp_async_bulk_tensor_3d(smem_addr(s.scales[stage]), maps.scales, full, 0, kScaleRow, at, kEvictFirst);
}

// The first pages, a warp each; the queries, and everything else that a barrier of the block is to follow.
MLA_DEVICE void load_inputs(Storage& s, const Maps& maps, const Token& token, i32 warp) {
    const SelectParams& p = token.p;
    const i32 thread = threadIdx.x, head = thread - (kThreads - kBlockHeads);
    if (thread % kWarpThreads == 0 && warp < token.pages) {
        const i32 page = *token.table(token.first_page + warp);
        s.pages[warp] = page;
        load_page(s, maps, p.num_pages, warp, page);
    }
    if (thread == 0) {
        mbarrier_arrive_expect_tx(s.q_full, kQueryBytes);
        cp_async_bulk_tensor_4d(smem_addr(s.q), maps.q, s.q_full, 0, 0, token.token, token.sequence, kEvictFirst);
    }
    if (thread >= kStages && thread < token.pages) s.pages[thread] = *token.table(token.first_page + thread);
    if (head >= 0) {  // those that are not there weigh nothing
        const float* row = p.weights + token.sequence * p.weights_stride_block_elems;
        row += token.token * p.weights_stride_token_elems;
        s.weights[head] = head < p.heads ? row[head * p.weights_stride_head_elems] : 0.f;
    }
}

// ---- Logits ----------------------------------------------------------------------------------------------------
struct Weights {
    float2 pairs[kPairs];  // of this thread's two heads of every eight

    MLA_DEVICE Weights(const Storage& s, i32 c) {
#pragma unroll
        for (i32 j = 0; j < kPairs; ++j) pairs[j] = *reinterpret_cast<const float2*>(s.weights + 8 * j + 2 * c);
    }

    // Adds products of rows g and g + 8; the thread gets one of the two sums, see RowThread.
    MLA_DEVICE float sum(const float (&d)[kProducts], i32 c) const {
        float sums[2] = {};
#pragma unroll
        for (i32 j = 0; j < kPairs; ++j) {
#pragma unroll
            for (i32 i = 0; i < 2; ++i) {
                sums[i] = fmaf(fmaxf(d[4 * j + 2 * i], 0.f), pairs[j].x, sums[i]);
                sums[i] = fmaf(fmaxf(d[4 * j + 2 * i + 1], 0.f), pairs[j].y, sums[i]);
            }
        }
        const float pair = add_in_pair(sums[0], sums[1], 1, c % 2);
        return add_in_pair(pair, pair, 2, false);
    }
};

// This warpgroup's pages of the share.
MLA_DEVICE void compute(Storage& s, const Maps& maps, const Token& token, Select& select, i32 warpgroup, i32 thread) {
    const RowThread own(thread);
    const Weights weights(s, own.c);
    const SmemDesc q = uniform(k_major_desc(smem_addr(s.q)));
    mbarrier_wait(s.q_full, 0);
#pragma unroll 1
    for (i32 i = warpgroup; i < token.pages; i += kMathWarpgroups) {
        const i32 stage = i % kStages;
        const SmemDesc keys = uniform(k_major_desc(smem_addr(s.k[stage])));
        mbarrier_wait(s.k_full[stage], i / kStages % 2);
        const float scale = s.scales[stage][own.row];
        float d[kProducts];
        pin(d);
        wgmma_fence();
        multiply_abt<kMmaSteps>(Element{}, d, keys, q);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        pin(d);
        if (i + kStages < token.pages) {
            bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);  // all have read the stage
            if (thread == 0) load_page(s, maps, token.p.num_pages, stage, s.pages[i + kStages]);
        }
        const float sum = weights.sum(d, own.c);
        if (own.c >= 2) continue;
        const i32 at = i * kPageKeys + own.row, key = token.first_page * kPageKeys + at;
        const u32 found = token.keeps(key) ? kKeptKey : order_key(sum * scale);
        select.put(at, key < token.end ? found : kNoKey);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_select_sm90_paged(const __grid_constant__ SelectParams p, const __grid_constant__ TensorMap q_map,
                                  const __grid_constant__ TensorMap codes_map,
                                  const __grid_constant__ TensorMap scales_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *static_cast<Storage*>(held_shared(smem));
    const Maps maps{q_map, codes_map, scales_map};
    const i32 warp = uniform_warp(), thread = threadIdx.x, rank = (i32)blockIdx.x % kClusterBlocks;
    Token token(p, (i32)blockIdx.x / kClusterBlocks);
    Select select(s.select, rank);
    if (thread % kWarpThreads == 0) {
        mbarrier_init(s.k_full[warp], 1);
        if (warp == 0) mbarrier_init(s.q_full, 1);
        fence_mbarrier_init();
    }
    select.digits.init();
    cluster_arrive();
    if (thread == 0) maps.prefetch();
    prefetch_inputs(token, rank, warp);
    griddepcontrol_wait();               // before the first read of anything that an earlier kernel may have written
    griddepcontrol_launch_dependents();  // the next kernel finds SMs: a few clusters leave most of them
    token.find_share(rank, *token.length());
    if (rank == 0 && thread == 0) p.counts[token.row * p.counts_stride_elems] = min(token.end, p.k);
    const bool is_short = token.end <= p.k;
    if (!is_short) load_inputs(s, maps, token, warp);
    cluster_wait();  // every block has its barriers
    if (is_short) {
        select_all(token, rank);
    } else {
        __syncthreads();
        compute(s, maps, token, select, warp / kWarpgroupWarps, thread % kWarpgroupThreads);
        select.select(p.k, token.pages * kPageKeys,
                      [&](i32 n, i32 at) { token.put(n, token.first_page * kPageKeys + at, s.pages[at / kPageKeys]); });
    }
}
}  // namespace mla::indexer::select
