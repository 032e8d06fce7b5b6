"""Dense attention with keys and values per head: prefill, un-absorbed."""
# Written by `python -m tests.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.dense import table
from mla_cupy.kernels.dense.pipeline import DENSE
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "DENSE",
    "KERNELS",
]

KERNELS: tuple[KernelSpec[Any], ...] = (*table.KERNELS,)
