"""Dense attention with keys and values per head: prefill, un-absorbed."""
# Written by `python -m tools.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.dense import backward_sm90, backward_table, fp8, mask, segments, table
from mla_cupy.kernels.dense.backward import DENSE_BACKWARD
from mla_cupy.kernels.dense.mask import MASK
from mla_cupy.kernels.dense.pipeline import DENSE
from mla_cupy.kernels.dense.segments import SEGMENTS
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "DENSE",
    "DENSE_BACKWARD",
    "KERNELS",
    "MASK",
    "SEGMENTS",
]

KERNELS: tuple[KernelSpec[Any], ...] = (
    *backward_sm90.KERNELS,
    *backward_table.KERNELS,
    *fp8.KERNELS,
    mask.KERNEL,
    segments.KERNEL,
    *table.KERNELS,
)
