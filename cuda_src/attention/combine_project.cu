// Merges the partial results of decode, and multiplies them by W_UV: in the place of a combine, where the caller wants
// results of the width of a head. The mathematics and the grid are in attention/projection.cuh.
//
// The attention kernel leaves the results of requests that were not split in the workspace, in fp32, where `out` of its
// parameters is; the others are in pieces, as for attention_combine.
#include "attention/decode_output.cuh"
#include "attention/pieces.cuh"
#include "attention/projection.cuh"

namespace mla::attention {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Projected = ProjectionConfig<MLA_DTYPE, MLA_SHARE>;

// ---- Params ----------------------------------------------------------------------------------------------------
struct CombineProjectParams : ProjectionAddresses, DecodeParams, ProjectionSizes {
    i32 has_pieces;  // whether the schedule is one in pieces (attention/pieces.cuh)
    i32 padding;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(CombineProjectParams, q_stride_b_elems), MLA_OFFSET(CombineProjectParams, b),
              MLA_OFFSET(CombineProjectParams, scale_log2), MLA_OFFSET(CombineProjectParams, w_uv_stride_h_elems),
              MLA_OFFSET(CombineProjectParams, tokens), (int)sizeof(CombineProjectParams));
MLA_FACT(tile_tokens, kTileTokens);
MLA_FACT(threads, kProjectionThreads);
MLA_FACT(smem_bytes, sizeof(ProjectionStorage<Projected>));
MLA_FACT(cluster, Projected::kShare);
MLA_FACT(columns, Projected::kColumns);
static_assert(kMaxSplits <= kMaxRowPieces, "a request may have a piece in every split");

// ---- Source ----------------------------------------------------------------------------------------------------
// The rows of a head: final ones in `out`, the others in the workspace.
struct SplitRows {
    const CombineProjectParams& p;

    // The attention kernel has waited for what was before it before it lets this kernel start.
    static constexpr bool kWeightsAreOlder = true;

    MLA_DEVICE i32 queries() const { return p.s_q; }
    // Rows are in fp32.
    MLA_DEVICE bool are_results() const { return false; }
    MLA_DEVICE const u16* result(i32, i32) const { return nullptr; }
    MLA_DEVICE bool is_fp32() const { return true; }
    MLA_DEVICE i64 lse_step() const { return (i64)p.s_q * p.h_q; }
    MLA_DEVICE i64 piece_step() const { return lse_step() * kHeadDimV; }
    MLA_DEVICE float lse2(float partial) const { return partial; }
    MLA_DEVICE float factor(i32 head, float max, float sum) const { return final_factor(p, head, max, sum); }
    MLA_DEVICE float final_lse(float max, float sum) const {
        return attention::final_lse(p, sum == 0.f ? negative_infinity() : max + log2f(sum));
    }

    // The cuts within each request of these tokens: the first one, and how many there are. Only the schedule is read,
    // which is older than the attention kernel.
    MLA_DEVICE void find_cuts(ProjectionStorage<Projected>& s, i32 first_request, i32 requests) const {
        const i32 thread = threadIdx.x;
        // Neither a schedule nor even cuts: the attention kernel has merged what it has split.
        const i32 num_splits = p.schedule == nullptr && p.request_units == 0 ? 1 : p.num_splits;
        if (thread < Projected::kTokens) {
            s.first_cut[thread] = num_splits;
            s.cuts[thread] = 0;
        }
        __syncthreads();
        for (i32 i = 1 + thread; i < num_splits; i += kProjectionThreads) {
            const SchedulePoint cut = split_begin(p, i);
            const i32 request = cut.request - first_request;
            if (cut.tile <= 0 || request < 0 || request >= requests) continue;
            atomicMin(&s.first_cut[request], i);
            atomicAdd(&s.cuts[request], 1);
        }
        __syncthreads();
    }

    MLA_DEVICE void find(const ProjectionBlock<Projected>& block, i32 first_token, i32 count) const {
        ProjectionStorage<Projected>& s = block.s;
        const i32 first_request = first_token / p.s_q, last_request = (first_token + count - 1) / p.s_q;
        if (!p.has_pieces) find_cuts(s, first_request, last_request - first_request + 1);
        if (threadIdx.x < count) {
            const i32 token = first_token + threadIdx.x, request = token / p.s_q;
            i32 split, pieces;
            if (p.has_pieces) {
                split = first_splits(p)[request];
                pieces = min(first_splits(p)[request + 1] - split, kMaxRowPieces);
            } else {
                split = s.first_cut[request - first_request] - 1;
                pieces = s.cuts[request - first_request] + 1;
            }
            s.rows[threadIdx.x] = row_pieces(request, token % p.s_q, block.head, split, pieces);
        }
        __syncthreads();
    }

    // Of a row whose request has so many pieces, the first of which ends `split`.
    MLA_DEVICE RowPieces row_pieces(i32 request, i32 query, i32 head, i32 split, i32 pieces) const {
        const i32 group = p.h_q / p.h_kv, kv_head = head / group, row = query * group + head % group;
        if (pieces < 2) {
            const float* const final_row = static_cast<const float*>(p.out) + out_offset(p, request, kv_head, row);
            return RowPieces{final_row, final_row, nullptr, nullptr, nullptr, 1};
        }
        // The first piece ended its split, every other one began its split.
        const i64 first = workspace_row(p, p.continued_index + split, kv_head, row);
        const i64 others = workspace_row(p, split, kv_head, row);
        return RowPieces{p.partial_out + first * kHeadDimV,
                         p.partial_out + others * kHeadDimV,
                         p.partial_lse + first,
                         p.partial_lse + others,
                         p.lse + lse_offset(p, request, kv_head, row),
                         pieces};
    }
};

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kProjectionThreads, 2)
    mla_attention_combine_project(const __grid_constant__ CombineProjectParams p) {
    extern __shared__ __align__(16) u8 smem[];
    const ProjectionBlock<Projected> block(p, p, *reinterpret_cast<ProjectionStorage<Projected>*>(smem));
    run_projection(block, SplitRows{p});
}
}  // namespace mla::attention
