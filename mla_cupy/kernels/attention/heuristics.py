"""Numbers of splits and blocks of attention kernels, and the costs of partial results that the schedule assumes."""

from __future__ import annotations

from mla_cupy.kernels.attention.split_schedule import PRICE_SCALE

COMBINE_BLOCKS_PER_SM = 4
COMBINE_UNITS_PER_BLOCK = 2
"""Units of work, some columns of a row each, that a block of the combine works at side by side."""
PROJECTION_BLOCKS_PER_SM = 2
"""Blocks that project which are resident on an SM at once."""
LEAST_ROWS_APART, LEAST_WIDE_ROWS_APART = 5120, 65
"""Least rows of all heads for which results are merged first and multiplied by W_UV in a separate launch: for heads up
to 128 wide, and for wider ones. Measured with layers on an H200: "Around attention" in the documentation.
"""
MAX_ROW_LIST_BLOCKS = 1 << 16
"""Blocks loop over the queries; a grid of this size keeps any GPU busy to the end."""
_MAX_COUNTED_ROWS = 1024


def merge_cost(block_rows: int) -> int:
    """Cost of storing and merging a block's partial results, in tiles: 2 up to 16 rows, 8 for 64."""
    return max(2, min(block_rows, 64) // 8)


def piece_cost(rows: int) -> int:
    """Cost of storing and merging one partial result of `rows` query rows (of all heads), in tiles / PRICE_SCALE.

    6 (1 + rows / 64) / 256 tiles, from times on an H200 with 16, 64 and 128 rows: see "Small batches of many rows" in
    `cuda_src/decode/small.md`.
    """
    return PRICE_SCALE // (256 * 64) * 6 * (64 + min(rows, _MAX_COUNTED_ROWS))
