"""The positions of elements, by formula: sums in tensor memory, registers of its loads, the 128-byte swizzle.

Written from the PTX ISA (tcgen05: data path layouts, load and store shapes; shared-memory swizzling) and CUTLASS's
layouts of the same, and not from the simulator, so that it and the GPU are held to a third opinion.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LANES = 128
WARP = 32
SW128_COLUMNS = 64
"""16-bit elements in a row of 128 bytes."""


class Cells(NamedTuple):
    """Lane and column of tensor memory, for each element of something."""

    lanes: Array
    columns: Array


def sum_cells(m: int, n: int, weight_stationary: bool = False) -> Cells:
    """Lane and column of the element (row, column) of D, as two (m, n) arrays, relative to D's address.

    Layout D (M = 128): row r is lane r. Layout F (M = 64): row r is lane 32 (r / 16) + r % 16. The weight-stationary
    forms E (M = 64) and G (M = 32) cut D's columns into 128 / M parts, one for each M lanes.
    """
    row, column = np.broadcast_arrays(np.arange(m)[:, None], np.arange(n)[None, :])
    if weight_stationary:
        width = n * m // LANES
        return Cells(column // width * m + row, column % width)
    if m == LANES:
        return Cells(row, column)
    return Cells(row // 16 * 32 + row % 16, column)


def pair_sum_cells(n: int) -> Cells:
    """Lane and column of the elements of D of a pair with M = 128, as two (64, n) arrays of the rows of each block.

    Layout B: row r is lane r in the first half of the columns, and lane 64 + r in the second.
    """
    row, column = np.broadcast_arrays(np.arange(LANES // 2)[:, None], np.arange(n)[None, :])
    return Cells(row + column // (n // 2) * (LANES // 2), column % (n // 2))


def shape_cells(shape: str, registers: int) -> Cells:
    """Lane and column of register i of thread t in a load or store, as two (registers, 32) arrays, from its address on.

    32x32b: lane t, column i. 16x256b: four registers for each 8 columns; of them 0 and 1 are lane t / 4, columns
    2 (t % 4) and the next, 2 and 3 the same columns of the lane 8 further.
    """
    i, t = np.broadcast_arrays(np.arange(registers)[:, None], np.arange(WARP)[None, :])
    if shape == "32x32b":
        return Cells(t, i)
    return Cells(t // 4 + i // 2 % 2 * 8, i // 4 * 8 + t % 4 * 2 + i % 2)


def swizzled(offset: Array) -> Array:
    """Byte offset in an aligned SW128 tile: bits 4 to 6 (the 16-byte chunk) xor bits 7 to 9 (the row of eight)."""
    result: Array = offset ^ (offset >> 7 & 7) << 4
    return result


def sw_tile_elements(rows: int) -> Array:
    """Offsets of the elements (row, column) of an SW128 tile of 16-bit elements, in elements: a (rows, 64) array."""
    row, column = np.arange(rows)[:, None], np.arange(SW128_COLUMNS)[None, :]
    return swizzled(row * 128 + column * 2) // 2


def by_rows(sw_tile: Array) -> Array:
    """The elements of an SW128 tile in the order of memory: (rows, 64)."""
    return sw_tile.reshape(-1, SW128_COLUMNS)
