// Indexer logits with mma.sync, for Ampere and newer GPUs; keys are contiguous or paged.
//
//   logits[t, s] = k_scale[s] * sum_h weights[t, h] * max(q[t, h] . k[s], 0)   for keys s in the token's range
//
// e4m3 codes are multiplied as f16, which represents them exactly. Keys are the A operand, loaded from global memory
// into registers and kept there for a whole tile: 32 keys per warp. Heads are the columns, so a thread adds up most
// heads of its keys without shuffles:
//
//   for each token, 16 heads at a time:   D = K Q^T  (32 x 16),   sum[row] += weight * max(D[row, head], 0)
//
// A dot product may add its elements in any order. So lane 4 g + c loads eight neighbours of each 32 elements of a row:
// one load of keys and one load of queries feed two MMAs.
//
// Grid: one block per SM, each with a share of the line of all tiles (indexer/logits/line.cuh). Between two blocks of
// tokens all warps meet to load the queries that fit into shared memory; otherwise warps run independently:
//
//   queries   all warps   Q, weights of some tokens -> shared memory |
//   products  warp w      |  keys of the next tile ->  | tokens x heads of this tile | sums, stored | ...
//   fill      all warps   -inf in front of and behind the tiles of each block, last
#include "indexer/e2m1_keys.cuh"
#include "indexer/logits/line.cuh"
#include "ptx/control.cuh"
#include "ptx/load.cuh"
#include "ptx/mma.cuh"
#include "tile/warp.cuh"

namespace mla::indexer::logits {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDim = MLA_HEAD_DIM;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256, kWarps = kThreads / kWarpThreads;
constexpr i32 kMmaRows = 16, kMmaColumns = 8, kMmaDepth = 16;
constexpr i32 kWarpKeys = 2 * kMmaRows, kKeyTiles = kWarpKeys / kMmaRows;
constexpr i32 kTileKeys = kWarps * kWarpKeys;
constexpr i32 kLaneRows = kWarpKeys / 8;  // keys of a lane: 8 i + lane / 4
constexpr i32 kHeadsAtOnce = 2 * kMmaColumns;
constexpr i32 kSliceElems = 2 * kMmaDepth;  // elements of a row that two MMAs read
constexpr i32 kLaneElems = kSliceElems / 4;
constexpr i32 kSlices = kHeadDim / kSliceElems;
constexpr i32 kMaxHeads = 128;
constexpr i32 kQueryBytes = 64 * 1024;  // room for queries; holds `tokens_at_once` tokens

MLA_LOGITS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(tile_keys, kTileKeys);
MLA_FACT(max_short_line, kMaxShortLine);
MLA_FACT(max_heads, kMaxHeads);

struct Storage {
    // (tokens, heads, head_dim), 16 bits; chunks of 16 bytes are swizzled, see `chunk_at`.
    alignas(16) u8 q[kQueryBytes];
    float weights[kMaxTokens * kMaxHeads];  // (tokens, heads)
};
MLA_FACT(smem_bytes, sizeof(Storage));

// ---- Elements --------------------------------------------------------------------------------------------------
// Eight elements in their memory format, zeros where absent; `pairs` converts them to four pairs of 16 bits.
template <class Element>
struct Eight;

template <>
struct Eight<float8_e4m3fn> {
    using Operand = float16;
    uint2 x;

    MLA_DEVICE void load(const u8* from, bool present) { x = ld_global_8(from, present); }
    MLA_DEVICE uint4 pairs() const {
        uint4 y;
        f16_x4_of_e4m3(x.x, y.x, y.y);
        f16_x4_of_e4m3(x.y, y.z, y.w);
        return y;
    }
};

template <>
struct Eight<bfloat16> {
    using Operand = bfloat16;
    uint4 x;

    MLA_DEVICE void load(const u8* from, bool present) { x = ld_global_16(from, present); }
    MLA_DEVICE uint4 pairs() const { return x; }
};

using Operand = Eight<Element>::Operand;

// ---- Queries ---------------------------------------------------------------------------------------------------
// Heads of a token in shared memory; padding heads are zeros with weight 0.
MLA_DEVICE i32 padded_heads(const LogitsParams& p) { return ceil_div(p.heads, kHeadsAtOnce) * kHeadsAtOnce; }

// Number of tokens with queries that fit into shared memory together.
MLA_DEVICE i32 tokens_at_once(i32 heads) {
    return min(kMaxTokens, kQueryBytes / (heads * kHeadDim * (i32)sizeof(u16)));
}
static_assert(kMaxHeads * kHeadDim * (i32)sizeof(u16) <= kQueryBytes, "there is room for a token");

// Byte offset of chunk `chunk` of row `row`. Lanes of two neighbouring rows read four chunks each at the same time.
MLA_DEVICE u32 chunk_at(i32 row, i32 chunk) {
    constexpr i32 kSwapped = kSlices > 1 ? kSliceElems / kLaneElems : 0;
    return row * kHeadDim * (i32)sizeof(u16) + (chunk ^ row % 2 * kSwapped) * 16;
}

// Loads `tokens` tokens of a block, starting at `first`. Called by all threads.
MLA_DEVICE void load_queries(const LogitsParams& p, Storage& s, i32 block, i32 first, i32 tokens, i32 heads) {
    constexpr i32 kChunks = kHeadDim / kLaneElems;
    const i64 at = block * p.q_stride_block_elems + first * p.q_stride_token_elems;
    for (i32 i = threadIdx.x; i < tokens * heads * kChunks; i += kThreads) {
        const i32 row = i / kChunks, chunk = i % kChunks, token = row / heads, head = row % heads;
        const i64 elem = at + token * p.q_stride_token_elems + head * p.q_stride_head_elems + chunk * kLaneElems;
        Eight<Element> x;
        x.load(p.q + elem * element_bytes(Element{}), head < p.heads);
        *reinterpret_cast<uint4*>(s.q + chunk_at(row, chunk)) = x.pairs();
    }
    const float* weights = p.weights + block * p.weights_stride_block_elems + first * p.weights_stride_token_elems;
    for (i32 i = threadIdx.x; i < tokens * heads; i += kThreads) {
        const i32 token = i / heads, head = i % heads;
        const i64 elem = token * p.weights_stride_token_elems + head * p.weights_stride_head_elems;
        s.weights[i] = head < p.heads ? weights[elem] : 0.f;
    }
}

// ---- Keys ------------------------------------------------------------------------------------------------------
struct KeyPlace {
    const u8* row;  // null: no such key
    const float* scale;
};

// A page stores the codes of all its keys, then their scales.
template <i32 kKeyBytes>
MLA_DEVICE KeyPlace place_of(const LogitsParams& p, i32 block, i32 key) {
    if (key >= p.num_keys) return {nullptr, nullptr};
    if (p.block_table == nullptr) {
        const float* scale = p.k_scale == nullptr ? nullptr : p.k_scale + key * p.k_scale_stride_elems;
        return {p.k + key * p.k_stride_elems * element_bytes(Element{}), scale};
    }
    const i32 index = key / p.page_size, row = key - index * p.page_size;
    const i32 page = p.block_table[block * p.table_stride_block_elems + index * p.table_stride_page_elems];
    if ((u32)page >= (u32)p.num_pages) return {nullptr, nullptr};
    const u8* records = p.k + page * p.page_stride_bytes;
    const u8* scales = records + (i64)p.page_size * kKeyBytes;
    return {records + (i64)row * kKeyBytes, reinterpret_cast<const float*>(scales) + row};
}

// A warp's keys, loading into registers, starting at key `first`.
struct Keys {
    Eight<Element> x[kLaneRows][kSlices];
    float scale;  // scale of key `stored_key`

    MLA_DEVICE uint4 pairs(i32 i, i32 slice) const { return x[i][slice].pairs(); }
    MLA_DEVICE void load(const LogitsParams& p, i32 block, i32 first, i32 lane) {
#pragma unroll
        for (i32 i = 0; i < kLaneRows; ++i) {
            constexpr i32 kKeyBytes = kHeadDim * element_bytes(Element{});
            const KeyPlace place = place_of<kKeyBytes>(p, block, first + 8 * i + lane / 4);
            const u8* from = place.row + lane % 4 * kLaneElems * element_bytes(Element{});
#pragma unroll
            for (i32 slice = 0; slice < kSlices; ++slice) {
                x[i][slice].load(from + slice * kSliceElems * element_bytes(Element{}), place.row != nullptr);
            }
            if (i != lane % 4) continue;
            scale = place.row == nullptr ? 0.f : place.scale == nullptr ? 1.f : *place.scale;
        }
    }
};

// `Keys` for e2m1, a format of paged caches only. The elements of a slice share one scale.
struct E2m1Keys {
    u32 x[kLaneRows][kSlices];
    u32 scales[kLaneRows];
    float scale;

    static_assert(kSliceElems == kE2m1Group, "a table for each slice");
    MLA_DEVICE uint4 pairs(i32 i, i32 slice) const {
        return Eight<float8_e4m3fn>{E2m1Table(E2m1Scales(scales[i]), slice).to_e4m3(x[i][slice])}.pairs();
    }
    MLA_DEVICE void load(const LogitsParams& p, i32 block, i32 first, i32 lane) {
#pragma unroll
        for (i32 i = 0; i < kLaneRows; ++i) {
            const KeyPlace place = place_of<kE2m1KeyBytes>(p, block, first + 8 * i + lane / 4);
            const bool present = place.row != nullptr;
            const u32* from = reinterpret_cast<const u32*>(place.row) + lane % 4;
#pragma unroll
            for (i32 slice = 0; slice < kSlices; ++slice) x[i][slice] = present ? from[slice * 4] : 0;
            scales[i] = present ? *reinterpret_cast<const u32*>(place.scale) : 0;
            if (i == lane % 4) scale = present ? E2m1Scales(scales[i]).of_key() : 0.f;
        }
    }
};

MLA_DEVICE bool are_e2m1(const LogitsParams& p) { return p.block_table != nullptr && p.k_stride_elems < kHeadDim; }

// A fragments of the keys, for two MMAs per slice.
struct Fragments {
    u32 x[kKeyTiles][kSlices][2][4];

    template <class AnyKeys>
    MLA_DEVICE explicit Fragments(const AnyKeys& keys) {
#pragma unroll
        for (i32 i = 0; i < kLaneRows; ++i) {
#pragma unroll
            for (i32 slice = 0; slice < kSlices; ++slice) {
                const uint4 pairs = keys.pairs(i, slice);
                x[i / 2][slice][0][i % 2] = pairs.x, x[i / 2][slice][0][i % 2 + 2] = pairs.y;
                x[i / 2][slice][1][i % 2] = pairs.z, x[i / 2][slice][1][i % 2 + 2] = pairs.w;
            }
        }
    }
};

// ---- One token, one tile ---------------------------------------------------------------------------------------
using Sums = float[kLaneRows];

// Adds the weighted products of 16 heads of a token; `row` is the row of the first of them in shared memory.
MLA_DEVICE void add_heads(const Storage& s, const Fragments& keys, i32 row, i32 lane, Sums& sums) {
    float d[kKeyTiles][2][4] = {};
    constexpr i32 kSliceBytes = kSliceElems * (i32)sizeof(u16), kTileBytes = kMmaColumns * kHeadDim * (i32)sizeof(u16);
    const u8* q = s.q + row * (kHeadDim * (i32)sizeof(u16));  // `row` is even, so the swizzle of row 0 applies
    const u32 even = chunk_at(lane / 4, lane % 4), odd = even ^ kSliceBytes;  // offsets in even and odd slices
#pragma unroll
    for (i32 slice = 0; slice < kSlices; ++slice) {
        const u8* from = q + (slice % 2 == 0 ? even : odd) + slice / 2 * 2 * kSliceBytes;
        const uint4 b0 = *reinterpret_cast<const uint4*>(from);
        const uint4 b1 = *reinterpret_cast<const uint4*>(from + kTileBytes);
#pragma unroll
        for (i32 tile = 0; tile < kKeyTiles; ++tile) {
            mma_m16n8k16(Operand{}, d[tile][0], keys.x[tile][slice][0], b0.x, b0.y);
            mma_m16n8k16(Operand{}, d[tile][1], keys.x[tile][slice][0], b1.x, b1.y);
        }
#pragma unroll
        for (i32 tile = 0; tile < kKeyTiles; ++tile) {
            mma_m16n8k16(Operand{}, d[tile][0], keys.x[tile][slice][1], b0.z, b0.w);
            mma_m16n8k16(Operand{}, d[tile][1], keys.x[tile][slice][1], b1.z, b1.w);
        }
    }
#pragma unroll
    for (i32 n = 0; n < 2; ++n) {
        const float2 w = *reinterpret_cast<const float2*>(&s.weights[row + n * kMmaColumns + lane % 4 * 2]);
#pragma unroll
        for (i32 i = 0; i < kLaneRows; ++i) {
            const float* products = d[i / 2][n] + 2 * (i % 2);
            sums[i] = fmaf(w.x, fmaxf(products[0], 0.f), sums[i]);
            sums[i] = fmaf(w.y, fmaxf(products[1], 0.f), sums[i]);
        }
    }
}

// Each lane of a quad holds a part of four sums; lane c receives the whole of sum c.
MLA_DEVICE float sum_of_quad(const Sums& sums, i32 lane) {
    const bool odd = lane & 1, high = lane & 2;
    const float even_pair = (high ? sums[2] : sums[0]) + __shfl_xor_sync(kFullWarp, high ? sums[0] : sums[2], 2);
    const float odd_pair = (high ? sums[3] : sums[1]) + __shfl_xor_sync(kFullWarp, high ? sums[1] : sums[3], 2);
    return (odd ? odd_pair : even_pair) + __shfl_xor_sync(kFullWarp, odd ? even_pair : odd_pair, 1);
}
static_assert(kLaneRows == 4, "a sum for each lane of a quad");

// ---- Kernel ----------------------------------------------------------------------------------------------------
// Computes the tiles of a block of tokens for `tokens` of its tokens, starting at `first`.
template <class AnyKeys>
MLA_DEVICE void run_tiles(const LogitsParams& p, const Storage& s, const BlockWalk<kTileKeys>& walk, i32 first,
                          i32 tokens, i32 heads, i32 warp) {
    const i32 lane = walk.lane, stored_key = 8 * (lane % 4) + lane / 4;
    AnyKeys next;
    next.load(p, walk.block, walk.tiles.begin * kTileKeys + warp * kWarpKeys, lane);
#pragma unroll 1
    for (i32 tile = walk.tiles.begin; tile < walk.tiles.end; ++tile) {
        const Fragments keys(next);
        const float scale = next.scale;
        const i32 key = tile * kTileKeys + warp * kWarpKeys;
        if (tile + 1 < walk.tiles.end) next.load(p, walk.block, key + kTileKeys, lane);
#pragma unroll 1
        for (i32 token = 0; token < tokens; ++token) {
            Sums sums = {};
#pragma unroll 1
            for (i32 head = 0; head < heads; head += kHeadsAtOnce) {
                add_heads(s, keys, token * heads + head, lane, sums);
            }
            const KeyRange range{__shfl_sync(kFullWarp, walk.range.begin, first + token),
                                 __shfl_sync(kFullWarp, walk.range.end, first + token)};
            const LogitsRow logits(p, walk.block, first + token);
            logits.store(key + stored_key, sum_of_quad(sums, lane) * scale, range);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_indexer_logits_mma(const __grid_constant__ LogitsParams p) {
    extern __shared__ __align__(16) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    const i32 warp = uniform_warp(), lane = threadIdx.x % kWarpThreads;
    const i32 heads = padded_heads(p), at_once = tokens_at_once(heads);
    griddepcontrol_wait();
    const KeyRanges ranges = key_ranges(p);
    BlockWalk<kTileKeys> walk(ranges, find_share<kTileKeys>(p, ranges, lane), lane);
    while (walk.next()) {
        const i32 tokens = ranges.tokens_of(walk.block);
#pragma unroll 1
        for (i32 first = 0; first < tokens; first += at_once) {
            const i32 some = min(at_once, tokens - first);
            __syncthreads();  // all warps have read the previous queries
            load_queries(p, s, walk.block, first, some, heads);
            __syncthreads();
            if constexpr (kHeadDim == kE2m1Keys && element_bytes(Element{}) == 1) {
                if (are_e2m1(p)) {
                    run_tiles<E2m1Keys>(p, s, walk, first, some, heads, warp);
                    continue;
                }
            }
            run_tiles<Keys>(p, s, walk, first, some, heads, warp);
        }
    }
    run_fill_role<kTileKeys, kWarps>(p, warp, lane);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::logits
