// Index queries and keys before the logits: RoPE, Hadamard transform, e4m3 codes with one scale per vector.
//
//   x = bf16(LayerNorm(k))            of keys, on request
//   y = bf16(rope(x))                 on the first 2 * half_rope elements; (i, i + half_rope) or (2i, 2i + 1) turn
//   z = bf16(H y * d^-0.5)            H: Hadamard, of order d
//   s = 2^ceil(log2(amax / 448))      or amax / 448, with amax = max(|z|, 1e-4); or 448 is less
//   code = e4m3(z / s);               of queries, the weight becomes ((w * h^-0.5) * s) * d^-0.5
//
// Every step is rounded as the models' own code rounds it, so multiplications and additions are not fused. The
// roundings to bf16 can be left out.
//
// Grid: blocks of warps. Eight lanes share a vector, and a warp takes four neighbouring vectors, then the next four: a
// lane has four neighbouring elements of every 32, so that all but three of the Hadamard transform's levels, and RoPE's
// pairs where they are 32 or 64 apart, stay within it. Cos and sin are loaded once for all heads of a token.
//
// Keys may go straight to a paged cache: with `slots`, key i becomes the record of its slot, and is skipped if there is
// no such slot. A joint launch has both: the key of a token is one more head of it. Keys of a cache may be e2m1 numbers
// with a scale for each 32 of them (indexer/e2m1_keys.cuh):
//
//   s = 2^ceil(log2(amax / 6)) of a group,  code = e2m1(z / s)
//
// Source: the reference implementation of DeepSeek-V3.2-Exp, from its description. What differs: one pass over memory.
#include "common/facts.cuh"
#include "common/types.cuh"
#include "indexer/e2m1_keys.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/element.cuh"
#include "ptx/fp4.cuh"
#include "ptx/fp8.cuh"
#include "ptx/load.cuh"
#include "tile/rope.cuh"

namespace mla::indexer::prepare {

// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr i32 kHeadDim = MLA_HEAD_DIM;
constexpr bool kUsual = MLA_USUAL;  // the options of DeepSeek-V3.2, and arrays that start at multiples of 16 bytes
constexpr bool kJoint = MLA_JOINT;  // queries and keys; else one of them
constexpr bool kDense = kUsual && !kJoint;
constexpr bool kMayNormalise = !kDense;
constexpr bool kMayBeE2m1 = kHeadDim == kE2m1Keys && !kUsual;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kLanes = 8;                             // of a vector
constexpr i32 kWarpVectors = kWarpThreads / kLanes;   // vectors that a warp works on at once
constexpr i32 kGroups = kThreads / kLanes;            // groups of lanes in a block
constexpr i32 kQuad = 4, kQuadStep = kLanes * kQuad;  // neighbouring elements of a lane, and how far apart they lie
constexpr i32 kQuads = kHeadDim / kQuadStep;          // of a lane
constexpr i32 kElems = kQuads * kQuad;
constexpr i32 kAngles = kElems / 2;  // of a lane
// Blocks per SM. Conversions to e4m3 take more registers where there is no instruction for them.
constexpr i32 kBlocks = __CUDA_ARCH__ >= 1000 ? (kDense ? 7 : 4) : __CUDA_ARCH__ >= 890 ? (kUsual ? 7 : 5) : 4;
constexpr float kMinAmax = 1e-4f;
constexpr float kMaxCode = 448.f;             // of e4m3
constexpr u32 kMaxScaleExponent = 127 + 126;  // its inverse is a normal number, too

// ---- Params ----------------------------------------------------------------------------------------------------
struct PrepareParams {
    const u16* x;              // (n, h, d), bfloat16
    const float* weights;      // (n, h), or null: `scales` are the scales themselves
    const float* cos;          // (max_position, half_rope); as sin and positions, null if half_rope is 0
    const float* sin;          // (max_position, half_rope)
    const i32* positions;      // (n,)
    const u8* slots;           // (n,), i32 or i64: `codes` are pages, h is 1; or null
    u8* codes;                 // (n, h, d), or (num_pages, page_size * (d + 4))
    float* scales;             // (n, h); not with slots
    const u16* k;              // (n, d), of a joint launch: the last head of each token
    u8* k_codes;               // (n, d), or pages: these, too
    float* k_scales;           // (n,), as these
    const float* norm_weight;  // (d,), of the keys' LayerNorm; or null
    const float* norm_bias;    // (d,)
    i64 x_stride_n_elems, x_stride_h_elems, weights_stride_n_elems, weights_stride_h_elems;
    i64 cos_stride_elems, sin_stride_elems, positions_stride_elems;
    i64 codes_stride_n_elems, codes_stride_h_elems, scales_stride_n_elems, scales_stride_h_elems;
    i64 slots_stride_bytes, page_stride_bytes;
    i64 k_stride_elems, k_codes_stride_elems, k_scales_stride_elems;
    i64 norm_weight_stride_elems, norm_bias_stride_elems;
    i32 n, h, half_rope, max_position;
    i32 interleaved, hadamard, power_of_2, rounded;
    i32 x_aligned, tables_aligned;  // to 16 bytes, in every row
    i32 num_pages, page_size, slots_are_64;
    i32 e2m1_keys;                // of a cache
    i32 group_vectors;            // vectors that a group of lanes processes in turn
    i32 step_tokens, step_heads;  // from one of them to the next
    i32 independent = 0;          // 1: of the call before, see the kernel
    float h_factor, d_factor;
    float max_code, inverse_max_code;  // the largest code there may be, of queries
    float norm_eps;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(PrepareParams, x_stride_n_elems), MLA_OFFSET(PrepareParams, n),
              MLA_OFFSET(PrepareParams, h_factor), (int)sizeof(PrepareParams));
MLA_FACT(threads, kThreads);
MLA_FACT(block_groups, kGroups);

// The call's choices, or the constants of usual calls.
MLA_DEVICE bool x_aligned(const PrepareParams& p) { return kUsual || p.x_aligned; }
MLA_DEVICE bool tables_aligned(const PrepareParams& p) { return kUsual || p.tables_aligned; }
MLA_DEVICE bool is_interleaved(const PrepareParams& p) { return !kUsual && p.interleaved; }
MLA_DEVICE bool has_hadamard(const PrepareParams& p) { return kUsual || p.hadamard; }
MLA_DEVICE bool has_powers_of_2(const PrepareParams& p) { return kUsual || p.power_of_2; }
MLA_DEVICE bool is_rounded(const PrepareParams& p) { return kUsual || p.rounded; }
MLA_DEVICE bool keys_are_e2m1(const PrepareParams& p) { return kMayBeE2m1 && p.e2m1_keys; }
MLA_DEVICE i32 half_rope(const PrepareParams& p) { return kUsual ? kHeadDim / 4 : p.half_rope; }

// ---- Where a vector is, and where it goes ----------------------------------------------------------------------
// One of a warp's vectors, kWarpVectors further with each step.
struct Place {
    i64 at;
    i32 token, head;

    MLA_DEVICE Place(const PrepareParams& p, i64 at) : at(at) {
        if (at >> 32 == 0) {
            token = (i32)((u32)at / (u32)p.h);
            head = (i32)((u32)at - (u32)token * (u32)p.h);
        } else {
            token = (i32)(at / p.h);
            head = (i32)(at % p.h);
        }
    }
    MLA_DEVICE void advance(const PrepareParams& p) {
        at += kWarpVectors;
        token += p.step_tokens;
        head += p.step_heads;
        if (head < p.h) return;
        head -= p.h;
        ++token;
    }
    // Usual arrays are dense.
    MLA_DEVICE bool is_key(const PrepareParams& p) const { return kJoint ? head == p.h - 1 : p.weights == nullptr; }
    MLA_DEVICE const u16* x(const PrepareParams& p) const {
        if (kJoint && is_key(p)) return p.k + token * p.k_stride_elems;
        return p.x + (kDense ? at * kHeadDim : token * p.x_stride_n_elems + head * p.x_stride_h_elems);
    }
    MLA_DEVICE const float* weight_at(const PrepareParams& p) const {
        return p.weights + (kDense ? at : token * p.weights_stride_n_elems + head * p.weights_stride_h_elems);
    }
    MLA_DEVICE float weight(const PrepareParams& p) const { return is_key(p) ? 0.f : *weight_at(p); }
};

struct Destination {
    u8* codes;  // null: nowhere
    float* scale;
};

// The slot of a key that goes to a cache, else -1. Volatile loads keep their place: before the vector is worked on.
MLA_DEVICE i64 slot_of(const PrepareParams& p, const Place& place) {
    if (kDense || p.slots == nullptr) return -1;
    const u8* from = p.slots + place.token * p.slots_stride_bytes;
    const bool is_key = place.is_key(p);
    const uint2 wide = ld_global_8(from, is_key && p.slots_are_64);
    const u32 narrow = ld_global_4(from, is_key && !p.slots_are_64);
    return p.slots_are_64 ? (i64)((u64)wide.y << 32 | wide.x) : (i64)(i32)narrow;
}

MLA_DEVICE Destination record_of_slot(const PrepareParams& p, u8* pages, i64 slot) {
    if (slot < 0 || slot >= (i64)p.num_pages * p.page_size) return Destination{nullptr, nullptr};
    const i64 page = slot / p.page_size, at = slot - page * p.page_size;
    u8* codes = pages + page * p.page_stride_bytes;
    const i64 key_bytes = keys_are_e2m1(p) ? kE2m1KeyBytes : kHeadDim;
    return Destination{codes + at * key_bytes, reinterpret_cast<float*>(codes + p.page_size * key_bytes) + at};
}

MLA_DEVICE Destination destination(const PrepareParams& p, const Place& place, i64 slot) {
    if (kDense) return Destination{p.codes + place.at * kHeadDim, p.scales + place.at};
    if (place.is_key(p)) {
        if (p.slots != nullptr) return record_of_slot(p, kJoint ? p.k_codes : p.codes, slot);
        if (kJoint) {
            return Destination{p.k_codes + place.token * p.k_codes_stride_elems,
                               p.k_scales + place.token * p.k_scales_stride_elems};
        }
    }
    return Destination{p.codes + place.token * p.codes_stride_n_elems + place.head * p.codes_stride_h_elems,
                       p.scales + place.token * p.scales_stride_n_elems + place.head * p.scales_stride_h_elems};
}

// ---- A vector --------------------------------------------------------------------------------------------------
typedef float Elements[kElems];  // four of each quad

// Memory layout: two elements per word.
typedef u32 RawElements[kElems / 2];
struct alignas(8) RawQuad {
    u32 words[2];
};
struct alignas(16) FloatQuad {
    float x[kQuad];
};

MLA_DEVICE i32 lane_of_vector() { return threadIdx.x % kLanes; }
MLA_DEVICE i32 first_element(i32 quad) { return quad * kQuadStep + lane_of_vector() * kQuad; }

MLA_DEVICE RawQuad load_quad(const PrepareParams& p, const u16* from) {
    if (x_aligned(p)) return *reinterpret_cast<const RawQuad*>(from);
    return RawQuad{{(u32)from[0] | (u32)from[1] << 16, (u32)from[2] | (u32)from[3] << 16}};
}

MLA_DEVICE void load_raw(const PrepareParams& p, const u16* vector, RawElements& raw) {
#pragma unroll
    for (i32 quad = 0; quad < kQuads; ++quad) {
        const RawQuad four = load_quad(p, vector + first_element(quad));
        raw[2 * quad] = four.words[0];
        raw[2 * quad + 1] = four.words[1];
    }
}

MLA_DEVICE void unpack(const u32* raw, float* x, i32 words) {
#pragma unroll
    for (i32 i = 0; i < words; ++i) {
        x[2 * i] = __uint_as_float(raw[i] << 16);
        x[2 * i + 1] = __uint_as_float(raw[i] & 0xffff0000u);
    }
}

// To bfloat16, an even number of elements.
MLA_DEVICE void round_elements(float* x, i32 count) {
#pragma unroll
    for (i32 i = 0; i < count; i += 2) {
        const u32 packed = cvt_x2(bfloat16{}, x[i], x[i + 1]);
        unpack(&packed, x + i, 1);
    }
}

// ---- LayerNorm -------------------------------------------------------------------------------------------------

// The sum of a vector's elements. Each lane first sums its own, distant ones before neighbours: the order is part of
// the result. Called by whole warps.
MLA_DEVICE float sum_of_vector(Elements& x) {
#pragma unroll
    for (i32 doubled = 2; doubled <= kElems; doubled *= 2) {
        const i32 count = kElems / doubled;
#pragma unroll
        for (i32 i = 0; i < kElems; ++i) {
            if (i < count) x[i] = __fadd_rn(x[i], x[i + count]);
        }
    }
    float sum = x[0];
#pragma unroll
    for (i32 step = 1; step < kLanes; step *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, step));
    return sum;
}

// Weight and bias of four elements; of usual calls, 16 bytes each.
struct Affine {
    FloatQuad weight, bias;
};

MLA_DEVICE FloatQuad load_norm_quad(const float* from, i32 first, i64 stride_elems) {
    if (kUsual) return *reinterpret_cast<const FloatQuad*>(from + first);
    FloatQuad four;
#pragma unroll
    for (i32 i = 0; i < kQuad; ++i) four.x[i] = from[(first + i) * stride_elems];
    return four;
}

MLA_DEVICE Affine load_affine(const PrepareParams& p, i32 first) {
    return Affine{load_norm_quad(p.norm_weight, first, p.norm_weight_stride_elems),
                  load_norm_quad(p.norm_bias, first, p.norm_bias_stride_elems)};
}

// Normalisation of a vector's elements, if any. Selected, not branched about, so that the lanes of a warp stay
// together.
struct Normal {
    bool in_warp = false, applies = false;
    float mean = 0.f, inverse_deviation = 0.f;

    // Called by whole warps.
    MLA_DEVICE void find(const PrepareParams& p, const Place& place, const Elements& x) {
        applies = place.is_key(p);
        in_warp = __any_sync(kFullWarp, applies);
        if (!in_warp) return;
        Elements y;
#pragma unroll
        for (i32 i = 0; i < kElems; ++i) y[i] = x[i];
        mean = __fmul_rn(sum_of_vector(y), 1.f / kHeadDim);
#pragma unroll
        for (i32 i = 0; i < kElems; ++i) {
            const float centred = __fsub_rn(x[i], mean);
            y[i] = __fmul_rn(centred, centred);
        }
        const float variance = __fmul_rn(sum_of_vector(y), 1.f / kHeadDim);
        inverse_deviation = __frcp_rn(__fsqrt_rn(__fadd_rn(variance, p.norm_eps)));
    }
    // To four elements from `first` on.
    MLA_DEVICE void apply(const PrepareParams& p, float* four, i32 first) const {
        if (kMayNormalise && in_warp) apply(p, four, load_affine(p, first));
    }
    // To a lane's elements. The weights of each quad lie in a line of their own: usual calls load two lines at once,
    // and wait half as often. More lines, or strides, would spill.
    MLA_DEVICE void apply(const PrepareParams& p, Elements& x) const {
        constexpr i32 kAtOnce = kUsual ? kQuads / 2 : 1;
        if (!in_warp) return;
#pragma unroll
        for (i32 first = 0; first < kQuads; first += kAtOnce) {
            Affine affine[kAtOnce];
#pragma unroll
            for (i32 i = 0; i < kAtOnce; ++i) affine[i] = load_affine(p, first_element(first + i));
#pragma unroll
            for (i32 i = 0; i < kAtOnce; ++i) apply(p, x + (first + i) * kQuad, affine[i]);
        }
    }

   private:
    MLA_DEVICE void apply(const PrepareParams& p, float* four, const Affine& affine) const {
        float normal[kQuad];
#pragma unroll
        for (i32 i = 0; i < kQuad; ++i) {
            const float unscaled = __fmul_rn(__fsub_rn(four[i], mean), inverse_deviation);
            normal[i] = __fadd_rn(__fmul_rn(unscaled, affine.weight.x[i]), affine.bias.x[i]);
        }
        if (is_rounded(p)) round_elements(normal, kQuad);
#pragma unroll
        for (i32 i = 0; i < kQuad; ++i) four[i] = applies ? normal[i] : four[i];
    }
};

// ---- RoPE ------------------------------------------------------------------------------------------------------

struct Tables {
    const float *cos, *sin;

    MLA_DEVICE Tables(const PrepareParams& p, i32 token) {
        const i32 row = max(0, min(p.positions[token * p.positions_stride_elems], p.max_position - 1));
        cos = p.cos + row * p.cos_stride_elems;
        sin = p.sin + row * p.sin_stride_elems;
    }
};

MLA_DEVICE FloatQuad load_angles(const PrepareParams& p, const float* from) {
    if (tables_aligned(p)) return *reinterpret_cast<const FloatQuad*>(from);
    return FloatQuad{{from[0], from[1], from[2], from[3]}};
}

// Location of a pair's elements: neighbours; in quads of a lane; in different lanes.
enum PairPlace { kNowhere, kNeighbours, kQuadsApart, kLanesApart };

MLA_DEVICE PairPlace pair_place(const PrepareParams& p) {
    if (half_rope(p) == 0) return kNowhere;
    if (is_interleaved(p)) return kNeighbours;
    return half_rope(p) % kQuadStep == 0 ? kQuadsApart : kLanesApart;
}

// cos and sin of a lane's pairs; none where a pair's elements are in different lanes.
struct Angles {
    float cos[kAngles], sin[kAngles];

    MLA_DEVICE void load(const PrepareParams& p, i32 token) {
        const PairPlace pairs = pair_place(p);
        if (pairs == kNowhere || pairs == kLanesApart) return;
        const Tables tables(p, token);
        if (pairs == kNeighbours) {
#pragma unroll
            for (i32 i = 0; i < kAngles; ++i) {
                const i32 at = first_element(i / 2) / 2 + i % 2;
                cos[i] = at < half_rope(p) ? tables.cos[at] : 1.f;
                sin[i] = at < half_rope(p) ? tables.sin[at] : 0.f;
            }
        } else {
#pragma unroll
            for (i32 quad = 0; quad < kQuads / 2; ++quad) {
                if (quad * kQuadStep >= half_rope(p)) break;
                const FloatQuad c = load_angles(p, tables.cos + first_element(quad));
                const FloatQuad s = load_angles(p, tables.sin + first_element(quad));
#pragma unroll
                for (i32 i = 0; i < kQuad; ++i) {
                    cos[quad * kQuad + i] = c.x[i];
                    sin[quad * kQuad + i] = s.x[i];
                }
            }
        }
    }
};

// Elements that do not turn stay as they are, NaN and infinities, too; so do they if they are rounded.
MLA_DEVICE void turn_neighbours(const PrepareParams& p, const Angles& angles, Elements& x) {
#pragma unroll
    for (i32 i = 0; i < kAngles; ++i) {
        if (first_element(i / 2) + 2 * (i % 2) >= 2 * half_rope(p)) continue;
        turn_pair(x[2 * i], x[2 * i + 1], angles.cos[i], angles.sin[i]);
        if (is_rounded(p)) round_elements(x + 2 * i, 2);
    }
}

template <i32 kDistance>
MLA_DEVICE void turn_quads(const PrepareParams& p, const Angles& angles, Elements& x) {
    if constexpr (2 * kDistance <= kQuads) {
#pragma unroll
        for (i32 i = 0; i < kDistance * kQuad; ++i) {
            turn_pair(x[i], x[i + kDistance * kQuad], angles.cos[i], angles.sin[i]);
        }
        if (is_rounded(p)) round_elements(x, 2 * kDistance * kQuad);
    }
}

// Loads the other lanes' elements again.
MLA_DEVICE void turn_lanes(const PrepareParams& p, const Normal& normal, const Place& place, Elements& x) {
    const Tables tables(p, place.token);
    const u16* vector = place.x(p);
#pragma unroll
    for (i32 quad = 0; quad < kQuads; ++quad) {
        const i32 at = first_element(quad);
        if (at >= 2 * half_rope(p)) continue;
        const bool is_first = at < half_rope(p);
        const i32 pair = is_first ? at : at - half_rope(p);
        const i32 other = is_first ? at + half_rope(p) : pair;
        const RawQuad raw = load_quad(p, vector + other);
        float others[kQuad];
        unpack(raw.words, others, 2);
        normal.apply(p, others, other);
#pragma unroll
        for (i32 i = 0; i < kQuad; ++i) {
            const float sin = tables.sin[pair + i];
            float& own = x[quad * kQuad + i];
            own = turned(own, others[i], tables.cos[pair + i], is_first ? -sin : sin);
        }
        if (is_rounded(p)) round_elements(x + quad * kQuad, kQuad);
    }
}

MLA_DEVICE void rotate(const PrepareParams& p, const Angles& angles, const Normal& normal, const Place& place,
                       Elements& x) {
    switch (pair_place(p)) {
        case kNowhere:
            return;
        case kNeighbours:
            return turn_neighbours(p, angles, x);
        case kLanesApart:
            return turn_lanes(p, normal, place, x);
        case kQuadsApart:
            return half_rope(p) == kQuadStep ? turn_quads<1>(p, angles, x) : turn_quads<2>(p, angles, x);
    }
}

// ---- Hadamard transform ----------------------------------------------------------------------------------------

// Levels with pairs `first`, 2 * first ... below `end` apart in a lane's elements.
MLA_DEVICE void transform_lane(Elements& x, i32 first, i32 end) {
#pragma unroll
    for (i32 step = first; step < end; step *= 2) {
#pragma unroll
        for (i32 i = 0; i < kElems; ++i) {
            if (i & step) continue;
            const float a = x[i], b = x[i + step];
            x[i] = a + b;
            x[i + step] = a - b;
        }
    }
}

// Neighbours first: the order of the additions is part of the result. Called by whole warps.
MLA_DEVICE void transform(const PrepareParams& p, Elements& x) {
    transform_lane(x, 1, kQuad);
#pragma unroll
    for (i32 step = 1; step < kLanes; step *= 2) {
        const float sign = threadIdx.x & step ? -1.f : 1.f;
#pragma unroll
        for (i32 i = 0; i < kElems; ++i) x[i] = fmaf(sign, x[i], __shfl_xor_sync(kFullWarp, x[i], step));
    }
    transform_lane(x, kQuad, kElems);
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

// The largest code. What queries are to be added up in does not change keys.
MLA_DEVICE float max_code(const PrepareParams& p, bool is_key) { return kJoint && is_key ? kMaxCode : p.max_code; }

MLA_DEVICE float find_scale(const PrepareParams& p, float amax, bool is_key) {
    const float ratio = __fmul_rn(amax, kJoint && is_key ? 1.f / kMaxCode : p.inverse_max_code);
    if (!has_powers_of_2(p)) return ratio;
    const u32 bits = __float_as_uint(ratio);
    return __uint_as_float(min((bits >> 23) + ((bits & 0x7fffff) != 0), kMaxScaleExponent) << 23);
}

// Infinities, and what no scale makes small enough. Conversions saturate at the largest e4m3 by themselves.
MLA_DEVICE void saturate(float largest, float (&ratio)[kQuad]) {
    if (largest == kMaxCode) return;
#pragma unroll
    for (i32 i = 0; i < kQuad; ++i) {
        if (fabsf(ratio[i]) > largest) ratio[i] = copysignf(largest, ratio[i]);  // NaN stays
    }
}

// x / scale, rounded and saturated: a word for each quad. The inverse of a power of 2 is exact.
MLA_DEVICE void encode(const PrepareParams& p, const Elements& x, float scale, float largest, u32 (&codes)[kQuads]) {
    const float inverse = __uint_as_float((254u << 23) - __float_as_uint(scale));
#pragma unroll
    for (i32 quad = 0; quad < kQuads; ++quad) {
        float ratio[kQuad];
#pragma unroll
        for (i32 i = 0; i < kQuad; ++i) {
            const float y = x[quad * kQuad + i];
            ratio[i] = has_powers_of_2(p) ? y * inverse : __fdiv_rn(y, scale);
        }
        saturate(largest, ratio);
        codes[quad] = cvt_e4m3_x2(ratio[0], ratio[1]) | cvt_e4m3_x2(ratio[2], ratio[3]) << 16;
    }
}

// ---- Codes of keys in e2m1 -------------------------------------------------------------------------------------
static_assert(kQuadStep == kE2m1Group, "a quad of each lane is a group");

// Biased exponent of the scale of a group with a largest magnitude of these bits; NaN bits are larger than infinity's.
MLA_DEVICE u32 e2m1_exponent(u32 largest) {
    if (largest > 0x7f800000) return kNanScale;
    const float amax = fmaxf(kMinAmax, fminf(__uint_as_float(largest), kMaxFloat));
    const u32 bits = __float_as_uint(__fdiv_rn(amax, 6.f));
    return min((bits >> 23) + ((bits & 0x7fffff) != 0), kMaxScaleExponent);
}

// The exponents of a vector's groups, the first one in the lowest byte. Called by whole warps.
MLA_DEVICE u32 e2m1_scales(const Elements& x) {
    u32 scales = 0;
#pragma unroll
    for (i32 quad = 0; quad < kQuads; ++quad) {
        u32 largest = 0;
#pragma unroll
        for (i32 i = 0; i < kQuad; ++i) largest = max(largest, __float_as_uint(x[quad * kQuad + i]) & 0x7fffffff);
#pragma unroll
        for (i32 step = 1; step < kLanes; step *= 2) {
            largest = max(largest, __shfl_xor_sync(kFullWarp, largest, step));
        }
        scales |= e2m1_exponent(largest) << 8 * quad;
    }
    return scales;
}

MLA_DEVICE void store_e2m1(const Destination& to, const Elements& x, u32 scales) {
#pragma unroll
    for (i32 quad = 0; quad < kQuads; ++quad) {
        const u32 exponent = scales >> 8 * quad & 0xff;
        const float inverse = __uint_as_float((254 - exponent) << 23);
        u32 codes = 0;
#pragma unroll
        for (i32 i = 0; i < kQuad; ++i) codes |= e2m1_bits(x[quad * kQuad + i] * inverse) << 4 * i;
        if (exponent == kNanScale) codes = 0;
        *reinterpret_cast<u16*>(to.codes + first_element(quad) / 2) = (u16)codes;
    }
    if (lane_of_vector() == 0) *reinterpret_cast<u32*>(to.scale) = scales;
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
// Brings what a group of lanes loads for its first vector into L2 before an earlier kernel is done, which may yet write
// it there. Only a prefetch depends on the position read here.
MLA_DEVICE void prefetch_inputs(const PrepareParams& p, const Place& place) {
    constexpr i32 kLineBytes = 128, kVectorLines = ceil_div(kHeadDim * (i32)sizeof(u16), kLineBytes);
    const i32 lane = lane_of_vector();
    const bool is_key = place.is_key(p), turns = half_rope(p) > 0;
    const u32 position = ld_global_l2_4(p.positions + place.token * p.positions_stride_elems, turns);
    if (lane < kVectorLines) prefetch_global_l2(place.x(p) + lane * (kLineBytes / (i32)sizeof(u16)));
    if (!is_key && lane == 0) prefetch_global_l2(place.weight_at(p));
    if (is_key && lane == 0 && p.slots != nullptr) prefetch_global_l2(p.slots + place.token * p.slots_stride_bytes);
    if (is_key && p.norm_weight != nullptr) {
        const i64 step = lane % kQuads * kQuadStep;
        prefetch_global_l2(lane / kQuads % 2 == 0 ? p.norm_weight + step * p.norm_weight_stride_elems
                                                  : p.norm_bias + step * p.norm_bias_stride_elems);
    }
    if (!turns || lane > 1) return;
    const i64 row = min(position, (u32)p.max_position - 1);
    prefetch_global_l2(lane == 0 ? p.cos + row * p.cos_stride_elems : p.sin + row * p.sin_stride_elems);
}

MLA_DEVICE void store(const PrepareParams& p, const Place& place, i64 slot, const Elements& x, float scale,
                      float weight, u32 scales) {
    const Destination to = destination(p, place, slot);
    if (!kDense && to.codes == nullptr) return;
    if (keys_are_e2m1(p) && place.is_key(p)) return store_e2m1(to, x, scales);
    u32 codes[kQuads];
    encode(p, x, scale, max_code(p, place.is_key(p)), codes);
#pragma unroll
    for (i32 quad = 0; quad < kQuads; ++quad) {
        *reinterpret_cast<u32*>(to.codes + first_element(quad)) = codes[quad];
    }
    if (lane_of_vector() != 0) return;
    const float folded = __fmul_rn(__fmul_rn(__fmul_rn(weight, p.h_factor), scale), p.d_factor);
    *to.scale = place.is_key(p) ? scale : folded;
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    mla_indexer_prepare_quantize(const __grid_constant__ PrepareParams p) {
    const i64 vectors = (i64)p.n * p.h;
    const i64 warp = (i64)blockIdx.x * (kThreads / kWarpThreads) + threadIdx.x / kWarpThreads;
    const i64 first = warp * kWarpVectors * p.group_vectors + threadIdx.x % kWarpThreads / kLanes;
    Place place(p, min(first, vectors - 1)), next = place;
    // An independent call shares no memory that either writes with the call before it. Everything older is complete,
    // because each kernel lets its dependents start only after its own wait; the exception is attention_combine, and
    // the attention kernel of the same call has waited.
    if (!p.independent) {
        if (may_be_early()) prefetch_inputs(p, place);
        griddepcontrol_wait();
    }
    griddepcontrol_launch_dependents();
    RawElements ahead;  // the next vector and its weight are under way while one is worked on
    load_raw(p, place.x(p), ahead);
    float weight_ahead = place.weight(p);
    Angles angles;
    angles.load(p, place.token);
    for (i32 i = 0; i < p.group_vectors; ++i, place = next) {
        Elements x;
        unpack(ahead, x, kElems / 2);
        const float weight = weight_ahead;
        const bool is_there = first + (i64)i * kWarpVectors < vectors;  // else whole warps: the last one again
        if (next.at + kWarpVectors < vectors) next.advance(p);
        if (i + 1 < p.group_vectors) {
            load_raw(p, next.x(p), ahead);
            weight_ahead = next.weight(p);
        }
        Normal normal;
        if (kMayNormalise && p.norm_weight != nullptr) {
            normal.find(p, place, x);
            normal.apply(p, x);
        }
        const i64 slot = slot_of(p, place);
        rotate(p, angles, normal, place, x);
        if (next.token != place.token) angles.load(p, next.token);
        if (has_hadamard(p)) {
            transform(p, x);
            if (is_rounded(p)) round_elements(x, kElems);
        }
        const float scale = find_scale(p, find_amax(x), place.is_key(p));
        const u32 scales = keys_are_e2m1(p) ? e2m1_scales(x) : 0;
        if (is_there) store(p, place, slot, x, scale, weight, scales);
    }
    griddepcontrol_wait();  // what waits for this launch finds the results of the one before, too
}
}  // namespace mla::indexer::prepare
