// Attention of up to 32 query rows to FP8 records with mma.sync, for the kernels that differ in where a request's
// tokens lie: in lists of slots (sparse_decode/mma.cu) or in pages (decode/mma_records.cu).
//
// A step is 32 tokens, whose bytes arrive by cp.async in shared memory private to each warp. The warp converts them to
// 16-bit keys, swizzled like the keys of mma_small.cu, which shares these kernels' matmuls. With two tiles of keys the
// next step is converted during the softmax:
//
//   scores   warp = 16 tokens, a quarter of d  | Q K^T  |            |          | Q K^T of the next step
//   softmax  thread = 2 or 4 tokens of a row   |        | max, P     |          |
//   convert  warp = 4 tokens                   |        | next keys  |          |
//   values   warp = 64 columns                 |        |            | O += P V |
//   loads    warp = 4 tokens, cp.async         |        | the step that takes the place of what was converted ->
//
// With room for one tile only, the next step is converted after the values, between two more barriers. Records with at
// most one scale per 128 columns use a faster form: mma/codes.cuh.
#pragma once
#include "attention/mma/few_rows.cuh"
#include "attention/record_tokens.cuh"
#include "ptx/copy.cuh"
#include "tile/elements.cuh"

namespace mla::attention::mma {
// ---- Formats ---------------------------------------------------------------------------------------------------
// v4 scales are powers of two, so a latent is exact in either 16-bit format. v32 scales are arbitrary, and f16 rounds
// their products with P eight times finer than bf16. e4m3 without a scale is exact in f16, and converts to f16 in one
// instruction on newer GPUs. RoPE columns stored as bf16 use the format of the queries.
template <class Record, class Element>
struct RecordFormats {
    using Latent = float16;
    using Rope = Element;
};
template <class Element>
struct RecordFormats<v4, Element> {
    using Latent = Element;
    using Rope = Element;
};
template <class Element>
struct RecordFormats<v41, Element> : RecordFormats<v4, Element> {};
template <class Element>
struct RecordFormats<fp8, Element> {
    using Latent = float16;
    using Rope = float16;
};

template <class A, class B>
constexpr bool kAlike = false;
template <class A>
constexpr bool kAlike<A, A> = true;

// ---- Variant ---------------------------------------------------------------------------------------------------
// Choices of a kernel. Tokens_ is one of attention/record_tokens.cuh.
template <class Element_, class Record_, class Tokens_, i32 kBlockRows, i32 kSmemBytes_>
struct MmaRecords {
    using Element = Element_;
    using TokenRecord = Record_;
    using Tokens = Tokens_;
    using Latent = typename RecordFormats<TokenRecord, Element>::Latent;
    using Rope = typename RecordFormats<TokenRecord, Element>::Rope;
    static constexpr i32 kSmemBytes = kSmemBytes_;  // shared memory of a block
    static constexpr i32 kHeadDimQk = kKeyColumns<TokenRecord>;
    static constexpr i32 kLatentSegments = TokenRecord::kLatentChunks * kRecordChunk * 2 / kSegmentBytes;
    using Few = FewRows<Latent, Rope, kBlockRows, kHeadDimQk, kLatentSegments>;
    using Rows = Block<kBlockRows, typename Tokens::Work>;
    // bf16 queries with f16 keys are multiplied by a power of two per row, which puts the row's largest element between
    // 2^14 and 2^15: elements down to 2^-31 of it keep all of their bits in f16.
    static constexpr bool kScaledQueries = !kAlike<Element, Latent>;
};

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kTokenLanes = 8;  // lanes per token
constexpr i32 kLaneTokens = kWarpThreads / kTokenLanes;
constexpr i32 kPieceCodes = 8;  // codes that a lane converts at a time, to one chunk

// A token's bytes in shared memory: its elements as in the record, without the scales, which lie apart.
template <class Record>
struct RawToken {
    static constexpr bool kWideRope = Record::kRopeKind != kE4m3;
    // Scaled RoPE columns are read as further latent columns. In v41 the second cache may hold compact records, with
    // half of the bytes and twice the scale bytes.
    static constexpr bool kScaledRope = kHasCompact<Record>;
    static constexpr i32 kLatentBytes = (Record::kLatentChunks + (kScaledRope ? kRopeChunks : 0)) * kRecordChunk;
    static constexpr i32 kLatentPieces = kLatentBytes / (kTokenLanes * kPieceCodes);  // of a lane
    static constexpr i32 kRopeBytes = kScaledRope ? 0 : kRopeChunksOf<Record> * kRecordChunk * (kWideRope ? 2 : 1);
    static constexpr i32 kBytes = kLatentBytes + kRopeBytes;
    static constexpr i32 kChunks = kBytes / kChunkBytes, kCompactChunks = kChunks / 2;
    static constexpr i32 kGap = kScaledRope ? 0 : Record::kRopeOffset - kLatentBytes;  // before RoPE columns
    static constexpr i32 kScaleBytes = kScaledRope                       ? 32
                                       : Record::kScale == kScaleFloat32 ? 16
                                       : Record::kScale == kScaleE8m0    ? 8
                                                                         : 0;
    // Two tokens are read at once, 64 bytes of each. Odd tokens swap halves where all lanes would hit the same banks.
    static constexpr bool kSwapped = kBytes % kSegmentBytes == 0;
    // 512 codes that have no scale, or one for each 128 of them: mma/codes.cuh has a faster form for these.
    static constexpr bool kFourGroups = kLatentBytes == 512 && !kScaledRope;
    static_assert(kBytes % 64 == 0 && kGap % kChunkBytes == 0, "whole pieces");
    static_assert(kScaleBytes == 0 || kScaledRope ||
                      Record::kGroupChunks * kRecordChunk % (kTokenLanes * kPieceCodes) == 0,
                  "all lanes of a token are in one group");
};

// ---- Storage ---------------------------------------------------------------------------------------------------
// Which tokens of a step have the compact record, where some may.
template <bool kSome>
struct RawKinds {};
template <>
struct RawKinds<true> {
    u8 compact[kWarps][kLaneTokens];
};

// A warp's tokens of one step, as they were loaded.
template <class Record>
struct RawStep : RawKinds<kHasCompact<Record>> {
    using Raw = RawToken<Record>;
    alignas(16) u8 bytes[kWarps][kLaneTokens][Raw::kBytes];
    alignas(16) u8 scales[Raw::kScaleBytes > 0 ? kWarps : 1][kLaneTokens][Raw::kScaleBytes > 0 ? Raw::kScaleBytes : 4];
};

// One or two tiles of keys.
template <class C>
struct KeyTiles {
    static constexpr i32 kOctets = C::Few::kStepTokens / kOctetTokens;  // of a tile
    using Swizzle = KeyRing<C::kHeadDimQk, 2 * kOctets, C::Few::kStepTokens>;
    static constexpr i32 kRowBytes = Swizzle::kRowBytes, kTokenThreads = kTokenLanes;
    static constexpr i32 kTileBytes = C::Few::kStepTokens * kRowBytes;

    MLA_DEVICE static i32 position(i32 first, i32 octet) { return first + octet; }
    MLA_DEVICE static u32 offset(i32 row, i32 chunk) { return Swizzle::offset(row, chunk); }
};

// Steps for which the present tokens are recorded: the requested, the converted and the weighed.
constexpr i32 kKnownSteps = 8;

template <class C>
struct RecordBudget {
    static constexpr i32 kOtherBytes = sizeof(SoftmaxSlots<typename C::Few::Softmax>) + 1024 + 16 * C::Few::kRows;
    static constexpr i32 kStepBytes = sizeof(RawStep<typename C::TokenRecord>);
    MLA_DEVICE static constexpr i32 raw_steps(i32 tiles) {
        return (C::kSmemBytes - kOtherBytes - tiles * KeyTiles<C>::kTileBytes) / kStepBytes;
    }
    static constexpr i32 kTiles = raw_steps(2) >= 2 ? 2 : 1;
    static constexpr i32 kRawSteps = raw_steps(kTiles);
    static_assert(kRawSteps >= 1 && kRawSteps + 2 <= kKnownSteps, "steps on their way");
};

template <class C>
struct RecordStorage {
    using Budget = RecordBudget<C>;
    struct Keys {
        alignas(kSegmentBytes) u8 octets[Budget::kTiles * KeyTiles<C>::kOctets][kOctetTokens * KeyTiles<C>::kRowBytes];
    } keys;
    RawStep<typename C::TokenRecord> raw[Budget::kRawSteps];
    SoftmaxSlots<typename C::Few::Softmax> softmax;
    u8 present[kKnownSteps][kWarps];  // bit = token of a warp: present
    u32 largest[kQuarters][C::Few::kRows];
    ItemsOf<typename C::Tokens::Work> items;
    float factor[C::Few::kRows];
};

// ---- Queries ---------------------------------------------------------------------------------------------------
MLA_DEVICE float power_of_two(i32 biased_exponent) { return __uint_as_float((u32)biased_exponent << 23); }

template <class C, bool = C::kScaledQueries>
struct QueryFactors : NoFactors {
    template <class Shared>
    MLA_DEVICE void scale(Shared&, typename C::Few::Queries&, i32, i32) {}
};

// Factors of a row's scores where its queries are stored scaled.
template <class C>
struct QueryFactors<C, true> {
    static constexpr i32 kHalves = 2 * C::Few::kRowTiles;  // a lane's rows: 8 i + lane / 4
    static constexpr u32 kLeast = 15u << 24;               // so both factors are normal numbers
    float of[kHalves];

    MLA_DEVICE float operator[](i32 i) const { return of[i]; }
    // Factor for a row whose largest element has these bits, without the sign.
    MLA_DEVICE static float factor(u32 largest) { return power_of_two((i32)(largest >> 24) - 14); }

    // Called by all warps, with a block barrier, since each holds a quarter of a row.
    template <class Shared>
    MLA_DEVICE void scale(Shared& s, typename C::Few::Queries& q, i32 warp, i32 lane) {
#pragma unroll
        for (i32 i = 0; i < kHalves; ++i) {
            u32 largest = 0;  // signs are shifted out; the bits after an exponent do not matter
#pragma unroll
            for (i32 j = 0; j < 2 * C::Few::kScoreSteps; ++j) {
                const u32 word = q[j / 2][i / 2][i % 2 + 2 * (j % 2)];
                largest = max(largest, max(word << 1, word << 17));
            }
            largest = max(largest, __shfl_xor_sync(kFullWarp, largest, 1));
            largest = max(largest, __shfl_xor_sync(kFullWarp, largest, 2));
            if (lane % 4 == 0) s.largest[C::Few::quarter(warp)][8 * i + lane / 4] = largest;
        }
        __syncthreads();
#pragma unroll
        for (i32 i = 0; i < kHalves; ++i) {
            u32 largest = kLeast;
#pragma unroll
            for (i32 quarter = 0; quarter < kQuarters; ++quarter) {
                largest = max(largest, s.largest[quarter][8 * i + lane / 4]);
            }
            const i32 exponent = (i32)(largest >> 24);
            of[i] = factor(largest);
            const float up = power_of_two(2 * 127 + 14 - exponent);
#pragma unroll
            for (i32 j = 0; j < 2 * C::Few::kScoreSteps; ++j) {
                u32& word = q[j / 2][i / 2][i % 2 + 2 * (j % 2)];
                const float2 x = unpack<typename C::Element>(word);
                word = j / 2 < C::kLatentSegments ? cvt_x2(typename C::Latent{}, x.x * up, x.y * up)
                                                  : cvt_x2(typename C::Rope{}, x.x * up, x.y * up);
            }
        }
    }
};

// ---- Keys ------------------------------------------------------------------------------------------------------
// The first or second two of four e4m3 numbers as f16, exactly. The exponents of e4m3 and f16 differ by 8; subnormal
// numbers come out right as well. NaN gets an exponent of all ones.
template <i32 kPair>
MLA_DEVICE u32 e4m3_pair(u32 codes) {
#if __CUDA_ARCH__ >= 890
    return kPair == 0 ? cvt_f16_x2_e4m3(codes) : cvt_f16_x2_e4m3_high(codes);
#else
    const u32 spread = __byte_perm(codes, 0, kPair == 0 ? 0x1404 : 0x3424);
    const u32 size = spread >> 1 & 0x3f803f80, nan = size + 0x00800080 & 0x40004000;
    return mul_x2(float16{}, spread & 0x80008000 | size | nan, 0x5c005c00);  // 2^8
#endif
}

// A group's scale, for packed products of f16, and for the exact ones that bf16 holds.
MLA_DEVICE u32 scale_pair(float16, float scale) { return cvt_x2(float16{}, scale, scale); }
MLA_DEVICE float scale_pair(bfloat16, float scale) { return scale; }

template <i32 kPair>
MLA_DEVICE u32 dequantise(float16, u32 codes, u32 scale) {
    return mul_x2(float16{}, e4m3_pair<kPair>(codes), scale);
}
template <i32 kPair>
MLA_DEVICE u32 dequantise(bfloat16, u32 codes, float scale) {
    const float2 x = unpack<float16>(e4m3_pair<kPair>(codes));
    return cvt_x2(bfloat16{}, x.x * scale, x.y * scale);
}

template <class Latent, class Scale>
MLA_DEVICE uint4 dequantise_piece(uint2 codes, Scale scale) {
    return make_uint4(dequantise<0>(Latent{}, codes.x, scale), dequantise<1>(Latent{}, codes.x, scale),
                      dequantise<0>(Latent{}, codes.y, scale), dequantise<1>(Latent{}, codes.y, scale));
}

MLA_DEVICE u32 convert_rope(bfloat16, u32 pair) { return pair; }
MLA_DEVICE u32 convert_rope(float16, u32 pair) {
    const float2 x = unpack<bfloat16>(pair);
    return cvt_x2(float16{}, x.x, x.y);
}

// Marks a token with the compact record, in kernels where some may have it.
template <bool kSome>
struct ShareKind {};
template <>
struct ShareKind<true> {
    bool compact;
};

// A lane's raw share of a token: pieces of latent columns and of RoPE columns, and the scales.
template <class C>
struct RawShare : ShareKind<kHasCompact<typename C::TokenRecord>> {
    using Record = typename C::TokenRecord;
    using Raw = RawToken<Record>;
    using Rope = typename C::Rope;
    uint2 codes[Raw::kLatentPieces];
    uint4 rope;
    uint4 scales;  // as stored; of v41 the lane's, a byte for each piece

    MLA_DEVICE RawShare(const RawStep<Record>& step, i32 warp, i32 token, i32 k) {
        const u8* from = step.bytes[warp][token];
        if constexpr (Raw::kScaledRope) {
            this->compact = step.compact[warp][token];
            load_either(from, step.scales[warp][token], token, k);
        } else {
#pragma unroll
            for (i32 piece = 0; piece < Raw::kLatentPieces; ++piece) {
                const i32 at = place_of(piece, token);
                codes[piece] = *reinterpret_cast<const uint2*>(from + (at * kTokenLanes + k) * kPieceCodes);
            }
            rope = *reinterpret_cast<const uint4*>(from + Raw::kLatentBytes + k * kChunkBytes);
            const uint2 codes_of_scales = *reinterpret_cast<const uint2*>(step.scales[warp][token]);
            scales = make_uint4(codes_of_scales.x, codes_of_scales.y, 0, 0);
        }
    }

    // Stores the share as keys. `to` is the lane's chunk of the row's first segment; one piece of all lanes of a token
    // is a segment.
    MLA_DEVICE void store(u8* to, i32 token) const {
#pragma unroll
        for (i32 piece = 0; piece < Raw::kLatentPieces; ++piece) {
            *reinterpret_cast<uint4*>(to + place_of(piece, token) * kSegmentBytes) =
                dequantise_piece<typename C::Latent>(codes[piece], scale_of(piece));
        }
        if constexpr (!Raw::kScaledRope) {
            *reinterpret_cast<uint4*>(to + C::kLatentSegments * kSegmentBytes) =
                make_uint4(convert_rope(Rope{}, rope.x), convert_rope(Rope{}, rope.y), convert_rope(Rope{}, rope.z),
                           convert_rope(Rope{}, rope.w));
        }
    }

   private:
    // Codes of either record as e4m3: a lane has eight, and so the same columns, of each piece. Of the 32 scales of a
    // compact token each is of two lanes, of the 16 of another one of four.
    MLA_DEVICE void load_either(const u8* from, const u8* stored, i32 token, i32 k) {
        const bool compact = this->compact;
        u32 of_pieces[2] = {0, 0};
#pragma unroll
        for (i32 piece = 0; piece < Raw::kLatentPieces; ++piece) {
            const i32 at = place_of(piece, token), chunk = at * kTokenLanes + k;
            codes[piece] = compact ? e4m3_x8_of_e2m1(*reinterpret_cast<const u32*>(from + chunk * kPieceCodes / 2))
                                   : *reinterpret_cast<const uint2*>(from + chunk * kPieceCodes);
            of_pieces[piece / 4] |= (u32)stored[chunk / (compact ? 2 : 4)] << 8 * (piece % 4);
        }
        scales = make_uint4(of_pieces[0], of_pieces[1], 0, 0);
    }

    // Which piece of the token the lane's is.
    MLA_DEVICE static i32 place_of(i32 piece, i32 token) {
        if (!Raw::kSwapped) return piece;
        return piece + (piece % 2 == 0 ? token % 2 : -(token % 2));
    }

    MLA_DEVICE auto scale_of(i32 piece) const {
        if constexpr (Raw::kScaledRope) {
            const u32 code = (piece < 4 ? scales.x : scales.y) >> 8 * (piece % 4) & 0xff;
            return scale_pair(typename C::Latent{}, this->compact ? cvt_f32_x2_e4m3(code).x : e8m0_value(code));
        } else {
            const i32 group = piece * kTokenLanes * kPieceCodes / (Record::kGroupChunks * kRecordChunk);
            const u32 word = group < 4 ? scales.x : scales.y;
            return scale_pair(typename C::Latent{}, e8m0_value(word >> 8 * (group % 4) & 0xff));
        }
    }
};

// One lane's share of loading and converting: an eighth of token `threadIdx.x / 8` of each step. Only its own warp
// reads the bytes that it has loaded.
template <class C>
struct RecordLoader {
    using Record = typename C::TokenRecord;
    using Raw = RawToken<Record>;
    using Tiles = KeyTiles<C>;
    using Shared = RecordStorage<C>;
    static constexpr i32 kRawSteps = Shared::Budget::kRawSteps;
    static constexpr i32 kStepTokens = C::Few::kStepTokens;

    typename C::Tokens::Place place;  // of the lane's token of the next step to request, read ahead
    i32 asked, slot;                  // steps of the item; the place of the step that is converted next

    MLA_DEVICE static i32 token() { return (i32)threadIdx.x / kTokenLanes; }
    MLA_DEVICE static i32 token_of_warp() { return token() % kLaneTokens; }
    MLA_DEVICE static i32 lane_of_token() { return (i32)threadIdx.x % kTokenLanes; }

    // Asks for the first of the item's `steps`.
    MLA_DEVICE void begin(const typename C::Rows& block, Shared& s, i32 steps) {
        asked = slot = 0;
        look_up(block, steps);
#pragma unroll 1
        for (i32 i = 0; i < kRawSteps; ++i) {
            ask(block, s, i, steps);
            look_up(block, steps);
        }
    }

    // Looks up the next step to request. It may cost a division and a load: call it where nobody waits.
    MLA_DEVICE void look_up(const typename C::Rows& block, i32 steps) {
        place = asked < steps ? C::Tokens::place(block.p, block.item(), next_token(block)) : C::Tokens::nowhere();
    }

    // The lane's share of the next step to convert. Then requests the step that takes its place. Past the last step
    // there is nothing to request, but an empty group of copies is committed all the same, so that all waits are alike.
    MLA_DEVICE RawShare<C> fetch(const typename C::Rows& block, Shared& s, i32 steps, i32 warp) {
        cp_async_wait_group<kRawSteps - 1>();
        __syncwarp();
        const RawShare<C> share(s.raw[slot], warp, token_of_warp(), lane_of_token());
        __syncwarp();
        ask(block, s, slot, steps);
        slot = slot + 1 == kRawSteps ? 0 : slot + 1;
        return share;
    }

    // To tile `tile`.
    MLA_DEVICE void store(Shared& s, const RawShare<C>& share, i32 tile) const {
        const i32 octet = tile * Tiles::kOctets + token() / kOctetTokens;
        share.store(s.keys.octets[octet] + Tiles::offset(token() % kOctetTokens, lane_of_token()), token());
    }

   private:
    MLA_DEVICE i32 next_token(const typename C::Rows& block) const {
        return block.begin() + asked * kStepTokens + token();
    }

    MLA_DEVICE void ask(const typename C::Rows& block, Shared& s, i32 slot, i32 steps) {
        if (asked < steps) {
            const TokenBytes from = C::Tokens::template bytes<Record>(block.p, block.item(), next_token(block), place);
            copy(block, s, slot, from);
        }
        cp_async_commit_group();
        ++asked;
    }

    // The token that is asked for.
    MLA_DEVICE bool is_compact(const typename C::Rows& block) const {
        return C::Tokens::template is_compact<Record>(block.p, block.item(), next_token(block));
    }

    MLA_DEVICE void copy(const typename C::Rows& block, Shared& s, i32 slot, const TokenBytes& from) const {
        const i32 warp = (i32)threadIdx.x / kWarpThreads, k = lane_of_token();
        const bool present = from.data != nullptr;
        const u32 lanes = __ballot_sync(kFullWarp, present);
        if (threadIdx.x % kWarpThreads == 0) {
            u32 bits = 0;
#pragma unroll
            for (i32 i = 0; i < kLaneTokens; ++i) bits |= (lanes >> (i * kTokenLanes) & 1) << i;
            s.present[asked % kKnownSteps][warp] = (u8)bits;
        }
        const u8* nothing = reinterpret_cast<const u8*>(block.p.kv);
        const u8* data = (present ? from.data : nothing) + k * kChunkBytes;
        const SmemAddr to = smem_addr(s.raw[slot].bytes[warp][token_of_warp()]) + (u32)(k * kChunkBytes);
#pragma unroll
        for (i32 chunk = 0; chunk < Raw::kChunks; chunk += kTokenLanes) {
            if (chunk + kTokenLanes > Raw::kChunks && chunk + k >= Raw::kChunks) break;
            if (Raw::kScaledRope && chunk >= Raw::kCompactChunks && is_compact(block)) break;
            cp_async_16(to + chunk * kChunkBytes, data + chunk * kChunkBytes, present);
        }
        if constexpr (Raw::kScaledRope) {
            const bool compact = is_compact(block);
            const i32 at = k * kChunkBytes;
            if (k == 0) s.raw[slot].compact[warp][token_of_warp()] = compact;
            if (k < (compact ? 2 : 1)) {
                cp_async_16(smem_addr(s.raw[slot].scales[warp][token_of_warp()]) + (u32)at,
                            (present ? from.scales : nothing) + at, present);
            }
        } else if constexpr (Raw::kScaleBytes > 0) {
            if (k != 0) return;
            cp_async<Raw::kScaleBytes>(smem_addr(s.raw[slot].scales[warp][token_of_warp()]),
                                       present ? from.scales : nothing, present);
        }
    }
};

// ---- Kernel ----------------------------------------------------------------------------------------------------
template <class C>
struct RecordMath {
    typename C::Few::Queries q;
    QueryFactors<C> factors;
    RecordLoader<C> loader;
    SoftmaxRow<typename C::Few::Softmax> row;
    i32 warp = uniform_warp(), lane = threadIdx.x % kWarpThreads;
};

// P of step `step`. Of tokens that not every row sees, values that are not finite become 0; a row that does see one has
// a score of NaN, and so is NaN as a whole.
template <class C>
MLA_DEVICE void weigh(const typename C::Rows& block, RecordStorage<C>& s, RecordMath<C>& math, i32 step, i32 first) {
    const i32 token = block.begin() + step * C::Few::kStepTokens, seen_by_all = block.item().seen_by_all;
    const bool masked = token + C::Few::kStepTokens > seen_by_all;
    const i32 mine = math.row.first_token();
    const u32 present = s.present[step % kKnownSteps][mine / kLaneTokens] >> mine % kLaneTokens;
    math.row.add_step(typename C::Latent{}, block, s.softmax, token, masked, present);
    if constexpr (C::Tokens::kMasked) {
        if (masked) clean_values<typename C::Latent, KeyTiles<C>>(s.keys, first, token, seen_by_all);
    }
}

template <class C>
MLA_DEVICE void run_item(const typename C::Rows& block, RecordStorage<C>& s, RecordMath<C>& math) {
    using Few = typename C::Few;
    constexpr i32 kTiles = RecordBudget<C>::kTiles;
    const i32 steps = max(0, ceil_div(block.end() - block.begin(), Few::kStepTokens));
    math.loader.begin(block, s, steps);
    math.row.begin();
    Output<typename C::Element, Few::kRowTiles> out;
    out.clear();
    if (steps > 0) {
        load_queries<Few, true>(block, math.q, math.warp, math.lane);
        math.factors.scale(s, math.q, math.warp, math.lane);
        math.loader.store(s, math.loader.fetch(block, s, steps, math.warp), 0);
        math.loader.look_up(block, steps);
        __syncthreads();
    }
#pragma unroll 1
    for (i32 step = 0; step < steps; ++step) {
        const i32 tile = step % kTiles, first = tile * KeyTiles<C>::kOctets;
        const bool more = step + 1 < steps;
        score<Few, KeyTiles<C>>(s.softmax, s.keys, first, math.q, math.factors, math.warp, math.lane);
        __syncthreads();  // scores are stored; the last step's values have been read
        if (kTiles > 1 && more) {
            math.loader.store(s, math.loader.fetch(block, s, steps, math.warp), tile ^ 1);
        }
        weigh(block, s, math, step, first);
        __syncthreads();  // P is stored; with two tiles, the next step's keys, too
        if (kTiles > 1 || !more) {
            add_values<Few, KeyTiles<C>>(s.softmax, s.keys, first, out, math.warp, math.lane);
        } else {
            const RawShare<C> share = math.loader.fetch(block, s, steps, math.warp);
            add_values<Few, KeyTiles<C>>(s.softmax, s.keys, first, out, math.warp, math.lane);
            __syncthreads();  // the values have been read
            math.loader.store(s, share, 0);
            __syncthreads();  // the next step's keys are stored
        }
        math.loader.look_up(block, steps);
    }
    const float sum = math.row.whole_sum();
    if (math.row.is_first()) {
        const float factor = store_statistics(block, math.row.row(), math.row.max, sum, math.row.row_max);
        s.factor[math.row.row()] = kHasValueScale<typename C::TokenRecord> ? factor * block.p.value_scale : factor;
    }
    __syncthreads();
    out.store(block, s.factor, math.warp, math.lane);
}

template <class C>
MLA_DEVICE void run_records(const DecodeParams& p, RecordStorage<C>& s) {
    griddepcontrol_wait();
    const typename C::Rows block(p, s.items);
    RecordMath<C> math;
    while (block.next()) run_item<C>(block, s, math);
    griddepcontrol_launch_dependents();
}
}  // namespace mla::attention::mma
