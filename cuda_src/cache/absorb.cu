// Before attention: multiplies the queries' non-RoPE part by a head's W_UK, puts the RoPE columns next to the result,
// turned or unchanged, and writes tokens to a paged cache.
//
//   q[t, :512] = q_nope[t, head] W_UK[head],   q[t, 512:] = RoPE(q_rope[t, head])
//   cache[slot] = record of (latent, rope)                                            cache/append.cuh
//
// Grid: x = blocks of eight tokens each, then heads, 2^parts_log2 blocks per head; y = shares of the tokens. The blocks
// of a head divide the 512 columns, and the RoPE part by tokens. A block requests its part of W_UK before anything
// else, reads it once and keeps it in registers, 32 columns per warp. It processes its tokens kStep at a time, while
// the next ones are in flight; where it has fewer columns than its warps could hold, the warps also divide tiles of 16
// tokens.
//
//   W_UK, first and next tokens on their way | RoPE | W_UK to registers | product, store | product, store | ...
#include "attention/shapes.cuh"
#include "cache/prepare.cuh"
#include "common/facts.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"
#include "tile/copies.cuh"
#include "tile/warp.cuh"

namespace mla::cache {

// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = kAppendThreads;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kMaxDNope = MLA_MAX_D_NOPE;                                   // rows of W_UK
constexpr i32 kWarpColumns = 32;                                            // columns whose weights a warp keeps
constexpr i32 kMaxColumns = kMaxDNope <= 192 ? 128 : 64;                    // of a block
constexpr i32 kMinColumns = 64;                                             // for few heads
constexpr i32 kTile = 16;                                                   // tokens of a product
constexpr i32 kStep = __CUDA_ARCH__ >= 800 ? 2 * kTile : kTile;             // tokens at a time
constexpr i32 kStages = 2;                                                  // tokens at work, and the next ones
constexpr i32 kColumnsPitch = kMaxColumns + 8, kNopePitch = kMaxDNope + 8;  // ldmatrix then uses every bank
constexpr i32 kSlice = 64;                                                  // d_nope is a multiple of it
constexpr i32 kBlocksPerSm = kMaxDNope <= 128 ? 4 : 2;
static_assert(kMaxColumns <= kWarpColumns * kWarps, "a warp has its columns");

// ---- Params ----------------------------------------------------------------------------------------------------
struct AbsorbAddresses {
    const u16* q_nope;  // (t, h_q, d_nope)
    const u16* w_uk;    // (h_q, d_nope, 512)
    u16* absorbed;      // (t, h_q, 512), or with RoPE's columns (t, h_q, 576)
};
struct AbsorbSizes {
    i64 q_nope_stride_t_elems, q_nope_stride_h_elems;
    i64 w_uk_stride_h_elems, w_uk_stride_d_elems;
    i64 absorbed_stride_t_elems, absorbed_stride_h_elems;
    i32 t, d_nope;
    i32 parts_log2;    // blocks of a head: no division stands before the first load
    i32 share_tokens;  // a multiple of kTile
};
struct AbsorbParams : AbsorbAddresses, CachePrepareParams, AbsorbSizes {
    i32 has_rope;  // 1: queries have a RoPE part, as in CachePrepareParams; `out` is `absorbed`
    i32 padding;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(AbsorbParams, frequencies), MLA_OFFSET(AbsorbParams, n),
              MLA_OFFSET(AbsorbParams, kv_scale), MLA_OFFSET(AbsorbParams, q_nope_stride_t_elems),
              MLA_OFFSET(AbsorbParams, t), (int)sizeof(AbsorbParams));
MLA_FACT(threads, kThreads);
MLA_FACT(tile_tokens, kTile);
MLA_FACT(min_columns, kMinColumns);
MLA_FACT(max_columns, kMaxColumns);
MLA_FACT(max_d_nope, kMaxDNope);

// ---- Storage ---------------------------------------------------------------------------------------------------
struct Storage {
    alignas(16) u16 w_uk[kMaxDNope][kColumnsPitch];
    alignas(16) u16 q[kStages][kStep][kNopePitch];
};

MLA_FACT(smem_bytes, sizeof(Storage));

struct Block {
    const AbsorbParams& p;
    Storage& s;
    i32 head, part, columns, first, end;  // tokens first .. end - 1

    MLA_DEVICE Block(const AbsorbParams& p, Storage& s)
        : p(p),
          s(s),
          head((blockIdx.x - p.token_blocks) >> p.parts_log2),
          part((blockIdx.x - p.token_blocks) & ((1 << p.parts_log2) - 1)),
          columns(kHeadDimV >> p.parts_log2),
          first(blockIdx.y * p.share_tokens),
          end(min(p.t, first + p.share_tokens)) {}
    MLA_DEVICE const u16* w_uk(i32 row) const {
        return p.w_uk + head * p.w_uk_stride_h_elems + row * p.w_uk_stride_d_elems + part * columns;
    }
    MLA_DEVICE u16* out(i32 token) const {
        return p.absorbed + token * p.absorbed_stride_t_elems + head * p.absorbed_stride_h_elems;
    }
    MLA_DEVICE u16* queries(i32 first_token) const { return s.q[(first_token - first) / kStep % kStages][0]; }
};

// ---- Steps -----------------------------------------------------------------------------------------------------
// The first queries and W_UK, to the L2 alone: an earlier kernel may still be writing them. Queries come first: with
// many heads W_UK is megabytes.
MLA_DEVICE void prefetch_inputs(const Block& block) {
#if __CUDA_ARCH__ >= 900
    const AbsorbParams& p = block.p;
    const i32 token = block.first + threadIdx.x / kRowLanes, line = threadIdx.x % kRowLanes;
    const i64 of_query = token * p.q_nope_stride_t_elems + block.head * p.q_nope_stride_h_elems;
    if (token < block.end) {
        if (line * kSlice < p.d_nope) prefetch_global_l2(p.q_nope + of_query + line * kSlice);
        if (line == kRowLanes - 1 && p.has_rope) prefetch_global_l2(QueryRow(p, token, block.head, true).rope);
    }
#pragma unroll 1
    for (i32 row = threadIdx.x; row < p.d_nope; row += kThreads) {
        cp_async_bulk_prefetch_l2(block.w_uk(row), 2 * block.columns);
    }
#endif
}

MLA_DEVICE void fetch_w_uk(const Block& block) {
    constexpr i32 kHeadPieces = 6;  // 2^6 pieces of 16 bytes are a row of a head
    const i32 pieces_log2 = kHeadPieces - block.p.parts_log2, rows = kThreads >> pieces_log2;
    const i32 column = (threadIdx.x & ((1 << pieces_log2) - 1)) * 8;
    constexpr i32 kAtOnce = 4;
    static_assert(kThreads * kAtOnce <= kSlice * kMinColumns / 8, "all of them are rows of W_UK");
    i32 row = threadIdx.x >> pieces_log2;
    const u16* from = block.w_uk(row) + column;
    const i64 step = rows * block.p.w_uk_stride_d_elems;
#pragma unroll 1
    while (row < block.p.d_nope) {
#pragma unroll
        for (i32 i = 0; i < kAtOnce; ++i, row += rows, from += step) copy_16(&block.s.w_uk[row][column], from);
    }
}

// Fetches kStep queries from `first` on, nothing past the last tile. Tiles are whole: the last token stands in for
// missing ones.
MLA_DEVICE void fetch_queries(const Block& block, i32 first) {
    constexpr i32 kRowThreads = kThreads / kTile;
    const AbsorbParams& p = block.p;
    const i32 row = threadIdx.x / kRowThreads, column = threadIdx.x % kRowThreads * 8;
    const u16* const of_head = p.q_nope + block.head * p.q_nope_stride_h_elems + column;
    u16* const to = block.queries(first) + row * kNopePitch + column;
#pragma unroll
    for (i32 tile = 0; tile < kStep; tile += kTile) {
        if (first + tile >= block.end) return;
        const u16* const from = of_head + min(first + tile + row, block.end - 1) * p.q_nope_stride_t_elems;
#pragma unroll
        for (i32 slice = 0; slice < kMaxDNope; slice += kSlice) {
            if (slice > 0 && slice >= p.d_nope) break;
            copy_16(to + tile * kNopePitch + slice, from + slice);
        }
    }
}

// RoPE's columns: the parts of a head share the tokens out, eight lanes a row. Called by whole warps.
MLA_DEVICE void prepare_rope(const Block& block) {
    const AbsorbParams& p = block.p;
    if (!p.has_rope) return;
    const AnyRotation rotation(p);
    const i32 lane = threadIdx.x % kRowLanes, row = threadIdx.x / kRowLanes << p.parts_log2 | block.part;
#pragma unroll 1
    for (i32 first = block.first; first < block.end; first += kRows << p.parts_log2) {
        const bool exists = first + row < block.end;
        const QueryRow query(p, exists ? first + row : first, block.head, exists);
        const uint4 piece = turned_piece<Element, true>(rotation, query, lane);
        if (!exists) continue;
        *reinterpret_cast<uint4*>(query.out + kHeadDimV * sizeof(u16) + lane * kPieceBytes) = piece;
    }
}

// ---- Product ---------------------------------------------------------------------------------------------------
#if __CUDA_ARCH__ >= 800
// Lane i of four neighbours gets word i of each.
MLA_DEVICE void transpose_quad(u32 (&x)[4]) {
#pragma unroll
    for (i32 step = 1; step < 4; step *= 2) {
        const bool upper = threadIdx.x & step;
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            if (i & step) continue;
            const u32 got = __shfl_xor_sync(kFullWarp, upper ? x[i] : x[i + step], step);
            (upper ? x[i] : x[i + step]) = got;
        }
    }
}

// A warp's part of W_UK, by 16 rows and by pairs of 8 columns, in mma.sync's layout.
struct Weights {
    u32 of[kMaxDNope / 16][kWarpColumns / 16][4];
    i32 column;           // the first one, of the block's
    i32 tile, tile_step;  // the first token that it multiplies of each step

    MLA_DEVICE explicit Weights(const Block& block) {
        constexpr i32 kHeadWarps = 4;  // 2^4 warps have the columns of a head
        static_assert(kHeadDimV == kWarpColumns << kHeadWarps, "16 warps");
        const i32 lane = threadIdx.x % kWarpThreads, warp = uniform_warp();
        const i32 warps_log2 = kHeadWarps - block.p.parts_log2;
        column = (warp & ((1 << warps_log2) - 1)) * kWarpColumns;
        tile = (warp >> warps_log2) * kTile;
        tile_step = (kWarps >> warps_log2) * kTile;
        const SmemAddr from = smem_addr(&block.s.w_uk[lane % 16][column + lane / 16 * 8]);
#pragma unroll
        for (i32 slice = 0; slice < kMaxDNope; slice += kSlice) {
            if (slice > 0 && slice >= block.p.d_nope) break;
#pragma unroll
            for (i32 k = slice; k < slice + kSlice; k += 16) {
#pragma unroll
                for (i32 i = 0; i < kWarpColumns / 16; ++i) {
                    ldmatrix_x4_trans(of[k / 16][i], from + 2 * (k * kColumnsPitch + 16 * i));
                }
            }
        }
    }
};

// Up to kStep tokens from `first` on by the warp's columns. Lanes trade their pairs of columns, so that each stores 16
// bytes.
MLA_DEVICE void multiply(const Block& block, const Weights& w, i32 first) {
    constexpr i32 kColumnTiles = kWarpColumns / 8;
    const i32 lane = threadIdx.x % kWarpThreads, count = min(kStep, block.end - first);
    const i32 column = block.part * block.columns + w.column + lane % 4 * 8;
    const i64 step = block.p.absorbed_stride_t_elems;
    i32 row = w.tile + lane / 4;  // and eight rows on
    u16* to = block.out(first + row) + column;
    SmemAddr from = smem_addr(block.queries(first) + (w.tile + lane % 16) * kNopePitch + lane / 16 * 8);
#pragma unroll 1
    for (i32 tile = w.tile; tile < count; tile += w.tile_step) {
        float sums[kColumnTiles][4] = {};
#pragma unroll
        for (i32 slice = 0; slice < kMaxDNope; slice += kSlice) {
            if (slice > 0 && slice >= block.p.d_nope) break;
#pragma unroll
            for (i32 k = slice; k < slice + kSlice; k += 16) {
                u32 a[4];
                ldmatrix_x4(a, from + 2 * k);
#pragma unroll
                for (i32 i = 0; i < kColumnTiles; ++i) {
                    const u32(&b)[4] = w.of[k / 16][i / 2];
                    mma_m16n8k16(Element{}, sums[i], a, b[i % 2 * 2], b[i % 2 * 2 + 1]);
                }
            }
        }
#pragma unroll
        for (i32 half = 0; half < 2; ++half) {
            u32 x[kColumnTiles];
#pragma unroll
            for (i32 i = 0; i < kColumnTiles; ++i) {
                x[i] = cvt_x2(Element{}, sums[i][2 * half], sums[i][2 * half + 1]);
            }
            transpose_quad(x);
            if (row + 8 * half < count) {
                *reinterpret_cast<uint4*>(to + 8 * half * step) = make_uint4(x[0], x[1], x[2], x[3]);
            }
        }
        row += w.tile_step;
        to += w.tile_step * step;
        from = from + 2 * w.tile_step * kNopePitch;
    }
}
#else
struct Weights {
    MLA_DEVICE explicit Weights(const Block&) {}
};

MLA_DEVICE void multiply(const Block& block, const Weights&, i32 first) {
    const i32 pairs = block.columns / 2, column = threadIdx.x % pairs * 2;
    for (i32 row = threadIdx.x / pairs; row < min(kStep, block.end - first); row += kThreads / pairs) {
        const u16* const queries = block.queries(first) + row * kNopePitch;
        float x = 0.f, y = 0.f;
        for (i32 k = 0; k < block.p.d_nope; ++k) {
            const float q = Element::to_float(queries[k]);
            x = fmaf(q, Element::to_float(block.s.w_uk[k][column]), x);
            y = fmaf(q, Element::to_float(block.s.w_uk[k][column + 1]), y);
        }
        *reinterpret_cast<u32*>(block.out(first + row) + block.part * block.columns + column) = cvt_x2(Element{}, x, y);
    }
}
#endif

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    mla_cache_absorb(const __grid_constant__ AbsorbParams p) {
    extern __shared__ __align__(16) u8 smem[];
    const Block block(p, *reinterpret_cast<Storage*>(smem));
    if ((i32)blockIdx.x < p.token_blocks) {  // one share of the blocks
        if (blockIdx.y == 0) append(p, AnyRotation(p));
        return;
    }
    prefetch_inputs(block);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    fetch_w_uk(block);
    fetch_queries(block, block.first);
    commit_copies();
    fetch_queries(block, block.first + kStep);
    commit_copies();
    prepare_rope(block);
    wait_for_copies<1>();  // except the next queries
    __syncthreads();
    const Weights weights(block);
    for (i32 first = block.first; first < block.end; first += kStep) {
        multiply(block, weights, first);
        if (first + kStep >= block.end) break;
        __syncthreads();  // the queries have been read
        fetch_queries(block, first + kStages * kStep);
        commit_copies();
        wait_for_copies<1>();
        __syncthreads();
    }
}
}  // namespace mla::cache
