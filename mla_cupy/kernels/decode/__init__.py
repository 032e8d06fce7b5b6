"""Dense decode over a paged cache."""

from mla_cupy.kernels.decode import combine_pieces, schedule_pieces
from mla_cupy.kernels.decode.pipeline import DECODE

__all__ = ["DECODE", "KERNELS"]

KERNELS = (*DECODE.kernels, schedule_pieces.KERNEL, combine_pieces.KERNEL)
