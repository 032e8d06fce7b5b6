// The FP8 records that attention reads, as compile-time constants (mla_cupy/cache_formats.py).
#pragma once
#include "attention/record.cuh"
#include "common/facts.cuh"

namespace mla::attention {
// Layout members that describe how to read a token at a known address.
struct v32 {
    using Compact = v32;
    static constexpr i32 kLatentChunks = 32, kGroupChunks = 8, kRopeOffset = 528;
    static constexpr ScaleKind kScale = kScaleFloat32;
    static constexpr ElementKind kKind = kE4m3, kRopeKind = kBfloat16;

    // Address of the scales of a token in a page.
    MLA_DEVICE static u8* scales(u8*, u8* data, i32, i32) { return data + kLatentChunks * kRecordChunk; }
};
// v32 without RoPE columns: their bytes are reserved, may hold anything, and are not read.
struct v32_nope : v32 {
    using Compact = v32_nope;
};
struct v4 {
    using Compact = v4;
    static constexpr i32 kLatentChunks = 28, kGroupChunks = 4, kRopeOffset = 448;
    static constexpr ScaleKind kScale = kScaleE8m0;
    static constexpr ElementKind kKind = kE4m3, kRopeKind = kBfloat16;
    static constexpr i32 kPlaneBytes = 576, kScalesBytes = 8;  // of a token in each plane of a page

    MLA_DEVICE static u8* scales(u8* page, u8*, i32 page_size, i32 token) {
        return page + (i64)page_size * kPlaneBytes + token * kScalesBytes;
    }
};

// All columns are codes, with scales in another plane. Sparse decode's second cache may hold this compact record,
// recognised by its token stride, kPlaneBytes.
struct v41_fp4 {
    static constexpr i32 kLatentChunks = 28, kGroupChunks = 1, kRopeOffset = 224;
    static constexpr ScaleKind kScale = kScaleE4m3;
    static constexpr ElementKind kKind = kE2m1, kRopeKind = kE2m1;
    static constexpr i32 kPlaneBytes = 256, kScalesBytes = 32;

    MLA_DEVICE static u8* scales(u8* page, u8*, i32 page_size, i32 token) {
        return page + (i64)page_size * kPlaneBytes + token * kScalesBytes;
    }
};
struct v41 {
    using Compact = v41_fp4;
    static constexpr i32 kLatentChunks = 28, kGroupChunks = 2, kRopeOffset = 448;
    static constexpr ScaleKind kScale = kScaleE8m0;
    static constexpr ElementKind kKind = kE4m3, kRopeKind = kE4m3;
    static constexpr i32 kPlaneBytes = 512, kScalesBytes = 16;

    MLA_DEVICE static u8* scales(u8* page, u8*, i32 page_size, i32 token) {
        return page + (i64)page_size * kPlaneBytes + token * kScalesBytes;
    }
};

// One scale for the whole cache: scores and results are multiplied by it, not keys.
struct fp8 {
    using Compact = fp8;
    static constexpr i32 kLatentChunks = 32, kGroupChunks = 0, kRopeOffset = 512;
    static constexpr ScaleKind kScale = kScaleOfTensor;
    static constexpr ElementKind kKind = kE4m3, kRopeKind = kE4m3;

    MLA_DEVICE static u8* scales(u8*, u8* data, i32, i32) { return data; }
};

template <class Record>
constexpr bool kHasValueScale = Record::kScale == kScaleOfTensor;

template <class Record, class Other>
constexpr bool kSame = false;
template <class Record>
constexpr bool kSame<Record, Record> = true;
template <class Record>
constexpr bool kHasCompact = !kSame<Record, typename Record::Compact>;

template <class Record>
constexpr i32 kRopeChunksOf = kSame<Record, v32_nope> ? 0 : kRopeChunks;
template <class Record>
constexpr i32 kKeyColumns = (Record::kLatentChunks + kRopeChunksOf<Record>)*kRecordChunk;

// The part of a layout that reading a token at a known address uses.
template <class Record>
MLA_DEVICE RecordLayout token_layout() {
    RecordLayout layout{};
    layout.kind = Record::kKind, layout.rope_kind = Record::kRopeKind;
    layout.latent_chunks = Record::kLatentChunks, layout.rope_chunks = kRopeChunksOf<Record>;
    layout.group_chunks = Record::kGroupChunks, layout.scale_kind = Record::kScale;
    layout.rope_offset = Record::kRopeOffset, layout.kv_scale = 1.f;
    return layout;
}
}  // namespace mla::attention

// Which record a kernel was compiled for, in elements and bytes.
#define MLA_RECORD_FACT(Record)                                                                                     \
    MLA_FACT_LIST(record, mla::attention::kKeyColumns<Record>, Record::kLatentChunks* mla::attention::kRecordChunk, \
                  Record::kGroupChunks* mla::attention::kRecordChunk, Record::kRopeOffset)
