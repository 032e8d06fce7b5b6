"""Products with the halves of kv_b_proj: of queries before attention, and of merged results after it."""
# Written by `python -m tools.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.projection import pipeline
from mla_cupy.kernels.projection.pipeline import ABSORBING, MERGE_PROJECT
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "ABSORBING",
    "KERNELS",
    "MERGE_PROJECT",
]

KERNELS: tuple[KernelSpec[Any], ...] = (*pipeline.KERNELS,)
