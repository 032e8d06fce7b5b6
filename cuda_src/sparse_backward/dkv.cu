// From the workspace of the sparse backward to the gradient of kv: fp32 sums, in the main kernel's order of the dims of
// a row, to the caller's dtype. A deterministic backward has several bins of sums, which are added up here.
//
// Grid: x = rows of kv, one warp each. A lane loads 16 bytes of every 128 dims, permutes them through shared memory if
// need be, and stores four neighbouring dims.
#include "ptx/control.cuh"
#include "ptx/element.cuh"
#include "sparse_backward/params.cuh"

namespace mla::sparse_backward {
using Element = MLA_DTYPE;

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kLaneDims = 4;
constexpr i32 kWarpDims = kLaneDims * kWarpThreads;
constexpr i32 kSteps = ceil_div(kMaxHeadDimQk, kWarpDims);  // 5, the last one half full
// Four neighbouring dims are two contiguous pairs in the workspace. Four words of padding after every 32 put what half
// a warp reads at once in different banks.
constexpr i32 kPaddedDims = kMaxHeadDimQk + kMaxHeadDimQk / 32 * 4;
static_assert(dkv_position(2) % 2 == 0 && dkv_position(3) == dkv_position(2) + 1, "pairs of dims are contiguous");
MLA_DEVICE constexpr i32 padded(i32 position) { return position + position / 32 * 4; }

// ---- Params ----------------------------------------------------------------------------------------------------
enum DkvOrder : i32 { kOrderPlain, kOrderSm90, kOrderSm100 };

struct DkvParams {
    const float* sums;  // (num_bins, s_kv, d_qk), contiguous
    void* dkv;          // (s_kv, d_qk), 16-bit or fp32
    i64 dkv_stride_s_elems;
    i32 s_kv, d_qk, num_bins;
    i32 order;  // of the dims within a row of sums: 0 their own, 1 dkv_position, 2 dkv_position_sm100
    i32 dkv_is_fp32;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(DkvParams, dkv_stride_s_elems), MLA_OFFSET(DkvParams, s_kv),
              (int)sizeof(DkvParams));
MLA_FACT(threads, kThreads);
MLA_FACT(rows_per_block, kWarps);

struct Row {
    float4 dims[kSteps];  // lane's four of each step
};

MLA_DEVICE void load_bin(Row& row, const float* sums, i32 d_qk, i32 lane) {
#pragma unroll
    for (i32 i = 0; i < kSteps; ++i) {
        const i32 dim = i * kWarpDims + lane * kLaneDims;
        if (dim < d_qk) row.dims[i] = *reinterpret_cast<const float4*>(sums + dim);
    }
}

// The finest bin is the last, and added first.
MLA_DEVICE void load_sums(Row& row, const DkvParams& p, i64 index, i32 lane) {
    const i64 bin_elems = (i64)p.s_kv * p.d_qk;
    const float* sums = p.sums + index * p.d_qk + (p.num_bins - 1) * bin_elems;
    load_bin(row, sums, p.d_qk, lane);
    for (i32 bin = p.num_bins - 2; bin >= 0; --bin) {
        Row coarser;
        load_bin(coarser, sums -= bin_elems, p.d_qk, lane);
#pragma unroll
        for (i32 i = 0; i < kSteps; ++i) {
            row.dims[i].x += coarser.dims[i].x;
            row.dims[i].y += coarser.dims[i].y;
            row.dims[i].z += coarser.dims[i].z;
            row.dims[i].w += coarser.dims[i].w;
        }
    }
}

// Restores the order of the dims of a row, through shared memory.
MLA_DEVICE void restore_order(Row& row, float* shared, const DkvParams& p, i32 lane) {
#pragma unroll
    for (i32 i = 0; i < kSteps; ++i) {
        const i32 position = i * kWarpDims + lane * kLaneDims;
        if (position < p.d_qk) *reinterpret_cast<float4*>(shared + padded(position)) = row.dims[i];
    }
    __syncwarp();
#pragma unroll
    for (i32 i = 0; i < kSteps; ++i) {
        const i32 dim = i * kWarpDims + lane * kLaneDims;
        if (dim >= p.d_qk) break;
        if (p.order == kOrderSm90) {
            const float2 low = *reinterpret_cast<const float2*>(shared + padded(dkv_position(dim)));
            const float2 high = *reinterpret_cast<const float2*>(shared + padded(dkv_position(dim + 2)));
            row.dims[i] = make_float4(low.x, low.y, high.x, high.y);
        } else {
            row.dims[i].x = shared[padded(dkv_position_sm100(dim))];
            row.dims[i].y = shared[padded(dkv_position_sm100(dim + 1))];
            row.dims[i].z = shared[padded(dkv_position_sm100(dim + 2))];
            row.dims[i].w = shared[padded(dkv_position_sm100(dim + 3))];
        }
    }
}

template <class T>
MLA_DEVICE bool is_aligned(const T* to) {
    return reinterpret_cast<u64>(to) % (kLaneDims * sizeof(T)) == 0;
}

MLA_DEVICE void store_dims(float* to, const float4& x) {
    if (is_aligned(to)) {
        *reinterpret_cast<float4*>(to) = x;
    } else {
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
}

MLA_DEVICE void store_dims(u16* to, const float4& x) {
    const ushort4 rounded = make_ushort4(Element::from_float(x.x), Element::from_float(x.y), Element::from_float(x.z),
                                         Element::from_float(x.w));
    if (is_aligned(to)) {
        *reinterpret_cast<ushort4*>(to) = rounded;
    } else {
        to[0] = rounded.x, to[1] = rounded.y, to[2] = rounded.z, to[3] = rounded.w;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) mla_sparse_backward_dkv(const __grid_constant__ DkvParams p) {
    __shared__ __align__(16) float shared[kWarps][kPaddedDims];
    griddepcontrol_wait();
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const i64 index = (i64)blockIdx.x * kWarps + warp;
    if (index >= p.s_kv) return;
    Row row;
    load_sums(row, p, index, lane);
    if (p.order != kOrderPlain) restore_order(row, shared[warp], p, lane);
    const i64 to = index * p.dkv_stride_s_elems;
#pragma unroll
    for (i32 i = 0; i < kSteps; ++i) {
        const i32 dim = i * kWarpDims + lane * kLaneDims;
        if (dim >= p.d_qk) break;
        if (p.dkv_is_fp32) {
            store_dims(static_cast<float*>(p.dkv) + to + dim, row.dims[i]);
        } else {
            store_dims(static_cast<u16*>(p.dkv) + to + dim, row.dims[i]);
        }
    }
}
}  // namespace mla::sparse_backward
