// dQ of queries with split lists: the sum of the pieces' sums, in their order.
//
// Grid: x = heads of these queries. A thread has four neighbouring dims.
#include "ptx/control.cuh"
#include "ptx/element.cuh"
#include "sparse_backward/params.cuh"

namespace mla::sparse_backward {
using Element = MLA_DTYPE;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreadDims = 4;
constexpr i32 kThreads =
    ceil_div(kMaxHeadDimQk / kThreadDims, kWarpThreads) * kWarpThreads;  // 160, of whom 16 are idle
constexpr i32 kBatch = 8;                                                // pieces loaded at once

// ---- Params ----------------------------------------------------------------------------------------------------
struct DqPiecesParams {
    const float* dq_pieces;  // (queries from first_query on, pieces, h_q, d_qk); pieces without a key are undefined
    const i32* counts;       // (s_q,)
    u16* dq;                 // (s_q, h_q, d_qk)
    i64 dq_stride_s_elems, dq_stride_h_elems;
    i32 first_query, pieces, piece_keys;
    i32 h_q, d_qk;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(DqPiecesParams, dq_stride_s_elems), MLA_OFFSET(DqPiecesParams, first_query),
              (int)sizeof(DqPiecesParams));
MLA_FACT(threads, kThreads);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_sparse_backward_dq_pieces(const __grid_constant__ DqPiecesParams p) {
    griddepcontrol_wait();
    const i32 of_query = blockIdx.x / p.h_q, head = blockIdx.x % p.h_q, dim = threadIdx.x * kThreadDims;
    if (dim >= p.d_qk) return;
    const i32 query = p.first_query + of_query;
    const i32 present = ceil_div(p.counts[query], p.piece_keys);
    const i64 piece_elems = (i64)p.h_q * p.d_qk;
    const float* from = p.dq_pieces + of_query * p.pieces * piece_elems + head * p.d_qk + dim;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (i32 first = 0; first < present; first += kBatch) {
        float4 loaded[kBatch];
#pragma unroll
        for (i32 i = 0; i < kBatch; ++i) {
            loaded[i] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (first + i < present) loaded[i] = *reinterpret_cast<const float4*>(from + (first + i) * piece_elems);
        }
#pragma unroll
        for (i32 i = 0; i < kBatch; ++i) {
            sum.x += loaded[i].x;
            sum.y += loaded[i].y;
            sum.z += loaded[i].z;
            sum.w += loaded[i].w;
        }
    }
    u16* const to = p.dq + query * p.dq_stride_s_elems + head * p.dq_stride_h_elems + dim;
    *reinterpret_cast<ushort4*>(to) = make_ushort4(Element::from_float(sum.x), Element::from_float(sum.y),
                                                   Element::from_float(sum.z), Element::from_float(sum.w));
}
}  // namespace mla::sparse_backward
