// Writes tokens to a paged cache: quantises the latent part, turns the RoPE part if asked to, scatters by slot.
//
//   s = scale of the group's largest magnitude,   code = e4m3(x / s)
//
// Grid: x = tokens, two for each warp. What the kernel takes is the time to issue its instructions, unless they are
// few: so the usual calls, aligned rows of 16-bit elements whose scales are powers of 2 or which are kept as they are,
// have a path with no more than it takes. The loads of a warp's tokens are in flight together:
//
//   lane t: place of token t | all: load 32 bytes of each | largest of the group | quantise | store 16 bytes
//
// Any other token is written in pieces of eight elements: a lane has the pieces l and l + 32 of the latent part, and
// some lanes one of the RoPE part. A slot outside of the pool is skipped.
#include "attention/record.cuh"
#include "common/facts.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/load.cuh"

namespace mla::cache {
using namespace attention;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kTokens = 2;  // of a warp
constexpr i32 kPieceElems = 8;
constexpr i32 kPieceBytes = 16;  // of 16-bit elements
constexpr float kMinRatio = 1e-4f;
constexpr float kMinNormal = 1.17549435e-38f;
constexpr u32 kExponentMask = 0x7f800000u;

// ---- Params ----------------------------------------------------------------------------------------------------
struct CacheAppendParams {
    const u8* latent;     // (n, 16 latent_chunks), `element`
    const u8* rope;       // (n, 16 rope_chunks), `element`; or null
    u8* cache;            // pages
    const u8* slots;      // (n,), i32 or i64
    const float* cos;     // (max_position, 32), or null
    const float* sin;     // (max_position, 32), or null
    const u8* positions;  // (n,), i32 or i64; or null
    i64 latent_stride_bytes, rope_stride_bytes, slots_stride_bytes, positions_stride_bytes;
    i64 cos_stride_elems, sin_stride_elems;
    i64 page_stride_bytes, token_stride_bytes;
    i32 n, num_pages, page_size, max_position;
    i32 element, slots_are_64, positions_are_64, interleaved, power_of_2;
    i32 kind, rope_kind, latent_chunks, rope_chunks, group_chunks, scale_kind;
    i32 rope_offset, scales_offset, scales_stride;
    float kv_scale;
    i32 padding;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(CacheAppendParams, latent_stride_bytes), MLA_OFFSET(CacheAppendParams, n),
              MLA_OFFSET(CacheAppendParams, kv_scale), (int)sizeof(CacheAppendParams));
MLA_FACT(threads, kThreads);
MLA_FACT(tokens_per_block, kWarps* kTokens);

// ---- Numbers ---------------------------------------------------------------------------------------------------
MLA_DEVICE i64 read_index(const u8* from, i32 is_64) {
    return is_64 ? *reinterpret_cast<const i64*>(from) : (i64) * reinterpret_cast<const i32*>(from);
}

// NaN if either is.
MLA_DEVICE float nan_max(float a, float b) { return a > b || a != a ? a : b; }

// What numbers are divided by, and its inverse, with which a division takes a few instructions. `lift` is a power of
// two that takes both far away from the smallest and the largest numbers.
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

// x / scale: the nearest float, unless it is so small that its code is 0, or infinite. The correction makes NaN of what
// is infinite or divided by infinity; there the first product is right.
MLA_DEVICE float quotient(float x, const Scale& scale) {
    if (__CUDA_ARCH__ < 800) return x / scale.value;  // where the reciprocal spills
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

MLA_DEVICE i32 element_bytes(i32 kind) { return kind == kE4m3 ? 1 : kind == kFloat32 ? 4 : 2; }

// ---- Pieces ----------------------------------------------------------------------------------------------------

// Eight 16-bit elements; zeros where there are none.
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
    for (i32 i = 0; i < 4; ++i) {
        words[i] = (u32)Element::from_float(x[2 * i + 1]) << 16 | Element::from_float(x[2 * i]);
    }
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

// ---- Any token -------------------------------------------------------------------------------------------------

// Turns a piece of the RoPE part. Every operation is rounded: no fused multiply-add.
MLA_DEVICE void turn(const CacheAppendParams& p, float (&x)[kPieceElems], const u8* row, i32 piece, i64 i) {
    const i64 position = read_index(p.positions + i * p.positions_stride_bytes, p.positions_are_64);
    const i64 clamped = max(0ll, min(position, (i64)p.max_position - 1));
    const float *cos = p.cos + clamped * p.cos_stride_elems, *sin = p.sin + clamped * p.sin_stride_elems;
    if (p.interleaved) {
#pragma unroll
        for (i32 k = 0; k < kPieceElems; k += 2) {
            const i32 pair = (kPieceElems * piece + k) / 2;
            const float c = cos[pair], s = sin[pair], first = x[k], second = x[k + 1];
            x[k] = __fsub_rn(__fmul_rn(first, c), __fmul_rn(second, s));
            x[k + 1] = __fadd_rn(__fmul_rn(second, c), __fmul_rn(first, s));
        }
        return;
    }
    constexpr i32 kHalfPieces = kRopePairs / kPieceElems;
    const u8* from = row + (piece ^ kHalfPieces) * kPieceElems * element_bytes(p.element);
    float other[kPieceElems];
    const uint4 raw = load_piece(from, false, p.element != kFloat32);
    piece_values(other, raw, from, p.element, true);
#pragma unroll
    for (i32 k = 0; k < kPieceElems; ++k) {
        const i32 pair = (kPieceElems * piece + k) % kRopePairs;
        const float along = __fmul_rn(x[k], cos[pair]), across = __fmul_rn(other[k], sin[pair]);
        x[k] = piece < kHalfPieces ? __fsub_rn(along, across) : __fadd_rn(along, across);
    }
}

// A piece of the RoPE part as it is kept: its bits, if nothing changes them.
MLA_DEVICE void append_rope(const CacheAppendParams& p, u8* to, const uint4& raw, i64 i, i32 piece) {
    if (p.cos == nullptr && p.rope_kind == p.element) {
        store_piece(to + piece * kPieceBytes, raw);
        return;
    }
    const u8* row = p.rope + i * p.rope_stride_bytes;
    float x[kPieceElems];
    piece_values(x, raw, row + piece * kPieceElems * element_bytes(p.element), p.element, true);
    if (p.cos != nullptr) turn(p, x, row, piece, i);
    if (p.rope_kind != kE4m3) {
        store_piece(to + piece * kPieceBytes, rounded(x, p.rope_kind));
        return;
    }
    const Scale scale = plain_scale(p.kv_scale);
#pragma unroll
    for (float& value : x) value = quotient(value, scale);
    reinterpret_cast<uint2*>(to)[piece] = codes_of(x);
}

// Of the whole warp's piece.
MLA_DEVICE Scale scale_of(const CacheAppendParams& p, const float (&x)[kPieceElems]) {
    if (p.scale_kind == kScaleOfTensor) return plain_scale(p.kv_scale);
    const float ratio = group_amax(x, 2 * p.group_chunks) / kMaxE4m3;
    return p.power_of_2 ? power_of_2_scale(ratio) : plain_scale(nan_max(ratio, kMinNormal));
}

// A piece of the latent part as codes. Called by whole warps.
MLA_DEVICE void append_codes(const CacheAppendParams& p, const TokenBytes& token, const uint4& raw, const u8* row,
                             i32 piece) {
    const bool present = piece < 2 * p.latent_chunks;
    float x[kPieceElems];
    piece_values(x, raw, row + piece * kPieceElems * element_bytes(p.element), p.element, present);
    const Scale scale = scale_of(p, x);
#pragma unroll
    for (float& value : x) value = p.power_of_2 ? value * scale.inverse : quotient(value, scale);
    if (!present) return;
    reinterpret_cast<uint2*>(token.data)[piece] = codes_of(x);
    const i32 group_pieces = 2 * p.group_chunks;
    if (p.scale_kind == kScaleOfTensor || piece % group_pieces != 0) return;
    const i32 group = piece / group_pieces;
    if (p.scale_kind == kScaleFloat32) {
        reinterpret_cast<float*>(token.scales)[group] = scale.value;
    } else {
        token.scales[group] = (u8)(__float_as_uint(scale.value) >> 23);      // 0xff for NaN and infinity
        if (piece == 0) token.scales[p.latent_chunks / p.group_chunks] = 0;  // the padding
    }
}

// A piece of the latent part as 16-bit elements.
MLA_DEVICE void append_wide(const CacheAppendParams& p, u8* to, const uint4& raw, const u8* row, i32 piece) {
    if (piece >= 2 * p.latent_chunks) return;
    uint4 kept = raw;
    if (p.kind != p.element) {
        float x[kPieceElems];
        piece_values(x, raw, row + piece * kPieceElems * element_bytes(p.element), p.element, true);
        kept = rounded(x, p.kind);
    }
    store_piece(to + piece * kPieceBytes, kept);
}

MLA_DEVICE bool rows_are_aligned(const CacheAppendParams& p) {
    const u64 latent = reinterpret_cast<u64>(p.latent) | p.latent_stride_bytes;
    const u64 rope = reinterpret_cast<u64>(p.rope) | p.rope_stride_bytes;
    return (latent | rope) % kPieceBytes == 0;
}

// Called by whole warps.
MLA_DEVICE void append_any(const CacheAppendParams& p, const RecordLayout& layout, i64 i, i32 lane) {
    const TokenBytes token = token_at(layout, p.cache, read_index(p.slots + i * p.slots_stride_bytes, p.slots_are_64));
    if (token.data == nullptr) return;
    const bool aligned = rows_are_aligned(p), narrow = p.element != kFloat32;
    const u8 *row = p.latent + i * p.latent_stride_bytes, *rope = p.rope + i * p.rope_stride_bytes;
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
        const i32 piece = lane + half * kWarpThreads;
        const uint4 raw = load_piece(row + piece * kPieceBytes, aligned, narrow && piece < 2 * p.latent_chunks);
        if (p.kind == kE4m3) {
            append_codes(p, token, raw, row, piece);
        } else {
            append_wide(p, token.data, raw, row, piece);
        }
    }
    if (lane >= 2 * p.rope_chunks) return;
    const uint4 raw = load_piece(rope + lane * kPieceBytes, aligned, narrow);
    append_rope(p, token.data + p.rope_offset, raw, i, lane);
}

// ---- The usual tokens --------------------------------------------------------------------------------------------
MLA_DEVICE bool is_usual(const CacheAppendParams& p) {
    if (__CUDA_ARCH__ < 900) return false;  // which lack the products of bf16
    const u64 pages = reinterpret_cast<u64>(p.cache) | p.page_stride_bytes | p.token_stride_bytes;
    const bool codes = p.kind == kE4m3 && p.power_of_2 && (p.group_chunks == 4 || p.group_chunks == 8);
    const bool same_rope = p.rope_chunks == 0 || (p.rope_kind == p.element && p.cos == nullptr);
    return pages % kPieceBytes == 0 && rows_are_aligned(p) && p.element != kFloat32 && same_rope &&
           (codes || p.kind == p.element);
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

// Eight codes. Products with a power of 2 are exact in 16 bits, but for those that are too small to have a code.
template <class Element>
MLA_DEVICE uint2 scaled_codes(const uint4& piece, u32 inverse_x2) {
    const Element element;
    const uint4 scaled = make_uint4(mul_x2(element, piece.x, inverse_x2), mul_x2(element, piece.y, inverse_x2),
                                    mul_x2(element, piece.z, inverse_x2), mul_x2(element, piece.w, inverse_x2));
    float x[kPieceElems];
    unpack_piece<Element>(x, scaled);
    return codes_of(x);
}

// Sixteen elements of each lane, zeros in those that have none.
template <class Element>
MLA_DEVICE void store_codes(const CacheAppendParams& p, const TokenBytes& token, const uint4 (&pieces)[2], i32 lane) {
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

// Called by whole warps. Elements that are quantised have 32 bytes in a lane; others are stored as adjacent pieces.
template <class Element, bool kQuantised>
MLA_DEVICE void append_usual(const CacheAppendParams& p, const RecordLayout& layout, i64 first, i32 lane) {
    const i32 count = (i32)min(p.n - first, (i64)kTokens);
    const i64 slot = lane < count ? read_index(p.slots + (first + lane) * p.slots_stride_bytes, p.slots_are_64) : -1;
    const i32 at[2] = {kQuantised ? 2 * lane : lane, kQuantised ? 2 * lane + 1 : lane + kWarpThreads};
    const bool has_rope = lane < 2 * p.rope_chunks;
    const u8 *row = p.latent + first * p.latent_stride_bytes, *rope = p.rope + first * p.rope_stride_bytes;
    uint4 pieces[kTokens][2], rope_pieces[kTokens];
#pragma unroll
    for (i32 t = 0; t < kTokens; ++t) {
#pragma unroll
        for (i32 half = 0; half < 2; ++half) {
            const bool present = t < count && at[half] < 2 * p.latent_chunks;
            pieces[t][half] = ld_global_16(row + at[half] * kPieceBytes, present);
        }
        rope_pieces[t] = ld_global_16(rope + lane * kPieceBytes, t < count && has_rope);
        row += p.latent_stride_bytes;
        rope += p.rope_stride_bytes;
    }
    griddepcontrol_launch_dependents();
    const TokenBytes mine = token_at(layout, p.cache, slot);  // lane t's is that of token t
#pragma unroll
    for (i32 t = 0; t < kTokens; ++t) {
        const TokenBytes token{from_lane(mine.data, t), from_lane(mine.scales, t)};
        if (token.data == nullptr) continue;
        if (kQuantised) {
            store_codes<Element>(p, token, pieces[t], lane);
        } else {
#pragma unroll
            for (i32 half = 0; half < 2; ++half) {
                if (at[half] < 2 * p.latent_chunks) reinterpret_cast<uint4*>(token.data)[at[half]] = pieces[t][half];
            }
        }
        if (has_rope) reinterpret_cast<uint4*>(token.data + p.rope_offset)[lane] = rope_pieces[t];
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) mla_cache_append(const __grid_constant__ CacheAppendParams p) {
    griddepcontrol_wait();
    const i32 lane = threadIdx.x % kWarpThreads;
    const i64 first = ((i64)blockIdx.x * kWarps + threadIdx.x / kWarpThreads) * kTokens;
    const RecordLayout layout = MLA_RECORD_LAYOUT(p);
    if (is_usual(p)) {
        if (p.kind != kE4m3) {
            append_usual<bfloat16, false>(p, layout, first, lane);
        } else if (p.element == kBfloat16) {
            append_usual<bfloat16, true>(p, layout, first, lane);
        } else {
            append_usual<float16, true>(p, layout, first, lane);
        }
        return;
    }
#pragma unroll 1
    for (i64 i = first; i < min(first + kTokens, (i64)p.n); ++i) append_any(p, layout, i, lane);
}
}  // namespace mla::cache
