// Merges n partial attention results over disjoint sets of keys, and multiplies them by W_UV. The mathematics and the
// grid are in attention/projection.cuh. A state with an lse of +Inf or -Inf is empty: it saw no key, and is ignored
// whatever it holds. Without lses there is one state, and nothing to merge.
#include "attention/projection.cuh"
#include "common/lse.cuh"

namespace mla::projection {
using namespace attention;

// ---- Variant ---------------------------------------------------------------------------------------------------
using Projected = ProjectionConfig<MLA_DTYPE, MLA_SHARE, (MLA_SHARE <= 2 ? 1 : 2)>;

// ---- Params ----------------------------------------------------------------------------------------------------
struct StatesAddresses {
    const void* outs;             // (n, b, s_q, h_q, 512), Element or fp32
    const float* lses = nullptr;  // (n, b, h_q, s_q), or null
    float* lse = nullptr;         // (b, h_q, s_q), or null
};
struct MergeProjectParams : ProjectionAddresses, StatesAddresses, ProjectionSizes {
    i64 outs_stride_n_elems, outs_stride_b_elems, outs_stride_s_elems, outs_stride_h_elems;
    i64 lses_stride_n_elems = 0, lses_stride_b_elems = 0, lses_stride_h_elems = 0, lses_stride_s_elems = 0;
    i64 lse_stride_b_elems = 0, lse_stride_h_elems = 0, lse_stride_s_elems = 0;
    i32 states = 1, s_q, outs_are_fp32 = 0;
    float to_log2 = 1.f;  // from the caller's base to base 2
    LseConvention lse_convention;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(MergeProjectParams, w_uv_stride_h_elems),
              MLA_OFFSET(MergeProjectParams, tokens), MLA_OFFSET(MergeProjectParams, outs_stride_n_elems),
              MLA_OFFSET(MergeProjectParams, states), MLA_OFFSET(MergeProjectParams, to_log2),
              (int)sizeof(MergeProjectParams));
MLA_FACT(threads, kProjectionThreads);
MLA_FACT(smem_bytes, sizeof(ProjectionStorage<Projected>));
MLA_FACT(cluster, Projected::kShare);
MLA_FACT(columns, Projected::kColumns);
MLA_FACT(max_states, kMaxRowPieces);

// ---- Source ----------------------------------------------------------------------------------------------------
struct StateRows {
    const MergeProjectParams& p;

    static constexpr bool kWeightsAreOlder = false;

    MLA_DEVICE i32 queries() const { return p.s_q; }
    MLA_DEVICE bool are_results() const { return p.lses == nullptr && !p.outs_are_fp32; }
    MLA_DEVICE const u16* result(i32 head, i32 token) const {
        return static_cast<const u16*>(p.outs) + at(head, token);
    }
    MLA_DEVICE i32 request(i32 token) const { return p.s_q == 1 ? token : token / p.s_q; }
    MLA_DEVICE i64 at(i64 head, i32 token) const {
        const i64 b = request(token), query = token - (i32)b * p.s_q;
        return b * p.outs_stride_b_elems + query * p.outs_stride_s_elems + head * p.outs_stride_h_elems;
    }
    MLA_DEVICE bool is_fp32() const { return p.outs_are_fp32; }
    MLA_DEVICE float lse2(float lse) const {
        return fabsf(lse) == -negative_infinity() ? negative_infinity() : __fmul_rn(lse, p.to_log2);
    }
    MLA_DEVICE float factor(i32, float, float sum) const { return sum == 0.f ? 0.f : 1.f / sum; }
    MLA_DEVICE float final_lse(float max, float sum) const { return callers_lse(p.lse_convention, max, sum); }
    MLA_DEVICE i64 lse_step(i32 state) const { return state * p.lses_stride_n_elems; }
    MLA_DEVICE i64 piece_step(i32 state) const { return state * p.outs_stride_n_elems * bytes(); }
    MLA_DEVICE i32 bytes() const { return p.outs_are_fp32 ? 4 : 2; }

    // Called by a warp, for its rows, one per lane.
    MLA_DEVICE void find(const ProjectionBlock<Projected>& block, i32 first_token, i32 count) const {
        const i32 lane = threadIdx.x % kWarpThreads, row = uniform_warp() + lane * kProjectionWarps;
        if (lane < Projected::kRows && row < count) {
            const i32 token = first_token + row;
            const i64 b = request(token), query = token - (i32)b * p.s_q, head = block.head;
            const u8* const first = static_cast<const u8*>(p.outs) + at(head, token) * bytes();
            const i64 of_lses =
                b * p.lses_stride_b_elems + head * p.lses_stride_h_elems + query * p.lses_stride_s_elems;
            const i64 of_lse = b * p.lse_stride_b_elems + head * p.lse_stride_h_elems + query * p.lse_stride_s_elems;
            const float* const lses = p.lses == nullptr ? nullptr : p.lses + of_lses;
            float* const lse = p.lses == nullptr ? nullptr : p.lse + of_lse;
            block.s.rows[row] = RowPieces{first, first, lses, lses, lse, p.states, p.states > kFewPieces};
        }
        __syncwarp();
    }

    // Prefetches the first tokens' pieces into L2, for grids with few blocks and few requests in flight.
    MLA_DEVICE void prefetch(const ProjectionBlock<Projected>& block) const {
#if __CUDA_ARCH__ >= 900
        if constexpr (Projected::kShare <= 2) return;
        constexpr i32 kLine = 128, kWideLines = kHeadDimV * sizeof(float) / Projected::kShare / kLine;
        const i32 lines = p.outs_are_fp32 ? kWideLines : kWideLines / 2, rows_at_once = kProjectionThreads / lines;
        const i32 pieces = min(Projected::kTokens, block.end - block.first) * p.states;
        const i32 line = (block.part * lines + threadIdx.x % lines) * kLine;
#pragma unroll 1
        for (i32 i = threadIdx.x / lines; i < pieces; i += rows_at_once) {
            const i32 token = i / p.states, state = i - token * p.states;
            const i64 from = (at(block.head, block.first + token) + state * p.outs_stride_n_elems) * bytes();
            prefetch_global_l2(static_cast<const u8*>(p.outs) + from + line);
        }
#endif
    }
};

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kProjectionThreads, 2)
    mla_projection_states(const __grid_constant__ MergeProjectParams p) {
    extern __shared__ __align__(16) u8 smem[];
    const ProjectionBlock<Projected> block(p, p, *reinterpret_cast<ProjectionStorage<Projected>*>(smem));
    run_projection(block, StateRows{p});
}
}  // namespace mla::projection
