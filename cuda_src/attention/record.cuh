// The record of a token in a paged cache, in the host's description (mla_cupy/cache_formats.py), and how to read its
// numbers.
//
// A token is chunks of 16 elements: `latent_chunks`, then `rope_chunks`. The kinds give their encoding. Chunks of e4m3
// or e2m1 share a scale in groups of `group_chunks`, or all have the caller's scale.
#pragma once
#include "ptx/fp4.cuh"
#include "ptx/fp8.cuh"
#include "tile/elements.cuh"

namespace mla::attention {
enum ElementKind : i32 { kBfloat16, kFloat16, kFloat32, kE4m3, kE2m1 };
enum ScaleKind : i32 { kNoScale, kScaleOfTensor, kScaleFloat32, kScaleE8m0, kScaleE4m3 };

constexpr i64 kMaxU32 = 0xffffffff;
constexpr i32 kRecordChunk = 16;  // elements
constexpr i32 kRopeChunks = 4;

// Offsets and strides in bytes. The scales of a token may lie in another plane of the page.
struct RecordLayout {
    i64 page_stride, token_stride;
    i32 num_pages, page_size;
    i32 kind, rope_kind;  // ElementKind
    i32 latent_chunks, rope_chunks, group_chunks;
    i32 scale_kind;  // ScaleKind
    i32 rope_offset, scales_offset, scales_stride;
    float kv_scale;
};

MLA_DEVICE bool is_code(i32 kind) { return kind == kE4m3 || kind == kE2m1; }
MLA_DEVICE i32 chunk_bytes_of(i32 kind) { return kRecordChunk * (kind == kE2m1 ? 1 : kind == kE4m3 ? 2 : 4) / 2; }

// Addresses of a token's bytes and of its scales.
struct TokenBytes {
    u8* data;
    u8* scales;
};

// Null unless the slot is in the pool: a slot is page * page_size + token.
MLA_DEVICE TokenBytes token_at(const RecordLayout& layout, u8* cache, i64 slot) {
    if (slot < 0 || slot >= (i64)layout.num_pages * layout.page_size) return TokenBytes{nullptr, nullptr};
    const i64 page = slot <= kMaxU32 ? (u32)slot / (u32)layout.page_size : slot / layout.page_size;
    const i64 token = slot - page * layout.page_size;
    u8* from = cache + page * layout.page_stride;
    return TokenBytes{from + token * layout.token_stride, from + layout.scales_offset + token * layout.scales_stride};
}

// An address that one lane of the warp has.
MLA_DEVICE u8* from_lane(u8* address, i32 lane) {
    return reinterpret_cast<u8*>(__shfl_sync(kFullWarp, reinterpret_cast<u64>(address), lane));
}

MLA_DEVICE float e8m0_value(u32 code) {
    return code == 0xff ? __uint_as_float(0x7fffffff)
           : code == 0  ? 5.877471754111438e-39f
                        : __uint_as_float(code << 23);
}

// The scale of a chunk of codes.
MLA_DEVICE float chunk_scale(const RecordLayout& layout, const TokenBytes& token, i32 chunk) {
    if (layout.scale_kind == kScaleFloat32) {
        return reinterpret_cast<const float*>(token.scales)[chunk / layout.group_chunks];
    }
    if (layout.scale_kind == kScaleE8m0) return e8m0_value(token.scales[chunk / layout.group_chunks]);
    if (layout.scale_kind == kScaleE4m3) return cvt_f32_x2_e4m3(token.scales[chunk / layout.group_chunks]).x;
    return layout.kv_scale;
}

// The stored scale of a group, separate from its conversion: loads in flight together stay together.
MLA_DEVICE u32 load_scale(const RecordLayout& layout, const TokenBytes& token, i32 group) {
    return layout.scale_kind == kScaleFloat32 ? reinterpret_cast<const u32*>(token.scales)[group] : token.scales[group];
}

MLA_DEVICE float scale_value(const RecordLayout& layout, u32 stored) {
    return layout.scale_kind == kScaleFloat32 ? __uint_as_float(stored) : e8m0_value(stored);
}

// Sixteen stored elements as floats.
MLA_DEVICE void load_record_chunk(float (&to)[kRecordChunk], const u8* from, i32 kind) {
    if (is_code(kind)) {
        uint4 chunk;
        if (kind == kE2m1) {
            const uint2 codes = *reinterpret_cast<const uint2*>(from);
            const uint2 low = e4m3_x8_of_e2m1(codes.x), high = e4m3_x8_of_e2m1(codes.y);
            chunk = make_uint4(low.x, low.y, high.x, high.y);
        } else {
            chunk = *reinterpret_cast<const uint4*>(from);
        }
        const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (i32 i = 0; i < kRecordChunk / 2; ++i) {
            const float2 pair = cvt_f32_x2_e4m3(words[i / 2] >> 16 * (i % 2) & 0xffff);
            to[2 * i] = pair.x;
            to[2 * i + 1] = pair.y;
        }
        return;
    }
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
        float x[kChunkElems];
        if (kind == kFloat32) {
            load_chunk<bfloat16>(x, reinterpret_cast<const float*>(from) + half * kChunkElems);
        } else if (kind == kBfloat16) {
            load_chunk<bfloat16>(x, reinterpret_cast<const u16*>(from) + half * kChunkElems);
        } else {
            load_chunk<float16>(x, reinterpret_cast<const u16*>(from) + half * kChunkElems);
        }
#pragma unroll
        for (i32 i = 0; i < kChunkElems; ++i) to[half * kChunkElems + i] = x[i];
    }
}

// Dequantises chunk `chunk` of a token; latent chunks come first, then RoPE chunks.
MLA_DEVICE void load_token_chunk(const RecordLayout& layout, const TokenBytes& token, i32 chunk,
                                 float (&to)[kRecordChunk]) {
    const bool latent = chunk < layout.latent_chunks;
    const i32 kind = latent ? layout.kind : layout.rope_kind, in_part = latent ? chunk : chunk - layout.latent_chunks;
    load_record_chunk(to, token.data + (latent ? 0 : layout.rope_offset) + in_part * chunk_bytes_of(kind), kind);
    if (!is_code(kind)) return;
    const float scale = chunk_scale(layout, token, chunk);
#pragma unroll
    for (i32 i = 0; i < kRecordChunk; ++i) to[i] *= scale;
}

// Rounds and stores sixteen floats in one of the wide kinds.
MLA_DEVICE void store_chunk(u8* to, const float (&x)[kRecordChunk], i32 kind) {
    const bool aligned = reinterpret_cast<u64>(to) % 16 == 0;
    if (kind == kFloat32) {
#pragma unroll
        for (i32 i = 0; i < kRecordChunk; i += 4) {
            if (aligned) {
                reinterpret_cast<float4*>(to)[i / 4] = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
            } else {
#pragma unroll
                for (i32 j = i; j < i + 4; ++j) reinterpret_cast<float*>(to)[j] = x[j];
            }
        }
        return;
    }
    u32 words[kRecordChunk / 2];
#pragma unroll
    for (i32 i = 0; i < kRecordChunk / 2; ++i) {
        const float lo = x[2 * i], hi = x[2 * i + 1];
        words[i] = kind == kBfloat16 ? (u32)bfloat16::from_float(hi) << 16 | bfloat16::from_float(lo)
                                     : (u32)float16::from_float(hi) << 16 | float16::from_float(lo);
    }
#pragma unroll
    for (i32 i = 0; i < kRecordChunk / 2; i += 4) {
        if (aligned) {
            reinterpret_cast<uint4*>(to)[i / 4] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
        } else {
#pragma unroll
            for (i32 j = 2 * i; j < 2 * i + 8; ++j) {
                reinterpret_cast<u16*>(to)[j] = (u16)(words[j / 2] >> 16 * (j % 2));
            }
        }
    }
}
}  // namespace mla::attention

// Members of the parameter structs of kernels that take a record, and the layout made of them.
#define MLA_RECORD_LAYOUT(p)                                                                                          \
    mla::attention::RecordLayout {                                                                                    \
        (p).page_stride_bytes, (p).token_stride_bytes, (p).num_pages, (p).page_size, (p).kind, (p).rope_kind,         \
            (p).latent_chunks, (p).rope_chunks, (p).group_chunks, (p).scale_kind, (p).rope_offset, (p).scales_offset, \
            (p).scales_stride, (p).kv_scale                                                                           \
    }
