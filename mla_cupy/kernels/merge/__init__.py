"""Merging partial results."""
# Written by `python -m tools.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.merge import exchange, pipeline
from mla_cupy.kernels.merge.pipeline import MERGE
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "KERNELS",
    "MERGE",
]

KERNELS: tuple[KernelSpec[Any], ...] = (
    exchange.KERNEL,
    pipeline.KERNEL,
)
