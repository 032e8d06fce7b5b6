// Queries and keys before decode: RoPE of both, queries rounded to e4m3, and tokens written to a paged cache.
//
//   q[-64:], rope = RoPE(q[-64:], rope)             in 16 bits
//   codes = e4m3(q / s)                             s: the row's power of two (attention/query_codes.cuh), or the
//   caller's cache[slot] = record of (latent, rope)          cache/append.cuh
//
// Grid: x = blocks for tokens, eight each, then blocks for rows of queries, 16 each. Eight lanes share a row: a lane
// has 16 bytes of every 128, so that the RoPE part, the row's last 128 bytes, is one piece per lane, and all loads of a
// row are in flight together. If the result overwrites the queries, only the RoPE part is read and written.
//
//   position | angles | load row | turn | largest of the row | round | store
#include "attention/query_codes.cuh"
#include "cache/prepare.cuh"
#include "common/facts.cuh"
#include "ptx/control.cuh"

namespace mla::cache {

// ---- Variant ---------------------------------------------------------------------------------------------------
constexpr bool kCodes = MLA_CODES;  // queries become e4m3

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kMovedPieces = 4;  // of a lane, in flight together
// Blocks per SM. All rows of 128 tokens with 128 heads are one wave of 8.
constexpr i32 kBlocks = kCodes ? 5 : 8;

// ---- Params ----------------------------------------------------------------------------------------------------
MLA_FACT_LIST(params_layout, MLA_OFFSET(CachePrepareParams, frequencies), MLA_OFFSET(CachePrepareParams, n),
              MLA_OFFSET(CachePrepareParams, kv_scale), (int)sizeof(CachePrepareParams));
MLA_FACT(threads, kAppendThreads);
MLA_FACT(tokens_per_block, kAppendWarps* kTokens);
MLA_FACT(rows_per_block, kRows);

// ---- Queries ---------------------------------------------------------------------------------------------------
// Eight codes, to any address.
MLA_DEVICE void store_eight_codes(u8* to, const uint2& codes) {
    if (reinterpret_cast<u64>(to) % sizeof(uint2) == 0) {
        *reinterpret_cast<uint2*>(to) = codes;
        return;
    }
#pragma unroll
    for (i32 i = 0; i < kPieceElems; ++i) to[i] = (u8)((i < 4 ? codes.x : codes.y) >> 8 * (i % 4));
}

// Codes with the caller's scale.
template <class Element>
MLA_DEVICE uint2 codes_of_tensor(const uint4& piece, const Scale& scale) {
    float x[kPieceElems];
    unpack_piece<Element>(x, piece);
#pragma unroll
    for (float& value : x) value = quotient(value, scale);
    return codes_of(x);
}

MLA_DEVICE bool in_place(const CachePrepareParams& p) { return !kCodes && p.out == p.q && p.q_rope == nullptr; }

// Brings a row into L2 before an earlier kernel is done, as the blocks for tokens do with what all rows share.
MLA_DEVICE void prefetch_row(const CachePrepareParams& p, i64 at, i32 lane) {
    const QueryRow row(p, at);
    if (lane < p.pieces && !in_place(p)) prefetch_global_l2(row.q + lane * kLaneStepBytes);
    if (lane == 0) prefetch_global_l2(row.rope);
}

// A row in 16 bits. Called by whole warps.
template <class Element, bool kAligned>
MLA_DEVICE void move_row(const CachePrepareParams& p, const AnyRotation& rotation, const QueryRow& row, i32 lane) {
    const u8* from = row.q + lane * kPieceBytes;
    u8* to = row.out + lane * kPieceBytes;
    const i32 moved = in_place(p) || row.out == nullptr ? 0 : p.pieces;
    uint4 pieces[kMovedPieces];
    const auto load = [&](i32 first) {
#pragma unroll
        for (i32 i = 0; i < kMovedPieces; ++i) {
            pieces[i] = load_piece(from + (first + i) * kLaneStepBytes, kAligned, first + i < moved);
        }
    };
    const auto store = [&](i32 first) {
#pragma unroll
        for (i32 i = 0; i < kMovedPieces; ++i) {
            if (first + i < moved) store_piece(to + (first + i) * kLaneStepBytes, pieces[i]);
        }
    };
    load(0);
    const uint4 rope = turned_piece<Element, kAligned>(rotation, row, lane);
    if (row.out != nullptr) store_piece(to + p.pieces * kLaneStepBytes, rope);
    store(0);
#pragma unroll 1
    for (i32 first = kMovedPieces; first < moved; first += kMovedPieces) load(first), store(first);
}

// A row as codes. Called by whole warps.
template <class Element, bool kAligned>
MLA_DEVICE void encode_row(const CachePrepareParams& p, const AnyRotation& rotation, const QueryRow& row, i32 lane) {
    constexpr i32 kMaxPieces = 8;  // pieces of a lane, without the RoPE part: 512 elements of a row
    uint4 pieces[kMaxPieces];
#pragma unroll
    for (i32 i = 0; i < kMaxPieces; ++i) {
        pieces[i] = load_piece(row.q + i * kLaneStepBytes + lane * kPieceBytes, kAligned, i < p.pieces);
    }
    const uint4 rope = turned_piece<Element, kAligned>(rotation, row, lane);
    u8* const to = row.out + lane * kPieceElems;
    const auto store = [&](auto codes) {
        if (row.out == nullptr) return;
#pragma unroll
        for (i32 i = 0; i < kMaxPieces; ++i) {
            if (i < p.pieces) store_eight_codes(to + i * kRowLanes * kPieceElems, codes(pieces[i]));
        }
        store_eight_codes(to + p.pieces * kRowLanes * kPieceElems, codes(rope));
    };
    float scale_up = p.q_scale;
    if (p.own_scale) {
        u32 largest = largest_magnitude<Element>(rope, 0);
#pragma unroll
        for (const uint4& piece : pieces) largest = largest_magnitude<Element>(piece, largest);
#pragma unroll
        for (i32 lanes = 1; lanes < kRowLanes; lanes *= 2) {
            largest = max(largest, __shfl_xor_sync(kFullWarp, largest, lanes));
        }
        const QueryScale scale = query_scale(largest);
        store([&](const uint4& piece) { return query_codes<Element>(piece, scale.down); });
        scale_up = scale.up;
    } else {
        const Scale scale = plain_scale(p.q_scale);
        store([&](const uint4& piece) { return codes_of_tensor<Element>(piece, scale); });
    }
    if (row.out == nullptr || lane != 0) return;
    p.q_scales[row.token * p.q_scales_stride_n_elems + row.head * p.q_scales_stride_h_elems] = scale_up;
}

// Called by whole warps.
template <class Element, bool kAligned>
MLA_DEVICE void prepare_row(const CachePrepareParams& p, const AnyRotation& rotation, i64 at, i32 lane) {
    const QueryRow row(p, at);
    if constexpr (kCodes) {
        encode_row<Element, kAligned>(p, rotation, row, lane);
    } else {
        move_row<Element, kAligned>(p, rotation, row, lane);
    }
}

template <class Element>
MLA_DEVICE void prepare_row_of(const CachePrepareParams& p, const AnyRotation& rotation, i64 at, i32 lane) {
    if (queries_are_aligned(p)) {
        prepare_row<Element, true>(p, rotation, at, lane);
    } else {
        prepare_row<Element, false>(p, rotation, at, lane);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kAppendThreads, kBlocks)
    mla_cache_prepare(const __grid_constant__ CachePrepareParams p) {
    const AnyRotation rotation(p);
    if ((i32)blockIdx.x < p.token_blocks) return append(p, rotation);
    const i64 at = (i64)(blockIdx.x - p.token_blocks) * kRows + threadIdx.x / kRowLanes;
    if (may_be_early()) prefetch_row(p, at, threadIdx.x % kRowLanes);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (p.element == kBfloat16) {
        prepare_row_of<bfloat16>(p, rotation, at, threadIdx.x % kRowLanes);
    } else {
        prepare_row_of<float16>(p, rotation, at, threadIdx.x % kRowLanes);
    }
}
}  // namespace mla::cache
