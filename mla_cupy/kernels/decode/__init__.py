"""Dense decode over a paged cache."""
# Written by `python -m tools.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.decode import (
    combine_pieces,
    records,
    schedule_groups,
    schedule_pieces,
    sm90,
    sm90_fp8,
    sm90_small,
    sm90_small_cluster8,
    sm100,
    sm100_fp8,
)
from mla_cupy.kernels.decode.pipeline import DECODE
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "DECODE",
    "KERNELS",
]

KERNELS: tuple[KernelSpec[Any], ...] = (
    combine_pieces.KERNEL,
    *records.KERNELS,
    schedule_groups.KERNEL,
    schedule_pieces.KERNEL,
    *sm100.KERNELS,
    sm100_fp8.KERNEL,
    sm90.KERNEL,
    sm90_fp8.KERNEL,
    sm90_small.KERNEL,
    sm90_small_cluster8.KERNEL,
)
