// Index queries and keys before the logits: RoPE, Hadamard transform, e4m3 codes with one scale per vector.
//
//   y = bf16(rope(x))                 on the first 2 * half_rope elements; (i, i + half_rope) or (2i, 2i + 1) turn
//   z = bf16(H y * d^-0.5)            H: Hadamard, of order d
//   s = 2^ceil(log2(amax / 448))      or amax / 448, with amax = max(|z|, 1e-4)
//   code = e4m3(z / s);               of queries, the weight becomes ((w * h^-0.5) * s) * d^-0.5
//
// Every step is rounded as the models' own code rounds it, so multiplications and additions are not fused. Both
// roundings to bf16 can be left out.
//
// Grid: x = groups of vectors. Eight lanes share a vector, each with d / 8 neighbouring elements: of the Hadamard
// transform's levels all but three stay in the lane. A group of lanes takes a few vectors in turn, so that cos and
// sin are loaded once for several heads of a token.
//
// Keys may go straight to a paged cache: with `slots`, key i becomes the record of its slot, and is skipped if there is
// no such slot.
//
// Source: the reference implementation of DeepSeek-V3.2-Exp, from its description. What differs: one pass over memory.
#include "common/facts.cuh"
#include "common/types.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/element.cuh"
#include "ptx/fp8.cuh"

namespace mla::indexer {

// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr i32 kHeadDim = MLA_HEAD_DIM;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kLanes = 8;                   // of a vector
constexpr i32 kElems = kHeadDim / kLanes;   // of a lane
constexpr i32 kGroups = kThreads / kLanes;  // that work on a vector each
// Blocks per SM. Conversions to e4m3 take more registers where there is no instruction for them.
constexpr i32 kBlocks = __CUDA_ARCH__ >= 890 ? 5 : 4;
constexpr float kMinAmax = 1e-4f;
constexpr float kInverseMaxCode = (float)(1.0 / 448.0);
static_assert(kElems % 4 == 0, "codes are stored by words");

// ---- Params ----------------------------------------------------------------------------------------------------
struct PrepareParams {
    const u16* x;          // (n, h, d), bfloat16
    const float* weights;  // (n, h), or null: `scales` are the scales themselves
    const float* cos;      // (max_position, half_rope); as sin and positions, null if half_rope is 0
    const float* sin;      // (max_position, half_rope)
    const i32* positions;  // (n,)
    const u8* slots;       // (n,), i32 or i64: `codes` are pages, h is 1; or null
    u8* codes;             // (n, h, d), or (num_pages, page_size * (d + 4))
    float* scales;         // (n, h); not with slots
    i64 x_stride_n_elems, x_stride_h_elems, weights_stride_n_elems, weights_stride_h_elems;
    i64 cos_stride_elems, sin_stride_elems, positions_stride_elems;
    i64 codes_stride_n_elems, codes_stride_h_elems, scales_stride_n_elems, scales_stride_h_elems;
    i64 slots_stride_bytes, page_stride_bytes;
    i32 n, h, half_rope, max_position;
    i32 interleaved, hadamard, power_of_2, rounded;
    i32 x_aligned;  // to 16 bytes, in every row
    i32 num_pages, page_size, slots_are_64;
    i32 group_vectors;  // that a group of lanes takes in turn
    float h_factor, d_factor;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(PrepareParams, x_stride_n_elems), MLA_OFFSET(PrepareParams, n),
              MLA_OFFSET(PrepareParams, h_factor), (int)sizeof(PrepareParams));
MLA_FACT(threads, kThreads);
MLA_FACT(block_groups, kGroups);

// ---- A vector --------------------------------------------------------------------------------------------------
typedef float Elements[kElems];

// As it lies in memory: two elements in a word.
typedef u32 RawElements[kElems / 2];
struct alignas(kElems >= 8 ? 16 : 8) Chunk {
    u32 words[kElems >= 8 ? 4 : 2];
};
struct alignas(4 * (kElems / 4)) Codes {
    u32 words[kElems / 4];
};

MLA_DEVICE void load_raw(const PrepareParams& p, const u16* from, RawElements& raw) {
    constexpr i32 kWords = sizeof(Chunk) / sizeof(u32);
    if (p.x_aligned) {
#pragma unroll
        for (i32 i = 0; i < kElems / 2; i += kWords) {
            const Chunk chunk = *reinterpret_cast<const Chunk*>(from + 2 * i);
#pragma unroll
            for (i32 j = 0; j < kWords; ++j) raw[i + j] = chunk.words[j];
        }
    } else {
#pragma unroll
        for (i32 i = 0; i < kElems / 2; ++i) raw[i] = (u32)from[2 * i] | (u32)from[2 * i + 1] << 16;
    }
}

MLA_DEVICE void unpack(const RawElements& raw, Elements& x) {
#pragma unroll
    for (i32 i = 0; i < kElems / 2; ++i) {
        x[2 * i] = __uint_as_float(raw[i] << 16);
        x[2 * i + 1] = __uint_as_float(raw[i] & 0xffff0000u);
    }
}

MLA_DEVICE void round_elements(Elements& x) {
#pragma unroll
    for (i32 i = 0; i < kElems; i += 2) {
        const u32 packed = cvt_x2(bfloat16{}, x[i], x[i + 1]);
        x[i] = __uint_as_float(packed << 16);
        x[i + 1] = __uint_as_float(packed & 0xffff0000u);
    }
}

// ---- RoPE ------------------------------------------------------------------------------------------------------

// cos and sin of a lane's elements; of pairs, once per pair.
struct Rotation {
    Elements cos, sin;
    i32 lane, partner;  // of the vector; `partner` is the lane whose elements turn with these

    MLA_DEVICE explicit Rotation(const PrepareParams& p) {
        lane = threadIdx.x % kLanes;
        const i32 half_lanes = p.half_rope / kElems;
        partner = lane >= 2 * half_lanes ? lane : lane < half_lanes ? lane + half_lanes : lane - half_lanes;
    }
    MLA_DEVICE bool is_first() const { return lane < partner; }
    MLA_DEVICE void load(const PrepareParams& p, i32 token) {
        if (p.half_rope == 0) return;
        const i32 row = max(0, min(p.positions[token * p.positions_stride_elems], p.max_position - 1));
        const float* cos_row = p.cos + row * p.cos_stride_elems;
        const float* sin_row = p.sin + row * p.sin_stride_elems;
#pragma unroll
        for (i32 i = 0; i < kElems; ++i) {
            const i32 at = p.interleaved ? (lane * kElems + i) / 2 : min(lane, partner) * kElems + i;
            const bool turns = lane * kElems + i < 2 * p.half_rope;
            cos[i] = turns ? cos_row[at] : 1.f;
            const bool first = p.interleaved ? i % 2 == 0 : is_first();
            sin[i] = turns ? (first ? -sin_row[at] : sin_row[at]) : 0.f;
        }
    }
};

// Elements that do not turn stay as they are, NaN and infinities, too. Called by whole warps.
MLA_DEVICE void rotate(const PrepareParams& p, const Rotation& rotation, const RawElements& raw, Elements& x) {
    if (p.half_rope == 0) return;
    const i32 first_lane = (i32)threadIdx.x % kWarpThreads - rotation.lane;
    RawElements raw_others;
    Elements others;
#pragma unroll
    for (i32 i = 0; i < kElems / 2; ++i) {
        raw_others[i] =
            p.interleaved ? raw[i] << 16 | raw[i] >> 16 : __shfl_sync(kFullWarp, raw[i], first_lane + rotation.partner);
    }
    unpack(raw_others, others);
    if (rotation.lane * kElems >= 2 * p.half_rope) return;
#pragma unroll
    for (i32 i = 0; i < kElems; ++i) {  // `sin` has the sign
        const float turned = __fadd_rn(__fmul_rn(x[i], rotation.cos[i]), __fmul_rn(others[i], rotation.sin[i]));
        if (rotation.lane * kElems + i < 2 * p.half_rope) x[i] = turned;
    }
}

// ---- Hadamard transform ----------------------------------------------------------------------------------------

// Neighbours first: the order of the additions is part of the result. Called by whole warps.
MLA_DEVICE void transform(const PrepareParams& p, Elements& x) {
#pragma unroll
    for (i32 step = 1; step < kElems; step *= 2) {
#pragma unroll
        for (i32 i = 0; i < kElems; ++i) {
            if (i & step) continue;
            const float a = x[i], b = x[i + step];
            x[i] = a + b;
            x[i + step] = a - b;
        }
    }
#pragma unroll
    for (i32 step = 1; step < kLanes; step *= 2) {
        const float sign = threadIdx.x & step ? -1.f : 1.f;
#pragma unroll
        for (i32 i = 0; i < kElems; ++i) x[i] = fmaf(sign, x[i], __shfl_xor_sync(kFullWarp, x[i], step));
    }
#pragma unroll
    for (i32 i = 0; i < kElems; ++i) x[i] = __fmul_rn(x[i], p.d_factor);
}

// ---- Codes -----------------------------------------------------------------------------------------------------

// The largest magnitude of the vector: NaN does not count, infinity as the largest float. Called by whole warps.
MLA_DEVICE float find_amax(const Elements& x) {
    float amax = kMinAmax;
#pragma unroll
    for (i32 i = 0; i < kElems; ++i) amax = fmaxf(amax, fabsf(x[i]));
#pragma unroll
    for (i32 step = 1; step < kLanes; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, step));
    return fminf(amax, kMaxFloat);
}

MLA_DEVICE float find_scale(const PrepareParams& p, float amax) {
    const float ratio = __fmul_rn(amax, kInverseMaxCode);
    if (!p.power_of_2) return ratio;
    const u32 bits = __float_as_uint(ratio);
    return __uint_as_float(((bits >> 23) + ((bits & 0x7fffff) != 0)) << 23);
}

// x / scale, rounded and saturated. The inverse of a power of 2 is exact.
MLA_DEVICE Codes encode(const PrepareParams& p, const Elements& x, float scale) {
    const float inverse = __uint_as_float((254u << 23) - __float_as_uint(scale));
    Elements ratio;
    if (p.power_of_2) {
#pragma unroll
        for (i32 i = 0; i < kElems; ++i) ratio[i] = x[i] * inverse;
    } else {
#pragma unroll
        for (i32 i = 0; i < kElems; ++i) ratio[i] = __fdiv_rn(x[i], scale);
    }
    Codes codes;
#pragma unroll
    for (i32 word = 0; word < kElems / 4; ++word) {
        const float* four = ratio + 4 * word;
        codes.words[word] = cvt_e4m3_x2(four[0], four[1]) | cvt_e4m3_x2(four[2], four[3]) << 16;
    }
    return codes;
}

// ---- Where a vector goes ---------------------------------------------------------------------------------------
struct Destination {
    u8* codes;  // null: nowhere
    float* scale;
};

MLA_DEVICE Destination record_of_slot(const PrepareParams& p, i32 token) {
    const u8* from = p.slots + token * p.slots_stride_bytes;
    const i64 slot = p.slots_are_64 ? *reinterpret_cast<const i64*>(from) : (i64) * reinterpret_cast<const i32*>(from);
    if (slot < 0 || slot >= (i64)p.num_pages * p.page_size) return Destination{nullptr, nullptr};
    const i64 page = slot / p.page_size, at = slot - page * p.page_size;
    u8* codes = p.codes + page * p.page_stride_bytes;
    return Destination{codes + at * kHeadDim, reinterpret_cast<float*>(codes + (i64)p.page_size * kHeadDim) + at};
}

MLA_DEVICE Destination destination(const PrepareParams& p, i32 token, i32 head) {
    if (p.slots != nullptr) return record_of_slot(p, token);
    return Destination{p.codes + token * p.codes_stride_n_elems + head * p.codes_stride_h_elems,
                       p.scales + token * p.scales_stride_n_elems + head * p.scales_stride_h_elems};
}

// ---- Which vector ----------------------------------------------------------------------------------------------
struct Place {
    i32 token, head;

    MLA_DEVICE Place(const PrepareParams& p, i64 at) {
        if (at >> 32 == 0) {
            token = (i32)((u32)at / (u32)p.h);
            head = (i32)((u32)at - (u32)token * (u32)p.h);
        } else {
            token = (i32)(at / p.h);
            head = (i32)(at % p.h);
        }
    }
    MLA_DEVICE void advance(const PrepareParams& p) {
        if (++head < p.h) return;
        head = 0;
        ++token;
    }
    MLA_DEVICE const u16* vector(const PrepareParams& p, i32 lane) const {
        return p.x + token * p.x_stride_n_elems + head * p.x_stride_h_elems + lane * kElems;
    }
    MLA_DEVICE float weight(const PrepareParams& p) const {
        if (p.weights == nullptr) return 0.f;
        return p.weights[token * p.weights_stride_n_elems + head * p.weights_stride_h_elems];
    }
};

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    mla_indexer_prepare(const __grid_constant__ PrepareParams p) {
    griddepcontrol_wait();
    const i64 vectors = (i64)p.n * p.h;
    const i64 begin = ((i64)blockIdx.x * kGroups + threadIdx.x / kLanes) * p.group_vectors;
    Rotation rotation(p);
    Place place(p, min(begin, vectors - 1)), next = place;
    RawElements ahead;  // the next vector and its weight are under way while one is worked on
    load_raw(p, place.vector(p, rotation.lane), ahead);
    float weight_ahead = place.weight(p);
    rotation.load(p, place.token);
    for (i32 i = 0; i < p.group_vectors; ++i, place = next) {
        RawElements raw;
#pragma unroll
        for (i32 j = 0; j < kElems / 2; ++j) raw[j] = ahead[j];
        const float weight = weight_ahead;
        if (begin + i + 1 < vectors) next.advance(p);  // else whole warps: the last one again, which is not stored
        if (i + 1 < p.group_vectors) {
            load_raw(p, next.vector(p, rotation.lane), ahead);
            weight_ahead = next.weight(p);
        }
        const i32 token = place.token, head = place.head;
        Elements x;
        unpack(raw, x);
        rotate(p, rotation, raw, x);
        if (next.token != token) rotation.load(p, next.token);
        if (p.rounded) round_elements(x);
        if (p.hadamard) {
            transform(p, x);
            if (p.rounded) round_elements(x);
        }
        const float scale = find_scale(p, find_amax(x));
        if (begin + i >= vectors) continue;
        const Destination to = destination(p, token, head);
        if (to.codes == nullptr) continue;
        *reinterpret_cast<Codes*>(to.codes + rotation.lane * kElems) = encode(p, x, scale);
        if (rotation.lane == 0) {
            const float folded = __fmul_rn(__fmul_rn(__fmul_rn(weight, p.h_factor), scale), p.d_factor);
            *to.scale = p.weights != nullptr ? folded : scale;
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer
