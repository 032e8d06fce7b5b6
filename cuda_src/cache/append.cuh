// Writes tokens to a paged cache: quantises the latent part, turns the RoPE part if requested, scatters by slot.
//
//   s = scale of the group's largest magnitude,   code = e4m3(x / s), or e2m1(x / s)
//
// A warp handles two tokens. The kernel is bound by instruction issue, so the usual calls have a path with the minimum
// of instructions: aligned rows of 16-bit elements, with power-of-two scales, the caller's scale, or no quantisation.
// The loads of a warp's tokens are in flight together:
//
//   lane t: place of token t | all: load 32 bytes of each | largest of the group | quantise | store 16 bytes
//   lanes 8 t to 8 t + 7: the RoPE part of token t, a piece of eight elements each, and its angles
//
// Any other token is written in pieces of eight elements: a lane writes the pieces l and l + 32 of the latent part, and
// each of the first eight lanes one piece of the RoPE part. Slots outside the pool are skipped.
//
// `Params` has the members of `CacheAppendParams` (append.cu); `Rotation` has the angles of tokens.
#pragma once
#include "attention/record.cuh"
#include "common/types.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/element.cuh"
#include "ptx/fp4.cuh"
#include "ptx/fp8.cuh"
#include "ptx/load.cuh"
#include "tile/elements.cuh"
#include "tile/rope.cuh"

namespace mla::cache {
using namespace attention;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kAppendThreads = 128;
constexpr i32 kAppendWarps = kAppendThreads / kWarpThreads;
constexpr i32 kTokens = 2;  // of a warp
constexpr i32 kPieceElems = kChunkElems;
constexpr i32 kPieceBytes = 16;  // of 16-bit elements
constexpr float kMinRatio = 1e-4f;
constexpr float kMaxE2m1 = 6.f, kMinE4m3 = 0.001953125f;
constexpr float kMinNormal = 1.17549435e-38f;
constexpr u32 kExponentMask = 0x7f800000u;

// ---- Numbers ---------------------------------------------------------------------------------------------------
MLA_DEVICE i64 read_index(const u8* from, i32 is_64) {
    return is_64 ? *reinterpret_cast<const i64*>(from) : (i64) * reinterpret_cast<const i32*>(from);
}

// NaN if either is.
MLA_DEVICE float nan_max(float a, float b) { return a > b || a != a ? a : b; }

// A divisor and its inverse, with which a division takes a few instructions. `lift` is a power of two that moves both
// away from the smallest and the largest numbers.
struct Scale {
    float value;
    float inverse;  // of lift * value
    float lift;
};

constexpr float kLift = 18446744073709551616.f;  // 2^64
constexpr float kLarge = 1152921504606846976.f;  // 2^60

MLA_DEVICE Scale power_of_2_scale(float ratio) {
    ratio = nan_max(ratio, kMinRatio);
    const u32 bits = __float_as_uint(ratio);
    if ((bits & kExponentMask) == kExponentMask) return Scale{ratio, ratio != ratio ? ratio : 0.f, 1.f};
    const u32 exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);
    return Scale{__uint_as_float(exponent << 23), __uint_as_float((254 - exponent) << 23), 1.f};
}

MLA_DEVICE Scale plain_scale(float value) {
    const float lift = value < 1 / kLarge ? kLift : value > kLarge ? 1 / kLift : 1.f;
    return Scale{value, __frcp_rn(value * lift), lift};
}

// Rounded to e4m3; NaN unless the ratio is finite.
MLA_DEVICE Scale e4m3_scale(float ratio) {
    const bool finite = (__float_as_uint(ratio) & kExponentMask) != kExponentMask;
    const u32 code = finite ? cvt_e4m3_x2(fmaxf(ratio, kMinE4m3), 0.f) : kE4m3Nan;
    return plain_scale(cvt_f32_x2_e4m3(code).x);
}

// x / scale, rounded to nearest unless it is so small that its code is 0, or infinite. The correction step makes NaN of
// infinite numbers and of numbers divided by infinity; there the first product is right.
MLA_DEVICE float quotient(float x, const Scale& scale) {
    if (__CUDA_ARCH__ < 800) return x / scale.value;  // the reciprocal spills there
    const float lifted = x * scale.lift, first = lifted * scale.inverse;
    const float corrected = fmaf(fmaf(-first, scale.value * scale.lift, lifted), scale.inverse, first);
    return corrected == corrected ? copysignf(corrected, first) : first;
}

// The largest magnitude of the pieces that share a scale, in all their lanes. As bits, NaN is above infinity.
MLA_DEVICE float group_amax(const float (&x)[kPieceElems], i32 group_pieces) {
    u32 amax = 0;
#pragma unroll
    for (float value : x) amax = max(amax, __float_as_uint(value) & 0x7fffffffu);
    for (i32 step = 1; step < group_pieces; step *= 2) amax = max(amax, __shfl_xor_sync(kFullWarp, amax, step));
    return __uint_as_float(amax);
}

MLA_DEVICE uint2 codes_of(const float (&x)[kPieceElems]) {
    return make_uint2(cvt_e4m3_x2(x[0], x[1]) | cvt_e4m3_x2(x[2], x[3]) << 16,
                      cvt_e4m3_x2(x[4], x[5]) | cvt_e4m3_x2(x[6], x[7]) << 16);
}

MLA_DEVICE u32 narrow_codes_of(const float (&x)[kPieceElems]) {
    u32 codes = 0;
#pragma unroll
    for (i32 i = 0; i < kPieceElems; ++i) codes |= e2m1_bits(x[i]) << 4 * i;
    return codes;
}

MLA_DEVICE i32 element_bytes(i32 kind) { return kind == kE4m3 ? 1 : kind == kFloat32 ? 4 : 2; }

// ---- Pieces ----------------------------------------------------------------------------------------------------

// Eight 16-bit elements; zeros where `present` is false.
MLA_DEVICE uint4 load_piece(const u8* from, bool aligned, bool present) {
    if (aligned) return ld_global_16(from, present);
    u32 words[4] = {0, 0, 0, 0};
    if (present) {
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            const u16* pair = reinterpret_cast<const u16*>(from) + 2 * i;
            words[i] = (u32)pair[1] << 16 | pair[0];
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

MLA_DEVICE void store_piece(u8* to, const uint4& piece) {
    if (reinterpret_cast<u64>(to) % kPieceBytes == 0) {
        *reinterpret_cast<uint4*>(to) = piece;
        return;
    }
    const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (i32 i = 0; i < kPieceElems; ++i) reinterpret_cast<u16*>(to)[i] = (u16)(words[i / 2] >> 16 * (i % 2));
}

template <class Element>
MLA_DEVICE void unpack_piece(float (&to)[kPieceElems], const uint4& piece) {
    const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
        const float2 pair = unpack<Element>(words[i]);
        to[2 * i] = pair.x;
        to[2 * i + 1] = pair.y;
    }
}

template <class Element>
MLA_DEVICE uint4 pack_piece(const float (&x)[kPieceElems]) {
    u32 words[4];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) words[i] = cvt_x2(Element{}, x[2 * i], x[2 * i + 1]);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// The elements of a piece that has been loaded; 32-bit ones are loaded now.
MLA_DEVICE void piece_values(float (&to)[kPieceElems], const uint4& piece, const u8* from, i32 element, bool present) {
    if (element == kBfloat16) {
        unpack_piece<bfloat16>(to, piece);
    } else if (element == kFloat16) {
        unpack_piece<float16>(to, piece);
    } else if (present) {
        load_chunk<bfloat16>(to, reinterpret_cast<const float*>(from));
    } else {
#pragma unroll
        for (float& value : to) value = 0.f;
    }
}

// Rounded to one of the 16-bit kinds.
MLA_DEVICE uint4 rounded(const float (&x)[kPieceElems], i32 kind) {
    return kind == kBfloat16 ? pack_piece<bfloat16>(x) : pack_piece<float16>(x);
}

template <class Params>
MLA_DEVICE bool rows_are_aligned(const Params& p) {
    const u64 latent = reinterpret_cast<u64>(p.latent) | p.latent_stride_bytes;
    const u64 rope = reinterpret_cast<u64>(p.rope) | p.rope_stride_bytes;
    return (latent | rope) % kPieceBytes == 0;
}

// ---- RoPE ------------------------------------------------------------------------------------------------------

// Angles from tables, indexed by position.
struct TableRotation {
    const float *cos, *sin;  // (max_position, 32), or null: nothing turns
    const u8* positions;     // (n,), i32 or i64
    i64 cos_stride_elems, sin_stride_elems, positions_stride_bytes;
    i32 max_position, positions_are_64, interleaved;

    MLA_DEVICE bool turns() const { return cos != nullptr; }
    MLA_DEVICE i64 position(i64 token) const {
        return read_index(positions + token * positions_stride_bytes, positions_are_64);
    }
    MLA_DEVICE void load_row(PieceAngles& angles, i64 position, i32 piece) const {
        const u64 begin = reinterpret_cast<u64>(cos) | reinterpret_cast<u64>(sin);
        const u64 steps = (cos_stride_elems | sin_stride_elems) * sizeof(float);
        const i64 row = max(0ll, min(position, (i64)max_position - 1));
        angles.load(cos + row * cos_stride_elems, sin + row * sin_stride_elems, piece, interleaved,
                    (begin | steps) % kPieceBytes == 0);
    }
    // Called by whole warps.
    MLA_DEVICE void load(PieceAngles& angles, i64 token, i32 piece) const { load_row(angles, position(token), piece); }
    // Brings a token's position, and its rows of the tables by lanes 0 and 1, into L2 before an earlier kernel is done.
    // The position is read past L1, because that kernel may still change it; only the prefetches use it.
    MLA_DEVICE void prefetch(i64 token, i32 lane) const {
        if (positions == nullptr) return;
        const u32 position = ld_global_l2_4(positions + token * positions_stride_bytes, true);
        if (cos == nullptr || lane > 1) return;
        const i64 row = min(position, (u32)max_position - 1);
        prefetch_global_l2(lane == 0 ? cos + row * cos_stride_elems : sin + row * sin_stride_elems);
    }
};

// Optional destination of turned RoPE parts in addition to the cache: rows of 16-bit elements of the same type, or
// null.
struct RopeRows {
    u8* rows;
    i64 stride_bytes;

    MLA_DEVICE void store(i64 token, i32 piece, const uint4& elements) const {
        if (rows != nullptr) store_piece(rows + token * stride_bytes + piece * kPieceBytes, elements);
    }
};

// A lane's piece of a RoPE part: its bits, which are kept if nothing changes them, or its numbers.
struct RopePiece {
    uint4 raw;
    float x[kPieceElems];
};

// Loads a piece and turns it if requested. Called by whole warps; `present` is false in lanes without a piece.
template <class Params, class Rotation>
MLA_DEVICE RopePiece load_rope(const Params& p, const Rotation& rotation, i64 token, i32 piece, bool present) {
    RopePiece rope;
    const u8* from = p.rope + token * p.rope_stride_bytes + piece * kPieceElems * element_bytes(p.element);
    rope.raw = load_piece(from, rows_are_aligned(p), present && p.element != kFloat32);
    if (!rotation.turns() && p.rope_kind == p.element) return rope;
    piece_values(rope.x, rope.raw, from, p.element, present);
    if (!rotation.turns()) return rope;
    PieceAngles angles;
    rotation.load(angles, token, piece);
    angles.turn(rope.x, piece, rotation.interleaved);
    if (p.element != kFloat32) rope.raw = rounded(rope.x, p.element);
    return rope;
}

// Its numbers, rounded to the kind that the tokens have.
template <class Params>
MLA_DEVICE void rounded_rope(float (&to)[kPieceElems], const Params& p, const RopePiece& rope) {
    if (p.element != kFloat32) return piece_values(to, rope.raw, nullptr, p.element, true);
#pragma unroll
    for (i32 i = 0; i < kPieceElems; ++i) to[i] = rope.x[i];
}

template <class Params>
MLA_DEVICE void store_rope(const Params& p, u8* to, const RopePiece& rope, i32 piece) {
    if (p.rope_kind != kE4m3) {
        store_piece(to + piece * kPieceBytes, p.rope_kind == p.element ? rope.raw : rounded(rope.x, p.rope_kind));
        return;
    }
    const Scale scale = plain_scale(p.kv_scale);
    float x[kPieceElems];
#pragma unroll
    for (i32 i = 0; i < kPieceElems; ++i) x[i] = quotient(rope.x[i], scale);
    reinterpret_cast<uint2*>(to)[piece] = codes_of(x);
}

// ---- Any token -------------------------------------------------------------------------------------------------

// Scale of the whole warp's piece.
template <class Params>
MLA_DEVICE Scale scale_of(const Params& p, const float (&x)[kPieceElems]) {
    if (p.scale_kind == kScaleOfTensor) return plain_scale(p.kv_scale);
    const float amax = group_amax(x, 2 * p.group_chunks);
    if (p.scale_kind == kScaleE4m3) return e4m3_scale(amax / kMaxE2m1);
    const float ratio = amax / kMaxE4m3;
    return p.power_of_2 ? power_of_2_scale(ratio) : plain_scale(nan_max(ratio, kMinNormal));
}

// A piece of a row as codes, and its group's scale. Called by whole warps.
template <class Params>
MLA_DEVICE void append_codes(const Params& p, const TokenBytes& token, float (&x)[kPieceElems], i32 piece,
                             bool present) {
    const Scale scale = scale_of(p, x);
#pragma unroll
    for (float& value : x) value = p.power_of_2 ? value * scale.inverse : quotient(value, scale);
    if (!present) return;
    if (p.kind == kE2m1) {
        reinterpret_cast<u32*>(token.data)[piece] = narrow_codes_of(x);
    } else {
        reinterpret_cast<uint2*>(token.data)[piece] = codes_of(x);
    }
    const i32 group_pieces = 2 * p.group_chunks;
    if (p.scale_kind == kScaleOfTensor || piece % group_pieces != 0) return;
    const i32 group = piece / group_pieces;
    if (p.scale_kind == kScaleFloat32) {
        reinterpret_cast<float*>(token.scales)[group] = scale.value;
    } else if (p.scale_kind == kScaleE4m3) {
        token.scales[group] = (u8)cvt_e4m3_x2(scale.value, 0.f);
    } else {
        token.scales[group] = (u8)(__float_as_uint(scale.value) >> 23);  // 0xff for NaN and infinity
        const bool padded = piece == 0 && !is_code(p.rope_kind);
        if (padded) token.scales[p.latent_chunks / p.group_chunks] = 0;
    }
}

// A piece of the latent part as 16-bit elements.
template <class Params>
MLA_DEVICE void append_wide(const Params& p, u8* to, const uint4& raw, const u8* row, i32 piece) {
    if (piece >= 2 * p.latent_chunks) return;
    uint4 kept = raw;
    if (p.kind != p.element) {
        float x[kPieceElems];
        piece_values(x, raw, row + piece * kPieceElems * element_bytes(p.element), p.element, true);
        kept = rounded(x, p.kind);
    }
    store_piece(to + piece * kPieceBytes, kept);
}

// Called by whole warps.
template <class Params, class Rotation>
MLA_DEVICE void append_any(const Params& p, const Rotation& rotation, const RecordLayout& layout,
                           const RopeRows& turned_rows, i64 i, i32 lane) {
    const i32 rope_piece = lane % kRopePieces;
    // RoPE pieces that share scales as the latent ones do follow these, in the lanes that have no second one.
    const bool grouped_rope = is_code(p.rope_kind) && p.scale_kind != kScaleOfTensor;
    const i32 in_rope = lane - (grouped_rope ? 2 * p.latent_chunks - kWarpThreads : 0);
    const bool has_rope = in_rope >= 0 && in_rope < 2 * p.rope_chunks, narrow = p.element != kFloat32;
    const i64 slot = p.cache == nullptr ? -1 : read_index(p.slots + i * p.slots_stride_bytes, p.slots_are_64);
    const TokenBytes token = token_at(layout, p.cache, slot);
    const RopePiece rope = load_rope(p, rotation, i, rope_piece, has_rope);
    if (has_rope) turned_rows.store(i, rope_piece, rope.raw);
    if (token.data == nullptr) return;
    if (has_rope && !grouped_rope) store_rope(p, token.data + p.rope_offset, rope, rope_piece);
    const u8* row = p.latent + i * p.latent_stride_bytes;
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
        const i32 piece = lane + half * kWarpThreads;
        const bool present = piece < 2 * p.latent_chunks;
        const uint4 raw = load_piece(row + piece * kPieceBytes, rows_are_aligned(p), present && narrow);
        if (is_code(p.kind)) {
            float x[kPieceElems];
            piece_values(x, raw, row + piece * kPieceElems * element_bytes(p.element), p.element, present);
            const bool is_rope = grouped_rope && has_rope && half == 1;
            if (is_rope) rounded_rope(x, p, rope);
            append_codes(p, token, x, piece, present || is_rope);
        } else {
            append_wide(p, token.data, raw, row, piece);
        }
    }
}

// ---- The usual tokens --------------------------------------------------------------------------------------------
template <class Params>
MLA_DEVICE bool is_usual(const Params& p) {
    if (__CUDA_ARCH__ < 900) return false;  // older GPUs lack products of bf16
    const u64 pages = reinterpret_cast<u64>(p.cache) | p.page_stride_bytes | p.token_stride_bytes;
    const bool groups = p.kind == kE4m3 && p.power_of_2 && (p.group_chunks == 4 || p.group_chunks == 8);
    const bool all_codes = p.scale_kind == kScaleOfTensor && p.rope_kind == kE4m3;
    const bool same_rope = p.rope_chunks == 0 || p.rope_kind == p.element;
    return pages % kPieceBytes == 0 && rows_are_aligned(p) && p.element != kFloat32 &&
           (all_codes || (same_rope && (groups || p.kind == p.element)));
}

// The largest magnitude of 16 elements, as bits.
template <class Element>
MLA_DEVICE u32 amax_bits(const uint4& low, const uint4& high) {
    const Element element;
    const u32 a = max_abs_x2(element, max_abs_x2(element, low.x, low.y), max_abs_x2(element, low.z, low.w));
    const u32 b = max_abs_x2(element, max_abs_x2(element, high.x, high.y), max_abs_x2(element, high.z, high.w));
    const u32 both = max_abs_x2(element, a, b);
    return max(both & 0x7fff, both >> 16 & 0x7fff);
}

// `power_of_2_scale` of amax / 448, in a few instructions: 448 is 1.75 * 2^8, so a mantissa above 1.75 carries.
MLA_DEVICE Scale scale_of_amax(float amax) {
    constexpr u32 kCarry = 0x7fffffu - 0x600000u, kMinExponent = 114;  // 2^-13, above 1e-4
    const u32 bits = __float_as_uint(amax);
    if (bits >= kExponentMask) return Scale{amax, bits == kExponentMask ? 0.f : amax, 1.f};
    const u32 exponent = max((bits + kCarry) >> 23, kMinExponent + 8) - 8;
    return Scale{__uint_as_float(exponent << 23), __uint_as_float((254 - exponent) << 23), 1.f};
}

// Eight codes. Products with a power of 2 are exact in 16 bits, unless the result is too small for a code.
template <class Element>
MLA_DEVICE uint2 scaled_codes(const uint4& piece, u32 inverse_x2) {
    const Element element;
    const uint4 scaled = make_uint4(mul_x2(element, piece.x, inverse_x2), mul_x2(element, piece.y, inverse_x2),
                                    mul_x2(element, piece.z, inverse_x2), mul_x2(element, piece.w, inverse_x2));
    float x[kPieceElems];
    unpack_piece<Element>(x, scaled);
    return codes_of(x);
}

// Sixteen elements per lane, zeros in lanes without any.
template <class Element, class Params>
MLA_DEVICE void store_codes(const Params& p, const TokenBytes& token, const uint4 (&pieces)[2], i32 lane) {
    u32 amax = amax_bits<Element>(pieces[0], pieces[1]);
#pragma unroll
    for (i32 step = 1; step < 8; step *= 2) {
        if (step < p.group_chunks) amax = max(amax, __shfl_xor_sync(kFullWarp, amax, step));
    }
    const Scale scale = scale_of_amax(Element::to_float((u16)amax));
    const u32 inverse_x2 = cvt_x2(Element{}, scale.inverse, scale.inverse);
    const uint2 low = scaled_codes<Element>(pieces[0], inverse_x2), high = scaled_codes<Element>(pieces[1], inverse_x2);
    const bool present = lane < p.latent_chunks;
    if (present) reinterpret_cast<uint4*>(token.data)[lane] = make_uint4(low.x, low.y, high.x, high.y);
    if ((lane & (p.group_chunks - 1)) != 0) return;
    const i32 group = p.group_chunks == 8 ? lane / 8 : lane / 4;
    if (p.scale_kind == kScaleFloat32) {
        if (present) reinterpret_cast<float*>(token.scales)[group] = scale.value;
    } else if (group * p.group_chunks <= p.latent_chunks) {  // with the padding
        token.scales[group] = present ? (u8)(__float_as_uint(scale.value) >> 23) : 0;
    }
}

// Stores codes with the caller's scale.
template <class Params>
MLA_DEVICE void store_codes_of_tensor(const Params& p, const TokenBytes& token, const uint4 (&pieces)[2], i32 lane) {
    const Scale scale = plain_scale(p.kv_scale);
    uint2 codes[2];
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
        float x[kPieceElems];
        piece_values(x, pieces[half], nullptr, p.element, false);
#pragma unroll
        for (float& value : x) value = quotient(value, scale);
        codes[half] = codes_of(x);
    }
    if (lane >= p.latent_chunks) return;
    reinterpret_cast<uint4*>(token.data)[lane] = make_uint4(codes[0].x, codes[0].y, codes[1].x, codes[1].y);
}

// Storage of the latent part: unquantised, with a scale per group, or with the caller's scale.
enum class Kept { AsItIs, Groups, Tensor };

// Called by whole warps. Elements that are quantised have 32 bytes in a lane; others are stored as adjacent pieces.
template <class Element, Kept kForm, class Params, class Rotation>
MLA_DEVICE void append_usual(const Params& p, const Rotation& rotation, const RecordLayout& layout,
                             const RopeRows& turned_rows, i64 first, i32 lane) {
    constexpr bool kQuantised = kForm != Kept::AsItIs;
    const i32 count = (i32)min(p.n - first, (i64)kTokens);
    const bool in_cache = lane < count && p.cache != nullptr;
    const i64 slot = in_cache ? read_index(p.slots + (first + lane) * p.slots_stride_bytes, p.slots_are_64) : -1;
    const i32 at[2] = {kQuantised ? 2 * lane : lane, kQuantised ? 2 * lane + 1 : lane + kWarpThreads};
    const i32 rope_token = lane / kRopePieces, rope_piece = lane % kRopePieces;
    const bool has_rope = p.rope_chunks != 0 && rope_token < count;
    const u8* row = p.latent + first * p.latent_stride_bytes;
    uint4 pieces[kTokens][2];
#pragma unroll
    for (i32 t = 0; t < kTokens; ++t) {
#pragma unroll
        for (i32 half = 0; half < 2; ++half) {
            const bool present = t < count && at[half] < 2 * p.latent_chunks;
            pieces[t][half] = ld_global_16(row + at[half] * kPieceBytes, present);
        }
        row += p.latent_stride_bytes;
    }
    const i64 token_of_rope = has_rope ? first + rope_token : first;
    const RopePiece rope = load_rope(p, rotation, min(token_of_rope, (i64)p.n - 1), rope_piece, has_rope);
    griddepcontrol_launch_dependents();
    if (has_rope) turned_rows.store(token_of_rope, rope_piece, rope.raw);
    const TokenBytes mine = token_at(layout, p.cache, slot);  // lane t holds token t
#pragma unroll
    for (i32 t = 0; t < kTokens; ++t) {
        const TokenBytes token{from_lane(mine.data, t), from_lane(mine.scales, t)};
        if (token.data == nullptr) continue;
        if (has_rope && rope_token == t) store_rope(p, token.data + p.rope_offset, rope, rope_piece);
        if (kForm == Kept::Groups) {
            store_codes<Element>(p, token, pieces[t], lane);
        } else if (kForm == Kept::Tensor) {
            store_codes_of_tensor(p, token, pieces[t], lane);
        } else {
#pragma unroll
            for (i32 half = 0; half < 2; ++half) {
                if (at[half] < 2 * p.latent_chunks) reinterpret_cast<uint4*>(token.data)[at[half]] = pieces[t][half];
            }
        }
    }
}

// Brings a warp's tokens, and what leads to them, into L2 before an earlier kernel is done, which may yet write it
// there. A thread asks for few lines.
template <class Params>
MLA_DEVICE void prefetch_tokens(const Params& p, const TableRotation& rotation, i64 first, i32 lane) {
    constexpr i32 kLanes = kWarpThreads / kTokens, kLineBytes = 128;
    const i64 token = first + lane / kLanes;
    const i32 line = lane % kLanes, bytes = p.latent_chunks * 2 * kPieceElems * element_bytes(p.element);
    if (!may_be_early() || token >= p.n) return;
    if (p.cache != nullptr) {
        if (line * kLineBytes < bytes) prefetch_global_l2(p.latent + token * p.latent_stride_bytes + line * kLineBytes);
        if (line == 0) prefetch_global_l2(p.slots + token * p.slots_stride_bytes);
    }
    if (line == 0 && p.rope_chunks != 0) prefetch_global_l2(p.rope + token * p.rope_stride_bytes);
    rotation.prefetch(token, line);
}

// The tokens of a warp from `first` on.
template <class Params, class Rotation>
MLA_DEVICE void append_tokens(const Params& p, const Rotation& rotation, const RopeRows& turned_rows, i64 first,
                              i32 lane) {
    const RecordLayout layout = MLA_RECORD_LAYOUT(p);
    if (is_usual(p)) {
        if (p.kind != kE4m3) {
            append_usual<bfloat16, Kept::AsItIs>(p, rotation, layout, turned_rows, first, lane);
        } else if (p.scale_kind == kScaleOfTensor) {
            append_usual<bfloat16, Kept::Tensor>(p, rotation, layout, turned_rows, first, lane);
        } else if (p.element == kBfloat16) {
            append_usual<bfloat16, Kept::Groups>(p, rotation, layout, turned_rows, first, lane);
        } else {
            append_usual<float16, Kept::Groups>(p, rotation, layout, turned_rows, first, lane);
        }
        return;
    }
#pragma unroll 1
    for (i64 i = first; i < min(first + kTokens, (i64)p.n); ++i) append_any(p, rotation, layout, turned_rows, i, lane);
}
}  // namespace mla::cache
