"""What decode, the sparse forward and sparse decode share: the schedule, the combine, lists of rows, a plain kernel."""

from mla_cupy.kernels.attention import combine, generic, row_lists, schedule

__all__ = ["KERNELS"]

KERNELS = (generic.KERNEL, schedule.KERNEL, combine.KERNEL, row_lists.KERNEL)
