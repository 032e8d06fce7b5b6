// Indexer logits on any GPU, in fp32: correct and slow.
//
//   logits[t, s] = k_scale[s] * sum_h weights[t, h] * max(q[t, h] . k[s], 0)   for keys s in the token's range
//
// Grid: x = tiles of 128 keys, y = tokens; blocks loop over the rest of both. A thread holds its key in registers, and
// the block keeps the query in shared memory, 16 heads at a time. max turns a NaN product into 0; NaN in weights and
// scales propagates.
#include "indexer/e2m1_keys.cuh"
#include "indexer/logits/params.cuh"
#include "ptx/control.cuh"

namespace mla::indexer::logits {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kTileKeys = kThreads;
constexpr i32 kMaxHeadDim = 128;
constexpr i32 kChunk = 32;  // elements of a key between two checks of head_dim
constexpr i32 kHeadsAtOnce = 16;

MLA_LOGITS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(max_head_dim, kMaxHeadDim);

struct Storage {
    float q[kHeadsAtOnce][kMaxHeadDim];
    float weights[kHeadsAtOnce];
};

// ---- Elements --------------------------------------------------------------------------------------------------
MLA_DEVICE float element(float8_e4m3fn, const u8* from, i64 at) { return float8_e4m3fn::to_float(from[at]); }
MLA_DEVICE float element(bfloat16, const u8* from, i64 at) {
    return bfloat16::to_float(reinterpret_cast<const u16*>(from)[at]);
}

struct Key {
    float x[kMaxHeadDim];
    float scale;

    // Zeros stand for a key outside the range or on an invalid page.
    MLA_DEVICE void clear() {
#pragma unroll
        for (i32 i = 0; i < kMaxHeadDim; ++i) x[i] = 0.f;
        scale = 0.f;
    }

    MLA_DEVICE void load(const u8* from, i32 head_dim, float key_scale) {
        scale = key_scale;
#pragma unroll
        for (i32 i = 0; i < kMaxHeadDim; ++i) x[i] = i < head_dim ? element(Element{}, from, i) : 0.f;
    }

    // 128 e2m1 numbers in groups of 32, converted exactly for any scales.
    MLA_DEVICE void load_e2m1(const u8* from, u32 bytes) {
        const E2m1Scales scales(bytes);
        scale = scales.power();
        const u32* words = reinterpret_cast<const u32*>(from);
#pragma unroll
        for (i32 i = 0; i < kMaxHeadDim; ++i) {
            const i32 group = scales.of(i / kE2m1Group);
            const u32 code = words[i / 8] >> i % 8 * 4 & 15, size = code & 7;
            const float magnitude = size < 2 ? 0.5f * size : ldexpf(1.f + 0.5f * (size & 1), (i32)(size >> 1) - 1);
            const float value = ldexpf(magnitude, group - scales.largest);
            x[i] = group == kNanScale ? __uint_as_float(0x7fc00000) : code & 8 ? -value : value;
        }
    }

    MLA_DEVICE float dot(const float* q, i32 head_dim) const {
        float sum = 0.f;
#pragma unroll
        for (i32 chunk = 0; chunk < kMaxHeadDim; chunk += kChunk) {
            if (chunk >= head_dim) break;
#pragma unroll
            for (i32 i = chunk; i < chunk + kChunk; ++i) sum = fmaf(q[i], x[i], sum);
        }
        return sum;
    }
};

// A page stores the codes of all its keys, then their scales.
MLA_DEVICE void load_cached(const LogitsParams& p, Key& key, i32 block, i32 index) {
    const i32 page =
        p.block_table[block * p.table_stride_block_elems + index / p.page_size * p.table_stride_page_elems];
    if ((u32)page >= (u32)p.num_pages) return;
    const i32 row = index % p.page_size, row_bytes = (i32)p.k_stride_elems;
    const u8* records = p.k + page * p.page_stride_bytes;
    const u8* scale = records + (i64)p.page_size * row_bytes + row * 4;  // pages are aligned to 4 bytes
    const u8* codes = records + (i64)row * row_bytes;
    if constexpr (element_bytes(Element{}) == 1) {  // the only element type of pages
        if (row_bytes < p.head_dim) return key.load_e2m1(codes, *reinterpret_cast<const u32*>(scale));
    }
    key.load(codes, p.head_dim, *reinterpret_cast<const float*>(scale));
}

MLA_DEVICE void load_key(const LogitsParams& p, Key& key, i32 block, i32 index) {
    if (p.block_table != nullptr) return load_cached(p, key, block, index);
    const float scale = p.k_scale == nullptr ? 1.f : p.k_scale[index * p.k_scale_stride_elems];
    key.load(p.k + index * p.k_stride_elems * element_bytes(Element{}), p.head_dim, scale);
}

// ---- One token, one tile ---------------------------------------------------------------------------------------
// Called by all threads; rows are padded with zeros to whole chunks.
MLA_DEVICE void load_heads(const LogitsParams& p, Storage& s, i32 block, i32 token, i32 head0) {
    const u8* q = p.q + (block * p.q_stride_block_elems + token * p.q_stride_token_elems) * element_bytes(Element{});
    for (i32 i = threadIdx.x; i < kHeadsAtOnce * kMaxHeadDim; i += kThreads) {
        const i32 head = head0 + i / kMaxHeadDim, at = i % kMaxHeadDim;
        const bool present = head < p.heads && at < p.head_dim;
        s.q[i / kMaxHeadDim][at] = present ? element(Element{}, q, head * p.q_stride_head_elems + at) : 0.f;
    }
    const i64 row = block * p.weights_stride_block_elems + token * p.weights_stride_token_elems;
    if (threadIdx.x < kHeadsAtOnce && head0 + (i32)threadIdx.x < p.heads) {
        s.weights[threadIdx.x] = p.weights[row + (head0 + threadIdx.x) * p.weights_stride_head_elems];
    }
}

MLA_DEVICE float score(const LogitsParams& p, Storage& s, const Key& key, i32 block, i32 token) {
    float sum = 0.f;
    for (i32 head0 = 0; head0 < p.heads; head0 += kHeadsAtOnce) {
        __syncthreads();
        load_heads(p, s, block, token, head0);
        __syncthreads();
        for (i32 head = 0; head < min(kHeadsAtOnce, p.heads - head0); ++head) {
            sum = fmaf(s.weights[head], fmaxf(key.dot(s.q[head], p.head_dim), 0.f), sum);
        }
    }
    return sum * key.scale;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_indexer_logits_generic(const __grid_constant__ LogitsParams p) {
    __shared__ Storage s;
    griddepcontrol_wait();
    const KeyRanges ranges = key_ranges(p);
    const i32 tiles = ceil_div(p.num_keys, kTileKeys);
    for (i32 row = blockIdx.y; row < p.num_tokens; row += gridDim.y) {
        const i32 block = row / p.block_tokens, token = row % p.block_tokens;
        const KeyRange range = ranges.of(block, token);
        const TileRange needed = tiles_of<kTileKeys>(range.begin, range.end);
        const LogitsRow logits(p, block, token);
        for (i32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const i32 index = tile * kTileKeys + threadIdx.x;
            float value = 0.f;
            if (needed.begin <= tile && tile < needed.end) {
                Key key;
                key.clear();
                if (range.contains(index)) load_key(p, key, block, index);
                value = score(p, s, key, block, token);
            }
            logits.store(index, value, range);
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::logits
