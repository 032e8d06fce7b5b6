// Dense MLA decode on Hopper for few query rows, for the forms of attention/query_groups.cuh: queries whose number
// varies from request to request, a window, queries in two arrays.
//
// The mathematics, the grid, the time line and the source are in decode/sm90_small.cu. What differs: a split holds
// groups of queries instead of requests, masks begin where the windows of rows do, and query rows are two pieces each.
#include "common/limits.cuh"
#include "decode/sm90_small_block.cuh"
#include "decode/split_rows.cuh"

namespace mla::decode::sm90 {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Forms = Config<MLA_DTYPE, MLA_BLOCK_ROWS, MLA_HEAD_DIM_QK, /*kTree=*/false, GroupedWork>;

static_assert(sizeof(Storage<Forms>) <= kMaxDynamicSmem, "shared memory");

MLA_DECODE_FORM_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage<Forms>));
MLA_FACT(block_rows, Forms::kBlockRows);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode_sm90_small_forms(const __grid_constant__ DecodeFormParams p, const __grid_constant__ TensorMap kv_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_small_block<Forms>(p, kv_map, *reinterpret_cast<Storage<Forms>*>(smem));
}
}  // namespace mla::decode::sm90
