"""Parts of decode, the sparse forward and sparse decode: schedule, combine, lists of rows, a CUDA-core kernel."""
# Written by `python -m tools.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.attention import combine, combine_project, generic, mma, quantize_output, row_lists, schedule
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "KERNELS",
]

KERNELS: tuple[KernelSpec[Any], ...] = (
    combine.KERNEL,
    combine_project.KERNEL,
    generic.KERNEL,
    *mma.KERNELS,
    quantize_output.KERNEL,
    row_lists.KERNEL,
    schedule.KERNEL,
)
