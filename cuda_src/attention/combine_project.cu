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
using Projected = ProjectionConfig<MLA_DTYPE, MLA_SHARE, (MLA_SHARE == 1 ? 1 : 2)>;

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
    MLA_DEVICE float lse2(float partial) const { return partial; }
    MLA_DEVICE float factor(i32 head, float max, float sum) const { return final_factor(p, head, max, sum); }
    MLA_DEVICE void store_lse(i32 head, const MergedRow& row, float max, float sum) const {
        const HeadRow of = head_row(head, row);
        p.lse[lse_offset(p, row.token / p.s_q, of.kv_head, of.row)] =
            final_lse(p, sum == 0.f ? negative_infinity() : max + log2f(sum));
    }

    // By a warp, of its rows. Only the schedule is read, which is older than the attention kernel.
    MLA_DEVICE void find(const ProjectionBlock<Projected>& block, i32 first_token, i32 count) const {
        if (p.has_pieces) {
            find_pieces(block.s, first_token, count);
        } else {
            find_cuts(block.s, first_token, count);
        }
        __syncwarp();
    }

    // Of a row whose request has so many pieces, the first of which ends `split`.
    MLA_DEVICE static MergedRow row_of(i32 token, i32 split, i32 pieces) {
        return MergedRow{token, split, max(1, pieces), pieces < 2};
    }

    MLA_DEVICE void find_pieces(ProjectionStorage<Projected>& s, i32 first_token, i32 count) const {
        const i32 row = threadIdx.x / kWarpThreads + threadIdx.x % kWarpThreads * kProjectionWarps;  // a lane a row
        if (row >= count) return;
        const i32 token = first_token + row, request = token / p.s_q, split = first_splits(p)[request];
        s.rows[row] = row_of(token, split, min(first_splits(p)[request + 1] - split, kMaxRowPieces));
    }

    // The cuts within each request: the first one, and how many there are.
    MLA_DEVICE void find_cuts(ProjectionStorage<Projected>& s, i32 first_token, i32 count) const {
        constexpr i32 kLaneCuts = kMaxSplits / kWarpThreads;
        // Neither a schedule nor even cuts: the attention kernel has merged what it has split.
        const i32 num_splits = p.schedule == nullptr && p.request_units == 0 ? 1 : p.num_splits;
        const i32 warp = uniform_warp(), lane = threadIdx.x % kWarpThreads;
        i32 requests[kLaneCuts];
#pragma unroll
        for (i32 i = 0; i < kLaneCuts; ++i) {
            const i32 split = lane + i * kWarpThreads;
            SchedulePoint cut{-1, 0};
            if (split > 0 && split < num_splits) cut = split_begin(p, split);
            requests[i] = cut.tile > 0 ? cut.request : -1;
        }
        for (i32 row = warp; row < count; row += kProjectionWarps) {
            const i32 token = first_token + row, request = token / p.s_q;
            i32 first = 0, cuts = 0;
#pragma unroll
            for (i32 i = 0; i < kLaneCuts; ++i) {
                const u32 found = __ballot_sync(kFullWarp, requests[i] == request);
                if (cuts == 0 && found != 0) first = i * kWarpThreads + __ffs(found) - 1;
                cuts += __popc(found);
            }
            if (lane == 0) s.rows[row] = row_of(token, first - 1, cuts + 1);
        }
    }

    struct HeadRow {
        i32 kv_head, row;
    };
    MLA_DEVICE HeadRow head_row(i32 head, const MergedRow& row) const {
        const i32 group = p.h_q / p.h_kv;
        return HeadRow{head / group, row.token % p.s_q * group + head % group};
    }
    // The first piece ended its split, every other one began its split.
    MLA_DEVICE i64 in_workspace(i32 head, const MergedRow& row, i32 piece) const {
        const HeadRow of = head_row(head, row);
        const i32 index = piece == 0 ? p.continued_index + row.first : row.first + piece;
        return workspace_row(p, index, of.kv_head, of.row);
    }
    MLA_DEVICE const float* lse(i32 head, const MergedRow& row, i32 piece) const {
        return p.partial_lse + in_workspace(head, row, piece);
    }
    MLA_DEVICE PiecePlaces places(i32 head, const MergedRow& row) const {
        constexpr i32 kBytes = sizeof(float);
        const auto at = [](const void* from, i64 elems) { return static_cast<const u8*>(from) + elems * kBytes; };
        if (row.is_final) {
            const HeadRow of = head_row(head, row);
            const u8* const result = at(p.out, out_offset(p, row.token / p.s_q, of.kv_head, of.row));
            return PiecePlaces{result, result, 0};
        }
        const i64 others = in_workspace(head, row, 1) * kHeadDimV, step = (i64)p.s_q * p.h_q * kHeadDimV;
        return PiecePlaces{at(p.partial_out, in_workspace(head, row, 0) * kHeadDimV), at(p.partial_out, others - step),
                           step * kBytes};
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
