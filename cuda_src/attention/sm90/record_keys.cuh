// FP8 records as keys for Hopper's tensor cores: the formats of the operands, the tiles of a block's split in order,
// and how a lane's bytes of a row become 16-bit elements of SW128 tiles.
#pragma once
#include "attention/query_groups.cuh"
#include "attention/sm90/tile.cuh"
#include "attention/token_record.cuh"
#include "ptx/convert.cuh"
#include "ptx/load.cuh"
#include "tile/sw128.cuh"
#include "tile/uniform.cuh"

namespace mla::attention::sm90 {
// ---- Two records in one tile -----------------------------------------------------------------------------------
// Sparse decode's second cache may hold compact records. Addresses of rows and of scales are multiples of 16; the
// lowest bit marks a compact row.
struct v41_mixed : v41 {};

template <class Record>
constexpr bool kMixed = kSame<Record, v41_mixed>;

MLA_DEVICE bool is_compact_row(const u8* tagged) { return (reinterpret_cast<u64>(tagged) & 1) != 0; }

// `bytes` of Tokens, tagged so.
template <class Record, class Tokens, class Item, class Place>
MLA_DEVICE TokenBytes find_token(const DecodeParams& p, const Item& item, i32 token, Place place) {
    TokenBytes found = Tokens::template bytes<Record>(p, item, token, place);
    if constexpr (kMixed<Record>) {
        const i32 tag = found.data != nullptr && Tokens::template is_compact<Record>(p, item, token);
        found.data += tag, found.scales += tag;
    }
    return found;
}

// A lane's 16 codes of a piece as e4m3, from the bytes that it has read: of a compact row two lanes read the same 16.
MLA_DEVICE uint4 unpacked_piece(const uint4& bytes, bool compact, i32 lane) {
    if (!compact) return bytes;
    const bool odd = lane & 1;
    const uint2 low = e4m3_x8_of_e2m1(odd ? bytes.z : bytes.x), high = e4m3_x8_of_e2m1(odd ? bytes.w : bytes.y);
    return make_uint4(low.x, low.y, high.x, high.y);
}

// ---- Formats ---------------------------------------------------------------------------------------------------
// v4 scales are powers of two, so a latent is exact in either 16-bit format. v32 scales are arbitrary, and f16 rounds
// the product eight times finer than bf16. RoPE columns use the format of the queries: bf16 as stored.
template <class Record, class Element>
struct KeyFormats {
    using Latent = Element;
    using Rope = Element;
};
template <class Element>
struct KeyFormats<v32, Element> {
    using Latent = float16;
    using Rope = Element;
};
template <class Element>
struct KeyFormats<v32_nope, Element> {
    using Latent = float16;
    using Rope = float16;  // of the last SW128 tile, which has latent columns
};
template <class Element>
struct KeyFormats<fp8, Element> : KeyFormats<v32, Element> {};

// A row is read in pieces of 64 bytes: each is 64 latent columns, or half of the 64 RoPE columns, or all of them where
// those have 8 bits, too.
constexpr i32 kPieceBytes = 64;
constexpr i32 kPieceLanes = kPieceBytes / 16;
template <class Record>
constexpr i32 kRopePieces = kRopeChunksOf<Record> / (Record::kRopeKind == kE4m3 ? kPieceLanes : kPieceLanes / 2);

template <class Record>
struct RecordTile : KeyTile<kKeyColumns<Record>> {
    static constexpr i32 kLatentSwTiles = Record::kLatentChunks / kPieceLanes;
    static constexpr i32 kRopeSwTile = kLatentSwTiles;
    static constexpr i32 kRowPieces = kLatentSwTiles + kRopePieces<Record>;
    static_assert(kRopeSwTile + (kRopePieces<Record> > 0) == RecordTile::kSwTilesQk, "latent, then RoPE");

    // The SW128 tile that a piece goes to.
    MLA_DEVICE static constexpr i32 sw_tile_of(i32 piece) { return piece < kLatentSwTiles ? piece : kRopeSwTile; }
};

// ---- Tiles of a split ------------------------------------------------------------------------------------------
// The tiles of all work items of a split, one after the other.
template <class Work>
struct TileWalk : Work::HeldItem {
    using Work::HeldItem::tile_begin, Work::HeldItem::tile_end;
    WorkIteratorOf<Work> walk;
    i32 tile;
    bool first;  // of its work item

    MLA_DEVICE TileWalk(const DecodeParams& p, i32 split) : walk(p, split), tile(0), first(false) { tile_end = 0; }

    // After the last tile it may be called again.
    MLA_DEVICE bool next(const DecodeParams& p) {
        ++tile;
        first = false;
        while (tile >= tile_end) {
            if (!walk.next(p, *this)) return false;
            tile = tile_begin;
            first = true;
        }
        return true;
    }

    // The item's index for `query_row` of Tokens.
    MLA_DEVICE i32 queries() const {
        if constexpr (Work::kForms) return walk.group - 1;
        return this->request;
    }
};

// The walk with fewer registers.
template <class Work>
struct SlimTileWalk {
    SchedulePoint end;
    i32 hidden;                            // tokens at a sequence's end that none of the block's rows sees
    i32 request, tokens, tokens_in_first;  // as in WorkItem, but without what is hidden
    i32 tile, tile_end;
    i32 skipped;  // tiles of the next request that are another split's
    bool first;   // of its work item

    MLA_DEVICE SlimTileWalk(const DecodeParams& p, i32 split, i32 hidden = 0)
        : end(Work::begin(p, split + 1)), hidden(hidden) {
        const SchedulePoint begin = Work::begin(p, split);
        request = begin.request - 1, skipped = begin.tile;
        tokens = tokens_in_first = tile = tile_end = 0;
        first = false;
    }

    // After the last tile it may be called again.
    MLA_DEVICE bool next(const DecodeParams& p) {
        ++tile;
        first = false;
        while (tile >= tile_end) {
            if (!open(p, request + 1)) return false;
        }
        return true;
    }

    MLA_DEVICE bool open(const DecodeParams& p, i32 next) {
        if (next >= p.b || next > end.request || (next == end.request && end.tile == 0)) return false;
        request = next;
        const RequestLength length = Work::length(p, request);
        tokens = length.tokens - (hidden == 0 ? 0 : hidden_here(p, hidden, length.behind_last));
        tokens_in_first = Work::tokens_in_first(p, request);
        tile = skipped;
        skipped = 0;
        tile_end = ceil_div(length.tokens, kTileTokens);
        if (request == end.request) tile_end = min(tile_end, end.tile);
        first = true;
        return true;
    }

    MLA_DEVICE i32 queries() const { return request; }
    MLA_DEVICE bool ends() const { return tile + 1 == tile_end; }  // its work item, with this tile
    MLA_DEVICE i32 at() const { return tile; }
    MLA_DEVICE const SlimTileWalk& item() const { return *this; }  // the argument of `place` of Tokens

    // Tells the compiler that all lanes have the same.
    MLA_DEVICE void make_uniform() {
        request = in_uniform(request);
        tokens = in_uniform(tokens);
        tokens_in_first = in_uniform(tokens_in_first);
        tile = in_uniform(tile);
        tile_end = in_uniform(tile_end);
    }
};

// ---- Rows ------------------------------------------------------------------------------------------------------
// Lane 4 g + c of a warp has bytes [16 c, 16 c + 16) of each piece of row g.

// Address of a piece. Odd rows have the halves of RoPE swapped, so that eight lanes store to eight different banks.
template <class Record>
MLA_DEVICE const u8* piece_address(const u8* row, i32 piece, i32 lane) {
    if constexpr (kMixed<Record>) {
        const bool compact = is_compact_row(row);
        const i32 bytes = compact ? kPieceBytes / 2 : kPieceBytes, chunk = lane % kPieceLanes;
        return row - compact + piece * bytes + (compact ? chunk / 2 : chunk) * 16;
    }
    constexpr i32 kLatentPieces = RecordTile<Record>::kLatentSwTiles;
    const i32 odd_row = lane / kPieceLanes & 1;
    const i32 at = piece < kLatentPieces || kRopePieces<Record> == 1
                       ? piece * kPieceBytes
                       : Record::kRopeOffset + ((piece - kLatentPieces) ^ odd_row) * kPieceBytes;
    return row + at + lane % kPieceLanes * 16;
}

// The codes of a piece; zeros for an absent row.
template <class Record>
MLA_DEVICE uint4 load_piece(const TokenBytes& token, i32 piece, i32 lane) {
    return ld_global_16(piece_address<Record>(token.data, piece, lane), token.data != nullptr);
}

// RoPE columns have scales, like the latent columns.
template <class Record>
constexpr bool kScaledRope = kSame<Record, v41> || kMixed<Record>;

// The scales of a row lie apart from the row.
template <class Record>
constexpr bool kScalesApart = Record::kScale == kScaleE8m0;

// Read in place of an absent row: an unconditional load stays where it is, and its register, too.
__device__ alignas(16) const u8 kZeroRow[768] = {};

struct NoScale {};

// The scales of a row, spread over its four lanes: each has one of v32's four, or two of v4's seven. `OfRow` is a copy
// of them in shared memory.
template <class Record>
struct LaneScales {
    static_assert(Record::kScale == kScaleFloat32, "the others have their own");
    float scale;

    MLA_DEVICE static LaneScales load(const TokenBytes& token, i32 lane) {
        // In the record: no register for token.scales.
        constexpr i32 kScalesOffset = Record::kLatentChunks * kRecordChunk;
        const float* scales = reinterpret_cast<const float*>(token.data + kScalesOffset);
        return {token.data == nullptr ? 0.f : scales[lane % kPieceLanes]};
    }
    MLA_DEVICE float of_lane(i32) const { return scale; }

    using OfRow = float4;
    MLA_DEVICE static float of_group(const OfRow& scales, i32 group) { return (&scales.x)[group]; }
    MLA_DEVICE static LaneScales of_row(const OfRow& scales, i32 lane) { return {(&scales.x)[lane % kPieceLanes]}; }
};

template <>
struct LaneScales<v4> {
    u32 codes;

    MLA_DEVICE static LaneScales load(const TokenBytes& token, i32 lane) {
        const u16* scales = reinterpret_cast<const u16*>(token.scales);
        return {token.data == nullptr ? 0u : scales[lane % kPieceLanes]};
    }

    using OfRow = u64;
    MLA_DEVICE static float of_group(const OfRow& scales, i32 group) {
        return e8m0_value((u32)(scales >> 8 * group) & 0xff);
    }
    MLA_DEVICE static LaneScales of_row(const OfRow& scales, i32 lane) {
        return {reinterpret_cast<const u16*>(&scales)[lane % kPieceLanes]};
    }
    MLA_DEVICE float of_lane(i32 number) const { return e8m0_value(codes >> 8 * number & 0xff); }
};

// Each lane holds four of sixteen scales, two pieces' worth: a piece's scales are in its first two and last two lanes.
template <>
struct LaneScales<v41> {
    u32 codes;

    MLA_DEVICE static LaneScales load(const TokenBytes& token, i32 lane) {
        const u32* scales = reinterpret_cast<const u32*>(token.scales);
        return {token.data == nullptr ? 0u : scales[lane % kPieceLanes]};
    }

    using OfRow = uint4;
    MLA_DEVICE static u32 of_pieces(const OfRow& scales, i32 pair) { return (&scales.x)[pair]; }
    MLA_DEVICE static LaneScales of_row(const OfRow& scales, i32 lane) { return {(&scales.x)[lane % kPieceLanes]}; }
    // A lane's of a piece, of the four codes of a pair of pieces.
    MLA_DEVICE static float of_lane(u32 codes, i32 piece, i32 lane) {
        return e8m0_value(codes >> (16 * (piece % 2) + 8 * (lane % kPieceLanes / 2)) & 0xff);
    }
};

// Scales of a wide row, or eight of the 32 of a compact row: four of each of two pieces, one per lane.
struct MixedRow {
    uint4 low, high;
};
template <>
struct LaneScales<v41_mixed> {
    u32 even, odd;  // a compact row's two pieces; a wide row uses only the first
    bool compact;

    MLA_DEVICE static LaneScales of_words(const u32* words, bool compact, i32 lane) {
        const i32 chunk = lane % kPieceLanes;
        return {words[compact ? 2 * chunk : chunk], compact ? words[2 * chunk + 1] : 0u, compact};
    }
    MLA_DEVICE static LaneScales load(const TokenBytes& token, i32 lane) {
        if (token.data == nullptr) return {0u, 0u, false};
        const bool compact = is_compact_row(token.scales);
        return of_words(reinterpret_cast<const u32*>(token.scales - compact), compact, lane);
    }

    using OfRow = MixedRow;
    MLA_DEVICE static LaneScales of_row(const OfRow& scales, bool compact, i32 lane) {
        return of_words(&scales.low.x, compact, lane);
    }
};

template <>
struct LaneScales<fp8> {
    using OfRow = NoScale;
    MLA_DEVICE static LaneScales load(const TokenBytes&, i32) { return {}; }
};

// The scales as pairs of 16-bit elements, for packed products.
template <class Record, class Latent>
struct RowScales {
    static constexpr i32 kOfLane = Record::kScale == kScaleFloat32 ? 1 : 2;
    static constexpr i32 kGroupPieces = Record::kGroupChunks / kPieceLanes;
    u32 pair[kOfLane];

    MLA_DEVICE explicit RowScales(const LaneScales<Record>& scales) {
#pragma unroll
        for (i32 i = 0; i < kOfLane; ++i) {
            const float scale = scales.of_lane(i);
            pair[i] = cvt_x2(Latent{}, scale, scale);
        }
    }

    // Called by all lanes of the warp.
    MLA_DEVICE u32 of_piece(i32 piece, i32 lane) const {
        const i32 group = piece / kGroupPieces, owner = (lane & ~(kPieceLanes - 1)) | group / kOfLane;
        return __shfl_sync(kFullWarp, pair[group % kOfLane], owner);
    }
};

// Scales where each lane holds all of its row: no shuffles.
template <class Record, class Latent>
struct WholeRowScales {
    typename LaneScales<Record>::OfRow row;

    MLA_DEVICE u32 of_piece(i32 piece, i32) const {
        const float scale = LaneScales<Record>::of_group(row, piece / RowScales<Record, Latent>::kGroupPieces);
        return cvt_x2(Latent{}, scale, scale);
    }
};

template <class Latent>
struct RowScales<v41, Latent> {
    u32 codes;

    MLA_DEVICE explicit RowScales(const LaneScales<v41>& scales) : codes(scales.codes) {}
    MLA_DEVICE u32 of_piece(i32 piece, i32 lane) const {
        const u32 of_pair = __shfl_sync(kFullWarp, codes, (lane & ~(kPieceLanes - 1)) | piece / 2);
        const float scale = LaneScales<v41>::of_lane(of_pair, piece, lane);
        return cvt_x2(Latent{}, scale, scale);
    }
};
template <class Latent>
struct WholeRowScales<v41, Latent> {
    uint4 row;

    MLA_DEVICE u32 of_piece(i32 piece, i32 lane) const {
        const u32 of_pair = LaneScales<v41>::of_pieces(row, piece / 2);
        const float scale = LaneScales<v41>::of_lane(of_pair, piece, lane);
        return cvt_x2(Latent{}, scale, scale);
    }
};

template <class Latent>
struct RowScales<v41_mixed, Latent> {
    LaneScales<v41_mixed> own;

    MLA_DEVICE explicit RowScales(const LaneScales<v41_mixed>& scales) : own(scales) {}
    MLA_DEVICE u32 of_piece(i32 piece, i32 lane) const {
        const u32 word = own.compact && piece % 2 != 0 ? own.odd : own.even;
        const u32 of_pair = __shfl_sync(kFullWarp, word, (lane & ~(kPieceLanes - 1)) | piece / 2);
        const u32 code = of_pair >> 8 * (lane % kPieceLanes) & 0xff;
        const float scale = own.compact ? cvt_f32_x2_e4m3(code).x : LaneScales<v41>::of_lane(of_pair, piece, lane);
        return cvt_x2(Latent{}, scale, scale);
    }
};

template <class Latent>
struct RowScales<fp8, Latent> {
    MLA_DEVICE explicit RowScales(const LaneScales<fp8>&) {}
    MLA_DEVICE NoScale of_piece(i32, i32) const { return {}; }
};

// The first or second two of four e4m3 numbers. `kUnshifted` converts the second two without a shift: one instruction
// less, but the compiler holds more registers (sparse_decode/sm90.cu would spill).
template <i32 kPair, bool kUnshifted>
MLA_DEVICE u32 e4m3_pair(float16, u32 codes) {
    if (kPair == 0) return cvt_f16_x2_e4m3(codes);
    return kUnshifted ? cvt_f16_x2_e4m3_high(codes) : cvt_f16_x2_e4m3(codes >> 16);
}
template <i32 kPair, bool kUnshifted>
MLA_DEVICE u32 e4m3_pair(bfloat16, u32 codes) {
    const float2 x = unpack<float16>(e4m3_pair<kPair, kUnshifted>(float16{}, codes));
    return cvt_x2(bfloat16{}, x.x, x.y);
}

// The codes times their scale.
template <i32 kPair, bool kUnshifted, class Latent>
MLA_DEVICE u32 dequantise(Latent, u32 codes, u32 scale) {
    return mul_x2(Latent{}, e4m3_pair<kPair, kUnshifted>(Latent{}, codes), scale);
}
template <i32 kPair, bool kUnshifted, class Latent>
MLA_DEVICE u32 dequantise(Latent, u32 codes, NoScale) {
    return e4m3_pair<kPair, kUnshifted>(Latent{}, codes);
}

MLA_DEVICE u32 convert_rope(bfloat16, u32 pair) { return pair; }
MLA_DEVICE u32 convert_rope(float16, u32 pair) {
    const float2 x = unpack<bfloat16>(pair);
    return cvt_x2(float16{}, x.x, x.y);
}

// A lane's 16 latent bytes of row `row` to two chunks of an SW128 tile.
template <class Latent, bool kUnshifted = false, class Scale>
MLA_DEVICE void store_latent(u8* sw_tile, const uint4& codes, Scale scale, i32 row, i32 lane) {
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
        const u32 low = words[2 * half], high = words[2 * half + 1];
        uint4* to = reinterpret_cast<uint4*>(sw_tile + sw128_offset(row, lane % kPieceLanes * 2 + half));
        *to = make_uint4(
            dequantise<0, kUnshifted>(Latent{}, low, scale), dequantise<1, kUnshifted>(Latent{}, low, scale),
            dequantise<0, kUnshifted>(Latent{}, high, scale), dequantise<1, kUnshifted>(Latent{}, high, scale));
    }
}

// A lane's 16 bytes of RoPE columns, as `load_piece` has read them: of half of the columns, to one chunk ...
template <class Rope>
MLA_DEVICE void store_rope(u8* sw_tile, const uint4& pairs, i32 half, i32 row, i32 lane) {
    const i32 odd_row = lane / kPieceLanes & 1;
    const i32 chunk = (half ^ odd_row) * kPieceLanes + lane % kPieceLanes;
    *reinterpret_cast<uint4*>(sw_tile + sw128_offset(row, chunk)) =
        make_uint4(convert_rope(Rope{}, pairs.x), convert_rope(Rope{}, pairs.y), convert_rope(Rope{}, pairs.z),
                   convert_rope(Rope{}, pairs.w));
}

// ... or of all of them, where they are e4m3.
template <class Record, class Rope>
MLA_DEVICE void store_rope_piece(u8* sw_tile, const uint4& bytes, i32 piece, i32 row, i32 lane) {
    if constexpr (Record::kRopeKind == kE4m3) {
        store_latent<Rope>(sw_tile, bytes, NoScale{}, row, lane);
    } else {
        store_rope<Rope>(sw_tile, bytes, piece, row, lane);
    }
}
}  // namespace mla::attention::sm90
