// Writes tokens to a paged cache: quantises the latent part, turns the RoPE part if asked to, scatters by slot.
//
//   s = scale of the group's largest magnitude,   code = e4m3(x / s)
//
// Grid: x = tokens, two for each warp, whose loads are in flight together. A lane has 16 consecutive elements of the
// latent part; the RoPE part belongs to some of the lanes:
//
//   all lanes  | load 16 | largest of the group by shuffles | quantise | store 16 bytes | RoPE lanes: turn, store |
//
// Rows of 16-bit elements that are aligned to 16 bytes are loaded in such pieces; others by a path of their own.
// A slot outside of the pool is skipped.
#include "attention/record.cuh"
#include "common/facts.cuh"
#include "ptx/control.cuh"
#include "ptx/load.cuh"

namespace mla::cache {
using namespace attention;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kTokens = 2;  // of a warp
constexpr i32 kPieceBytes = 16;
constexpr i32 kPieceElems = 8;  // of 16 bits
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

// The largest magnitude of the chunks that share a scale, in all their lanes. As bits, NaN is above infinity.
MLA_DEVICE float group_amax(const float (&x)[kRecordChunk], i32 group_chunks) {
    u32 amax = 0;
#pragma unroll
    for (float value : x) amax = max(amax, __float_as_uint(value) & 0x7fffffffu);
    for (i32 step = 1; step < group_chunks; step *= 2) {
        amax = max(amax, __shfl_xor_sync(kFullWarp, amax, step));
    }
    return __uint_as_float(amax);
}

MLA_DEVICE void store_codes(u8* to, const float (&x)[kRecordChunk]) {
    u32 words[4];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
        words[i] = cvt_e4m3_x2(x[4 * i], x[4 * i + 1]) | cvt_e4m3_x2(x[4 * i + 2], x[4 * i + 3]) << 16;
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// The same bits, NaN payloads included.
MLA_DEVICE void copy_halves(u8* to, const u8* from) {
    if ((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from)) % 16 == 0) {
        const uint4 low = reinterpret_cast<const uint4*>(from)[0], high = reinterpret_cast<const uint4*>(from)[1];
        reinterpret_cast<uint4*>(to)[0] = low;
        reinterpret_cast<uint4*>(to)[1] = high;
    } else {
#pragma unroll
        for (i32 i = 0; i < kRecordChunk; ++i) {
            reinterpret_cast<u16*>(to)[i] = reinterpret_cast<const u16*>(from)[i];
        }
    }
}

MLA_DEVICE i32 chunk_bytes(i32 kind) { return kRecordChunk * (kind == kE4m3 ? 1 : kind == kFloat32 ? 4 : 2); }

// ---- Parts -----------------------------------------------------------------------------------------------------

// Sixteen elements of the latent part in each lane that has some, zeros in the others. Called by whole warps.
MLA_DEVICE void store_quantised(const CacheAppendParams& p, const TokenBytes& token, float (&x)[kRecordChunk],
                                i32 lane) {
    Scale scale = plain_scale(p.kv_scale);
    if (p.scale_kind != kScaleOfTensor) {
        const float ratio = group_amax(x, p.group_chunks) / kMaxE4m3;
        scale = p.power_of_2 ? power_of_2_scale(ratio) : plain_scale(nan_max(ratio, kMinNormal));
    }
    if (p.power_of_2) {
#pragma unroll
        for (float& value : x) value *= scale.inverse;
    } else {
#pragma unroll
        for (float& value : x) value = quotient(value, scale);
    }
    if (lane >= p.latent_chunks) return;
    store_codes(token.data + lane * kRecordChunk, x);
    if (lane % p.group_chunks != 0) return;
    const i32 group = lane / p.group_chunks;
    if (p.scale_kind == kScaleFloat32) {
        reinterpret_cast<float*>(token.scales)[group] = scale.value;
    } else if (p.scale_kind == kScaleE8m0) {
        const u32 exponent = __float_as_uint(scale.value) >> 23 & 0xff;  // 0xff for NaN and infinity
        token.scales[group] = (u8)exponent;
        if (lane == 0) token.scales[p.latent_chunks / p.group_chunks] = 0;  // the padding
    }
}

// Called by whole warps.
MLA_DEVICE void append_latent(const CacheAppendParams& p, const TokenBytes& token, const u8* row, i32 lane) {
    const bool active = lane < p.latent_chunks;
    const u8* from = row + lane * chunk_bytes(p.element);
    u8* to = token.data + lane * chunk_bytes(p.kind);
    if (p.kind == p.element) {
        if (active) copy_halves(to, from);
        return;
    }
    float x[kRecordChunk];
#pragma unroll
    for (float& value : x) value = 0.f;
    if (active) load_record_chunk(x, from, p.element);
    if (p.kind != kE4m3) {
        if (active) store_chunk(to, x, p.kind);
        return;
    }
    store_quantised(p, token, x, lane);
}

// Elements 16 chunk to 16 chunk + 15 of the RoPE part, turned. Every operation is rounded: no fused multiply-add.
MLA_DEVICE void load_turned(const CacheAppendParams& p, const u8* row, i32 chunk, i64 position,
                            float (&x)[kRecordChunk]) {
    load_record_chunk(x, row + chunk * chunk_bytes(p.element), p.element);
    const i64 clamped = max(0ll, min(position, (i64)p.max_position - 1));
    const float *cos = p.cos + clamped * p.cos_stride_elems, *sin = p.sin + clamped * p.sin_stride_elems;
    if (p.interleaved) {
#pragma unroll
        for (i32 i = 0; i < kRecordChunk; i += 2) {
            const float c = cos[(kRecordChunk * chunk + i) / 2], s = sin[(kRecordChunk * chunk + i) / 2];
            const float first = x[i], second = x[i + 1];
            x[i] = __fsub_rn(__fmul_rn(first, c), __fmul_rn(second, s));
            x[i + 1] = __fadd_rn(__fmul_rn(second, c), __fmul_rn(first, s));
        }
        return;
    }
    const bool is_first = chunk < kRopeChunks / 2;
    float other[kRecordChunk];
    load_record_chunk(other, row + (chunk ^ kRopeChunks / 2) * chunk_bytes(p.element), p.element);
#pragma unroll
    for (i32 i = 0; i < kRecordChunk; ++i) {
        const i32 pair = (kRecordChunk * chunk + i) % kRopePairs;
        const float along = __fmul_rn(x[i], cos[pair]), across = __fmul_rn(other[i], sin[pair]);
        x[i] = is_first ? __fsub_rn(along, across) : __fadd_rn(along, across);
    }
}

MLA_DEVICE void append_rope(const CacheAppendParams& p, const TokenBytes& token, const u8* row, i32 chunk, i64 i) {
    u8* to = token.data + p.rope_offset + chunk * chunk_bytes(p.rope_kind);
    if (p.cos == nullptr && p.rope_kind == p.element) {
        copy_halves(to, row + chunk * chunk_bytes(p.element));
        return;
    }
    float x[kRecordChunk];
    if (p.cos == nullptr) {
        load_record_chunk(x, row + chunk * chunk_bytes(p.element), p.element);
    } else {
        load_turned(p, row, chunk, read_index(p.positions + i * p.positions_stride_bytes, p.positions_are_64), x);
    }
    if (p.rope_kind != kE4m3) {
        store_chunk(to, x, p.rope_kind);
        return;
    }
    const Scale scale = plain_scale(p.kv_scale);
#pragma unroll
    for (float& value : x) value = quotient(value, scale);
    store_codes(to, x);
}

MLA_DEVICE void append_any(const CacheAppendParams& p, const RecordLayout& layout, i64 i, i32 lane) {
    const TokenBytes token = token_at(layout, p.cache, read_index(p.slots + i * p.slots_stride_bytes, p.slots_are_64));
    if (token.data == nullptr) return;
    append_latent(p, token, p.latent + i * p.latent_stride_bytes, lane);
    const i32 chunk = (lane + kWarpThreads - p.latent_chunks) % kWarpThreads;
    if (chunk < p.rope_chunks) append_rope(p, token, p.rope + i * p.rope_stride_bytes, chunk, i);
}

// ---- Aligned rows of 16-bit elements -----------------------------------------------------------------------------
MLA_DEVICE bool is_aligned(const CacheAppendParams& p) {
    if (__CUDA_ARCH__ < 800) return false;  // sm_75 spills
    const u64 inputs =
        reinterpret_cast<u64>(p.latent) | p.latent_stride_bytes | reinterpret_cast<u64>(p.rope) | p.rope_stride_bytes;
    const u64 pages = reinterpret_cast<u64>(p.cache) | p.page_stride_bytes | p.token_stride_bytes | p.rope_offset;
    return (inputs | pages) % kPieceBytes == 0 && p.element != kFloat32 && (p.kind == kE4m3 || p.kind == p.element);
}

// What a lane has of a token: two pieces of the latent part, at most one of the RoPE part.
struct Pieces {
    uint4 latent[2];
    uint4 rope;
};

// A lane's piece of the latent part: neighbours if they are quantised, else such that a warp's stores are adjacent.
MLA_DEVICE i32 latent_piece(const CacheAppendParams& p, i32 lane, i32 half) {
    return p.kind == kE4m3 ? 2 * lane + half : lane + kWarpThreads * half;
}

MLA_DEVICE bool copies_rope(const CacheAppendParams& p) { return p.cos == nullptr && p.rope_kind == p.element; }

MLA_DEVICE Pieces load_pieces(const CacheAppendParams& p, i64 i, i32 lane) {
    Pieces pieces;
    const bool present = i < p.n;
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
        const i32 piece = latent_piece(p, lane, half);
        pieces.latent[half] = ld_global_16(p.latent + i * p.latent_stride_bytes + piece * kPieceBytes,
                                           present && piece < 2 * p.latent_chunks);
    }
    pieces.rope = ld_global_16(p.rope + i * p.rope_stride_bytes + lane * kPieceBytes,
                               present && copies_rope(p) && lane < 2 * p.rope_chunks);
    return pieces;
}

template <class Element>
MLA_DEVICE void unpack_piece(float* to, const uint4& piece) {
    const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
        const float2 pair = unpack<Element>(words[i]);
        to[2 * i] = pair.x;
        to[2 * i + 1] = pair.y;
    }
}

MLA_DEVICE void store_pieces(const CacheAppendParams& p, const TokenBytes& token, const Pieces& pieces, i64 i,
                             i32 lane) {
    if (p.kind == kE4m3) {
        float x[kRecordChunk];
#pragma unroll
        for (i32 half = 0; half < 2; ++half) {
            if (p.element == kBfloat16) {
                unpack_piece<bfloat16>(x + half * kPieceElems, pieces.latent[half]);
            } else {
                unpack_piece<float16>(x + half * kPieceElems, pieces.latent[half]);
            }
        }
        store_quantised(p, token, x, lane);
    } else {
#pragma unroll
        for (i32 half = 0; half < 2; ++half) {
            const i32 piece = latent_piece(p, lane, half);
            if (piece < 2 * p.latent_chunks) reinterpret_cast<uint4*>(token.data)[piece] = pieces.latent[half];
        }
    }
    if (!copies_rope(p)) {
        if (lane < p.rope_chunks) append_rope(p, token, p.rope + i * p.rope_stride_bytes, lane, i);
    } else if (lane < 2 * p.rope_chunks) {
        reinterpret_cast<uint4*>(token.data + p.rope_offset)[lane] = pieces.rope;
    }
}

MLA_DEVICE void append_aligned(const CacheAppendParams& p, const RecordLayout& layout, i64 first, i32 lane) {
    i64 slots[kTokens];
    Pieces pieces[kTokens];
#pragma unroll
    for (i32 t = 0; t < kTokens; ++t) {
        const i64 i = first + t;
        slots[t] = i < p.n ? read_index(p.slots + i * p.slots_stride_bytes, p.slots_are_64) : -1;
        pieces[t] = load_pieces(p, i, lane);
    }
    // One after the other by the same code: the next token's pieces move up.
#pragma unroll 1
    for (i32 t = 0; t < kTokens; ++t) {
        const TokenBytes token = token_at(layout, p.cache, slots[0]);
        if (token.data != nullptr) store_pieces(p, token, pieces[0], first + t, lane);
#pragma unroll
        for (i32 later = 1; later < kTokens; ++later) {
            slots[later - 1] = slots[later];
            pieces[later - 1] = pieces[later];
        }
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) mla_cache_append(const __grid_constant__ CacheAppendParams p) {
    griddepcontrol_wait();
    const i32 lane = threadIdx.x % kWarpThreads;
    const i64 first = ((i64)blockIdx.x * kWarps + threadIdx.x / kWarpThreads) * kTokens;
    const RecordLayout layout = MLA_RECORD_LAYOUT(p);
    if (is_aligned(p)) {
        append_aligned(p, layout, first, lane);
        return;
    }
#pragma unroll 1
    for (i64 i = first; i < min(first + kTokens, (i64)p.n); ++i) append_any(p, layout, i, lane);
}
}  // namespace mla::cache
