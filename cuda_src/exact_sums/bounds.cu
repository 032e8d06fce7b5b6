// An upper bound on a query's contribution to an element of dKV, for the binned sums of the sparse backward.
//
//   c_i = sum_h max|dO_ih| + scale (|dO_ih| max_j |V_j| + |delta_ih|) max|Q_ih|,   largest = max_i c_i
//
// since P <= 1 and |dO . V| <= |dO| |V|. j runs over the rows that query i selects. Heads with a non-finite number are
// ignored: their contribution is non-finite in any order.
//
// Grid: x = queries. The threads of a block scan the query's rows, then each warp takes every eighth head.
#include "attention/shapes.cuh"
#include "common/facts.cuh"
#include "ptx/control.cuh"
#include "tile/elements.cuh"
#include "tile/warp.cuh"

namespace mla::exact_sums {
using namespace attention;
using Element = MLA_DTYPE;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kWarps = kThreads / kWarpThreads;

// ---- Params ----------------------------------------------------------------------------------------------------
struct BoundsParams {
    const u16* q;        // (s_q, h_q, d_qk)
    const u16* dout;     // (s_q, h_q, 512)
    const float* lse2;   // (s_q, h_q)
    const float* delta;  // (s_q, h_q)
    const i32* rows;     // (s_q, rows_stride)
    const i32* counts;   // (s_q,)
    const float* norms;  // (s_kv,)
    u32* largest;        // one, zeroed: the bits of a float that is at least 0, which grow with it
    i64 q_stride_s_elems, q_stride_h_elems;
    i64 dout_stride_s_elems, dout_stride_h_elems;
    i64 rows_stride_elems;
    i32 s_q, h_q, d_qk;
    float scale;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(BoundsParams, q_stride_s_elems), MLA_OFFSET(BoundsParams, s_q),
              MLA_OFFSET(BoundsParams, scale), (int)sizeof(BoundsParams));
MLA_FACT(threads, kThreads);

struct Magnitudes {
    float largest;      // |x|; NaN is ignored
    float sum_squares;  // not finite if one of the elements is not
};

MLA_DEVICE Magnitudes row_magnitudes(const u16* row, i32 elems, i32 lane) {
    Magnitudes m{0.f, 0.f};
    for (i32 column = lane * kChunkElems; column < elems; column += kWarpThreads * kChunkElems) {
        float x[kChunkElems];
        load_chunk<Element>(x, row + column);
#pragma unroll
        for (i32 i = 0; i < kChunkElems; ++i) {
            m.largest = fmaxf(m.largest, fabsf(x[i]));
            m.sum_squares = fmaf(x[i], x[i], m.sum_squares);
        }
    }
    return Magnitudes{warp_max(m.largest), warp_sum(m.sum_squares)};
}

// The largest norm among the rows of the query, in every thread.
MLA_DEVICE float longest_row(const BoundsParams& p, const i32* rows, i32 count, float (&shared)[kWarps]) {
    float longest = 0.f;
    for (i32 i = threadIdx.x; i < count; i += kThreads) longest = fmaxf(longest, p.norms[rows[i]]);
    longest = warp_max(longest);
    if (threadIdx.x % kWarpThreads == 0) shared[threadIdx.x / kWarpThreads] = longest;
    __syncthreads();
#pragma unroll
    for (i32 i = 0; i < kWarps; ++i) longest = fmaxf(longest, shared[i]);
    __syncthreads();
    return longest;
}

MLA_DEVICE float head_bound(const BoundsParams& p, i64 query, i32 head, float longest, i32 lane) {
    const Magnitudes q = row_magnitudes(p.q + query * p.q_stride_s_elems + head * p.q_stride_h_elems, p.d_qk, lane);
    const Magnitudes dout =
        row_magnitudes(p.dout + query * p.dout_stride_s_elems + head * p.dout_stride_h_elems, kHeadDimV, lane);
    const float delta = fabsf(p.delta[query * p.h_q + head]);
    const float bound = dout.largest + p.scale * (sqrtf(dout.sum_squares) * longest + delta) * q.largest;
    const float zero = 0.f * (q.sum_squares + p.lse2[query * p.h_q + head]);  // or NaN
    return bound + zero <= kMaxFloat ? bound : 0.f;
}

extern "C" __global__ void __launch_bounds__(kThreads) mla_exact_sums_bounds(const __grid_constant__ BoundsParams p) {
    __shared__ float shared[kWarps];
    griddepcontrol_wait();
    const i64 query = blockIdx.x;
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const i32 count = p.counts[query];
    if (count == 0) return;
    const float longest = longest_row(p, p.rows + query * p.rows_stride_elems, count, shared);
    float bound = 0.f;
    for (i32 head = warp; head < p.h_q; head += kWarps) bound += head_bound(p, query, head, longest, lane);
    if (lane == 0) shared[warp] = bound;
    __syncthreads();
    if (threadIdx.x != 0) return;
    bound = 0.f;
#pragma unroll
    for (i32 i = 0; i < kWarps; ++i) bound += shared[i];
    atomicMax(p.largest, __float_as_uint(bound));
}
}  // namespace mla::exact_sums
