// TMA modes that are new on Blackwell (sm_100a, sm_103a).
#pragma once
#include "ptx/copy.cuh"

namespace mla {
// Four rows of a matrix, by index, from column `column` on. A row outside the matrix becomes zeros, and its bytes still
// count.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
MLA_DEVICE void cp_async_bulk_tensor_gather4(SmemAddr to, const TensorMap& map, MBarrier& full, i32 column,
                                             const int4& rows, u64 l2_policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to.value),
        "l"(&map), "r"(smem_addr(&full).value), "r"(column), "r"(rows.x), "r"(rows.y), "r"(rows.z), "r"(rows.w),
        "l"(l2_policy)
        : "memory");
}
}  // namespace mla
