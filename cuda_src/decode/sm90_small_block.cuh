// A thread block of decode for few query rows whose splits are in a schedule, for the kernels that differ in whose
// queries and tokens it works at: decode/sm90_small.cu, which explains it, and decode/sm90_small_forms.cu.
#pragma once
#include "decode/sm90_small.cuh"
#include "ptx/control.cuh"

namespace mla::decode::sm90 {
// ---- Math role -------------------------------------------------------------------------------------------------
template <class C>
MLA_DEVICE void run_math_role(Block<C>& block, i32 thread) {
    using Element = typename C::Element;
    const DecodeParams& p = block.p;
    Storage<C>& s = block.s;
    Math<C> math;
    math.stage = math.q_stage = 0;
    typename C::Work::HeldItem item;
    for (WorkIteratorOf<typename C::Work> walk(p, block.split, block.hidden); walk.next(p, item);) {
        math.reset();
        process_item(block, math, item, thread);
        if constexpr (C::Work::kForms)
            turn_back<C::kBlockRows>(p, item, block.row0, math.out[C::kSwTilesV - 1], thread);
        i32 at_end = thread, row0 = block.row0;
        if constexpr (C::kBlockRows > 32)
            opaque(at_end), opaque(row0);  // what follows from them would not fit beside the loops' values
        const BlockHeadsOf<typename C::Work> rows{block.kv_head, row0, block.rows_of(item)};
        store_result</*kWithRowMax=*/false>(Element{}, p, item, rows, math, s.warp_values, s.stats, 0, true, MathOnly,
                                            at_end);
        if (s.nonfinite_request == item.request) {
            bar_sync(MathOnly, kWarpgroupThreads);  // the results are stored
            fixup_nonfinite<Element, head_dim_v(C::kHeadDimQk)>(block, item, 0, at_end);
        }
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
template <class C>
MLA_DEVICE void run_small_block(const DecodeParams& p, const TensorMap& kv_map, Storage<C>& s) {
    Block<C> block(p, s);
    if (threadIdx.x == 0) {
        prefetch_tensormap(kv_map);
        init_storage(s);
    }
    __syncthreads();
    prefetch_inputs<typename C::Work, ItemRows<typename C::Work>::template kLatentLines<C>>(p);
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    if (warp < kLoadWarp) {
        run_math_role(block, threadIdx.x);
    } else if (warp == kLoadWarp) {
        run_load_role(block, threadIdx.x % kWarpThreads, GroupLoader<C>{block, kv_map, 0});
    } else {
        const QueryStages<kStagesQ> stages{s.q[0][0], s.q_full, s.q_empty};
        run_query_role<C>(block, stages, threadIdx.x - kQueryWarp * kWarpThreads);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::decode::sm90
