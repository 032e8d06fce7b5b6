// What rounds the additions of a deterministic sparse backward: see attention/exact_addition.cuh.
//
//   bound = largest of sparse_bounds, rounded up to a power of two
//   rounder_j = 1.5 * 2^23 * quantum_j,   quantum_j = bound / 2^k,   selected_j * additions * 2^k <= 2^23
//
// Grid: x = rows of kv, a thread each, and one thread for the bound, which stands after them.
#include "attention/exact_addition.cuh"
#include "common/facts.cuh"
#include "ptx/control.cuh"

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
// Of the bound. Below, quanta would be subnormal, which additions in memory take for 0; above, rounders infinite.
constexpr i32 kLeastExponent = -80, kMostExponent = 90;
// Beyond it a number and its rounder leave the binade in which the quantum is the last place.
constexpr i32 kMostBits = kMantissaBits - 1;

// ---- Params ----------------------------------------------------------------------------------------------------
struct SparseRoundersParams {
    const u32* selected;   // (s_kv,)
    const float* largest;  // one
    float* rounders;       // (s_kv + 1,)
    i32 s_kv;
    i32 additions;  // for each slot, to each element
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(SparseRoundersParams, s_kv), (int)sizeof(SparseRoundersParams));
MLA_FACT(threads, kThreads);
MLA_FACT(rows_per_block, kThreads);
MLA_FACT(levels, kLevels);

// The least e with x <= 2^e.
MLA_DEVICE i32 ceil_log2(u32 x) { return x <= 1 ? 0 : 32 - __clz(x - 1); }

// The same of a float from 0 on; at least -127.
MLA_DEVICE i32 ceil_log2(float x) {
    const u32 bits = __float_as_uint(x);
    return (i32)(bits >> 23) - 127 + ((bits & 0x7fffff) != 0);
}

MLA_DEVICE float power_of_two(i32 exponent) { return __int_as_float((exponent + 127) << 23); }

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_sparse_rounders(const __grid_constant__ SparseRoundersParams p) {
    griddepcontrol_wait();
    const i64 row = (i64)blockIdx.x * kThreads + threadIdx.x;
    const i32 bound = min(max(ceil_log2(*p.largest), kLeastExponent), kMostExponent);
    if (row < p.s_kv) {
        const i32 bits = min(kMantissaBits - ceil_log2(p.selected[row] * (u32)p.additions), kMostBits);
        p.rounders[row] = 1.5f * power_of_two(bound - bits + kMantissaBits);
    } else if (row == p.s_kv) {
        p.rounders[row] = power_of_two(bound);
    }
}
