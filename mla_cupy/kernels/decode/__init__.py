"""Dense decode over a paged cache."""
# Written by `python -m tests.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.decode import (
    combine_pieces,
    generic_records,
    schedule_pieces,
    sm90_records,
    sm90_records_seesaw,
    sm90_seesaw,
    sm90_small,
    sm90_small_cluster8,
)
from mla_cupy.kernels.decode.pipeline import DECODE
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "DECODE",
    "KERNELS",
]

KERNELS: tuple[KernelSpec[Any], ...] = (
    combine_pieces.KERNEL,
    generic_records.KERNEL,
    schedule_pieces.KERNEL,
    sm90_records.KERNEL,
    sm90_records_seesaw.KERNEL,
    sm90_seesaw.KERNEL,
    sm90_small.KERNEL,
    sm90_small_cluster8.KERNEL,
)
