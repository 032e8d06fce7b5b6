// Reads tokens of a paged cache as rows of numbers: dequantises, rounds once, gathers by slot.
//
// Grid: x = rows, two per warp, whose loads are in flight together. Slots outside the pool give rows of zeros. Without
// slots row i is slot i: the sparse forward uses this to convert a whole cache.
//
// Rows of 16-bit elements that are aligned to 16 bytes are stored in 16-byte pieces, a warp's side by side: lane l has
// the pieces l, l + 32, and l + 64 of a row, or of the latent part, and one of the RoPE part. Other rows use a separate
// path: a lane has 16 consecutive elements, and some lanes 16 more.
#include "attention/record.cuh"
#include "common/facts.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/load.cuh"

namespace mla::cache {
using namespace attention;

constexpr i32 kThreads = 128;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kRows = 2;  // of a warp
constexpr i32 kPieceBytes = 16;
constexpr i32 kPieceElems = 8;
constexpr i32 kPieces = 3;  // of a lane, at most: 72 of a row

// ---- Params ----------------------------------------------------------------------------------------------------
struct CacheGatherParams {
    const u8* cache;            // pages
    const u8* slots = nullptr;  // (n,), i32 or i64; null: row i is slot i
    u8* rows;                   // (n, 16 (latent_chunks + rope_chunks)), `element`
    i64 slots_stride_bytes = 0, rows_stride_bytes;
    i64 page_stride_bytes, token_stride_bytes;
    i32 n, num_pages, page_size;
    i32 element, slots_are_64 = 0;
    i32 kind, rope_kind, latent_chunks, rope_chunks, group_chunks, scale_kind;
    i32 rope_offset, scales_offset, scales_stride;
    float kv_scale;
    i32 padding;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(CacheGatherParams, slots_stride_bytes), MLA_OFFSET(CacheGatherParams, n),
              MLA_OFFSET(CacheGatherParams, kv_scale), (int)sizeof(CacheGatherParams));
MLA_FACT(threads, kThreads);
MLA_FACT(rows_per_block, kWarps* kRows);

MLA_DEVICE TokenBytes token_of_row(const CacheGatherParams& p, const RecordLayout& layout, i64 i) {
    i64 at = i;
    if (p.slots != nullptr) {
        const u8* slot = p.slots + i * p.slots_stride_bytes;
        at = p.slots_are_64 ? *reinterpret_cast<const i64*>(slot) : (i64) * reinterpret_cast<const i32*>(slot);
    }
    return token_at(layout, const_cast<u8*>(p.cache), at);
}

MLA_DEVICE void gather_any(const CacheGatherParams& p, const RecordLayout& layout, i64 i, i32 lane) {
    const TokenBytes token = token_of_row(p, layout, i);
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

// ---- Aligned rows of 16-bit elements -----------------------------------------------------------------------------
MLA_DEVICE bool is_aligned(const CacheGatherParams& p) {
    const u64 rows = reinterpret_cast<u64>(p.rows) | p.rows_stride_bytes;
    const u64 pages = reinterpret_cast<u64>(p.cache) | p.page_stride_bytes | p.token_stride_bytes | p.rope_offset;
    const bool same = p.kind == p.element || (p.kind == kE4m3 && p.scale_kind != kScaleOfTensor);
    return (rows | pages) % kPieceBytes == 0 && p.element != kFloat32 && same &&
           (p.rope_kind == p.element || p.rope_chunks == 0);
}

// Address of piece `piece` of a row of 16-bit elements, for tokens stored unquantised.
MLA_DEVICE const u8* piece_at(const CacheGatherParams& p, const TokenBytes& token, i32 piece) {
    const i32 in_rope = piece - 2 * p.latent_chunks;
    return token.data + (in_rope < 0 ? piece * kPieceBytes : p.rope_offset + in_rope * kPieceBytes);
}

MLA_DEVICE uint4* row_piece(const CacheGatherParams& p, i64 i, i32 piece) {
    return reinterpret_cast<uint4*>(p.rows + i * p.rows_stride_bytes) + piece;
}

MLA_DEVICE void copy_rows(const CacheGatherParams& p, const TokenBytes (&tokens)[kRows], i64 first, i32 lane) {
    const i32 pieces = 2 * (p.latent_chunks + p.rope_chunks);
    uint4 kept[kRows][kPieces];
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
        for (i32 k = 0; k < kPieces; ++k) {
            const i32 piece = lane + k * kWarpThreads;
            kept[r][k] = ld_global_16(piece_at(p, tokens[r], piece), tokens[r].data != nullptr && piece < pieces);
        }
    }
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
        for (i32 k = 0; k < kPieces; ++k) {
            const i32 piece = lane + k * kWarpThreads;
            if (first + r < p.n && piece < pieces) *row_piece(p, first + r, piece) = kept[r][k];
        }
    }
}

// A lane's share of a token: twice eight codes, their stored scales, and eight elements of the RoPE part.
struct Codes {
    uint2 codes[2];
    u32 scales[2];
    uint4 rope;
};

// The lane's piece of the RoPE part, which follows the latent part's pieces in the row; out of range in lanes without
// one.
MLA_DEVICE i32 rope_piece(const CacheGatherParams& p, i32 lane) {
    return (lane + 2 * kWarpThreads - 2 * p.latent_chunks) % kWarpThreads;
}

MLA_DEVICE Codes load_codes(const CacheGatherParams& p, const RecordLayout& layout, const TokenBytes& token, i32 lane) {
    const bool present = token.data != nullptr;
    const i32 shift = 32 - __clz(p.group_chunks);  // log2 of a group's pieces, two per chunk; a power of two
    Codes loaded;
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
        const i32 piece = lane + half * kWarpThreads;
        const bool active = present && piece < 2 * p.latent_chunks;
        loaded.codes[half] = ld_global_8(token.data + piece * kPieceElems, active);
        loaded.scales[half] = active ? load_scale(layout, token, piece >> shift) : 0;
    }
    const i32 piece = rope_piece(p, lane);
    loaded.rope = ld_global_16(token.data + p.rope_offset + piece * kPieceBytes, present && piece < 2 * p.rope_chunks);
    return loaded;
}

template <class Element>
MLA_DEVICE uint4 dequantised(uint2 codes, float scale) {
    const u32 pairs[4] = {codes.x & 0xffff, codes.x >> 16, codes.y & 0xffff, codes.y >> 16};
    u32 words[4];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
        const float2 x = cvt_f32_x2_e4m3(pairs[i]);
        words[i] = cvt_x2(Element{}, x.x * scale, x.y * scale);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <class Element>
MLA_DEVICE void dequantise_rows(const CacheGatherParams& p, const RecordLayout& layout,
                                const TokenBytes (&tokens)[kRows], i64 first, i32 lane) {
    Codes loaded[kRows];
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) loaded[r] = load_codes(p, layout, tokens[r], lane);
    griddepcontrol_launch_dependents();
    const i32 in_rope = rope_piece(p, lane);
    u8* row = p.rows + first * p.rows_stride_bytes;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r, row += p.rows_stride_bytes) {
        if (first + r >= p.n) return;
        uint4* pieces = reinterpret_cast<uint4*>(row);
#pragma unroll
        for (i32 half = 0; half < 2; ++half) {
            const i32 piece = lane + half * kWarpThreads;
            const float scale = scale_value(layout, loaded[r].scales[half]);
            if (piece < 2 * p.latent_chunks) pieces[piece] = dequantised<Element>(loaded[r].codes[half], scale);
        }
        if (in_rope < 2 * p.rope_chunks) pieces[2 * p.latent_chunks + in_rope] = loaded[r].rope;
    }
}

MLA_DEVICE void gather_aligned(const CacheGatherParams& p, const RecordLayout& layout, i64 first, i32 lane) {
    TokenBytes mine{nullptr, nullptr}, tokens[kRows];  // lane r holds row r
    if (lane < kRows && first + lane < p.n) mine = token_of_row(p, layout, first + lane);
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) tokens[r] = TokenBytes{from_lane(mine.data, r), from_lane(mine.scales, r)};
    if (p.kind == p.element) {
        copy_rows(p, tokens, first, lane);
    } else if (p.element == kBfloat16) {
        dequantise_rows<bfloat16>(p, layout, tokens, first, lane);
    } else {
        dequantise_rows<float16>(p, layout, tokens, first, lane);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) mla_cache_gather(const __grid_constant__ CacheGatherParams p) {
    const i64 first_of_block = (i64)blockIdx.x * kWarps * kRows;
    if (threadIdx.x == 0 && p.slots != nullptr && first_of_block < p.n) {
        // Before an earlier kernel is done, which may yet change them there.
        prefetch_global_l2(p.slots + first_of_block * p.slots_stride_bytes);
    }
    griddepcontrol_wait();
    const i32 lane = threadIdx.x % kWarpThreads;
    const i64 first = first_of_block + threadIdx.x / kWarpThreads * kRows;
    const RecordLayout layout = MLA_RECORD_LAYOUT(p);
    if (is_aligned(p)) {
        gather_aligned(p, layout, first, lane);
        return;
    }
    for (i64 i = first; i < min(first + kRows, (i64)p.n); ++i) gather_any(p, layout, i, lane);
}
}  // namespace mla::cache
