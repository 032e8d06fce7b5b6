// The extractors and the bound of a deterministic sparse backward's sums: see tile/binned_sum.cuh.
//
//   bound = largest of exact_sums_bounds, rounded up to a power of two
//   extractor_j = 1.5 * 2^23 * quantum_j,   quantum_j = bound / 2^k,   selected_j * additions * 2^k <= 2^23
//
// Grid: x = rows of kv, one thread each, and one more thread for the bound, which is stored after them.
#include "common/facts.cuh"
#include "ptx/control.cuh"
#include "tile/binned_sum.cuh"

namespace mla::exact_sums {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
// Limits of the bound. Below, quanta would be subnormal, which atomic additions flush to 0; above, extractors would be
// infinite.
constexpr i32 kMinExponent = -80, kMaxExponent = 90;
// With more, a number plus its extractor would leave the binade in which the quantum is the last bit.
constexpr i32 kMaxBits = kMantissaBits - 1;

// ---- Params ----------------------------------------------------------------------------------------------------
struct BinsParams {
    const u32* selected;   // (s_kv,)
    const float* largest;  // one
    float* extractors;     // (s_kv + 1,)
    i32 s_kv;
    i32 additions;  // per top-k entry, to each element
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(BinsParams, s_kv), (int)sizeof(BinsParams));
MLA_FACT(threads, kThreads);
MLA_FACT(rows_per_block, kThreads);
MLA_FACT(num_bins, kNumBins);

// The smallest e with x <= 2^e.
MLA_DEVICE i32 ceil_log2(u32 x) { return x <= 1 ? 0 : 32 - __clz(x - 1); }

// Rounded-up log2 of a non-negative float; at least -127.
MLA_DEVICE i32 ceil_log2(float x) {
    const u32 bits = __float_as_uint(x);
    return (i32)(bits >> 23) - 127 + ((bits & 0x7fffff) != 0);
}

MLA_DEVICE float power_of_two(i32 exponent) { return __int_as_float((exponent + 127) << 23); }

extern "C" __global__ void __launch_bounds__(kThreads) mla_exact_sums_bins(const __grid_constant__ BinsParams p) {
    griddepcontrol_wait();
    const i64 row = (i64)blockIdx.x * kThreads + threadIdx.x;
    const i32 bound = min(max(ceil_log2(*p.largest), kMinExponent), kMaxExponent);
    if (row < p.s_kv) {
        const i32 bits = min(kMantissaBits - ceil_log2(p.selected[row] * (u32)p.additions), kMaxBits);
        p.extractors[row] = 1.5f * power_of_two(bound - bits + kMantissaBits);
    } else if (row == p.s_kv) {
        p.extractors[row] = power_of_two(bound);
    }
}
}  // namespace mla::exact_sums
