"""Dense decode over a paged cache."""

from mla_cupy.kernels.decode import combine, combine_pieces, schedule, schedule_pieces
from mla_cupy.kernels.decode.pipeline import DECODE

__all__ = ["DECODE", "KERNELS"]

KERNELS = (*DECODE.kernels, schedule.KERNEL, combine.KERNEL, schedule_pieces.KERNEL, combine_pieces.KERNEL)
