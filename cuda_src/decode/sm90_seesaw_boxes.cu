// Dense MLA decode on Hopper with the seesaw schedule, for pages of few tokens.
//
// The mathematics, the grid, the time line and the source are in decode/sm90_seesaw.cu. What differs is how keys
// arrive: a box has all four SW128 tiles of a half, and 8 rows of each of them lie in turn (HalfLayout<true>). With
// pages of 16 tokens a tile of 64 is 12 boxes instead of 36, with pages of 64 it is 3 instead of 9; one thread after
// the other issues them, while both warpgroups wait for the first half.
//
// One KV head. Pages that are no multiples of 8 tokens come in boxes of one SW128 tile and up to 4 rows.
#include "common/limits.cuh"
#include "decode/sm90_seesaw.cuh"

#ifndef MLA_HEAD_DIM_QK
#define MLA_HEAD_DIM_QK 576
#endif

namespace mla::decode {
// ---- Variant ---------------------------------------------------------------------------------------------------
struct InTurn : Config<MLA_DTYPE, MLA_HEAD_DIM_QK, /*kSparse=*/false> {
    using Layout = HalfLayout</*kRowsInTurn=*/true>;
};

static_assert(sizeof(Storage<InTurn>) <= kMaxDynamicSmem, "shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage<InTurn>));
MLA_FACT(block_m, kBlockM);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode_sm90_seesaw_boxes(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap half_map,
                                 const __grid_constant__ TensorMap rope_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Block<InTurn> block(p, *reinterpret_cast<Storage<InTurn>*>(smem));
    run_seesaw_block(block, HalfFetch<InTurn>(block, half_map, rope_map));
}
}  // namespace mla::decode
