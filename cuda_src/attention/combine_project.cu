// Merges the partial results of decode and multiplies them by W_UV, in place of a combine, for callers that want
// results of the width of a head. The mathematics and the grid are in attention/projection.cuh.
//
// The attention kernel leaves the results of unsplit requests in fp32 in the workspace, at its `out` parameter; split
// requests are in pieces, as for attention_combine.
#include "attention/decode_output.cuh"
#include "attention/pieces.cuh"
#include "attention/projection.cuh"

namespace mla::attention {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Projected = ProjectionConfig<MLA_DTYPE, MLA_SHARE, (MLA_SHARE == 1 ? 1 : 2)>;

// ---- Params ----------------------------------------------------------------------------------------------------
struct CombineProjectParams : ProjectionAddresses, DecodeParams, ProjectionSizes {
    i32 has_pieces;  // 1: the schedule is one in pieces (attention/pieces.cuh)
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
constexpr i32 kNoRequest = -1;

// ---- Source ----------------------------------------------------------------------------------------------------
// The rows of a head: final ones in `out`, the others in the workspace.
struct SplitRows {
    const CombineProjectParams& p;

    // The attention kernel waits for its predecessor before it lets this kernel start.
    static constexpr bool kWeightsAreOlder = true;

    MLA_DEVICE i32 queries() const { return p.s_q; }
    // Rows are in fp32.
    MLA_DEVICE bool are_results() const { return false; }
    MLA_DEVICE const u16* result(i32, i32) const { return nullptr; }
    MLA_DEVICE bool is_fp32() const { return true; }
    MLA_DEVICE float lse2(float partial) const { return partial; }
    // From `others` to piece `piece`: in elements, and in bytes.
    MLA_DEVICE u64 lse_step(i32 piece) const { return (u64)(u32)piece * (u32)(p.s_q * p.h_q); }
    MLA_DEVICE u64 piece_step(i32 piece) const { return lse_step(piece) * (kHeadDimV * sizeof(float)); }
    MLA_DEVICE float factor(i32 head, float max, float sum) const { return final_factor(p, head, max, sum); }
    MLA_DEVICE float final_lse(float max, float sum) const {
        return attention::final_lse(p, sum == 0.f ? negative_infinity() : max + log2f(sum));
    }

    // Called by a warp, for its rows, one per lane. Reads only the schedule, which is older than the attention kernel.
    MLA_DEVICE void find(const ProjectionBlock<Projected>& block, i32 first_token, i32 count) const {
        const i32 lane = threadIdx.x % kWarpThreads, row = uniform_warp() + lane * kProjectionWarps;
        const bool present = lane < Projected::kRows && row < count;
        const i32 token = first_token + row, request = present ? token / p.s_q : kNoRequest;
        i32 split, pieces;
        if (!p.has_pieces) {
            find_cuts(count, request, split, pieces);
        } else if (present) {
            split = first_splits(p)[request];
            pieces = min(first_splits(p)[request + 1] - split, kMaxRowPieces);
        }
        if (present) {
            RowPieces& found = block.s.rows[row];
            found = row_pieces(request, token - request * p.s_q, block.head, split, pieces);
            // In a batch-invariant call the order of the sums must not depend on the number of rows.
            found.for_all_warps =
                pieces > kFewPieces || (!p.has_pieces && all_warps_are_faster<Projected>(pieces, count));
        }
        __syncwarp();
    }

    // The cuts within each lane's request, of `rows` rows: where its first piece is, and how many pieces it has.
    MLA_DEVICE void find_cuts(i32 rows, i32 request, i32& split, i32& pieces) const {
        constexpr i32 kLaneCuts = kMaxSplits / kWarpThreads;
        const i32 lane = threadIdx.x % kWarpThreads;
        i32 first = 0, cuts = 0;
        // Each lane holds one of 32 cuts.
        const auto count = [&](i32 index, const SchedulePoint& cut) {
            const i32 within = cut.tile > 0 ? cut.request : kNoRequest - 1;
#pragma unroll
            for (i32 i = 0; i < Projected::kRows; ++i) {
                if (uniform_warp() + i * kProjectionWarps >= rows) break;
                const u32 found = __ballot_sync(kFullWarp, within == __shfl_sync(kFullWarp, request, i));
                const bool mine = lane == i;
                first = mine && cuts == 0 && found != 0 ? index * kWarpThreads + __ffs(found) - 1 : first;
                cuts += mine ? __popc(found) : 0;
            }
        };
        const auto is_cut = [&](i32 i) { return i > 0 && i < p.num_splits; };
        if (p.schedule != nullptr) {
            SchedulePoint points[kLaneCuts];
#pragma unroll
            for (i32 i = 0; i < kLaneCuts; ++i) {
                points[i] = SchedulePoint{0, 0};
                if (is_cut(lane + i * kWarpThreads)) points[i] = p.schedule[lane + i * kWarpThreads];
            }
#pragma unroll
            for (i32 i = 0; i < kLaneCuts; ++i) {
                if (i * kWarpThreads < p.num_splits) count(i, points[i]);
            }
        } else if (p.request_units > 0) {  // else the attention kernel has merged its splits
#pragma unroll 1
            for (i32 i = 0; i * kWarpThreads < p.num_splits; ++i) {
                const i32 at = lane + i * kWarpThreads;
                count(i, is_cut(at) ? split_begin(p, at) : SchedulePoint{0, 0});
            }
        }
        split = first - 1;
        pieces = cuts + 1;
    }

    // The pieces of a row whose request has `pieces` of them; the first ends `split`.
    MLA_DEVICE RowPieces row_pieces(i32 request, i32 query, i32 head, i32 split, i32 pieces) const {
        const i32 group = p.h_q / p.h_kv, kv_head = head / group, row = query * group + head % group;
        if (pieces < 2) {
            const u8* const final_row = bytes_of(p.out, out_offset(p, request, kv_head, row));
            return RowPieces{final_row, final_row, nullptr, nullptr, nullptr, 1, false};
        }
        // The first piece ended its split, every other one began its split.
        const i64 first = workspace_row(p, p.continued_index + split, kv_head, row);
        const i64 others = workspace_row(p, split, kv_head, row);
        return RowPieces{bytes_of(p.partial_out, first * kHeadDimV),
                         bytes_of(p.partial_out, others * kHeadDimV),
                         p.partial_lse + first,
                         p.partial_lse + others,
                         p.lse + lse_offset(p, request, kv_head, row),
                         pieces,
                         false};
    }
    MLA_DEVICE static const u8* bytes_of(const void* from, i64 elems) {
        return reinterpret_cast<const u8*>(static_cast<const float*>(from) + elems);
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
