// After attention: the partial results of a head's rows merged, and multiplied by the head's W_UV.
//
//   latents[t] = sum_j w_j piece_j[t],   w_j = exp2(lse_j - max lse) / sum_j exp2(lse_j - max lse)
//   result[t, d] = sum_c latents[t, c] W_UV[head, d, c] * sigmoid(gate[t, head, d])
//
// Grid: x = heads, each by `parts` blocks, which have as many of its columns d; y = equal shares of the tokens. The
// blocks of a cluster are the parts of one head: each merges a share of the columns c of its tokens, and gets the other
// shares from its peers. Without clusters every block merges all of them. A block goes through its tokens, kTokens at a
// time:
//
//   W_UV to shared memory | weigh and merge | exchange | product | store | weigh and merge | ...
//
// A single result in 16 bits is copied to shared memory, the next tokens during the product.
//
// A block reads W_UV once, whatever the number of tokens, and asks for it before anything else: it is most of what a
// call with few tokens reads. Latents are rounded to 16 bits before the product, as they are where a call of attention
// ends.
//
// The order of the sums depends on the number of a row's pieces only, and on the number of heads.
//
// Source: merging and projecting in one kernel is tokenspeed's idea. What differs: columns are shared in clusters, and
// any number of pieces is merged.
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
#include "tile/warp.cuh"

namespace mla::attention {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kProjectionThreads = 256;
constexpr i32 kProjectionWarps = kProjectionThreads / kWarpThreads;
constexpr i32 kFewPieces = kWarpThreads;  // of a row that a group of threads merges alone
constexpr i32 kLoadsInFlight = 8;         // of a thread
constexpr i32 kMaxRowPieces = kProjectionThreads;
constexpr i32 kPitch = kHeadDimV + 8;  // of rows in shared memory: ldmatrix then meets every bank

// kShare: blocks of a cluster, which share the merge; 1 without clusters.
template <class Element_, i32 kShare_>
struct ProjectionConfig {
    using Element = Element_;
    static constexpr i32 kShare = kShare_;
    static constexpr i32 kColumns = kShare == 1 ? 32 : 64;  // of a block, at most
    static constexpr i32 kTokens = kShare == 1 ? 16 : 32;   // at a time
    static constexpr i32 kSliceVectors = kHeadDimV / 4 / kShare;
    static constexpr i32 kGroups = kProjectionThreads / kSliceVectors;
    static constexpr i32 kCopied = 16;                 // single results of 16 bits at a time
    static constexpr i32 kStages = kTokens / kCopied;  // of them
    static_assert(kTokens % kProjectionWarps == 0, "a warp weighs as many rows as the others");
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
    i32 tokens, d_head, parts, projected_is_fp32;
};

// ---- Storage ---------------------------------------------------------------------------------------------------
// What the result of one row is made of: piece 0, and piece j > 0 at `others` + j steps.
struct RowPieces {
    const void *first, *others;
    const float *first_lse, *other_lse;  // null where there is one piece, and its result is final
    float* lse;                          // of all pieces; or null
    i32 count;
};

template <class C>
struct ProjectionStorage {
    alignas(16) u16 w_uv[C::kColumns][kPitch];
    alignas(16) u16 latents[C::kTokens][kPitch];
    float4 sums[kProjectionThreads];  // of a row with many pieces, by groups
    RowPieces rows[C::kTokens];
    float weights[C::kTokens][kFewPieces];
    float many_weights[kMaxRowPieces];
    float warp_max[kProjectionWarps], warp_sums[kProjectionWarps];
    i32 first_cut[C::kTokens], cuts[C::kTokens];  // of requests, for `Source::find`
};

// ---- W_UV ------------------------------------------------------------------------------------------------------
template <class C>
struct ProjectionBlock {
    const ProjectionAddresses& at;
    const ProjectionSizes& n;
    ProjectionStorage<C>& s;
    i32 head, part, columns, first, end;  // tokens first .. end - 1

    MLA_DEVICE ProjectionBlock(const ProjectionAddresses& at, const ProjectionSizes& n, ProjectionStorage<C>& s)
        : at(at), n(n), s(s), head(blockIdx.x / n.parts), part(blockIdx.x % n.parts), columns(n.d_head / n.parts) {
        const i64 tiles = ((i64)n.tokens + 15) / 16;  // of the product
        first = tiles * blockIdx.y / gridDim.y * 16;
        end = min((i64)n.tokens, tiles * (blockIdx.y + 1) / gridDim.y * 16);
    }

    MLA_DEVICE i32 first_column() const { return part * columns; }
    MLA_DEVICE const u16* w_uv(i32 row) const {
        return at.w_uv + head * n.w_uv_stride_h_elems + (first_column() + row) * n.w_uv_stride_d_elems;
    }
    // The share of the latents that the block merges, in vectors of four.
    MLA_DEVICE i32 first_vector() const { return C::kShare == 1 ? 0 : part * C::kSliceVectors; }
};

template <class C>
MLA_DEVICE void fetch_w_uv(const ProjectionBlock<C>& block) {
    constexpr i32 kRowPieces = kHeadDimV / 8;
    for (i32 i = threadIdx.x; i < block.columns * kRowPieces; i += kProjectionThreads) {
        const i32 row = i / kRowPieces, column = i % kRowPieces * 8;
        copy_16(&block.s.w_uv[row][column], block.w_uv(row) + column);
    }
}

// To the L2 alone: also of weights that an earlier kernel may still be writing.
template <class C>
MLA_DEVICE void prefetch_w_uv(const ProjectionBlock<C>& block) {
#if __CUDA_ARCH__ >= 900
    constexpr i32 kLine = 64, kRowLines = kHeadDimV / kLine;
    for (i32 i = threadIdx.x; i < block.columns * kRowLines; i += kProjectionThreads) {
        prefetch_global_l2(block.w_uv(i / kRowLines) + i % kRowLines * kLine);
    }
#endif
}

// ---- The merge -------------------------------------------------------------------------------------------------
// exp2(lse - max), where no key (-Inf) weighs nothing. A NaN stays one.
MLA_DEVICE float piece_weight(float lse, float max) { return lse == negative_infinity() ? 0.f : exp2f(lse - max); }

template <class Source>
MLA_DEVICE float piece_lse2(const Source& source, const RowPieces& row, i32 piece) {
    return source.lse2(piece == 0 ? *row.first_lse : row.other_lse[piece * source.lse_step()]);
}

// Four neighbouring numbers of a piece, as they are in memory; zeros if it weighs nothing, and is not read.
template <class Source>
MLA_DEVICE uint4 load_piece(const Source& source, const RowPieces& row, i32 piece, i32 vector, bool present) {
    const void* const from = piece == 0 ? row.first : row.others;
    const i64 at = (piece == 0 ? 0 : piece * source.piece_step()) + 4 * vector;
    if (source.is_fp32()) return ld_global_16(static_cast<const float*>(from) + at, present);
    const uint2 x = ld_global_8(static_cast<const u16*>(from) + at, present);
    return make_uint4(x.x, x.y, 0, 0);
}

template <class Element, class Source>
MLA_DEVICE void add_piece(const Source& source, float4& sum, const uint4& x, float weight) {
    float4 wide;
    if (source.is_fp32()) {
        wide = make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
    } else {
        wide = make_float4(Element::to_float((u16)x.x), Element::to_float((u16)(x.x >> 16)),
                           Element::to_float((u16)x.y), Element::to_float((u16)(x.y >> 16)));
    }
    sum.x = fmaf(weight, wide.x, sum.x);
    sum.y = fmaf(weight, wide.y, sum.y);
    sum.z = fmaf(weight, wide.z, sum.z);
    sum.w = fmaf(weight, wide.w, sum.w);
}

template <class C>
MLA_DEVICE void store_latents(ProjectionStorage<C>& s, i32 token, i32 vector, const float4& x) {
    typename C::Element kind;
    *reinterpret_cast<uint2*>(&s.latents[token][4 * vector]) =
        make_uint2(cvt_x2(kind, x.x, x.y), cvt_x2(kind, x.z, x.w));
}

// The weights of rows with few pieces: a lane has one of them, a warp a row. All rows' lses are on their way at once.
template <class C, class Source>
MLA_DEVICE void weigh_few(const ProjectionBlock<C>& block, const Source& source, i32 count) {
    ProjectionStorage<C>& s = block.s;
    constexpr i32 kRows = C::kTokens / kProjectionWarps;
    const i32 warp = uniform_warp(), piece = threadIdx.x % kWarpThreads;
    float lses[kRows];
#pragma unroll
    for (i32 i = 0; i < kRows; ++i) {
        const i32 token = warp + i * kProjectionWarps;
        const RowPieces& row = s.rows[token < count ? token : 0];
        const bool present = token < count && row.first_lse != nullptr && piece < row.count;
        lses[i] = present ? piece_lse2(source, row, piece) : negative_infinity();
    }
#pragma unroll
    for (i32 i = 0; i < kRows; ++i) {
        const i32 token = warp + i * kProjectionWarps;
        if (token >= count || s.rows[token].count > kFewPieces) continue;
        const RowPieces& row = s.rows[token];
        const float max = warp_max(lses[i]), weight = piece_weight(lses[i], max), sum = warp_sum(weight);
        s.weights[token][piece] = row.first_lse == nullptr ? 1.f : weight * source.factor(block.head, max, sum);
        if (piece == 0 && block.part == 0 && row.lse != nullptr) *row.lse = source.final_lse(max, sum);
    }
}

// By each group of threads: its rows with few pieces. Whatever the rows, so many pieces are on their way.
template <class C, class Source>
MLA_DEVICE void merge_few(const ProjectionBlock<C>& block, const Source& source, i32 count) {
    ProjectionStorage<C>& s = block.s;
    const i32 vector = block.first_vector() + threadIdx.x % C::kSliceVectors;
    i32 token = threadIdx.x / C::kSliceVectors, piece = 0;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    while (true) {
        i32 tokens[kLoadsInFlight], pieces[kLoadsInFlight];
        uint4 loaded[kLoadsInFlight];
#pragma unroll
        for (i32 i = 0; i < kLoadsInFlight; ++i) {
            while (token < count && s.rows[token].count > kFewPieces) token += C::kGroups;
            tokens[i] = token < count ? token : -1;
            pieces[i] = piece;
            const RowPieces& row = s.rows[max(0, tokens[i])];
            const bool present = tokens[i] >= 0 && s.weights[max(0, tokens[i])][piece] != 0.f;
            loaded[i] = load_piece(source, row, piece, vector, present);
            if (tokens[i] >= 0 && ++piece == row.count) {
                piece = 0;
                token += C::kGroups;
            }
        }
#pragma unroll
        for (i32 i = 0; i < kLoadsInFlight; ++i) {
            if (tokens[i] < 0) return;
            add_piece<typename C::Element>(source, sum, loaded[i], s.weights[tokens[i]][pieces[i]]);
            if (pieces[i] + 1 < s.rows[tokens[i]].count) continue;
            store_latents(s, tokens[i], vector, sum);
            sum = make_float4(0.f, 0.f, 0.f, 0.f);
        }
    }
}

// By the block: the weights of a row with many pieces, a thread each.
template <class C, class Source>
MLA_DEVICE void weigh_many(const ProjectionBlock<C>& block, const Source& source, const RowPieces& row) {
    ProjectionStorage<C>& s = block.s;
    const i32 thread = threadIdx.x, warp = thread / kWarpThreads;
    const float lse = thread < row.count ? piece_lse2(source, row, thread) : negative_infinity();
    const float largest = warp_max(lse);
    if (thread % kWarpThreads == 0) s.warp_max[warp] = largest;
    __syncthreads();
    float max = s.warp_max[0], sum = 0.f;
#pragma unroll
    for (i32 i = 1; i < kProjectionWarps; ++i) max = fmaxf(max, s.warp_max[i]);
    const float weight = piece_weight(lse, max), of_warp = warp_sum(weight);
    if (thread % kWarpThreads == 0) s.warp_sums[warp] = of_warp;
    __syncthreads();
#pragma unroll
    for (i32 i = 0; i < kProjectionWarps; ++i) sum += s.warp_sums[i];
    s.many_weights[thread] = weight * source.factor(block.head, max, sum);
    if (thread == 0 && block.part == 0 && row.lse != nullptr) *row.lse = source.final_lse(max, sum);
    __syncthreads();
}

// By the block: a row with many pieces, of which each group of threads has a share.
template <class C, class Source>
MLA_DEVICE void merge_many(const ProjectionBlock<C>& block, const Source& source, i32 token) {
    ProjectionStorage<C>& s = block.s;
    const RowPieces row = s.rows[token];
    weigh_many(block, source, row);
    const i32 in_slice = threadIdx.x % C::kSliceVectors, vector = block.first_vector() + in_slice;
    const i32 group = threadIdx.x / C::kSliceVectors;
    const i32 begin = row.count * group / C::kGroups, end = row.count * (group + 1) / C::kGroups;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (i32 first = begin; first < end; first += kLoadsInFlight) {
        uint4 loaded[kLoadsInFlight];
#pragma unroll
        for (i32 i = 0; i < kLoadsInFlight; ++i) {
            const i32 piece = min(first + i, end - 1);
            const bool present = first + i < end && s.many_weights[piece] != 0.f;
            loaded[i] = load_piece(source, row, piece, vector, present);
        }
#pragma unroll
        for (i32 i = 0; i < kLoadsInFlight; ++i) {
            const i32 piece = min(first + i, end - 1);
            add_piece<typename C::Element>(source, sum, loaded[i], first + i < end ? s.many_weights[piece] : 0.f);
        }
    }
    s.sums[threadIdx.x] = sum;
    __syncthreads();
    if (group == 0) {
#pragma unroll
        for (i32 i = 1; i < C::kGroups; ++i) {
            const float4 other = s.sums[i * C::kSliceVectors + in_slice];
            sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
        }
        store_latents(s, token, vector, sum);
    }
    // The next row's sums are written after two more barriers.
}

// The shares of the peers; a thread has several vectors on their way.
template <class C>
MLA_DEVICE void fetch_shares(const ProjectionBlock<C>& block, i32 count) {
    constexpr i32 kShareVectors = kHeadDimV / 8 / C::kShare, kOthers = kHeadDimV / 8 - kShareVectors, kInFlight = 4;
    const auto rank_of = [&](i32 at) {
        const i32 other = at % kOthers / kShareVectors;
        return other + (other >= block.part);
    };
    const auto place = [&](i32 at) {
        return &block.s.latents[at / kOthers][(rank_of(at) * kShareVectors + at % kShareVectors) * 8];
    };
    const i32 vectors = count * kOthers;
    for (i32 first = threadIdx.x; first < vectors; first += kInFlight * kProjectionThreads) {
        float4 loaded[kInFlight];
#pragma unroll
        for (i32 i = 0; i < kInFlight; ++i) {
            const i32 at = min(first + i * kProjectionThreads, vectors - 1);
            loaded[i] = ld_shared_cluster_v4(map_to_rank(smem_addr(place(at)), rank_of(at)));
        }
#pragma unroll
        for (i32 i = 0; i < kInFlight; ++i) {
            const i32 at = first + i * kProjectionThreads;
            if (at < vectors) *reinterpret_cast<float4*>(place(at)) = loaded[i];
        }
    }
}

// By the block, or the cluster: the latents of `count` tokens, in the shared memory of each block.
template <class C, class Source>
MLA_DEVICE void merge_tokens(const ProjectionBlock<C>& block, const Source& source, i32 count) {
    ProjectionStorage<C>& s = block.s;
    weigh_few(block, source, count);
    __syncthreads();
    merge_few(block, source, count);
    for (i32 token = 0; token < count; ++token) {
        if (s.rows[token].count > kFewPieces) merge_many(block, source, token);
    }
    const i32 padded = (count + 15) / 16 * 16;  // whole tiles of the product
    for (i32 i = threadIdx.x; i < (padded - count) * (kHeadDimV / 8); i += kProjectionThreads) {
        *reinterpret_cast<uint4*>(&s.latents[count + i / (kHeadDimV / 8)][i % (kHeadDimV / 8) * 8]) =
            make_uint4(0, 0, 0, 0);
    }
    if constexpr (C::kShare > 1) {
        cluster_sync();  // every block has its share
        fetch_shares(block, count);
        cluster_arrive();  // see `merge_and_project`
    }
    __syncthreads();
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

// Of `count` tokens, whose latents begin with that row in shared memory.
template <class C>
MLA_DEVICE void project_tokens(const ProjectionBlock<C>& block, i32 first_token, i32 count, i32 s_q,
                               i32 first_row = 0) {
    const ProjectionStorage<C>& s = block.s;
    const i32 lane = threadIdx.x % kWarpThreads, tiles = block.columns / 8;
    // Of a tile of 16 tokens and 8 columns.
    const auto store = [&](i32 tile_token, i32 tile_column, i32 row, float x, float y) {
        const i32 token = tile_token + row;
        if (token >= count) return;
        const i32 index = first_token + token;
        store_pair(block, index / s_q, index % s_q, block.first_column() + tile_column + lane % 4 * 2, x, y);
    };
    for (i32 unit = threadIdx.x / kWarpThreads; unit < ceil_div(count, 16) * tiles; unit += kProjectionWarps) {
        const i32 tile_token = unit / tiles * 16, tile_column = unit % tiles * 8;
#if __CUDA_ARCH__ >= 800
        const SmemAddr a_from = smem_addr(&s.latents[first_row + tile_token + lane % 16][lane / 16 * 8]);
        const SmemAddr b_from = smem_addr(&s.w_uv[tile_column + lane % 8][lane / 8 * 8]);
        float sums[4][4] = {};  // independent of each other, so that products need not wait for each other
#pragma unroll 4
        for (i32 k = 0; k < kHeadDimV; k += 64) {
#pragma unroll
            for (i32 half = 0; half < 2; ++half) {
                u32 a[2][4], b[4];
                const u32 bytes = 2 * (k + 32 * half);
                ldmatrix_x4(b, b_from + bytes);
                ldmatrix_x4(a[0], a_from + bytes);
                ldmatrix_x4(a[1], a_from + bytes + 32);
                mma_m16n8k16(typename C::Element{}, sums[2 * half], a[0], b[0], b[1]);
                mma_m16n8k16(typename C::Element{}, sums[2 * half + 1], a[1], b[2], b[3]);
            }
        }
        float total[4];
#pragma unroll
        for (i32 i = 0; i < 4; ++i) total[i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
        store(tile_token, tile_column, lane / 4, total[0], total[1]);
        store(tile_token, tile_column, lane / 4 + 8, total[2], total[3]);
#else
        for (i32 row = lane / 4; row < 16; row += 8) {
            float x = 0.f, y = 0.f;
            for (i32 k = 0; k < kHeadDimV; ++k) {
                const float latent = C::Element::to_float(s.latents[first_row + tile_token + row][k]);
                x = fmaf(latent, C::Element::to_float(s.w_uv[tile_column + lane % 4 * 2][k]), x);
                y = fmaf(latent, C::Element::to_float(s.w_uv[tile_column + lane % 4 * 2 + 1][k]), y);
            }
            store(tile_token, tile_column, row, x, y);
        }
#endif
    }
}

// ---- Block -----------------------------------------------------------------------------------------------------
// After `source.find`, for the block's first tokens.
template <class C, class Source>
MLA_DEVICE void merge_and_project(const ProjectionBlock<C>& block, const Source& source) {
    for (i32 first = block.first; first < block.end; first += C::kTokens) {
        const i32 count = min(C::kTokens, block.end - first);
        if (first > block.first) source.find(block, first, count);
        merge_tokens(block, source, count);
        if (first == block.first) {
            wait_for_all_copies();  // W_UV
            __syncthreads();
        }
        project_tokens(block, first, count, source.queries());
        if constexpr (C::kShare > 1) cluster_wait();  // the peers have read this block's share
    }
}

// Of results that need no merge, in 16 bits: kCopied rows to shared memory; zeros for a tile's others.
template <class C, class Source>
MLA_DEVICE void fetch_results(const ProjectionBlock<C>& block, const Source& source, i32 first) {
    constexpr i32 kRowPieces = kHeadDimV / 8;
    const i32 first_row = first / C::kCopied % C::kStages * C::kCopied;
    for (i32 i = threadIdx.x; i < C::kCopied * kRowPieces; i += kProjectionThreads) {
        const i32 row = i / kRowPieces, column = i % kRowPieces * 8;
        u16* const to = &block.s.latents[first_row + row][column];
        if (first + row < block.end) {
            copy_16(to, source.result(block.head, first + row) + column);
        } else {
            *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        }
    }
}

template <class C, class Source>
MLA_DEVICE void copy_and_project(const ProjectionBlock<C>& block, const Source& source) {
    constexpr i32 kAhead = (C::kStages - 1) * C::kCopied;
    if constexpr (kAhead > 0) {
        fetch_results(block, source, block.first);
        commit_copies();
    }
    for (i32 first = block.first; first < block.end; first += C::kCopied) {
        if (first + kAhead < block.end) fetch_results(block, source, first + kAhead);
        commit_copies();
        wait_for_copies<C::kStages - 1>();
        __syncthreads();
        project_tokens(block, first, min(C::kCopied, block.end - first), source.queries(),
                       first / C::kCopied % C::kStages * C::kCopied);
        __syncthreads();  // the results have been read
    }
}

// `source` says what the rows are made of, and may read for that what is older than the kernel before this one; its
// `find` ends with a barrier of the block, before which the latents of the tokens before have been read. W_UV is as old
// where kWeightsAreOlder.
template <class C, class Source>
MLA_DEVICE void run_projection(const ProjectionBlock<C>& block, const Source& source) {
    if constexpr (Source::kWeightsAreOlder) {
        fetch_w_uv(block);
    } else {
        prefetch_w_uv(block);
    }
    const bool merges = !source.are_results();
    if (merges) source.find(block, block.first, min(C::kTokens, block.end - block.first));
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if constexpr (!Source::kWeightsAreOlder) fetch_w_uv(block);
    if (merges) {
        merge_and_project(block, source);
    } else {
        copy_and_project(block, source);
    }
}
}  // namespace mla::attention
