// Before attention: the part of queries without RoPE, multiplied by a head's W_UK, to the columns of absorbed queries.
//
//   q[t, :512] = q_nope[t, head] W_UK[head],   q[t, 512:] = q_rope[t, head]
//
// Grid: x = heads, each by 8 blocks of 64 columns, which also copy 8 of RoPE's columns each; y = equal shares of the
// tokens. A block goes through its tokens, kTokens at a time, while the next ones are on their way; it reads W_UK once,
// whatever their number, and asks for it before anything else. All blocks of 128 heads are resident at once on Hopper,
// so all of W_UK is on its way at once; fewer heads leave room for several shares of the tokens.
#include "attention/shapes.cuh"
#include "common/facts.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"
#include "tile/copies.cuh"

namespace mla::projection {
using namespace attention;

// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 128;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kColumns = 64;  // of a block
constexpr i32 kParts = kHeadDimV / kColumns;
constexpr i32 kRopePart = kHeadDimRope / kParts;                         // columns that a block copies
constexpr i32 kTokens = 16;                                              // at a time: a tile of the product
constexpr i32 kStages = 2;                                               // tokens at work, and the next ones
constexpr i32 kMaxDNope = MLA_MAX_D_NOPE;                                // rows of W_UK
constexpr i32 kColumnsPitch = kColumns + 8, kNopePitch = kMaxDNope + 8;  // ldmatrix then meets every bank
static_assert(kColumns == 16 * kWarps, "a warp has 16 columns");
static_assert(kRopePart == 8, "16 bytes");

// ---- Params ----------------------------------------------------------------------------------------------------
struct AbsorbParams {
    const u16* q_nope;  // (t, h_q, d_nope)
    const u16* w_uk;    // (h_q, d_nope, 512)
    const u16* q_rope;  // (t, h_q, 64), or null
    u16* out;           // (t, h_q, 512), or with RoPE's columns (t, h_q, 576)
    i64 q_nope_stride_t_elems, q_nope_stride_h_elems;
    i64 w_uk_stride_h_elems, w_uk_stride_d_elems;
    i64 q_rope_stride_t_elems, q_rope_stride_h_elems;
    i64 out_stride_t_elems, out_stride_h_elems;
    i32 t, d_nope;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(AbsorbParams, q_nope_stride_t_elems), MLA_OFFSET(AbsorbParams, t),
              (int)sizeof(AbsorbParams));
MLA_FACT(threads, kThreads);
MLA_FACT(columns, kColumns);
MLA_FACT(max_d_nope, kMaxDNope);

// ---- Storage ---------------------------------------------------------------------------------------------------
struct Storage {
    alignas(16) u16 w_uk[kMaxDNope][kColumnsPitch];
    alignas(16) u16 q[kStages][kTokens][kNopePitch];
};

MLA_FACT(smem_bytes, sizeof(Storage));

struct Block {
    const AbsorbParams& p;
    Storage& s;
    i32 head, part, first, end;  // tokens first .. end - 1

    MLA_DEVICE Block(const AbsorbParams& p, Storage& s)
        : p(p), s(s), head(blockIdx.x / kParts), part(blockIdx.x % kParts) {
        const i64 tiles = ((i64)p.t + kTokens - 1) / kTokens;
        first = tiles * blockIdx.y / gridDim.y * kTokens;
        end = min((i64)p.t, tiles * (blockIdx.y + 1) / gridDim.y * kTokens);
    }
    MLA_DEVICE const u16* w_uk(i32 row) const {
        return p.w_uk + head * p.w_uk_stride_h_elems + row * p.w_uk_stride_d_elems + part * kColumns;
    }
    MLA_DEVICE u16* out(i32 token) const { return p.out + token * p.out_stride_t_elems + head * p.out_stride_h_elems; }
};

// ---- Steps -----------------------------------------------------------------------------------------------------
// To the L2 alone: an earlier kernel may still be writing it.
MLA_DEVICE void prefetch_w_uk(const Block& block) {
#if __CUDA_ARCH__ >= 900
    for (i32 row = threadIdx.x; row < block.p.d_nope; row += kThreads) prefetch_global_l2(block.w_uk(row));
#endif
}

MLA_DEVICE void fetch_w_uk(const Block& block) {
    constexpr i32 kPieces = kColumns / 8;
    for (i32 i = threadIdx.x; i < block.p.d_nope * kPieces; i += kThreads) {
        const i32 row = i / kPieces, column = i % kPieces * 8;
        copy_16(&block.s.w_uk[row][column], block.w_uk(row) + column);
    }
}

// Of the tile that starts with token `first`; none past the last tile. The product takes whole tiles.
MLA_DEVICE void fetch_queries(const Block& block, i32 first) {
    if (first >= block.end) return;
    const AbsorbParams& p = block.p;
    const i32 pieces = p.d_nope / 8, stage = first / kTokens % kStages;
    for (i32 i = threadIdx.x; i < kTokens * pieces; i += kThreads) {
        const i32 row = i / pieces, column = i % pieces * 8;
        u16* const to = &block.s.q[stage][row][column];
        if (first + row >= block.end) {
            *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
            continue;
        }
        copy_16(to, p.q_nope + (i64)(first + row) * p.q_nope_stride_t_elems + block.head * p.q_nope_stride_h_elems +
                        column);
    }
}

#if __CUDA_ARCH__ >= 800
// Of four neighbouring lanes, lane i gets number i of each.
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

// 16 tokens by the warp's 16 columns. Lanes trade their pairs of columns, so that each stores 16 bytes.
MLA_DEVICE void multiply(const Block& block, i32 first) {
    const Storage& s = block.s;
    const i32 lane = threadIdx.x % kWarpThreads, my_columns = threadIdx.x / kWarpThreads * 16;
    const SmemAddr a_from = smem_addr(&s.q[first / kTokens % kStages][lane % 16][lane / 16 * 8]);
    const SmemAddr b_from = smem_addr(&s.w_uk[lane % 16][my_columns + lane / 16 * 8]);
    float left[4] = {}, right[4] = {};
#pragma unroll 4
    for (i32 k = 0; k < block.p.d_nope; k += 16) {
        u32 a[4], b[4];
        ldmatrix_x4(a, a_from + 2 * k);
        ldmatrix_x4_trans(b, b_from + 2 * k * kColumnsPitch);
        mma_m16n8k16(Element{}, left, a, b[0], b[1]);
        mma_m16n8k16(Element{}, right, a, b[2], b[3]);
    }
    u32 x[4];  // rows of eight columns: of the upper tokens the left and the right ones, then of the lower ones
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
        x[2 * half] = cvt_x2(Element{}, left[2 * half], left[2 * half + 1]);
        x[2 * half + 1] = cvt_x2(Element{}, right[2 * half], right[2 * half + 1]);
    }
    transpose_quad(x);
    const i32 token = first + lane / 4 + lane % 4 / 2 * 8, column = my_columns + lane % 2 * 8;
    if (token >= block.end) return;
    *reinterpret_cast<uint4*>(block.out(token) + block.part * kColumns + column) = make_uint4(x[0], x[1], x[2], x[3]);
}
#else
MLA_DEVICE void multiply(const Block& block, i32 first) {
    const Storage& s = block.s;
    constexpr i32 kPairs = kColumns / 2;
    const i32 column = threadIdx.x % kPairs * 2;
    for (i32 row = threadIdx.x / kPairs; row < min(kTokens, block.end - first); row += kThreads / kPairs) {
        float x = 0.f, y = 0.f;
        for (i32 k = 0; k < block.p.d_nope; ++k) {
            const float q = Element::to_float(s.q[first / kTokens % kStages][row][k]);
            x = fmaf(q, Element::to_float(s.w_uk[k][column]), x);
            y = fmaf(q, Element::to_float(s.w_uk[k][column + 1]), y);
        }
        *reinterpret_cast<u32*>(block.out(first + row) + block.part * kColumns + column) = cvt_x2(Element{}, x, y);
    }
}
#endif

// RoPE's columns stay as they are; a block has some of them.
MLA_DEVICE void copy_rope(const Block& block) {
    const AbsorbParams& p = block.p;
    if (p.q_rope == nullptr) return;
    const i32 column = block.part * kRopePart;
    for (i32 token = block.first + threadIdx.x; token < block.end; token += kThreads) {
        const u16* const from = p.q_rope + token * p.q_rope_stride_t_elems + block.head * p.q_rope_stride_h_elems;
        *reinterpret_cast<uint4*>(block.out(token) + kHeadDimV + column) =
            *reinterpret_cast<const uint4*>(from + column);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) mla_projection_absorb(const __grid_constant__ AbsorbParams p) {
    extern __shared__ __align__(16) u8 smem[];
    const Block block(p, *reinterpret_cast<Storage*>(smem));
    prefetch_w_uk(block);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    fetch_w_uk(block);
    fetch_queries(block, block.first);
    commit_copies();
    copy_rope(block);
    for (i32 first = block.first; first < block.end; first += kTokens) {
        fetch_queries(block, first + kTokens);
        commit_copies();
        wait_for_copies<1>();  // but for the next queries
        __syncthreads();
        multiply(block, first);
        __syncthreads();  // the queries have been read
    }
}
}  // namespace mla::projection
