// The records that sparse decode reads, as compile-time constants (mla_cupy/records.py).
#pragma once
#include "attention/record.cuh"
#include "common/facts.cuh"

namespace mla::sparse_decode {
using namespace attention;

// The members of a layout that say how to read a token whose bytes are found.
struct v32 {
    static constexpr i32 kLatentChunks = 32, kGroupChunks = 8, kRopeOffset = 528;
    static constexpr ScaleKind kScale = kScaleFloat32;
};
struct v4 {
    static constexpr i32 kLatentChunks = 28, kGroupChunks = 4, kRopeOffset = 448;
    static constexpr ScaleKind kScale = kScaleE8m0;
};

template <class Record>
constexpr i32 kKeyColumns = (Record::kLatentChunks + kRopeChunks) * kRecordChunk;
}  // namespace mla::sparse_decode

// Which record a kernel was compiled for, in elements and bytes.
#define MLA_RECORD_FACT(Record)                                        \
    MLA_FACT_LIST(record, mla::sparse_decode::kKeyColumns<Record>,     \
                  Record::kLatentChunks* mla::attention::kRecordChunk, \
                  Record::kGroupChunks* mla::attention::kRecordChunk, Record::kRopeOffset)
