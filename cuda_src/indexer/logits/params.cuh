// Parameters of the kernels that compute indexer logits.
#pragma once
#include "common/facts.cuh"
#include "indexer/key_ranges.cuh"
#include "ptx/convert.cuh"
#include "ptx/fp8.cuh"

namespace mla::indexer::logits {
// Strides are in elements, except for strides of the cache, which are in bytes.
struct LogitsParams {
    const u8* q;                       // (tokens, heads, head_dim): e4m3 or 16 bits
    const u8* k;                       // (keys, head_dim), or the cache: (pages, page_size) records
    const float* weights;              // (tokens, heads)
    const float* k_scale = nullptr;    // (keys,), or null: 1; unused if paged
    const i32* begins = nullptr;       // (tokens,), or null
    const i32* ends;                   // (tokens,), or null; for paged decode (b,) or (b, tokens of a sequence)
    const i32* block_table = nullptr;  // (b, max_pages), or null: keys are contiguous
    const TileCut* cuts;               // (grid + 1,), or null: few blocks of tokens
    void* logits;                      // (tokens, keys), fp32 or bf16
    i64 q_stride_block_elems, q_stride_token_elems, q_stride_head_elems;
    i64 k_stride_elems;  // for the cache, bytes of a key's codes: half of head_dim for keys in e2m1
    i64 weights_stride_block_elems, weights_stride_token_elems, weights_stride_head_elems;
    i64 k_scale_stride_elems = 0;
    i64 begins_stride_elems = 0;
    i64 ends_stride_block_elems, ends_stride_token_elems;
    i64 table_stride_block_elems = 0, table_stride_page_elems = 0;
    i64 page_stride_bytes = 0;
    i64 logits_stride_block_elems, logits_stride_token_elems;
    i32 num_tokens, block_tokens, num_keys, end_of_last = 0;
    i32 heads, head_dim;
    i32 page_size = 0, num_pages = 0;
    i32 clean, bf16_out, wide_rows, num_blocks;  // wide rows: four logits may be stored at once
};

MLA_DEVICE KeyRanges key_ranges(const LogitsParams& p) {
    return KeyRanges{p.begins,
                     p.ends,
                     p.begins_stride_elems,
                     p.ends_stride_block_elems,
                     p.ends_stride_token_elems,
                     p.num_tokens,
                     p.num_blocks,
                     p.block_tokens,
                     p.num_keys,
                     p.end_of_last};
}

// ---- Elements --------------------------------------------------------------------------------------------------
MLA_DEVICE constexpr i32 element_bytes(float8_e4m3fn) { return 1; }
MLA_DEVICE constexpr i32 element_bytes(bfloat16) { return 2; }

// ---- Results ---------------------------------------------------------------------------------------------------
// The logits of one token.
struct LogitsRow {
    void* row;
    i32 num_keys, clean, bf16_out, wide;

    MLA_DEVICE LogitsRow(const LogitsParams& p, i32 block, i32 token)
        : num_keys(p.num_keys), clean(p.clean), bf16_out(p.bf16_out), wide(p.wide_rows) {
        const i64 at = block * p.logits_stride_block_elems + token * p.logits_stride_token_elems;
        row = static_cast<u8*>(p.logits) + at * (bf16_out ? 2 : 4);
    }

    MLA_DEVICE void store(i32 key, float x) const {
        if (bf16_out) {
            static_cast<u16*>(row)[key] = bfloat16::from_float(x);
        } else {
            static_cast<float*>(row)[key] = x;
        }
    }

    // Stores x for a key inside the token's range, -inf for a key outside if the row is to be clean, and nothing past
    // the row's end.
    MLA_DEVICE void store(i32 key, float x, KeyRange range) const {
        if (range.contains(key)) {
            store(key, x);
        } else if (clean && key < num_keys) {
            store(key, negative_infinity());
        }
    }

    // Stores four neighbours; the index of the first is a multiple of four.
    MLA_DEVICE void store4(i32 key, float4 x, KeyRange range) const {
        const bool whole = range.begin <= key && key + 3 < range.end;
        if (!whole || !wide) {
            store(key, x.x, range);
            store(key + 1, x.y, range);
            store(key + 2, x.z, range);
            store(key + 3, x.w, range);
        } else if (bf16_out) {
            *reinterpret_cast<uint2*>(static_cast<u16*>(row) + key) =
                make_uint2(cvt_x2(bfloat16{}, x.x, x.y), cvt_x2(bfloat16{}, x.z, x.w));
        } else {
            *reinterpret_cast<float4*>(static_cast<float*>(row) + key) = x;
        }
    }

    // Writes -inf for keys [begin, end) with the lanes of a warp; `begin` is a multiple of four.
    MLA_DEVICE void fill(i32 begin, i32 end, i32 lane) const {
        const float x = negative_infinity();
        const i32 wide_end = wide ? begin + (max(0, end - begin) & ~3) : begin;
        const KeyRange all{begin, wide_end};
        for (i32 key = begin + 4 * lane; key < wide_end; key += 4 * kWarpThreads) {
            store4(key, make_float4(x, x, x, x), all);
        }
        for (i32 key = wide_end + lane; key < end; key += kWarpThreads) store(key, x);
    }
};

#define MLA_LOGITS_FACTS()                                                                                             \
    MLA_FACT_LIST(params_layout, MLA_OFFSET(LogitsParams, q_stride_block_elems), MLA_OFFSET(LogitsParams, num_tokens), \
                  (int)sizeof(LogitsParams))
}  // namespace mla::indexer::logits
