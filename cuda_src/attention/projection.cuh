// After attention: the partial results of a head's rows merged, and multiplied by the head's W_UV.
//
//   latents[t] = sum_j w_j piece_j[t],   w_j = exp2(lse_j - max lse) / sum_j exp2(lse_j - max lse)
//   result[t, d] = sum_c latents[t, c] W_UV[head, d, c] * sigmoid(gate[t, head, d])
//
// Grid: x = heads, with one block per share of a head's columns d; y = shares of the tokens. The blocks of a cluster
// work on one head: each merges a share of the columns c of its tokens and writes them to the shared memory of all of
// them. Without clusters every block merges all columns. A block processes its tokens kTokens at a time:
//
//   W_UV on its way | find, weigh, merge (a warp a row), to all peers | barrier | product | store | next tokens ...
//
// A warp finds, weighs and merges its rows alone, so the cluster's barrier is the first one: the first pieces of all
// its rows are in flight while it weighs them. W_UV arrives by bulk copies, so loads do not queue behind it. A single
// result in 16 bits is copied to shared memory, the next tokens during the product.
//
// Latents are rounded to 16 bits before the product, as at the end of an attention call.
//
// A warp sums the even pieces of a row, then the odd ones, then both sums. A row with more than kFewPieces is cut into
// eight ranges of pieces, one per warp, each summed this way; so are a few rows of several pieces, unless the order of
// the sums must depend on the number of a row's pieces alone.
//
// Source: merging and projecting in one kernel is tokenspeed's idea. Here clusters share the columns, and any number of
// pieces can be merged.
#pragma once
#include "attention/shapes.cuh"
#include "common/facts.cuh"
#include "ptx/cluster.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/load.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"
#include "tile/copies.cuh"
#include "tile/ring.cuh"
#include "tile/warp.cuh"

namespace mla::attention {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kProjectionThreads = 256;
constexpr i32 kProjectionWarps = kProjectionThreads / kWarpThreads;
constexpr i32 kFewPieces = kWarpThreads;  // pieces of a row that one warp can merge alone
constexpr i32 kMaxRowPieces = kProjectionThreads;
constexpr i32 kPitch = kHeadDimV + 8;           // of rows in shared memory: ldmatrix then uses every bank
constexpr i32 kTile = 16;                       // tokens of a product
constexpr u32 kWeightRowBytes = 2 * kHeadDimV;  // of W_UV

// kShare: blocks of a cluster, which share the merge; 1 without clusters. kRowsAtOnce: rows that a warp weighs at once,
// two if registers allow.
template <class Element_, i32 kShare_, i32 kRowsAtOnce_>
struct ProjectionConfig {
    using Element = Element_;
    static constexpr i32 kShare = kShare_;
    static constexpr i32 kColumns = kShare == 1 ? 32 : 64;  // of a block, at most
    static constexpr i32 kTokens = kShare == 1 ? 16 : 32;   // at a time
    static constexpr i32 kRows = kTokens / kProjectionWarps;
    // A share of the latents is kSliceVectors vectors of four. A warp loads kAtOnce pieces at once; a lane loads
    // kLaneVectors of one of them.
    static constexpr i32 kSliceVectors = kHeadDimV / 4 / kShare;
    static constexpr i32 kLanes = kSliceVectors < kWarpThreads ? kSliceVectors : kWarpThreads;
    static constexpr i32 kAtOnce = kWarpThreads / kLanes;
    static constexpr i32 kLaneVectors = kSliceVectors / kLanes;
    // Loads of a thread that are on their way while it weighs a row, and afterwards.
    static constexpr i32 kRowsAtOnce = kRowsAtOnce_;
    static constexpr i32 kFirstLoads = 8 / kRowsAtOnce, kLoads = 8;
    static constexpr i32 kSumWarps = kShare == 1 ? kProjectionWarps / 2 : kProjectionWarps;  // per exchange of sums
    static constexpr i32 kStages = kTokens / kTile;  // of single results of 16 bits
    static_assert(kTokens % kProjectionWarps == 0, "the warps must divide the tokens evenly");
    static_assert(kAtOnce <= 2, "lanes know the parity of their pieces");
};

// ---- Parameters ------------------------------------------------------------------------------------------------
struct ProjectionAddresses {
    const u16* w_uv;  // (h_q, d_head, 512)
    const u16* gate;  // (b, s_q, h_q, d_head), or null
    void* projected;  // (b, s_q, h_q, d_head), 16-bit or fp32
};
struct ProjectionSizes {
    i64 w_uv_stride_h_elems, w_uv_stride_d_elems;
    i64 gate_stride_b_elems, gate_stride_s_elems, gate_stride_h_elems;
    i64 projected_stride_b_elems, projected_stride_s_elems, projected_stride_h_elems;
    i32 tokens, d_head, share_tokens, projected_is_fp32;
};

// ---- Storage ---------------------------------------------------------------------------------------------------
// Pieces of a row of the block's head: piece 0, and piece j > 0 at `others` + j steps. Addresses are computed
// once for a row, by one lane: they take divisions.
struct alignas(16) RowPieces {
    const u8 *first, *others;
    const float *first_lse, *other_lse;  // null where there is one piece, and its result is final
    float* lse;                          // of all pieces; or null
    i32 count;
    bool for_all_warps;  // merged by all warps; always with more than kFewPieces
};

template <class C>
struct ProjectionStorage {
    alignas(16) u16 w_uv[C::kColumns][kPitch];
    alignas(16) u16 latents[C::kTokens][kPitch];
    float4 sums[C::kSumWarps][C::kSliceVectors];  // of a row with many pieces
    RowPieces rows[C::kTokens];
    MBarrier w_uv_full;
};

// ---- W_UV ------------------------------------------------------------------------------------------------------
template <class C>
struct ProjectionBlock {
    const ProjectionAddresses& at;
    const ProjectionSizes& n;
    ProjectionStorage<C>& s;
    i32 head, part, columns, first, end;  // tokens first .. end - 1

    // In clusters no division stands before the first load.
    MLA_DEVICE ProjectionBlock(const ProjectionAddresses& at, const ProjectionSizes& n, ProjectionStorage<C>& s)
        : at(at), n(n), s(s) {
        const u32 parts = C::kShare > 1 ? C::kShare : n.d_head / C::kColumns;
        head = blockIdx.x / parts;
        part = blockIdx.x % parts;
        columns = n.d_head / parts;
        first = blockIdx.y * n.share_tokens;
        end = min(n.tokens, first + n.share_tokens);
    }

    MLA_DEVICE i32 first_column() const { return part * columns; }
    MLA_DEVICE const u16* w_uv(i32 row) const {
        return at.w_uv + head * n.w_uv_stride_h_elems + (first_column() + row) * n.w_uv_stride_d_elems;
    }
    // First vector of four among the latents that the block merges.
    MLA_DEVICE i32 first_vector() const { return C::kShare == 1 ? 0 : part * C::kSliceVectors; }
};

// In clusters: called after thread 0 has announced the number of bytes.
template <class C>
MLA_DEVICE void fetch_w_uv(const ProjectionBlock<C>& block) {
    if constexpr (C::kShare > 1) {  // each warp a few rows: a lane issues after the other
        const i32 row = threadIdx.x / kWarpThreads + threadIdx.x % kWarpThreads * kProjectionWarps;
        if (row >= block.columns) return;
        cp_async_bulk(smem_addr(block.s.w_uv[row]), block.w_uv(row), kWeightRowBytes, block.s.w_uv_full);
    } else {
        constexpr i32 kRowVectors = kHeadDimV / 8;
        for (i32 i = threadIdx.x; i < block.columns * kRowVectors; i += kProjectionThreads) {
            const i32 row = i / kRowVectors, column = i % kRowVectors * 8;
            copy_16(&block.s.w_uv[row][column], block.w_uv(row) + column);
        }
    }
}

// Called by all threads.
template <class C>
MLA_DEVICE void wait_for_w_uv(const ProjectionBlock<C>& block) {
    if constexpr (C::kShare > 1) {
        mbarrier_wait(block.s.w_uv_full, 0);
    } else {
        wait_for_all_copies();
        __syncthreads();
    }
}

// To the L2 alone: also of weights that an earlier kernel may still be writing.
template <class C>
MLA_DEVICE void prefetch_w_uv(const ProjectionBlock<C>& block) {
#if __CUDA_ARCH__ >= 900
    for (i32 row = threadIdx.x; row < block.columns; row += kProjectionThreads) {
        cp_async_bulk_prefetch_l2(block.w_uv(row), kWeightRowBytes);
    }
#endif
}

// ---- The merge -------------------------------------------------------------------------------------------------
// exp2(lse - max), where no key (-Inf) weighs nothing. A NaN stays one.
MLA_DEVICE float piece_weight(float lse, float max) { return lse == negative_infinity() ? 0.f : exp2f(lse - max); }

template <class Source>
MLA_DEVICE float piece_lse2(const Source& source, const RowPieces& row, i32 piece) {
    const bool present = piece < row.count && row.first_lse != nullptr;
    const float* const from = piece == 0 ? row.first_lse : row.other_lse + source.lse_step(piece);
    const float lse = __uint_as_float(ld_global_4(from, present));
    return present ? source.lse2(lse) : negative_infinity();
}

// Four neighbouring numbers, as they are in memory.
template <class Source>
MLA_DEVICE uint4 load_four(const Source& source, const u8* piece, i32 vector, bool present) {
    if (source.is_fp32()) return ld_global_16(piece + 16 * vector, present);
    const uint2 x = ld_global_8(piece + 8 * vector, present);
    return make_uint4(x.x, x.y, 0, 0);
}

// Pieces of weight 0 may hold anything.
template <class Element, class Source>
MLA_DEVICE void add_piece(const Source& source, float4& sum, const uint4& x, float weight) {
    float wide[4];
    if (source.is_fp32()) {
        wide[0] = __uint_as_float(x.x), wide[1] = __uint_as_float(x.y);
        wide[2] = __uint_as_float(x.z), wide[3] = __uint_as_float(x.w);
    } else {
        wide[0] = Element::to_float((u16)x.x), wide[1] = Element::to_float((u16)(x.x >> 16));
        wide[2] = Element::to_float((u16)x.y), wide[3] = Element::to_float((u16)(x.y >> 16));
    }
    const auto counted = [&](i32 i) { return weight == 0.f ? 0.f : wide[i]; };
    sum.x = fmaf(weight, counted(0), sum.x);
    sum.y = fmaf(weight, counted(1), sum.y);
    sum.z = fmaf(weight, counted(2), sum.z);
    sum.w = fmaf(weight, counted(3), sum.w);
}

// A predicate that the compiler knows to be warp-uniform. Without it, the synchronisation of the shuffles behind the
// branch was half of the code.
MLA_DEVICE bool warp_agrees(bool x) { return __any_sync(kFullWarp, x); }

// A lane's sums over a range of pieces. Where two pieces are loaded at once, all of its pieces are even or all odd, and
// `odd` is unused.
template <class C>
struct PieceSums {
    float4 even[C::kLaneVectors] = {}, odd[C::kLaneVectors] = {};

    MLA_DEVICE float4 total(i32 i) const {
        const float4 x = even[i];
        if constexpr (C::kAtOnce == 1) return plus(x, odd[i]);
        constexpr u32 kOther = C::kLanes;
        return plus(x, make_float4(__shfl_xor_sync(kFullWarp, x.x, kOther), __shfl_xor_sync(kFullWarp, x.y, kOther),
                                   __shfl_xor_sync(kFullWarp, x.z, kOther), __shfl_xor_sync(kFullWarp, x.w, kOther)));
    }
    MLA_DEVICE static float4 plus(const float4& a, const float4& b) {
        return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    }
};

// kSlots * kAtOnce pieces, as a lane loads them.
template <class C, i32 kSlots>
struct LoadedPieces {
    static constexpr i32 kHeld = kSlots * C::kAtOnce;
    static_assert(C::kAtOnce == 2 || kSlots % 2 == 0, "the next ones begin with an even one");
    uint4 vectors[kSlots][C::kLaneVectors];

    // Loads pieces first .. end - 1, at most kHeld of them.
    template <class Source>
    MLA_DEVICE void load(const ProjectionBlock<C>& block, const Source& source, const RowPieces& row, i32 first,
                         i32 end) {
        const i32 lane = threadIdx.x % kWarpThreads, vector = block.first_vector() + lane % C::kLanes;
#pragma unroll
        for (i32 slot = 0; slot < kSlots; ++slot) {
            const i32 piece = first + slot * C::kAtOnce + lane / C::kLanes;
            const u8* const from = piece == 0 ? row.first : row.others + source.piece_step(piece);
#pragma unroll
            for (i32 i = 0; i < C::kLaneVectors; ++i) {
                vectors[slot][i] = load_four(source, from, vector + i * C::kLanes, piece < end);
            }
        }
    }

    // `weight` is of piece `lane` of the range, `first` the first one here.
    template <class Source>
    MLA_DEVICE void add(const Source& source, PieceSums<C>& sums, float weight, i32 first) const {
        const i32 lane = threadIdx.x % kWarpThreads;
#pragma unroll
        for (i32 slot = 0; slot < kSlots; ++slot) {
            const float w = __shfl_sync(kFullWarp, weight, first + slot * C::kAtOnce + lane / C::kLanes);
#pragma unroll
            for (i32 i = 0; i < C::kLaneVectors; ++i) {
                float4& sum = C::kAtOnce == 1 && slot % 2 == 1 ? sums.odd[i] : sums.even[i];
                add_piece<typename C::Element>(source, sum, vectors[slot][i], w);
            }
        }
    }
};

template <class C>
using FirstPieces = LoadedPieces<C, C::kFirstLoads / C::kLaneVectors>;
template <class C>
using NextPieces = LoadedPieces<C, C::kLoads / C::kLaneVectors>;

// To the blocks `rank`, `rank` + `step`, ... of the cluster.
template <class C>
MLA_DEVICE void share_latents(const ProjectionBlock<C>& block, i32 token, i32 vector, const float4& x, i32 rank = 0,
                              i32 step = 1) {
    typename C::Element kind;
    const uint2 rounded = make_uint2(cvt_x2(kind, x.x, x.y), cvt_x2(kind, x.z, x.w));
    u16* const to = &block.s.latents[token][4 * vector];
    if constexpr (C::kShare == 1) {
        *reinterpret_cast<uint2*>(to) = rounded;
    } else {
        for (; rank < C::kShare; rank += step) st_shared_cluster_v2(map_to_rank(smem_addr(to), rank), rounded);
    }
}

// True if all warps merge a row of these pieces, one of `count` rows, faster than one warp does: this waits for memory
// once per load of NextPieces, and all warps together about twice per row.
template <class C>
MLA_DEVICE bool all_warps_are_faster(i32 pieces, i32 count) {
    return 1 + ceil_div(pieces - FirstPieces<C>::kHeld, NextPieces<C>::kHeld) > 2 * count;
}

// Called by a warp: rows `from`, `from` + 8, ... of the block, kRowsAtOnce of them, if a warp merges them.
template <class C, class Source>
MLA_DEVICE void merge_few(const ProjectionBlock<C>& block, const Source& source, i32 from, i32 count) {
    const i32 lane = threadIdx.x % kWarpThreads;
    if (warp_agrees(from >= count)) return;
    // An absent row, or one that all warps merge, has no pieces here.
    const auto row_of = [&](i32 i) -> const RowPieces& {
        const i32 token = from + i * kProjectionWarps;
        return block.s.rows[token < count ? token : from];
    };
    i32 counts[C::kRowsAtOnce], most = 0;
#pragma unroll
    for (i32 i = 0; i < C::kRowsAtOnce; ++i) {
        const RowPieces& row = row_of(i);
        counts[i] = from + i * kProjectionWarps < count && !row.for_all_warps ? row.count : 0;
        most = max(most, counts[i]);
    }
    if (warp_agrees(most == 0)) return;
    float lses[C::kRowsAtOnce];
    FirstPieces<C> pieces[C::kRowsAtOnce];
#pragma unroll
    for (i32 i = 0; i < C::kRowsAtOnce; ++i) {
        const RowPieces& row = row_of(i);
        lses[i] = lane < counts[i] ? piece_lse2(source, row, lane) : negative_infinity();
        pieces[i].load(block, source, row, 0, counts[i]);
    }
#pragma unroll
    for (i32 i = 0; i < C::kRowsAtOnce; ++i) {
        const RowPieces& row = row_of(i);
        if (warp_agrees(counts[i] == 0)) continue;
        float weight = lane == 0 ? 1.f : 0.f;
        if (warp_agrees(row.first_lse != nullptr)) {
            const float max = warp_max(lses[i]);
            weight = piece_weight(lses[i], max);
            const float sum = warp_sum(weight);
            weight *= source.factor(block.head, max, sum);
            if (lane == 0 && block.part == 0 && row.lse != nullptr) *row.lse = source.final_lse(max, sum);
        }
        PieceSums<C> sums;
        pieces[i].add(source, sums, weight, 0);
#pragma unroll 1
        for (i32 at = FirstPieces<C>::kHeld; warp_agrees(at < counts[i]); at += NextPieces<C>::kHeld) {
            NextPieces<C> next;
            next.load(block, source, row, at, counts[i]);
            next.add(source, sums, weight, at);
        }
#pragma unroll
        for (i32 v = 0; v < C::kLaneVectors; ++v) {
            const i32 vector = block.first_vector() + lane % C::kLanes + v * C::kLanes;
            share_latents(block, from + i * kProjectionWarps, vector, sums.total(v), lane / C::kLanes, C::kAtOnce);
        }
    }
}

// Called by the block: a row's pieces, one range of them per warp.
template <class C, class Source>
MLA_DEVICE void merge_many(const ProjectionBlock<C>& block, const Source& source, i32 token) {
    constexpr i32 kLaneLses = kMaxRowPieces / kWarpThreads;
    const RowPieces row = block.s.rows[token];
    const i32 warp = uniform_warp(), lane = threadIdx.x % kWarpThreads;
    const i32 begin = row.count * warp / kProjectionWarps, end = row.count * (warp + 1) / kProjectionWarps;
    NextPieces<C> pieces;
    pieces.load(block, source, row, begin, end);
    const float lse = piece_lse2(source, row, begin + lane);
    float lses[kLaneLses];  // all asked for at once: one after the other, they took as long as the pieces
#pragma unroll
    for (i32 i = 0; i < kLaneLses; ++i) lses[i] = piece_lse2(source, row, lane + i * kWarpThreads);
    float max = negative_infinity(), sum = 0.f;
#pragma unroll
    for (i32 i = 0; i < kLaneLses; ++i) max = fmaxf(max, lses[i]);
    max = warp_max(max);
#pragma unroll
    for (i32 i = 0; i < kLaneLses; ++i) sum += piece_weight(lses[i], max);
    sum = warp_sum(sum);
    const float weight = begin + lane < end ? piece_weight(lse, max) * source.factor(block.head, max, sum) : 0.f;
    if (threadIdx.x == 0 && block.part == 0 && row.lse != nullptr) *row.lse = source.final_lse(max, sum);
    PieceSums<C> sums;
    pieces.add(source, sums, weight, 0);
#pragma unroll 1
    for (i32 at = NextPieces<C>::kHeld; warp_agrees(at < end - begin); at += NextPieces<C>::kHeld) {
        pieces.load(block, source, row, begin + at, end);
        pieces.add(source, sums, weight, at);
    }
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);  // of all warps, in their order
#pragma unroll
    for (i32 first = 0; first < kProjectionWarps; first += C::kSumWarps) {
#pragma unroll
        for (i32 v = 0; v < C::kLaneVectors; ++v) {
            const float4 of_warp = sums.total(v);
            if (lane < C::kLanes && (u32)(warp - first) < (u32)C::kSumWarps) {
                block.s.sums[warp - first][lane + v * C::kLanes] = of_warp;
            }
        }
        __syncthreads();
        if (threadIdx.x < C::kSliceVectors) {
#pragma unroll
            for (i32 i = 0; i < C::kSumWarps; ++i) {
                const float4 of_warp = block.s.sums[i][threadIdx.x];
                total = first + i == 0 ? of_warp : PieceSums<C>::plus(total, of_warp);
            }
        }
        __syncthreads();  // the sums have been read
    }
    if (threadIdx.x < C::kSliceVectors) share_latents(block, token, block.first_vector() + threadIdx.x, total);
}

// Called by the block or cluster: the latents of `count` tokens, in the shared memory of each block.
template <class C, class Source>
MLA_DEVICE void merge_tokens(const ProjectionBlock<C>& block, const Source& source, i32 count) {
    ProjectionStorage<C>& s = block.s;
    if constexpr (C::kShare > 1) cluster_wait();  // the peers run, and have read the latents of the tokens before
#pragma unroll 1
    for (i32 i = 0; i < C::kRows; i += C::kRowsAtOnce) {
        merge_few(block, source, uniform_warp() + i * kProjectionWarps, count);
    }
    __syncthreads();  // every warp has found its rows
#pragma unroll 1
    for (i32 token = 0; token < count; ++token) {
        if (warp_agrees(s.rows[token].for_all_warps)) merge_many(block, source, token);
    }
    if constexpr (C::kShare > 1) {
        cluster_sync();  // every block has the latents of all
    } else {
        __syncthreads();
    }
}

// ---- The product -----------------------------------------------------------------------------------------------
MLA_DEVICE float sigmoid(float x) { return 1.f / (1.f + exp2f(-kLog2E * x)); }

// Two neighbouring columns of one token's result.
template <class C>
MLA_DEVICE void store_pair(const ProjectionBlock<C>& block, i64 request, i64 query, i32 column, float x, float y) {
    using Element = typename C::Element;
    const ProjectionSizes& n = block.n;
    if (block.at.gate != nullptr) {
        const i64 from = request * n.gate_stride_b_elems + query * n.gate_stride_s_elems +
                         block.head * n.gate_stride_h_elems + column;
        const u32 gate = *reinterpret_cast<const u32*>(block.at.gate + from);
        x *= sigmoid(Element::to_float((u16)gate));
        y *= sigmoid(Element::to_float((u16)(gate >> 16)));
    }
    const i64 to = request * n.projected_stride_b_elems + query * n.projected_stride_s_elems +
                   block.head * n.projected_stride_h_elems + column;
    if (n.projected_is_fp32) {
        *reinterpret_cast<float2*>(static_cast<float*>(block.at.projected) + to) = make_float2(x, y);
    } else {
        *reinterpret_cast<u32*>(static_cast<u16*>(block.at.projected) + to) = cvt_x2(Element{}, x, y);
    }
}

#if __CUDA_ARCH__ >= 800
// A warp's part of W_UV: 16 columns d of the block, by half of the columns c. Warps 2 i and 2 i + 1 have the two halves
// for the same columns d; there may be fewer of these than warps. Read from shared memory for each tile.
template <class C>
struct WarpWeights {
    static constexpr i32 kHalf = kHeadDimV / 2, kWarpColumns = 16, kMaxHead = 256;
    static constexpr i32 kMaxColumns = kMaxHead / C::kShare < C::kColumns ? kMaxHead / C::kShare : C::kColumns;
    static_assert(kMaxColumns / kWarpColumns <= kProjectionWarps / 2, "all columns have warps");
    static_assert(kMaxColumns * kTile * sizeof(float) <= sizeof(ProjectionStorage<C>::sums), "halves meet there");
    i32 column, half;
    SmemAddr from;

    MLA_DEVICE explicit WarpWeights(const ProjectionBlock<C>& block)
        : column(uniform_warp() / 2 * kWarpColumns), half(uniform_warp() % 2), from(smem_addr(&block.s.w_uv)) {
        const i32 lane = threadIdx.x % kWarpThreads;
        const i32 row = min(column + lane % 8 + lane / 16 * 8, block.columns - 1);
        from = smem_addr(&block.s.w_uv[row][half * kHalf + lane / 8 % 2 * 8]);
    }
    MLA_DEVICE bool works(const ProjectionBlock<C>& block) const { return column < block.columns; }
    // In mma.sync's fragment layout.
    MLA_DEVICE void load(u32 (&b)[4], i32 k) const { ldmatrix_x4(b, from + 32 * k); }
    // Slot in which the second half leaves sum i of its 8 sums.
    MLA_DEVICE float& partial(const ProjectionBlock<C>& block, i32 i) const {
        float* const sums = reinterpret_cast<float*>(block.s.sums);
        return sums[(column / kWarpColumns * 8 + i) * kWarpThreads + threadIdx.x % kWarpThreads];
    }
};

// The warp's weights, held in registers for all tiles.
template <class C>
struct HeldWeights : WarpWeights<C> {
    u32 of[WarpWeights<C>::kHalf / 16][4];

    MLA_DEVICE explicit HeldWeights(const ProjectionBlock<C>& block) : WarpWeights<C>(block) {
#pragma unroll
        for (i32 k = 0; k < this->kHalf / 16; ++k) WarpWeights<C>::load(of[k], k);
    }
    MLA_DEVICE void load(u32 (&b)[4], i32 k) const {
#pragma unroll
        for (i32 i = 0; i < 4; ++i) b[i] = of[k][i];
    }
};

// Projects a tile of `count` tokens whose latents begin at row `row` of shared memory. Called by the block, which
// synchronises between the halves and before the next tile.
template <class C, class Weights>
MLA_DEVICE void project_tile(const ProjectionBlock<C>& block, const Weights& w, i32 row, i32 first_token, i32 count,
                             i32 s_q) {
    const i32 lane = threadIdx.x % kWarpThreads;
    float total[8];  // of the left eight columns, then of the right ones
    if (w.works(block)) {
        // The last row stands in for missing ones.
        const i32 token = row + min(lane % kTile, count - 1);
        const SmemAddr from = smem_addr(&block.s.latents[token][w.half * w.kHalf + lane / 16 * 8]);
        float sums[2][2][4] = {};  // independent of each other, so that products need not wait for each other
#pragma unroll
        for (i32 k = 0; k < w.kHalf / 16; ++k) {
            u32 a[4], b[4];
            w.load(b, k);
            ldmatrix_x4(a, from + 32 * k);
            mma_m16n8k16(typename C::Element{}, sums[k % 2][0], a, b[0], b[1]);
            mma_m16n8k16(typename C::Element{}, sums[k % 2][1], a, b[2], b[3]);
        }
#pragma unroll
        for (i32 i = 0; i < 8; ++i) {
            total[i] = sums[0][i / 4][i % 4] + sums[1][i / 4][i % 4];
            if (w.half == 1) w.partial(block, i) = total[i];
        }
    }
    __syncthreads();
    if (!w.works(block) || w.half == 1) return;
#pragma unroll
    for (i32 i = 0; i < 8; ++i) total[i] += w.partial(block, i);
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
        const i32 token = lane / 4 + 8 * half;
        if (token >= count) continue;
        const i32 index = first_token + token, request = s_q == 1 ? index : index / s_q;
#pragma unroll
        for (i32 right = 0; right < 2; ++right) {
            const i32 column = w.column + 8 * right + lane % 4 * 2;
            if (column >= block.columns) continue;
            store_pair(block, request, index - request * s_q, block.first_column() + column,
                       total[4 * right + 2 * half], total[4 * right + 2 * half + 1]);
        }
    }
}
#else
template <class C>
struct WarpWeights {
    MLA_DEVICE explicit WarpWeights(const ProjectionBlock<C>&) {}
};
template <class C>
using HeldWeights = WarpWeights<C>;

template <class C>
MLA_DEVICE void project_tile(const ProjectionBlock<C>& block, const WarpWeights<C>&, i32 row, i32 first_token,
                             i32 count, i32 s_q) {
    const auto product = [&](const u16* latents, const u16* weights) {
        float sum = 0.f;
        for (i32 k = 0; k < kHeadDimV; ++k) {
            sum = fmaf(C::Element::to_float(latents[k]), C::Element::to_float(weights[k]), sum);
        }
        return sum;
    };
    const i32 pairs = block.columns / 2;
    for (i32 i = threadIdx.x; i < min(count, kTile) * pairs; i += kProjectionThreads) {
        const i32 token = i / pairs, column = i % pairs * 2, index = first_token + token, request = index / s_q;
        const u16* const latents = block.s.latents[row + token];
        store_pair(block, request, index - request * s_q, block.first_column() + column,
                   product(latents, block.s.w_uv[column]), product(latents, block.s.w_uv[column + 1]));
    }
    __syncthreads();
}
#endif

// ---- Block -----------------------------------------------------------------------------------------------------
// From here on the previous kernel's output may be read.
template <class C, class Source>
MLA_DEVICE void wait_for_inputs(const ProjectionBlock<C>& block, const Source&) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if constexpr (!Source::kWeightsAreOlder) fetch_w_uv(block);
}

template <class C, class Source>
MLA_DEVICE void merge_and_project(const ProjectionBlock<C>& block, const Source& source) {
#pragma unroll 1
    for (i32 first = block.first; first < block.end; first += C::kTokens) {
        const i32 count = min(C::kTokens, block.end - first);
        source.find(block, first, count);
        if (first == block.first) wait_for_inputs(block, source);
        merge_tokens(block, source, count);
        if (first == block.first) wait_for_w_uv(block);
        const WarpWeights<C> w(block);
#pragma unroll 1
        for (i32 tile = 0; tile < count; tile += kTile) {
            if (tile > 0) __syncthreads();  // sums of the tile before have been read
            project_tile(block, w, tile, first + tile, count - tile, source.queries());
        }
        if (first + C::kTokens >= block.end) break;
        if constexpr (C::kShare > 1) {
            cluster_arrive();  // the latents have been read, see `merge_tokens`
        } else {
            __syncthreads();
        }
    }
}

// Copies up to kTile rows of 16-bit results, which need no merge, to shared memory, one row per warp.
template <class C, class Source>
MLA_DEVICE void fetch_results(const ProjectionBlock<C>& block, const Source& source, i32 first) {
    const i32 first_row = (first - block.first) / kTile % C::kStages * kTile;
#pragma unroll
    for (i32 i = 0; i < kTile; i += kProjectionWarps) {
        const i32 row = i + uniform_warp(), column = threadIdx.x % kWarpThreads * 8;
        if (first + row >= block.end) break;
        const u16* const from = source.result(block.head, first + row) + column;
        u16* const to = &block.s.latents[first_row + row][column];
#pragma unroll
        for (i32 c = 0; c < kHeadDimV; c += 8 * kWarpThreads) copy_16(to + c, from + c);
    }
}

template <class C, class Source>
MLA_DEVICE void copy_and_project(const ProjectionBlock<C>& block, const Source& source) {
    constexpr i32 kAhead = (C::kStages - 1) * kTile;
    if constexpr (kAhead > 0) {
        fetch_results(block, source, block.first);
        commit_copies();
    }
    const auto wait = [&](i32 first) {  // for the tile that begins there
        if (first + kAhead < block.end) fetch_results(block, source, first + kAhead);
        commit_copies();
        wait_for_copies<C::kStages - 1>();
    };
    wait(block.first);
    wait_for_w_uv(block);
    __syncthreads();
    const HeldWeights<C> w(block);
#pragma unroll 1
    for (i32 first = block.first;;) {
        const i32 row = (first - block.first) / kTile % C::kStages * kTile;
        project_tile(block, w, row, first, block.end - first, source.queries());  // the tile has been read
        first += kTile;
        if (first >= block.end) break;
        wait(first);
        __syncthreads();
    }
}

// `source` describes the rows. To find them it may read data older than the previous kernel: each warp finds its rows
// before the latents are overwritten. W_UV is as old where kWeightsAreOlder.
template <class C, class Source>
MLA_DEVICE void run_projection(const ProjectionBlock<C>& block, const Source& source) {
    const bool merges = !source.are_results();
    if constexpr (C::kShare > 1) {
        if (threadIdx.x == 0) {
            mbarrier_init(block.s.w_uv_full, 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect_tx(block.s.w_uv_full, block.columns * kWeightRowBytes);
        }
        __syncthreads();
        if (merges) cluster_arrive_relaxed();
    }
    if constexpr (Source::kWeightsAreOlder) {
        fetch_w_uv(block);
    } else {
        source.prefetch(block);
        prefetch_w_uv(block);
    }
    if (merges) {
        merge_and_project(block, source);
    } else {
        wait_for_inputs(block, source);
        copy_and_project(block, source);
    }
}
}  // namespace mla::attention
