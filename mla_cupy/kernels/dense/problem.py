"""What the kernels of dense attention share on the host: the problem, its sizes, the builds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.spec import Variant

GEOMETRIES = ((192, 128), (256, 256), (128, 128))
"""Widths of keys and values that are built."""
D_ROPE = 64
"""Width of what may be an array of its own, of queries and of keys: their last columns."""
TILE_QUERIES = 128
SCHEDULE_BYTES, SEQUENCE_BYTES, TILE_BYTES = 8, 20, 32
"""Of the parts of the workspace that the schedule writes: its head, a sequence, a tile of queries."""


VARIANTS = tuple(Variant(dtype=dtype, head_dim_qk=d_qk, head_dim_v=d_v) for dtype in HALF for d_qk, d_v in GEOMETRIES)


@dataclass(frozen=True)
class DenseProblem:
    """What decides which kernels run and how: no pointers, no device.

    `sequences` is 1 where no starts are given. `aligned` says that all rows that are read start at, and step by,
    multiples of 16 bytes.
    """

    s_q: int
    s_kv: int
    h_q: int
    h_kv: int
    d_qk: int
    d_v: int
    dtype: str
    sequences: int = 1
    aligned: bool = True

    @property
    def variant(self) -> Variant:
        """The build that it takes."""
        return Variant(dtype=self.dtype, head_dim_qk=self.d_qk, head_dim_v=self.d_v)

    @property
    def most_tiles(self) -> int:
        """The most tiles of queries that there can be, whatever the starts are."""
        return min(self.s_q, self.s_q // TILE_QUERIES + self.sequences + 2)


class PrefillOptions(NamedTuple):
    """The arguments of a call beside its arrays: the caller's, then what the checks make of them."""

    causal: bool
    scale: float
    out_dtype: str | None
    kernel: str | None
