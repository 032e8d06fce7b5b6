"""Problem, sizes and builds of dense attention, which its kernels share on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.spec import Variant

GEOMETRIES = ((192, 128), (256, 256), (128, 128))
"""Widths of keys and values that are built."""
D_ROPE = 64
"""Width of the last columns of queries and keys, which may be separate arrays."""
TILE_QUERIES = TILE_KEYS = 128
"""Tile of the lists that the schedule makes. A kernel may compute less at once."""
FP8_GEOMETRY = (192, 128)
"""Widths of keys and values that are built for e4m3 codes."""
ROW_GROUP = 16
"""Alignment of sequences in the workspace, in rows."""
SCHEDULE_BYTES, SEQUENCE_BYTES, TILE_BYTES = 8, 28, 32
"""Sizes of the schedule's output: the head of a list, a sequence, a tile."""
MASK_ROW_BYTES = 16
"""Rows of masks start at, step by, and have multiples of these: 128 keys."""

VARIANTS = tuple(Variant(dtype=dtype, head_dim_qk=d_qk, head_dim_v=d_v) for dtype in HALF for d_qk, d_v in GEOMETRIES)


def _most_tiles(tokens: int, tile: int, sequences: int) -> int:
    """Most tiles, in the caller's sequences and in the tokens before and after them."""
    return min(tokens, tokens // tile + sequences + 2)


@dataclass(frozen=True)
class DenseProblem:
    """Sizes and dtypes that decide which kernels run and how: no pointers, no device.

    `sequences` is 1 without starts. `aligned`: all rows that are read start at, and step by, multiples of 16 bytes.
    `masked`: the call has a mask. The dtype of e4m3 codes is "float8_e4m3fn", whatever dtype their arrays have; e4m3
    supports neither mask nor state.
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
    masked: bool = False

    @property
    def coded(self) -> bool:
        """True if queries, keys and values are e4m3 codes."""
        return self.dtype == "float8_e4m3fn"

    @property
    def variant(self) -> Variant:
        """The build for a problem."""
        return Variant(dtype=self.dtype, head_dim_qk=self.d_qk, head_dim_v=self.d_v)

    @property
    def most_tiles(self) -> int:
        """The most tiles of queries that there can be, whatever the starts are."""
        return _most_tiles(self.s_q, TILE_QUERIES, self.sequences)


class PrefillOptions(NamedTuple):
    """A call's arguments other than arrays: as passed, then as resolved by the checks."""

    causal: bool
    scale: float
    out_dtype: str | None
    kernel: str | None


@dataclass(frozen=True)
class DenseBackwardProblem(DenseProblem):
    """Problem of the backward; `aligned` includes the rows of its results.

    `shared_rope` says that several KV heads share the keys' last columns.
    """

    deterministic: bool = False
    shared_rope: bool = False

    @property
    def most_key_tiles(self) -> int:
        """The most tiles of keys that there can be."""
        return _most_tiles(self.s_kv, TILE_KEYS, self.sequences)

    @property
    def num_rows(self) -> int:
        """Rows of the workspace: sequences begin at multiples, and the last tile is read whole."""
        begun = self.s_q + (ROW_GROUP - 1) * min(self.s_q, self.sequences + 2)
        return -(-begun // ROW_GROUP) * ROW_GROUP + TILE_QUERIES - ROW_GROUP


class PrefillBackwardOptions(NamedTuple):
    """A call's arguments other than arrays: as passed, then as resolved by the checks."""

    causal: bool
    scale: float
    deterministic: bool
    kernel: str | None
