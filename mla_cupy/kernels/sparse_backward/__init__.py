"""Sparse attention, backward."""
# Written by `python -m tests.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.sparse_backward import delta, dkv, generic, sink, sm90, sm90_pair, sm100, sm100_ws
from mla_cupy.kernels.sparse_backward.pipeline import SPARSE_BACKWARD
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "KERNELS",
    "SPARSE_BACKWARD",
]

KERNELS: tuple[KernelSpec[Any], ...] = (
    delta.KERNEL,
    dkv.KERNEL,
    generic.KERNEL,
    sink.KERNEL,
    sm100.KERNEL,
    sm100_ws.KERNEL,
    sm90.KERNEL,
    sm90_pair.KERNEL,
)
