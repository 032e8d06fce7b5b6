"""Host side of `merge/states.cu`."""

from __future__ import annotations

from mla_cupy.kernels.params import MergeStatesParams
from mla_cupy.kernels.spec import DTYPE_VARIANTS, KernelSpec

KERNEL: KernelSpec[object] = KernelSpec(
    "merge_states",
    "merges partial results over disjoint sets of keys",
    "merge/states.cu",
    MergeStatesParams,
    variants=DTYPE_VARIANTS,
    core=DTYPE_VARIANTS,
)
