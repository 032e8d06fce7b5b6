// After attention on Hopper: merged results of many tokens, multiplied by W_UV, and by the sigmoid of a gate.
//
//   out[t, d] = sum_c latents[t, head, c] W_UV[head, d, c] * sigmoid(gate[t, head, d])
//
// A block has 128 columns d of a head, and keeps their part of W_UV in shared memory; it processes its tokens 64 at a
// time, in pieces of 64 columns c. All of W_UV and the first tokens' pieces are in flight at once, so one block fills
// an SM.
//
//   load   W_UV, all pieces | wait for attention | pieces of the first 64 tokens | of the next ...
//   math   gates            | wait for attention | product, piece by piece | gate, store | gates ...
//
// Columns that a head lacks are zeros (TMA), and so are tokens past the last one.
//
// Grid: x = heads, with one block per 128 columns; y = shares of the tokens.
#include "attention/projection.cuh"
#include "common/limits.cuh"
#include "tile/fragment.cuh"
#include "tile/product.cuh"
#include "tile/prologue.cuh"
#include "tile/ring.cuh"

namespace mla::projection {
using namespace attention;

// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role   warps   does
// math   0..3    64 tokens by 128 columns
// load   4       all copies
constexpr i32 kMathThreads = kWarpgroupThreads;
constexpr i32 kThreads = kMathThreads + kWarpThreads;
constexpr i32 kTileTokens = kSw128Rows, kColumns = 2 * kSw128Rows;
constexpr i32 kPieces = kHeadDimV / kSw128Columns;
constexpr u32 kTokensBytes = kTileTokens * kSw128RowBytes, kColumnsBytes = kColumns * kSw128RowBytes;

// ---- Params ----------------------------------------------------------------------------------------------------
struct ResultsParams : ProjectionAddresses, ProjectionSizes {
    i32 s_q;
    i32 padding;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(ResultsParams, w_uv_stride_h_elems), MLA_OFFSET(ResultsParams, tokens),
              (int)sizeof(ResultsParams));

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier         arrives (count)   carries              waits   first phase
// w_uv_full[c]    load (1)          piece c of W_UV      math    blocked
// full[c]         load (1)          piece c of tokens    math    blocked
// empty[c]        math warps (4)    -                    load    free
struct Storage {
    alignas(kSwizzleAtomBytes) u8 w_uv[kPieces][kColumnsBytes];
    u8 tokens[kPieces][kTokensBytes];
    MBarrier w_uv_full[kPieces], full[kPieces], empty[kPieces];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(tile_tokens, kTileTokens);
MLA_FACT(columns, kColumns);

struct Block {
    i32 head, first_column, first, end;  // tokens first .. end - 1

    MLA_DEVICE explicit Block(const ResultsParams& p) {
        const i32 parts = (p.d_head + kColumns - 1) / kColumns;
        head = blockIdx.x / parts;
        first_column = blockIdx.x % parts * kColumns;
        first = blockIdx.y * p.share_tokens;
        end = min(p.tokens, first + p.share_tokens);
    }
};

// ---- Load role -------------------------------------------------------------------------------------------------
// Called by one thread. W_UV is older than the attention kernel, which waits for its predecessor before it lets this
// kernel start.
MLA_DEVICE void run_load_role(Storage& s, const TensorMap& w_uv, const TensorMap& latents, const Block& block) {
#pragma unroll 1
    for (i32 piece = 0; piece < kPieces; ++piece) {
        mbarrier_arrive_expect_tx(s.w_uv_full[piece], kColumnsBytes);
        cp_async_bulk_tensor_3d(smem_addr(s.w_uv[piece]), w_uv, s.w_uv_full[piece], piece * kSw128Columns,
                                block.first_column, block.head, kEvictFirst);
    }
    griddepcontrol_wait();
    u32 parity = 1;
#pragma unroll 1
    for (i32 first = block.first; first < block.end; first += kTileTokens, parity ^= 1) {
#pragma unroll 1
        for (i32 piece = 0; piece < kPieces; ++piece) {
            mbarrier_wait(s.empty[piece], parity);
            mbarrier_arrive_expect_tx(s.full[piece], kTokensBytes);
            cp_async_bulk_tensor_3d(smem_addr(s.tokens[piece]), latents, s.full[piece], piece * kSw128Columns, first,
                                    block.head, kEvictFirst);
        }
    }
}

// ---- Math role -------------------------------------------------------------------------------------------------
// A thread's two rows of a tile; `exists` is false past the last token.
struct Rows {
    i64 request[kFragmentRows], query[kFragmentRows];
    bool exists[kFragmentRows];

    MLA_DEVICE Rows(const ResultsParams& p, const Block& block, i32 first) {
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            const i32 token = first + fragment_row(threadIdx.x) + 8 * r;
            exists[r] = token < block.end;
            request[r] = p.s_q == 1 ? token : token / p.s_q;
            query[r] = token - request[r] * p.s_q;
        }
    }
};

// Pairs of neighbouring columns of the gates, as they lie in the accumulator: on their way during the product.
struct Gates {
    u32 of[kColumns / 4];

    MLA_DEVICE Gates(const ResultsParams& p, const Block& block, const Rows& rows) {
#pragma unroll
        for (i32 i = 0; i < kColumns / 4; ++i) {
            const i32 r = i % 2, column = block.first_column + fragment_column(threadIdx.x, 2 * i);
            const u16* const from = p.gate + rows.request[r] * p.gate_stride_b_elems +
                                    rows.query[r] * p.gate_stride_s_elems + block.head * p.gate_stride_h_elems + column;
            of[i] = ld_global_4(from, p.gate != nullptr && rows.exists[r] && column < p.d_head);
        }
    }
};

// Two neighbouring columns.
MLA_DEVICE void store_columns(const ResultsParams& p, const Rows& rows, i32 r, i32 head, i32 column, float x, float y,
                              u32 gate) {
    if (p.gate != nullptr) {
        x *= sigmoid(Element::to_float((u16)gate));
        y *= sigmoid(Element::to_float((u16)(gate >> 16)));
    }
    const i64 to = rows.request[r] * p.projected_stride_b_elems + rows.query[r] * p.projected_stride_s_elems +
                   head * p.projected_stride_h_elems + column;
    if (p.projected_is_fp32) {
        *reinterpret_cast<float2*>(static_cast<float*>(p.projected) + to) = make_float2(x, y);
    } else {
        *reinterpret_cast<u32*>(static_cast<u16*>(p.projected) + to) = cvt_x2(Element{}, x, y);
    }
}

MLA_DEVICE void run_math_role(const ResultsParams& p, Storage& s, const Block& block) {
    const i32 thread = threadIdx.x;
    u32 parity = 0;
#pragma unroll 1
    for (i32 first = block.first; first < block.end; first += kTileTokens, parity ^= 1) {
        const Rows rows(p, block, first);
        const Gates gates(p, block, rows);  // older than the attention kernel, like W_UV
        if (first == block.first) {
            griddepcontrol_wait();  // before the stores
            griddepcontrol_launch_dependents();
        }
        float d[kColumns / 2];
#pragma unroll
        for (float& x : d) x = 0.f;
#pragma unroll 1
        for (i32 piece = 0; piece < kPieces; ++piece) {
            mbarrier_wait(s.w_uv_full[piece], 0);
            mbarrier_wait(s.full[piece], parity);
            const SmemDesc a = k_major_desc(smem_addr(s.tokens[piece])), b = k_major_desc(smem_addr(s.w_uv[piece]));
            pin(d);
            wgmma_fence();
            multiply_abt<kSw128MmaSteps>(Element{}, d, a, b, true);
            wgmma_commit_group();
            wgmma_wait_group<0>();
            pin(d);
            release(s.empty[piece], thread);
        }
#pragma unroll
        for (i32 i = 0; i < kColumns / 4; ++i) {
            const i32 column = block.first_column + fragment_column(thread, 2 * i);
            if (!rows.exists[i % 2] || column >= p.d_head) continue;
            store_columns(p, rows, i % 2, block.head, column, d[2 * i], d[2 * i + 1], gates.of[i]);
        }
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_projection_sm90_results(const __grid_constant__ ResultsParams p, const __grid_constant__ TensorMap latents,
                                const __grid_constant__ TensorMap w_uv) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    if (threadIdx.x == 0) {
        prefetch_tensormap(w_uv);
        prefetch_tensormap(latents);
        init_ring(s.full, s.empty, 1, kMathThreads / kWarpThreads);
        for (MBarrier& full : s.w_uv_full) mbarrier_init(full, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    const Block block(p);
    if (threadIdx.x >= kMathThreads) {
        if (threadIdx.x == kMathThreads) run_load_role(s, w_uv, latents, block);
        return;
    }
    run_math_role(p, s, block);
}
}  // namespace mla::projection
