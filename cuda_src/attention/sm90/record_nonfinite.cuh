// The values of FP8 records in pages, one by one: for rows that see a NaN or an infinity that others do not.
#pragma once
#include "attention/record_tokens.cuh"
#include "attention/sm90/nonfinite_values.cuh"
#include "attention/sm90/record_keys.cuh"

namespace mla::attention::sm90 {
// As the kernels round them, see PageValues.
template <class Record, class Latent>
struct RecordValues {
    TokenBytes token{nullptr, nullptr};

    MLA_DEVICE bool seek(const DecodeParams& p, const WorkItem& item, i32, i32 at) {
        token = PagedTokens::bytes<Record>(p, PagedTokens::place(p, item, at));
        return token.data != nullptr;
    }

    MLA_DEVICE float operator[](i32 column) const {
        constexpr i32 kLatentColumns = Record::kLatentChunks * kRecordChunk;
        if (column >= kLatentColumns) {
            const u16* rope = reinterpret_cast<const u16*>(token.data + Record::kRopeOffset);
            return unpack<Latent>(convert_rope(Latent{}, rope[column - kLatentColumns])).x;
        }
        const float scale = chunk_scale(token_layout<Record>(), token, column / kRecordChunk);
        return unpack<Latent>(dequantise(Latent{}, token.data[column], cvt_x2(Latent{}, scale, scale))).x;
    }
};
}  // namespace mla::attention::sm90
