// Attention of up to 32 query rows to records of 512 e4m3 latent codes, with mma.sync. Codes become numbers in
// registers, once as part of a key and once as part of a value, and are never written back: shared memory holds the
// codes of all steps in flight.
//
//   scores   warp = 16 tokens, 128 + 16 columns  |        | Q K^T of the next step, sent
//   values   warp = 64 columns                   |        | O += P V
//   loads    all threads, cp.async               |        | the step that takes the place of the last one ->
//   softmax  thread = 2 or 4 tokens of a row     | max, P |
//
// Each step has two barriers of the block, one after each column of the table. Values and scores are interleaved
// without a branch: the products of one hide the latency of the other, and the copies are among them.
//
// Keys: the order of columns within a product is free. A lane reads 16 codes of its token at once and has four of them
// in each of four products; queries are loaded to match. A warp has 128 neighbouring latent columns with at most one
// scale per token, which multiplies the scores. It also has 16 RoPE columns.
//
// Values: ldmatrix.trans moves pairs of codes, neighbouring columns of a token. A byte permute separates them; the two
// products have even and odd columns. P is multiplied by the scale of the warp's columns (mma/scaled_rows.cuh).
#pragma once
#include "attention/mma/records.cuh"
#include "attention/mma/scaled_rows.cuh"

namespace mla::attention::mma {
constexpr i32 kPlaceSteps = 8;       // steps whose tokens a warp looks up at once, one lane each
constexpr i32 kKnownCodeSteps = 16;  // steps for which the present tokens are recorded

// ---- Storage ---------------------------------------------------------------------------------------------------
// A token: its latent codes, then its RoPE columns as stored; the scales lie apart. Within each 128 bytes chunk c lies
// at c ^ swizzle: ldmatrix reads the same chunk of eight tokens, scores four neighbouring chunks of two.
template <class Record>
struct CodedToken {
    using Raw = RawToken<Record>;
    static constexpr i32 kBytes = 640, kStepTokens = 32;
    static constexpr i32 kLatentChunks = Raw::kLatentBytes / kChunkBytes;
    static constexpr bool kScaled = Raw::kScaleBytes > 0;
    static constexpr i32 kGroups = kScaled ? Raw::kScaleBytes / (i32)sizeof(float) : 1;
    static_assert(Raw::kLatentBytes == 512 && Raw::kBytes <= kBytes, "four groups of 128 columns, and RoPE's");
    static_assert(!kScaled || Raw::kScaleBytes == 16, "none, or one for each group");

    MLA_DEVICE static i32 swizzle(i32 token) { return token % 2 * 4 + token / 2 % 4; }
    MLA_DEVICE static u32 offset(i32 token, i32 chunk) {
        return (u32)(token * kBytes + (chunk & ~7) * kChunkBytes + ((chunk ^ swizzle(token)) & 7) * kChunkBytes);
    }
};

template <class C>
struct CodeBudget {
    using Token = CodedToken<typename C::TokenRecord>;
    static constexpr i32 kOtherBytes = sizeof(SoftmaxSlots<typename C::Few::Softmax>) + 1024 + 20 * C::Few::kRows;
    static constexpr i32 kStepBytes = Token::kStepTokens * (Token::kBytes + (Token::kScaled ? 16 + 8 : 0));
    static constexpr i32 kFit = (C::kSmemBytes - kOtherBytes) / kStepBytes;
    static constexpr i32 kSteps = kFit < kPlaceSteps ? kFit : kPlaceSteps;
    static_assert(kSteps >= 2, "a step is read while the next one arrives");
};

template <class C>
struct CodeStorage {
    using Budget = CodeBudget<C>;
    using Token = typename Budget::Token;
    alignas(kSegmentBytes) u8 tokens[Budget::kSteps][Token::kStepTokens * Token::kBytes];
    alignas(
        16) float scales[Token::kScaled ? Budget::kSteps : 1][Token::kScaled ? Token::kStepTokens : 1][Token::kGroups];
    SoftmaxSlots<typename C::Few::Softmax> softmax;
    // The two factors of the scales: products with values apply `rests`, and P contains `powers`. One step of powers is
    // enough, because P is computed before the next step's scales are split.
    alignas(16) u16 rests[Token::kScaled ? Budget::kSteps : 1][Token::kGroups][Token::kStepTokens];
    alignas(16) float powers[Token::kStepTokens];
    MBarrier full[Budget::kSteps];        // all threads arrive, with their copies; the first phase blocks
    u8 present[kKnownCodeSteps][kWarps];  // bit = token of a warp: present
    u32 largest[kQuarters][C::Few::kRows];
    ItemsOf<typename C::Tokens::Work> items;
    float factor[C::Few::kRows];
};

// ---- Loads -----------------------------------------------------------------------------------------------------
// Addresses of the next copies.
struct CodeCopies {
    const u8* from;
    SmemAddr to, scales;
    i32 k;  // this thread's first chunk of the token
    bool present, due;
};

// One thread's share of loading: eight threads copy a token.
template <class C>
struct CodeLoader {
    using Record = typename C::TokenRecord;
    using Raw = RawToken<Record>;
    using Shared = CodeStorage<C>;
    using Token = typename Shared::Token;
    static constexpr i32 kSteps = Shared::Budget::kSteps;
    static constexpr i32 kRounds = ceil_div(Raw::kChunks, kTokenLanes) + 1;  // of copies of a step; scales are the last

    typename C::Tokens::Place place;  // of this lane's token in the next eight steps, read ahead
    const u8* data;                   // of this lane's token in these eight steps; null: absent
    i32 asked;                        // steps of the item
    i32 slot = 0;                     // of the next step to ask for
    u32 to = Token::offset((i32)threadIdx.x / kTokenLanes, (i32)threadIdx.x % kTokenLanes);

    // Asks for the first of the item's `steps`.
    MLA_DEVICE void begin(const typename C::Rows& block, Shared& s, i32 steps) {
        asked = 0;
        place = place_of(block, 0);
        data = data_of(block, 0);
#pragma unroll 1
        for (i32 i = 0; i < min(steps, kSteps); ++i) ask(block, s);
    }

    // The next step, if it is due.
    MLA_DEVICE void ask(const typename C::Rows& block, Shared& s, bool due = true) {
        if (due) look_up(block);
        const CodeCopies copies = next(block, s, due);
#pragma unroll
        for (i32 round = 0; round < kRounds; ++round) copy(copies, round);
        if (due) finish(s, copies);
    }

    // Prepares the lookup that `next` uses. Rare, but costs divisions and a load.
    MLA_DEVICE void look_up(const typename C::Rows& block) {
        const i32 at = asked % kPlaceSteps;
        if (at == 0 && asked > 0) data = data_of(block, asked);
        if (at == kPlaceSteps / 2) place = place_of(block, asked + kPlaceSteps / 2);
    }

    // Without a branch, which products could not be moved past.
    MLA_DEVICE CodeCopies next(const typename C::Rows& block, Shared& s, bool due) const {
        const i32 thread = threadIdx.x, k = thread % kTokenLanes;
        const i32 source = asked % kPlaceSteps * kLaneTokens + thread % kWarpThreads / kTokenLanes;
        const u8* from = reinterpret_cast<const u8*>(__shfl_sync(kFullWarp, reinterpret_cast<u64>(data), source));
        const bool present = from != nullptr;
        const u32 lanes = __ballot_sync(kFullWarp, present);
        if (due & (thread % kWarpThreads == 0)) {
            u32 bits = 0;
#pragma unroll
            for (i32 i = 0; i < kLaneTokens; ++i) bits |= (lanes >> (i * kTokenLanes) & 1) << i;
            s.present[asked % kKnownCodeSteps][thread / kWarpThreads] = (u8)bits;
        }
        return CodeCopies{present ? from : reinterpret_cast<const u8*>(block.p.kv),
                          smem_addr(s.tokens[slot]) + to,
                          smem_addr(s.scales[Token::kScaled ? slot : 0][Token::kScaled ? thread / kTokenLanes : 0]),
                          k,
                          present,
                          due};
    }

    // One of kRounds of its copies, by this thread.
    MLA_DEVICE static void copy(const CodeCopies& copies, i32 round) {
        const i32 chunk = round * kTokenLanes;
        if (chunk >= Raw::kChunks) {  // the last one
            if (Token::kScaled) {
                cp_async_16_if(copies.due & (copies.k == 0), copies.scales, copies.from + Raw::kLatentBytes,
                               copies.present);
            }
            return;
        }
        const bool whole = chunk + kTokenLanes <= Raw::kChunks;
        const i32 gap = chunk >= Token::kLatentChunks ? Raw::kGap : 0;
        cp_async_16_if(copies.due & (whole | (chunk + copies.k < Raw::kChunks)), copies.to + chunk * kChunkBytes,
                       copies.from + (chunk + copies.k) * kChunkBytes + gap, copies.present);
    }

    // After the last round of copies that are due.
    MLA_DEVICE void finish(Shared& s, const CodeCopies& copies) {
        if (copies.due) cp_async_mbarrier_arrive_noinc(s.full[slot]);
        slot = slot + copies.due == kSteps ? 0 : slot + copies.due;
        asked += copies.due;
    }

   private:
    MLA_DEVICE static i32 token_from(const typename C::Rows& block, i32 step) {
        const i32 thread = threadIdx.x, lane = thread % kWarpThreads;
        return block.begin() + (step + lane / kLaneTokens) * Token::kStepTokens + thread / kWarpThreads * kLaneTokens +
               lane % kLaneTokens;
    }
    MLA_DEVICE static bool is_within(const typename C::Rows& block, i32 token) { return token < block.end(); }

    // For eight steps from `step` on.
    MLA_DEVICE static typename C::Tokens::Place place_of(const typename C::Rows& block, i32 step) {
        const i32 token = token_from(block, step);
        return is_within(block, token) ? C::Tokens::place(block.p, block.item(), token) : C::Tokens::nowhere();
    }
    MLA_DEVICE const u8* data_of(const typename C::Rows& block, i32 step) const {
        const i32 token = token_from(block, step);
        if (!is_within(block, token)) return nullptr;
        return C::Tokens::template bytes<Record>(block.p, block.item(), token, place).data;
    }
};

// ---- Products --------------------------------------------------------------------------------------------------
// The block's rows, as A fragments for the order of columns in which codes come.
template <class C>
MLA_DEVICE void load_code_queries(const typename C::Rows& block, typename C::Few::Queries& q, i32 warp, i32 lane) {
    using Few = typename C::Few;
    opaque(lane);  // once an item: nothing that follows from it is worth a register
    const i32 quarter = Few::quarter(warp), c = lane % 4;
#pragma unroll
    for (i32 i = 0; i < 2 * Few::kRowTiles; ++i) {
        const i32 row = i * 8 + lane / 4;
        const u16* from = block.query(row, 0);
#pragma unroll
        for (i32 step = 0; step < Few::kScoreSteps; ++step) {
            const i32 column = step < 8 ? quarter * 128 + step / 4 * 64 + c * 16 + step % 4 * 4
                                        : kHeadDimV + quarter * kMmaDepth + c * 4;
#pragma unroll
            for (i32 k = 0; k < 2; ++k) {
                const u32 word = load_pair<true>(from + column + k * 2);
                q[step][i / 2][i % 2 + 2 * k] = block.row0 + row < block.rows ? word : 0;
            }
        }
    }
}

// Byte offsets that a lane reads from and writes to, computed once.
template <class C>
struct CodePlaces {
    using Few = typename C::Few;
    using Token = CodedToken<typename C::TokenRecord>;
    i32 keys, rope, values;  // in a step's tokens
    i32 p, scores;           // in SoftmaxSlots::p and SoftmaxSlots::scores

    MLA_DEVICE CodePlaces(i32 warp, i32 lane) {
        const i32 quarter = Few::quarter(warp), first = Few::half(warp) * Few::kScoreTokens, g = lane / 4, c = lane % 4;
        const i32 rope_chunk = Token::Raw::kWideRope ? quarter * 2 + c / 2 : quarter;
        keys = Token::offset(first + g, quarter * 8 + c);
        rope =
            Token::offset(first + g, Token::kLatentChunks + rope_chunk) + (Token::Raw::kWideRope ? c % 2 * 8 : c * 4);
        values = Token::offset(lane % 16, warp * 4 + lane / 16);
        p = (lane % 16 * Few::Softmax::kPitch + lane / 16 * 8) * (i32)sizeof(u16);
        scores = ((quarter * Few::kRows + g) * Few::Softmax::kPitch + first + c * 2) * (i32)sizeof(float);
        opaque(keys), opaque(rope), opaque(values), opaque(p), opaque(scores);  // not to be found again in each step
    }
};

// Scores and values are multiplied in four parts each, which may take turns.
constexpr i32 kCodeParts = 4;

// S of the warp's 16 tokens, over its part of d. A part is eight tokens, and half of the latent columns.
template <class C>
struct CodeScores {
    using Few = typename C::Few;
    using Token = CodedToken<typename C::TokenRecord>;
    using Raw = typename Token::Raw;
    using Latent = typename C::Latent;
    float sums[2][Few::kRowTiles][2][4];

    MLA_DEVICE void clear() {
#pragma unroll
        for (i32 i = 0; i < Few::kRowTiles * 16; ++i) (&sums[0][0][0][0])[i] = 0.f;
    }

    // A swizzled chunk four further is at the other half of its 128 bytes.
    MLA_DEVICE static uint4 load(const u8* tokens, const CodePlaces<C>& at, i32 number) {
        return *reinterpret_cast<const uint4*>(tokens + (at.keys ^ number % 2 * 64) +
                                               number / 2 * kOctetTokens * Token::kBytes);
    }

    MLA_DEVICE void add(const uint4& codes, const typename Few::Queries& q, i32 number) {
        const i32 n = number / 2, part = number % 2;
        const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            const u32 k0 = e4m3_pair<0>(words[i]), k1 = e4m3_pair<1>(words[i]);
#pragma unroll
            for (i32 tile = 0; tile < Few::kRowTiles; ++tile) {
                mma_m16n8k16(Latent{}, sums[part][tile][n], q[part * 4 + i][tile], k0, k1);
            }
        }
        if (part == 0) return;
#pragma unroll
        for (i32 i = 0; i < Few::kRowTiles * 4; ++i) sums[0][i / 4][n][i % 4] += sums[1][i / 4][n][i % 4];
    }

    // Splits the scales of the step's tokens, four of each warp, a lane for each scale.
    MLA_DEVICE static void split_scales(CodeStorage<C>& s, i32 slot, i32 warp, i32 lane) {
        if constexpr (Token::kScaled) {
            if (lane >= 16) return;
            const i32 token = warp * 4 + lane / Token::kGroups, group = lane % Token::kGroups;
            const float* scales = s.scales[slot][token];
            const float power = scale_power(*reinterpret_cast<const float4*>(scales));
            s.rests[slot][group][token] = scale_rest(scales[group], power);
            if (group == 0) s.powers[token] = power;
        }
    }

    // S += Q K^T of the RoPE columns, which have no scale of their own.
    MLA_DEVICE void add_rope(const u8* tokens, const CodePlaces<C>& at, const typename Few::Queries& q) {
        float (&x)[Few::kRowTiles][2][4] = sums[0];
#pragma unroll
        for (i32 n = 0; n < 2; ++n) {
            const u8* from = tokens + at.rope + n * kOctetTokens * Token::kBytes;
            u32 k[2];
            if constexpr (Raw::kWideRope) {
                const uint2 pairs = *reinterpret_cast<const uint2*>(from);
                k[0] = convert_rope(typename C::Rope{}, pairs.x), k[1] = convert_rope(typename C::Rope{}, pairs.y);
            } else {
                const u32 codes = *reinterpret_cast<const u32*>(from);
                k[0] = e4m3_pair<0>(codes), k[1] = e4m3_pair<1>(codes);
            }
#pragma unroll
            for (i32 tile = 0; tile < Few::kRowTiles; ++tile) {
                mma_m16n8k16(typename C::Rope{}, x[tile][n], q[8][tile], k[0], k[1]);
            }
        }
    }

    // With scales and RoPE columns, to shared memory.
    MLA_DEVICE void send(CodeStorage<C>& s, i32 slot, const CodePlaces<C>& at, const typename Few::Queries& q, i32 warp,
                         i32 lane) {
        const i32 quarter = Few::quarter(warp), half = Few::half(warp), c = lane % 4;
        float (&x)[Few::kRowTiles][2][4] = sums[0];
        if constexpr (Token::kScaled) {
#pragma unroll
            for (i32 n = 0; n < 2; ++n) {
#pragma unroll
                for (i32 i = 0; i < 2; ++i) {
                    const i32 token = half * Few::kScoreTokens + n * kMmaColumns + c * 2 + i;
                    const float scale = s.scales[slot][token][quarter];
#pragma unroll
                    for (i32 tile = 0; tile < Few::kRowTiles; ++tile) {
                        x[tile][n][i] *= scale, x[tile][n][2 + i] *= scale;
                    }
                }
            }
        }
        if constexpr (Raw::kRopeBytes > 0) add_rope(s.tokens[slot], at, q);
        u8* to = reinterpret_cast<u8*>(s.softmax.scores) + at.scores;
#pragma unroll
        for (i32 i = 0; i < 2 * Few::kRowTiles; ++i) {
#pragma unroll
            for (i32 n = 0; n < 2; ++n) {
                const float* pair = x[i / 2][n] + 2 * (i % 2);
                const i32 ahead = (8 * i * Few::Softmax::kPitch + n * kMmaColumns) * (i32)sizeof(float);
                *reinterpret_cast<float2*>(to + ahead) = make_float2(pair[0], pair[1]);
            }
        }
    }
};

// O += P V of the warp's columns. A part is 16 tokens, and half of the columns.
template <class C>
struct CodeValues {
    using Few = typename C::Few;
    using Token = CodedToken<typename C::TokenRecord>;
    using Latent = typename C::Latent;
    using P = u32[Few::kRowTiles][4];

    // Loads P of 16 tokens, a half of the step, times what P lacks of the scales of the warp's columns.
    MLA_DEVICE static void load_p(P& p, const CodeStorage<C>& s, i32 slot, const CodePlaces<C>& at, i32 half, i32 warp,
                                  i32 lane) {
        const SmemAddr from = smem_addr(s.softmax.p) + (u32)at.p;
#pragma unroll
        for (i32 tile = 0; tile < Few::kRowTiles; ++tile) {
            ldmatrix_x4(p[tile], from + (u32)((tile * kMmaRows * Few::Softmax::kPitch + half * 16) * sizeof(u16)));
        }
        if constexpr (Token::kScaled) {
            const u16* rests = s.rests[slot][warp / 2] + half * kMmaDepth + lane % 4 * 2;
#pragma unroll
            for (i32 k = 0; k < 2; ++k) {
                const u32 pair = *reinterpret_cast<const u32*>(rests + 8 * k);
#pragma unroll
                for (i32 i = 0; i < 2 * Few::kRowTiles; ++i) {
                    u32& x = p[i / 2][2 * k + i % 2];
                    x = mul_x2(Latent{}, x, pair);
                }
            }
        }
    }

    // A swizzled chunk two further is in the other 32 bytes of its 64.
    MLA_DEVICE static void load(u32 (&v)[4], SmemAddr tokens, const CodePlaces<C>& at, i32 number) {
        const i32 half = number / 2, part = number % 2;
        ldmatrix_x4_trans(v, tokens + (u32)(at.values ^ part * 32) + (u32)(half * kMmaDepth * Token::kBytes));
    }

    template <class Out>
    MLA_DEVICE static void add(const u32 (&codes)[4], const P& p, Out& out, i32 number) {
        u32 v[4];
#pragma unroll
        for (i32 i = 0; i < 4; ++i) v[i] = __byte_perm(codes[i], 0, 0x3120);
#pragma unroll
        for (i32 chunk = 0; chunk < 2; ++chunk) {
            const u32 low = v[2 * chunk], high = v[2 * chunk + 1];
            const u32 even[2] = {e4m3_pair<0>(low), e4m3_pair<0>(high)};
            const u32 odd[2] = {e4m3_pair<1>(low), e4m3_pair<1>(high)};
            const i32 n = 4 * (number % 2) + 2 * chunk;
#pragma unroll
            for (i32 tile = 0; tile < Few::kRowTiles; ++tile) {
                mma_m16n8k16(Latent{}, out.x[tile][n], p[tile], even[0], even[1]);
                mma_m16n8k16(Latent{}, out.x[tile][n + 1], p[tile], odd[0], odd[1]);
            }
        }
    }
};

// A warp's share of the output. Two accumulators hold the even and the odd columns of 16, so a lane has four
// neighbours.
template <class Element, i32 kRowTiles>
struct PartedOutput : Output<Element, kRowTiles> {
    using Plain = Output<Element, kRowTiles>;

    template <class Block>
    MLA_DEVICE void store(const Block& block, const float* factors, i32 warp, i32 lane) const {
        opaque(lane);  // as for the queries
#pragma unroll
        for (i32 i = 0; i < Plain::kHalves; ++i) {
            const i32 row = 8 * i + lane / 4, r = i % 2 * 2;
            if (block.row0 + row >= block.rows) continue;
            const float factor = factors[row];
#pragma unroll
            for (i32 n = 0; n < Plain::kValueTiles; n += 2) {
                const float (&even)[4] = this->x[i / 2][n], (&odd)[4] = this->x[i / 2][n + 1];
                float of_row[4] = {even[r], odd[r], even[r + 1], odd[r + 1]};
#pragma unroll
                for (float& x : of_row) x = factor == 0.f ? 0.f : x * factor;
                store_four(block, block.row0 + row, warp * Plain::kWarpColumns + n * kMmaColumns + lane % 4 * 4,
                           of_row);
            }
        }
    }

   private:
    template <class Block>
    MLA_DEVICE static void store_four(const Block& block, i32 row, i32 column, const float (&of_row)[4]) {
        const DecodeParams& p = block.p;
        const i32 partial = block.item().partial_index;
        const bool split = partial != kNotSplit;
        const i64 at = (split ? workspace_row(p, partial, block.kv_head, row) * kHeadDimV
                              : out_offset(p, block.item().request, block.kv_head, row)) +
                       column;
        if (split || p.out_is_fp32) {
            float2* to = reinterpret_cast<float2*>((split ? p.partial_out : static_cast<float*>(p.out)) + at);
            to[0] = make_float2(of_row[0], of_row[1]), to[1] = make_float2(of_row[2], of_row[3]);
        } else {
            u32* to = reinterpret_cast<u32*>(static_cast<u16*>(p.out) + at);
            to[0] = cvt_x2(Element{}, of_row[0], of_row[1]), to[1] = cvt_x2(Element{}, of_row[2], of_row[3]);
        }
    }
};

// Called by all threads. 0 * NaN is NaN, so codes of NaN become 0 in tokens that some row of the step does not see. A
// row that does see such a token has a NaN score, and its result is NaN all the same.
template <class C>
MLA_DEVICE void clean_codes(CodeStorage<C>& s, i32 slot, i32 token, i32 seen_by_all) {
    using Token = CodedToken<typename C::TokenRecord>;
    const i32 mine = threadIdx.x / kTokenLanes;
    if (token + mine < seen_by_all) return;
    constexpr u32 kSigns = 0x80808080;
#pragma unroll 1
    for (i32 word = threadIdx.x % kTokenLanes; word < Token::kLatentChunks * 4; word += kTokenLanes) {
        u32& codes = *reinterpret_cast<u32*>(s.tokens[slot] + Token::offset(mine, word / 4) + word % 4 * 4);
        const u32 nan = ((codes & ~kSigns) + 0x01010101) & kSigns;
        codes &= ~((nan >> 7) * 0xff);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
template <class C>
struct CodeMath {
    static_assert(!C::Tokens::kWithRowMax, "the softmax does not find it");
    typename C::Few::Queries q;
    CodeLoader<C> loader;
    typename CodeRow<typename C::Few::Softmax, CodedToken<typename C::TokenRecord>::kScaled>::Type row;
    float scale_log2;  // of that row, times the divisor of its queries
    i32 slot = 0;      // of the step that is scored next
    u32 parity = 0;
    i32 warp = uniform_warp(), lane = threadIdx.x % kWarpThreads;
    CodePlaces<C> at{warp, lane};

    MLA_DEVICE i32 last_slot() const { return (slot == 0 ? CodeBudget<C>::kSteps : slot) - 1; }
    MLA_DEVICE void advance() {
        slot = slot + 1 == CodeBudget<C>::kSteps ? 0 : slot + 1;
        parity ^= slot == 0;
    }
};

// Divisor of row `row` where queries are stored scaled, after QueryFactors::scale.
template <class C>
MLA_DEVICE float row_factor(const CodeStorage<C>& s, i32 row) {
    if constexpr (C::kScaledQueries) {
        u32 largest = QueryFactors<C>::kLeast;
#pragma unroll
        for (i32 quarter = 0; quarter < kQuarters; ++quarter) largest = max(largest, s.largest[quarter][row]);
        return QueryFactors<C>::factor(largest);
    }
    return 1.f;
}

// P of the step that was scored last.
template <class C>
MLA_DEVICE void add_step(const typename C::Rows& block, CodeStorage<C>& s, CodeMath<C>& math, i32 token, bool masked,
                         u32 present) {
    if constexpr (CodedToken<typename C::TokenRecord>::kScaled) {
        math.row.add_step(block, s.softmax, s.powers, token, masked, present, math.scale_log2);
    } else {
        math.row.add_step(typename C::Latent{}, block, s.softmax, token, masked, present, math.scale_log2);
    }
}

// Scores of the item's first step.
template <class C>
MLA_DEVICE void first_scores(CodeStorage<C>& s, CodeMath<C>& math) {
    mbarrier_wait(s.full[math.slot], math.parity);
    CodeScores<C>::split_scales(s, math.slot, math.warp, math.lane);
    CodeScores<C> scores;
    scores.clear();
#pragma unroll
    for (i32 i = 0; i < kCodeParts; ++i) {
        scores.add(CodeScores<C>::load(s.tokens[math.slot], math.at, i), math.q, i);
    }
    scores.send(s, math.slot, math.at, math.q, math.warp, math.lane);
    math.advance();
}

// The values of a step interleaved with the scores of the next one, which arrives meanwhile: each hides the latency of
// the other. Together they also hide the copies of a later step.
template <class C, class Out>
MLA_DEVICE void values_and_scores(const typename C::Rows& block, CodeStorage<C>& s, CodeMath<C>& math, Out& out,
                                  bool due) {
    using Values = CodeValues<C>;
    if (due) math.loader.look_up(block);
    if (*reinterpret_cast<const u64*>(s.softmax.rescales) != 0) out.rescale(s.softmax.scale, math.lane);
    const i32 slot = math.last_slot();
    mbarrier_wait(s.full[math.slot], math.parity);
    CodeScores<C>::split_scales(s, math.slot, math.warp, math.lane);
    const CodeCopies copies = math.loader.next(block, s, due);
    const u8* keys = s.tokens[math.slot];
    const SmemAddr tokens = smem_addr(s.tokens[slot]);
    CodeScores<C> scores;
    scores.clear();
    typename Values::P p;
    u32 v[4];
    uint4 k = CodeScores<C>::load(keys, math.at, 0);
    Values::load(v, tokens, math.at, 0);
#pragma unroll
    for (i32 i = 0; i < kCodeParts; ++i) {
        if (i % 2 == 0) Values::load_p(p, s, slot, math.at, i / 2, math.warp, math.lane);
        scores.add(k, math.q, i);
        if (i + 1 < kCodeParts) k = CodeScores<C>::load(keys, math.at, i + 1);
        Values::add(v, p, out, i);
        if (i + 1 < kCodeParts) Values::load(v, tokens, math.at, i + 1);
#pragma unroll
        for (i32 round = 2 * i; round < min(2 * i + 2, CodeLoader<C>::kRounds); ++round) {
            CodeLoader<C>::copy(copies, round);
        }
    }
    // A branch: with 32 rows the products with RoPE columns behind it need no more registers at once.
    constexpr bool kFinishFirst = C::Few::kRowTiles > 1;
    if (kFinishFirst) math.loader.finish(s, copies);
    scores.send(s, math.slot, math.at, math.q, math.warp, math.lane);
    if (!kFinishFirst) math.loader.finish(s, copies);
    math.advance();
}

template <class C, class Out>
MLA_DEVICE void last_values(const CodeStorage<C>& s, const CodeMath<C>& math, Out& out) {
    using Values = CodeValues<C>;
    if (*reinterpret_cast<const u64*>(s.softmax.rescales) != 0) out.rescale(s.softmax.scale, math.lane);
    const i32 slot = math.last_slot();
    typename Values::P p;
#pragma unroll
    for (i32 i = 0; i < kCodeParts; ++i) {
        if (i % 2 == 0) Values::load_p(p, s, slot, math.at, i / 2, math.warp, math.lane);
        u32 v[4];
        Values::load(v, smem_addr(s.tokens[slot]), math.at, i);
        Values::add(v, p, out, i);
    }
}

template <class C>
MLA_DEVICE void run_item(const typename C::Rows& block, CodeStorage<C>& s, CodeMath<C>& math) {
    using Few = typename C::Few;
    const i32 begin = block.begin(), steps = max(0, ceil_div(block.end() - begin, Few::kStepTokens));
    const i32 seen_by_all = block.item().seen_by_all;
    math.loader.begin(block, s, steps);
    math.row.begin();
    PartedOutput<typename C::Element, Few::kRowTiles> out;
    out.clear();
    if (steps > 0) {
        load_code_queries<C>(block, math.q, math.warp, math.lane);
        QueryFactors<C> factors;
        factors.scale(s, math.q, math.warp, math.lane);
        math.scale_log2 = block.p.scale_log2 * row_factor(s, math.row.row());
        first_scores(s, math);
    }
#pragma unroll 1
    for (i32 step = 0; step < steps; ++step) {
        const i32 token = begin + step * Few::kStepTokens;
        __syncthreads();  // scores are stored; the last step's values have been read
        const bool masked = C::Tokens::kMasked && token + Few::kStepTokens > seen_by_all;
        const i32 mine = math.row.first_token();
        const u32 present = s.present[step % kKnownCodeSteps][mine / kLaneTokens] >> mine % kLaneTokens;
        add_step<C>(block, s, math, token, masked, present);
        if constexpr (C::Tokens::kMasked) {
            if (masked) clean_codes(s, math.last_slot(), token, seen_by_all);
        }
        __syncthreads();  // P is stored; the scores have been read
        if (step + 1 < steps) values_and_scores(block, s, math, out, (step > 0) & (math.loader.asked < steps));
    }
    if (steps > 0) last_values(s, math, out);
    const float sum = math.row.whole_sum();
    if (math.row.is_first()) {
        const float factor = store_statistics(block, math.row.row(), math.row.reference(), sum, math.row.row_max);
        s.factor[math.row.row()] = kHasValueScale<typename C::TokenRecord> ? factor * block.p.value_scale : factor;
    }
    __syncthreads();
    out.store(block, s.factor, math.warp, math.lane);
}

template <class C>
MLA_DEVICE void run_records(const DecodeParams& p, CodeStorage<C>& s) {
    if (threadIdx.x == 0) {
        for (MBarrier& full : s.full) mbarrier_init(full, kThreads);
    }
    griddepcontrol_wait();
    const typename C::Rows block(p, s.items);
    CodeMath<C> math;
    while (block.next()) run_item<C>(block, s, math);
    griddepcontrol_launch_dependents();
}

// ---- Which form ------------------------------------------------------------------------------------------------
template <class C, bool = RawToken<typename C::TokenRecord>::kFourGroups>
struct StorageOf {
    using Type = CodeStorage<C>;
};
template <class C>
struct StorageOf<C, false> {
    using Type = RecordStorage<C>;
};
template <class C>
MLA_DEVICE void run_records(const DecodeParams& p, u8* smem) {
    using Shared = typename StorageOf<C>::Type;
    static_assert(sizeof(Shared) <= C::kSmemBytes, "shared memory");
    run_records<C>(p, *reinterpret_cast<Shared*>(smem));
}
}  // namespace mla::attention::mma

// Facts of such a kernel, in addition to the layout of its parameters.
#define MLA_MMA_RECORDS_FACTS(C)                                                    \
    MLA_FACT(threads, mla::attention::mma::kThreads);                               \
    MLA_FACT(smem_bytes, sizeof(typename mla::attention::mma::StorageOf<C>::Type)); \
    MLA_FACT(block_rows, C::Few::kRows);                                            \
    MLA_RECORD_FACT(C::TokenRecord)
