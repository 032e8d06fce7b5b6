"""Sums with bits independent of the order of their terms: bounds of the terms, and their bins."""
# Written by `python -m tools.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.exact_sums import launches
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "KERNELS",
]

KERNELS: tuple[KernelSpec[Any], ...] = (*launches.KERNELS,)
