"""Sums whose bits do not depend on the order of their terms: bounds of the terms, and the bins that they go to."""
# Written by `python -m tools.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.exact_sums import launches
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "KERNELS",
]

KERNELS: tuple[KernelSpec[Any], ...] = (*launches.KERNELS,)
