// Results of decode as e4m3 codes with a float32 scale per 128 columns of a row: the A operand of an FP8 GEMM.
//
//   scale = max(|x|, 1e-4) * (1 / 448)      code = e4m3(x / scale)      over 128 columns of a head's row
//
// or the least power of two that is not below this scale.
//
// The last launch of a call. The launches before it leave results in 16 bits in the workspace, so all of them serve
// this result unchanged: codes equal the codes of a 16-bit result. Columns with a NaN or an infinity among them are
// NaN, and so is their scale.
//
// Grid: x = blocks of 16 scales: 16 lanes per scale, eight columns per lane.
#include "common/facts.cuh"
#include "common/types.cuh"
#include "ptx/control.cuh"
#include "ptx/element.cuh"
#include "ptx/fp8.cuh"
#include "ptx/load.cuh"

namespace mla::attention {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kColumns = 128;  // of a scale
constexpr i32 kLanes = 16;     // of a scale
constexpr i32 kLaneColumns = kColumns / kLanes;
constexpr float kMinAmax = 1e-4f;

// ---- Params ----------------------------------------------------------------------------------------------------
struct QuantizeOutputParams {
    const u16* results;  // (b, s_q, h_q, columns), contiguous
    u8* codes;           // the same shape
    float* scales;       // (b, s_q, h_q, row_scales)
    i64 codes_stride_b_elems, codes_stride_s_elems, codes_stride_h_elems;
    i64 scales_stride_b_elems, scales_stride_s_elems, scales_stride_h_elems, scales_stride_column_elems;
    i64 num_scales;  // of all rows
    i32 s_q, h_q, row_scales;
    i32 results_are_bf16, power_of_2;
    i32 padding;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(QuantizeOutputParams, codes_stride_b_elems),
              MLA_OFFSET(QuantizeOutputParams, s_q), (int)sizeof(QuantizeOutputParams));
MLA_FACT(block_scales, kThreads / kLanes);
MLA_FACT(columns, kColumns);
MLA_FACT(threads, kThreads);

// ---- Kernel ----------------------------------------------------------------------------------------------------
template <typename Dtype>
MLA_DEVICE void unpack(const uint4& words, float (&x)[kLaneColumns]) {
    const u32 pairs[] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (i32 i = 0; i < kLaneColumns / 2; ++i) {
        x[2 * i] = Dtype::to_float((u16)pairs[i]);
        x[2 * i + 1] = Dtype::to_float((u16)(pairs[i] >> 16));
    }
}

// The largest magnitude of a scale's columns, as bits: NaN has more than an infinity. Called by whole warps.
MLA_DEVICE u32 largest_bits(const float (&x)[kLaneColumns]) {
    u32 largest = 0;
#pragma unroll
    for (i32 i = 0; i < kLaneColumns; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffff);
#pragma unroll
    for (i32 step = 1; step < kLanes; step *= 2) largest = max(largest, __shfl_xor_sync(kFullWarp, largest, step));
    return largest;
}

MLA_DEVICE float scale_of(u32 largest, bool power_of_2) {
    if (largest >= 0x7f800000) return __uint_as_float(0x7fffffff);
    const float scale = __fmul_rn(fmaxf(__uint_as_float(largest), kMinAmax), 1.f / kMaxE4m3);
    return power_of_2 ? __uint_as_float((__float_as_uint(scale) + 0x7fffff) & 0xff800000) : scale;
}

// Results of a scale of NaN are NaN. The largest result may be above 448 scales by a rounding, and saturates.
MLA_DEVICE uint2 encode(const float (&x)[kLaneColumns], float scale) {
    u32 pairs[kLaneColumns / 2];
#pragma unroll
    for (i32 i = 0; i < kLaneColumns / 2; ++i) {
        pairs[i] = cvt_e4m3_x2(__fdiv_rn(x[2 * i], scale), __fdiv_rn(x[2 * i + 1], scale));
    }
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Lanes past the last scale read zeros, take part in the shuffles, and store nothing.
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_attention_quantize_output(const __grid_constant__ QuantizeOutputParams p) {
    const i64 at = ((i64)blockIdx.x * kThreads + threadIdx.x) / kLanes;
    const i32 column = threadIdx.x % kLanes * kLaneColumns;
    const bool present = at < p.num_scales;
    griddepcontrol_wait();
    const uint4 words = ld_global_16(p.results + at * kColumns + column, present);
    float x[kLaneColumns];
    if (p.results_are_bf16) {
        unpack<bfloat16>(words, x);
    } else {
        unpack<float16>(words, x);
    }
    const float scale = scale_of(largest_bits(x), p.power_of_2);
    if (present) {
        const i64 row = at / p.row_scales, token = row / p.h_q;
        const i64 of_row = at % p.row_scales, head = row % p.h_q, b = token / p.s_q, s = token % p.s_q;
        u8* codes = p.codes + b * p.codes_stride_b_elems + s * p.codes_stride_s_elems + head * p.codes_stride_h_elems;
        *reinterpret_cast<uint2*>(codes + of_row * kColumns + column) = encode(x, scale);
        float* scales =
            p.scales + b * p.scales_stride_b_elems + s * p.scales_stride_s_elems + head * p.scales_stride_h_elems;
        if (column == 0) scales[of_row * p.scales_stride_column_elems] = scale;
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::attention
