// Stands in for cuda_src/ptx/gather4.cuh: four rows by four boxes of one row, which any TMA can fetch.
#pragma once
#include "ptx/copy.cuh"

namespace mla {
MLA_DEVICE void cp_async_bulk_tensor_gather4(SmemAddr to, const TensorMap& map, MBarrier& full, i32 column,
                                             const int4& rows, u64 l2_policy) {
    const i32 numbers[4] = {rows.x, rows.y, rows.z, rows.w};
    for (i32 i = 0; i < 4; ++i) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
            " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to.value + 128 * i),
            "l"(&map), "r"(smem_addr(&full).value), "r"(column), "r"(numbers[i]), "l"(l2_policy)
            : "memory");
    }
}
}  // namespace mla
