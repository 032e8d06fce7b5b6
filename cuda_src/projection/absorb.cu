// Before attention: the part of queries without RoPE, multiplied by a head's W_UK, to the columns of absorbed queries.
//
//   q[t, :512] = q_nope[t, head] W_UK[head],   q[t, 512:] = q_rope[t, head]
//
// Grid: x = heads, each by 8 blocks of 64 columns, which also copy 8 of RoPE's columns each. A block goes through all
// tokens, kTokens at a time; W_UK is read once, whatever their number, and asked for before anything else. All blocks
// of 128 heads are resident at once on Hopper, so all of W_UK is on its way at once.
#include "attention/shapes.cuh"
#include "common/facts.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"

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
constexpr i32 kTokens = 32;                                              // at a time
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
    alignas(16) u16 q[kTokens][kNopePitch];
};

MLA_FACT(smem_bytes, sizeof(Storage));

struct Block {
    const AbsorbParams& p;
    Storage& s;
    i32 head, part;

    MLA_DEVICE Block(const AbsorbParams& p, Storage& s)
        : p(p), s(s), head(blockIdx.x / kParts), part(blockIdx.x % kParts) {}
    MLA_DEVICE const u16* w_uk(i32 row) const {
        return p.w_uk + head * p.w_uk_stride_h_elems + row * p.w_uk_stride_d_elems + part * kColumns;
    }
    MLA_DEVICE u16* out(i32 token) const { return p.out + token * p.out_stride_t_elems + head * p.out_stride_h_elems; }
};

// ---- Steps -----------------------------------------------------------------------------------------------------
MLA_DEVICE void copy_16(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    cp_async_16(smem_addr(to), from, true);
#else
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#endif
}

MLA_DEVICE void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    cp_async_wait_all();
#endif
    __syncthreads();
}

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

MLA_DEVICE void fetch_queries(const Block& block, i32 first, i32 count) {
    const AbsorbParams& p = block.p;
    const i32 pieces = p.d_nope / 8, padded = (count + 15) / 16 * 16;  // whole tiles of the product
    for (i32 i = threadIdx.x; i < padded * pieces; i += kThreads) {
        const i32 row = i / pieces, column = i % pieces * 8;
        u16* const to = &block.s.q[row][column];
        if (row >= count) {
            *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
            continue;
        }
        copy_16(to, p.q_nope + (i64)(first + row) * p.q_nope_stride_t_elems + block.head * p.q_nope_stride_h_elems +
                        column);
    }
}

// Two neighbouring columns of a token's row.
MLA_DEVICE void store_pair(const Block& block, i32 token, i32 column, float x, float y) {
    *reinterpret_cast<u32*>(block.out(token) + block.part * kColumns + column) = cvt_x2(Element{}, x, y);
}

MLA_DEVICE void multiply(const Block& block, i32 first, i32 count) {
    const Storage& s = block.s;
    const i32 lane = threadIdx.x % kWarpThreads, my_columns = threadIdx.x / kWarpThreads * 16;
    const i32 column = my_columns + lane % 4 * 2;
    for (i32 tile = 0; tile < count; tile += 16) {
#if __CUDA_ARCH__ >= 800
        const SmemAddr a_from = smem_addr(&s.q[tile + lane % 16][lane / 16 * 8]);
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
#pragma unroll
        for (i32 half = 0; half < 2; ++half) {
            const i32 token = tile + lane / 4 + 8 * half;
            if (token >= count) continue;
            store_pair(block, first + token, column, left[2 * half], left[2 * half + 1]);
            store_pair(block, first + token, column + 8, right[2 * half], right[2 * half + 1]);
        }
#else
        for (i32 token = tile + lane / 4; token < min(count, tile + 16); token += 8) {
            float sums[4] = {};
            for (i32 k = 0; k < block.p.d_nope; ++k) {
                const float q = Element::to_float(s.q[token][k]);
#pragma unroll
                for (i32 i = 0; i < 4; ++i) {
                    sums[i] = fmaf(q, Element::to_float(s.w_uk[k][column + i % 2 + i / 2 * 8]), sums[i]);
                }
            }
            store_pair(block, first + token, column, sums[0], sums[1]);
            store_pair(block, first + token, column + 8, sums[2], sums[3]);
        }
#endif
    }
}

// RoPE's columns stay as they are; a block has some of them.
MLA_DEVICE void copy_rope(const Block& block) {
    const AbsorbParams& p = block.p;
    if (p.q_rope == nullptr) return;
    const i32 column = block.part * kRopePart;
    for (i32 token = threadIdx.x; token < p.t; token += kThreads) {
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
    copy_rope(block);
    for (i32 first = 0; first < p.t; first += kTokens) {
        const i32 count = min(kTokens, p.t - first);
        fetch_queries(block, first, count);
        wait_for_copies();
        multiply(block, first, count);
        __syncthreads();  // the queries have been read
    }
}
}  // namespace mla::projection
