"""Tensor memory of one block: 128 lanes x 512 columns of 32 bits, its allocations, and load/store shapes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import SyncError
from ..synchronisation.shadow import Shadow

LANES, COLUMNS = 128, 512

SHAPES = {"32x32b": (1, 128), "16x64b": (1, 128), "16x128b": (2, 64), "16x256b": (4, 32), "16x32bx2": (1, 128)}
"""Registers per repetition and the largest repetition of each load/store shape."""


class TensorMemory:
    """Cells, definedness and allocations."""

    def __init__(self, cta: Any, first: int = 0) -> None:
        self.cta = cta
        self.cells = np.full((LANES, COLUMNS), 0xFFFFFFFF, "u4")
        self.defined = np.zeros((LANES, COLUMNS), bool)
        self.owned = np.zeros(COLUMNS, bool)
        self.blocks: dict[int, int] = {}
        self.owners: dict[int, int] = {}
        self.smallest = COLUMNS
        self.permit = True
        self.first = first
        self.shadow = Shadow(LANES * COLUMNS, COLUMNS) if cta.cluster.detector else None

    def place(self, columns: int, peer: TensorMemory | None = None) -> int | None:
        """Return the first column where an allocation fits, here and in a peer; None when there is no room."""
        owned = self.owned if peer is None else self.owned | peer.owned
        for start in range(self.first, COLUMNS - columns + 1, 32):
            if not owned[start : start + columns].any():
                return start
        return None

    def take(self, start: int, columns: int, warp: int) -> None:
        """Allocate columns for a warp; their content is undefined."""
        self.owned[start : start + columns] = True
        self.blocks[start], self.owners[start] = columns, warp
        self.smallest = columns
        self.defined[:, start : start + columns] = False

    def release(self, start: int, columns: int) -> str:
        """Free an allocation; return what is wrong with the request ('' when nothing)."""
        if self.blocks.get(start) != columns:
            return f"column {start} is not the start of an allocation of {columns} columns ({self.blocks})"
        del self.blocks[start]
        self.owned[start : start + columns] = False
        self.defined[:, start : start + columns] = False
        return ""

    def check_exit(self) -> None:
        """Every allocation must be freed before the block exits."""
        if self.blocks:
            raise SyncError(
                f"kernel {self.cta.program.name}: block {self.cta.ctaid} exits without freeing tensor memory"
                f" {self.blocks}"
            )

    def outside(self, columns: np.ndarray) -> str:
        """Return what is wrong with an access to columns ('' when all are allocated)."""
        if int(columns.min()) < 0 or int(columns.max()) >= COLUMNS:
            return f"tensor-memory columns {int(columns.min())}..{int(columns.max())} exceed {COLUMNS}"
        if not self.owned[columns].all():
            return f"tensor-memory column {int(columns[~self.owned[columns]][0])} is not allocated"
        return ""


@lru_cache(maxsize=512)
def fragment(shape: str, count: int, split: int, packed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return lane and column offsets of a load or store.

    Parameters
    ----------
    shape : str
        ``32x32b``, ``16x64b``, ``16x128b``, ``16x256b`` or ``16x32bx2``.
    count : int
        The repetition (``.xN``).
    split : int
        Column offset of the second half of ``16x32bx2``.
    packed : bool
        Two 16-bit cells per register (``.pack::16b`` / ``.unpack::16b``).

    Returns
    -------
    tuple of numpy.ndarray
        Lanes and columns, each [registers, 32 threads, cells per register].
    """
    per_rep = SHAPES[shape][0]
    registers = per_rep * count
    cells = 2 if packed else 1
    r = np.arange(registers)[:, None, None]
    t = np.arange(32)[None, :, None]
    c = np.arange(cells)[None, None, :]
    zero = r * 0 + t * 0 + c * 0
    if shape == "32x32b":
        lane, column = t + zero, r * cells + c + zero
    elif shape == "16x32bx2":
        lane, column = t % 16 + zero, r * cells + c + t // 16 * split + zero
    elif shape == "16x64b":
        # Thread t: lane t/4 + 8*(t%2), column (t/2)%2; two columns per repetition.
        lane, column = t // 4 + 8 * (t % 2) + zero, (t // 2 % 2 + 2 * r) * cells + c + zero
    elif shape == "16x128b":
        # Two registers per repetition: lanes t/4 and t/4 + 8, column t%4; four columns per repetition.
        lane, column = t // 4 + 8 * (r % 2) + zero, (t % 4 + 4 * (r // 2)) * cells + c + zero
    else:
        # Four registers: (t/4, 2(t%4) + {0, 1}) and the same eight lanes below; eight columns per repetition.
        lane = t // 4 + 8 * (r // 2 % 2) + zero
        column = (2 * (t % 4) + r % 2 + 8 * (r // 4)) * cells + c + zero
    lane.flags.writeable = column.flags.writeable = False
    return lane, column


def tmem_of(cta: Any) -> TensorMemory:
    """Return a block's tensor memory, made on first use."""
    if cta.tmem is None:
        cta.tmem = TensorMemory(cta, cta.launch.tmem_base)
    return cta.tmem
