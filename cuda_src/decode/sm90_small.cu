// Dense MLA decode on Hopper for few query rows: memory-bound, so a tile of keys is held as briefly as possible.
//
//   S^T = K Q^T * scale           (64 x d_qk) (d_qk x rows) per tile of 64 tokens
//   P^T = exp2(S^T log2(e) - m)   m: running maximum of each row
//   l = sum of P,  O^T = V^T P^T  (d_v x 64) (64 x rows); V is K's first d_v columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// Grid: x = row blocks of all KV heads (up to 32 rows each, of s_q * h_q / h_kv), y = splits. One block per SM iterates
// over the work items of its split (attention/split_work.cuh). With values of 256 columns, half as many accumulators
// leave room for 64 rows, and a tile arrives as a whole.
//
// One warpgroup does all the math, one warp keeps two tiles of keys in flight, and the query rows of the next work item
// are loaded while the current one is processed. A tile arrives in three groups of SW128 tiles, each scored on arrival,
// and is released as a whole:
//
//   math    | S^T group 0, 1, 2 | max, P | O^T += V^T P^T | S'^T group 0, 1, 2 | ...
//   load    |        K' groups 0, 1, 2 ->                 | K'' groups 0, 1, 2 ->
//   query   |              Q of the next work item
//
// Query rows may be in two arrays (decode/split_rows.cuh). Variants: a mask over drafts, optional inputs
// (attention/query_groups.cuh). With optional inputs a split holds groups of queries instead of requests, and masks
// begin where the windows of rows do. decode/sm90_small.cuh processes the tiles.
//
// Source: swapped operands for few query rows are FlashMLA-ETAP's idea (2025). Here a single math warpgroup reads V^T
// from the tile of keys without a transpose.
#include "common/limits.cuh"
#include "decode/sm90_small.cuh"
#include "decode/split_rows.cuh"
#include "ptx/control.cuh"

// Keys have RoPE columns unless a variant says otherwise.
#ifndef MLA_HEAD_DIM_QK
#define MLA_HEAD_DIM_QK 576
#endif

// A mask says which drafts a query sees, if a variant says so.
#ifndef MLA_TREE_MASK
#define MLA_TREE_MASK 0
#endif

namespace mla::decode::sm90 {
// ---- Variant ---------------------------------------------------------------------------------------------------
#ifdef MLA_FORMS
using Params = DecodeFormParams;
using Work = GroupedWork;
MLA_DECODE_FORM_FACTS();
#elif MLA_TREE_MASK
using Params = DecodeParams;
using Work = ScheduledWork;
MLA_DECODE_FACTS();
#else
using Params = DecodeRopeParams;
using Work = SplitQueryWork;
MLA_DECODE_ROPE_FACTS();
#endif

using Small = Config<MLA_DTYPE, MLA_BLOCK_ROWS, MLA_HEAD_DIM_QK, MLA_TREE_MASK, Work>;

static_assert(sizeof(Storage<Small>) <= kMaxDynamicSmem, "shared memory");

MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage<Small>));
MLA_FACT(block_rows, Small::kBlockRows);

// ---- Math role -------------------------------------------------------------------------------------------------
MLA_DEVICE void run_math_role(Block<Small>& block, i32 thread) {
    using Element = Small::Element;
    const DecodeParams& p = block.p;
    Storage<Small>& s = block.s;
    Math<Small> math;
    math.stage = math.q_stage = 0;
    Work::HeldItem item;
    for (WorkIteratorOf<Work> walk(p, block.split, block.hidden); walk.next(p, item);) {
        math.reset();
        process_item(block, math, item, thread);
        if constexpr (Work::kForms) {
            turn_back<Small::kBlockRows>(p, GroupedWork::of(item), block.row0, math.out[Small::kSwTilesV - 1], thread);
        }
        griddepcontrol_wait();  // results may be written
        i32 at_end = thread, row0 = block.row0;
        if constexpr (Small::kBlockRows > 32) {  // values derived from them would not fit next to the loops'
            opaque(at_end);
            opaque(row0);
        }
        const BlockHeadsOf<Work> rows{block.kv_head, row0, block.rows_of(item)};
        store_result</*kWithRowMax=*/false>(Element{}, p, item, rows, math, s.warp_values, s.stats, 0, true, MathOnly,
                                            at_end);
        if (s.nonfinite_request == item.request) {
            bar_sync(MathOnly, kWarpgroupThreads);  // the results are stored
            fixup_nonfinite<Element, head_dim_v(Small::kHeadDimQk)>(block, item, 0, at_end);
        }
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode_sm90_small(const __grid_constant__ Params p, const __grid_constant__ TensorMap kv_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage<Small>& s = *reinterpret_cast<Storage<Small>*>(smem);
    Block<Small> block(p, s);
    if (threadIdx.x == 0) {
        prefetch_tensormap(kv_map);
        init_storage(s);
    }
    __syncthreads();
    prefetch_inputs<Work, ItemRows<Work>::kLatentLines<Small>, ItemRows<Work>::kRopeLine<Small>>(p);
    wait_for_inputs<Small>(p);

    const i32 warp = uniform_warp();
    if (warp < kLoadWarp) {
        run_math_role(block, threadIdx.x);
    } else if (warp == kLoadWarp) {
        run_load_role(block, threadIdx.x % kWarpThreads, GroupLoader<Small>{block, kv_map, 0});
    } else {
        const QueryStages<kStagesQ> stages{s.q[0][0], s.q_full, s.q_empty};
        run_query_role<Small>(block, stages, threadIdx.x - kQueryWarp * kWarpThreads);
    }
    griddepcontrol_wait();  // also blocks without work: this launch ends after the one before
    griddepcontrol_launch_dependents();
}
}  // namespace mla::decode::sm90
