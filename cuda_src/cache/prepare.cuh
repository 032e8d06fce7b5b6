// Shared by the kernels that prepare queries: their parameters, angles, and rows.
#pragma once
#include "cache/append.cuh"

namespace mla::cache {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kRowLanes = kRopePieces;             // of a row of queries
constexpr i32 kRows = kAppendThreads / kRowLanes;  // of a block
constexpr i32 kLaneStepBytes = kRowLanes * kPieceBytes;

// ---- Params ----------------------------------------------------------------------------------------------------
struct CachePrepareParams {
    const u8* q;       // (n, h, 64 pieces), `element`; with its RoPE part, 64 elements more, unless q_rope is given
    const u8* q_rope;  // (n, h, 64), `element`; or null
    u8* out;           // (n, h, 64 pieces + 64): `element`, or e4m3
    float* q_scales = nullptr;   // (n, h), or null without codes
    u8* rope_out = nullptr;      // (n, 64), `element`; or null
    const u8* latent = nullptr;  // from here on as in CacheAppendParams; `cache` may be null
    const u8* rope = nullptr;
    u8* cache = nullptr;
    const u8* slots = nullptr;
    const float* cos = nullptr;
    const float* sin = nullptr;
    const u8* positions = nullptr;
    i64 frequencies[kRopePairs];  // of RoPE without tables, in 2^-64 turns
    i64 q_stride_n_bytes, q_stride_h_bytes;
    i64 q_rope_stride_n_bytes, q_rope_stride_h_bytes;
    i64 out_stride_n_bytes, out_stride_h_bytes;
    i64 q_scales_stride_n_elems = 0, q_scales_stride_h_elems = 0;
    i64 rope_out_stride_bytes = 0;
    i64 latent_stride_bytes = 0, rope_stride_bytes = 0, slots_stride_bytes = 0, positions_stride_bytes = 0;
    i64 cos_stride_elems = 0, sin_stride_elems = 0;
    i64 page_stride_bytes = 0, token_stride_bytes = 0;
    i32 n, num_pages = 0, page_size = 0, max_position = 0;
    i32 element = 0, slots_are_64 = 0, positions_are_64 = 0, interleaved = 0, power_of_2 = 0;
    i32 kind = 0, rope_kind = 0, latent_chunks = 0, rope_chunks = 0, group_chunks = 0, scale_kind = 0;
    i32 rope_offset = 0, scales_offset = 0, scales_stride = 0;
    i32 h, pieces = 0;     // query heads; a lane's pieces of a row, without the RoPE part
    i32 token_blocks = 0;  // of the grid
    i32 own_scale = 0;     // of each row; else `q_scale`
    float kv_scale = 1.f, q_scale = 1.f;
};

// ---- RoPE ------------------------------------------------------------------------------------------------------
// Rotation by tables, or by computed angles.
struct AnyRotation : TableRotation {
    const i64* frequencies;

    MLA_DEVICE explicit AnyRotation(const CachePrepareParams& p)
        : TableRotation{p.cos,
                        p.sin,
                        p.positions,
                        p.cos_stride_elems,
                        p.sin_stride_elems,
                        p.positions_stride_bytes,
                        p.max_position,
                        p.positions_are_64,
                        p.interleaved},
          frequencies(p.frequencies) {}
    MLA_DEVICE bool turns() const { return positions != nullptr; }
    // Called by whole warps.
    MLA_DEVICE void load(PieceAngles& angles, i64 token, i32 piece) const {
        if (cos == nullptr) {
            angles.compute(position(token), frequencies, piece, interleaved);
        } else {
            load_row(angles, position(token), piece);
        }
    }
};

// ---- Tokens ----------------------------------------------------------------------------------------------------
// Eight tokens to the cache, by one block.
MLA_DEVICE void append(const CachePrepareParams& p, const AnyRotation& rotation) {
    const i32 lane = threadIdx.x % kWarpThreads;
    const i64 first = ((i64)blockIdx.x * kAppendWarps + threadIdx.x / kWarpThreads) * kTokens;
    prefetch_tokens(p, rotation, first, lane);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    append_tokens(p, rotation, RopeRows{p.rope_out, p.rope_out_stride_bytes}, first, lane);
}

// ---- Queries ---------------------------------------------------------------------------------------------------

// A row of queries, and where it goes; null without one.
struct QueryRow {
    const u8 *q, *rope;
    u8* out;
    i32 token, head;

    MLA_DEVICE QueryRow(const CachePrepareParams& p, i64 at) {
        const bool exists = at < (i64)p.n * p.h;
        const u32 row = exists ? (u32)at : 0;
        const i32 of = (i32)(row / (u32)p.h);
        locate(p, of, (i32)(row - (u32)of * (u32)p.h), exists);
    }
    MLA_DEVICE QueryRow(const CachePrepareParams& p, i32 token, i32 head, bool exists) {
        locate(p, token, head, exists);
    }

   private:
    MLA_DEVICE void locate(const CachePrepareParams& p, i32 of_token, i32 of_head, bool exists) {
        token = of_token, head = of_head;
        q = p.q + token * p.q_stride_n_bytes + head * p.q_stride_h_bytes;
        rope = p.q_rope == nullptr ? q + p.pieces * kLaneStepBytes
                                   : p.q_rope + token * p.q_rope_stride_n_bytes + head * p.q_rope_stride_h_bytes;
        out = exists ? p.out + token * p.out_stride_n_bytes + head * p.out_stride_h_bytes : nullptr;
    }
};

MLA_DEVICE bool queries_are_aligned(const CachePrepareParams& p) {
    const u64 q = reinterpret_cast<u64>(p.q) | p.q_stride_n_bytes | p.q_stride_h_bytes;
    const u64 rope = reinterpret_cast<u64>(p.q_rope) | p.q_rope_stride_n_bytes | p.q_rope_stride_h_bytes;
    return (q | rope) % kPieceBytes == 0;
}

// A lane's piece of the RoPE part, turned if it is to be. Called by whole warps.
template <class Element, bool kAligned>
MLA_DEVICE uint4 turned_piece(const AnyRotation& rotation, const QueryRow& row, i32 lane) {
    const uint4 piece = load_piece(row.rope + lane * kPieceBytes, kAligned, true);
    if (!rotation.turns()) return piece;
    PieceAngles angles;
    rotation.load(angles, row.token, lane);
    float x[kPieceElems];
    unpack_piece<Element>(x, piece);
    angles.turn(x, lane, rotation.interleaved);
    return pack_piece<Element>(x);
}
}  // namespace mla::cache
