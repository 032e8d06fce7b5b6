// Attention to FP8 records on Hopper for few query rows: warps that dequantise feed warpgroups that multiply.
//
// The kernels differ in where a request's tokens lie: in lists of slots (sparse_decode/sm90_small.cu), in listed rows
// (sparse_forward/sm90_records.cu) or in pages (decode/sm90_records.cu). Operands are swapped, see
// attention/sm90/swapped.cuh; query rows that share keys are called heads.
//
// Eight warps load rows, into registers or through shared memory, convert them to 16 bits
// (attention/sm90/record_keys.cuh) and write SW128 tiles in two stages. As soon as a row is converted, its registers
// are refilled from the next tile, also across work items: a whole tile is in flight all the time. A stage has three
// groups of SW128 tiles, passed on one by one:
//
//   math     |   S^T group 0, 1, 2   | max, P | O^T += V^T P^T, group 0, 1, 2 | S'^T ...
//   dequant  |        K' groups 0, 1, 2 ->          wait for a group, K'' ->
//   loads    |  K''  ...                              K''' ...
//
// With two math warpgroups each has the tiles of one stage, and the first one adds up both at the end of a work item.
//
// small_records_storage.cuh      configuration; warps and registers of the roles; shared memory, barriers
// small_records_conversion.cuh   a dequantising warp's query rows, and its rows of keys once it has their bytes
// small_records_dequant.cuh      the dequantising role that finds its rows itself
// small_records_scouts.cuh       warps that find rows, and the dequantising role that uses them
// small_records_math.cuh         the math role
#pragma once
#include "attention/sm90/small_records_dequant.cuh"
#include "attention/sm90/small_records_math.cuh"
#include "attention/sm90/small_records_scouts.cuh"
#include "common/limits.cuh"

namespace mla::attention::sm90 {
// ---- Kernel ----------------------------------------------------------------------------------------------------
// All of it. `smem` is aligned to kSwizzleAtomBytes.
template <class C>
MLA_DEVICE void run_small_records(const DecodeParams& p, u8* smem) {
    static_assert(sizeof(SmallStorage<C>) <= kMaxDynamicSmem, "shared memory");
    SmallStorage<C>& s = *reinterpret_cast<SmallStorage<C>*>(smem);
    SmallBlock<C> block(p, s);
    if (threadIdx.x == 0) init_storage(s);
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    constexpr i32 kMathWarps = C::kMathGroups * kWarpgroupWarps;
    if (warp < kMathWarps) {
        setmaxnreg_inc<C::kRegsMath>();
        const i32 group = C::kMathGroups > 1 ? warp / kWarpgroupWarps : 0;  // one alone: named barriers are constants
        run_math_role(block, group, C::kMathGroups > 1 ? threadIdx.x % kWarpgroupThreads : threadIdx.x);
    } else if (!C::kScouted || warp < kMathWarps + kDequantWarps) {
        setmaxnreg_dec<C::kRegsDequant>();
        const i32 lane = threadIdx.x % kWarpThreads;
        if constexpr (C::kScouted) {
            run_scouted_dequant_role(block, warp - kMathWarps, lane);
        } else {
            run_dequant_role(block, warp - kMathWarps, lane);
        }
    } else if constexpr (C::kScouted) {
        setmaxnreg_dec<C::kRegsScout>();
        const i32 thread = threadIdx.x % kWarpgroupThreads;
        if (thread < kTileTokens) run_scout_role(block, thread);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::attention::sm90

// Facts of such a kernel, in addition to the layout of its parameters.
#define MLA_SMALL_RECORDS_FACTS(C)                                       \
    MLA_FACT(threads, C::kThreads);                                      \
    MLA_FACT(smem_bytes, sizeof(mla::attention::sm90::SmallStorage<C>)); \
    MLA_FACT(block_rows, C::kBlockRows);                                 \
    MLA_RECORD_FACT(C::TokenRecord)
