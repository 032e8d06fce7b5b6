// Converts fp32 sums in the workspace to the gradient of dense attention's queries, times the factor of the scores, and
// to the gradient of the keys' last columns where heads share them.
//
// Grid: x = blocks of keys (dense/dk_rope.cuh), then tiles of queries (at most; the schedule has their number), then
// heads, which change faster. A warp converts a group of 16 rows, stored like its accumulators
// (dense/backward_params.cuh).
#include "dense/backward_params.cuh"
#include "dense/dk_rope.cuh"
#include "ptx/control.cuh"
#include "tile/fragment.cuh"

namespace mla::dense {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kWarps = 8;
constexpr i32 kThreads = kWarps * kWarpThreads;
static_assert(kWarps * kRowGroup == kTileQueries, "a group of rows per warp");

MLA_PREFILL_BACKWARD_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(keys_per_block, kDkRopeBlockKeys);
static_assert(kThreads == kDkRopeThreads, "blocks of either kind");

// ---- Rows ------------------------------------------------------------------------------------------------------
// Sums in the accumulator's layout: kColumns / 2 per lane, in two rows.
template <i32 kColumns>
MLA_DEVICE void load_sums(float (&d)[kColumns / 2], const float* group, i32 first_column, i32 lane) {
#pragma unroll
    for (i32 i = 0; i < kColumns / 8; ++i) {
        const float* from = group + dq_sum_offset(lane / 4, first_column + 8 * i + lane % 4 * 2, kHeadDimQk);
        const float4 x = *reinterpret_cast<const float4*>(from);
        d[4 * i] = x.x, d[4 * i + 1] = x.y, d[4 * i + 2] = x.z, d[4 * i + 3] = x.w;
    }
}

// Converts the columns of a group of rows that go to one array; `to` is the first row's address there.
template <i32 kColumns>
MLA_DEVICE void convert(const PrefillBackwardParams& p, u16* to, i64 stride_elems, const float* group, i32 first_column,
                        i32 rows, i32 lane) {
    float d[kColumns / 2];
    load_sums<kColumns>(d, group, first_column, lane);
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 row = lane / 4 + 8 * r;
        store_row(Element{}, to + row * stride_elems, d, r, p.scale, row < rows, lane);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) mla_dense_dq(const __grid_constant__ PrefillBackwardParams p) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const i32 key_blocks = p.dk_rope_sums == nullptr ? 0 : ceil_div(p.s_kv, kDkRopeBlockKeys);
    const i32 block = (i32)blockIdx.x - key_blocks;
    if (block < 0) return convert_dk_rope<Element>(p, blockIdx.x, threadIdx.x);
    const i32 index = block / p.h_q, head = block % p.h_q;
    if (index >= p.schedule->num_tiles) return;
    const QueryTile tile = p.tiles[index];
    const i32 lane = threadIdx.x % kWarpThreads, first = threadIdx.x / kWarpThreads * kRowGroup;
    const i32 rows = tile.queries - first;
    if (rows <= 0) return;
    const float* group = p.dq_sums + ((i64)head * p.num_rows + tile.first_row + first) * kHeadDimQk;
    const i64 query = tile.first_query + first;
    u16* to = p.dq + query * p.dq_stride_s_elems + head * p.dq_stride_h_elems;
    u16* to_last = p.dq_rope + query * p.dq_rope_stride_s_elems + head * p.dq_rope_stride_h_elems + p.q_rope_column;
    convert<kHeadDimQk - kRopeColumns>(p, to, p.dq_stride_s_elems, group, 0, rows, lane);
    convert<kRopeColumns>(p, to_last, p.dq_rope_stride_s_elems, group, kHeadDimQk - kRopeColumns, rows, lane);
}
}  // namespace mla::dense
