// Dense MLA decode on Blackwell with both products in FP8, over records of e4m3 with one scale for all.
//
//   S^T = K Q^T * scale               (64 x 576) (576 x rows) per tile of 64 tokens; Q in e4m3, with a scale per row
//   P^T = 2^(4 + S^T log2(e) - m)     m: running maximum of each row; in e4m3
//   l = sum of P,  O^T = V^T P^T      (512 x 64) (64 x rows), in tensor memory; V is K's first 512 columns
//   out = O / l,   lse = ln 2 (m - 4 + log2 of the sum of P before it is rounded)
//
// Grid, roles, time line and code are decode/sm100.cu's (decode/sm100.cuh): codes lie in SW128 tiles as 16-bit elements
// do, with 128 columns in each. A tile has half of the bytes, so four of them are in flight. decode/sm100_codes.cuh has
// the differences.
//
// Source: as decode/sm100.cu. Tensor cores accept 8-bit V by tokens or by columns, so nothing is transposed.
#include "attention/token_record.cuh"
#include "decode/sm100.cuh"

namespace mla::decode::sm100 {
// ---- Variant ---------------------------------------------------------------------------------------------------
struct C : ConfigOf<Fp8QueryType<MLA_DTYPE>::Element, MLA_BLOCK_ROWS, CodeTile, false> {
    using Query = MLA_DTYPE;
};
using Shared = Storage<C>;

static_assert(sizeof(Shared) <= kMaxDynamicSmem, "shared memory");
static_assert(regions_are_disjoint<C>(), "tensor memory");

MLA_DECODE_FP8_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Shared));
MLA_FACT(block_rows, C::kBlockRows);
MLA_FACT(tmem_columns, TmemMap<C>::kAllocated);
MLA_FACT(tmem_columns_used, TmemMap<C>::kUsed);
MLA_RECORD_FACT(fp8);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode_sm100_fp8(const __grid_constant__ DecodeFp8Params p, const __grid_constant__ TensorMap kv_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_block<C>(p, kv_map, *reinterpret_cast<Shared*>(smem));
}
}  // namespace mla::decode::sm100
