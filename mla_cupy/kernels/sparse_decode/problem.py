"""Problem and options of sparse decode, which its kernels share on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mla_cupy.kernels.decode.schedule_pieces import Pieces
from mla_cupy.shapes import TILE_TOKENS


@dataclass(frozen=True)
class SparseDecodeProblem:
    """Sizes and dtypes that decide which kernels run and how: no pointers, no device.

    `topk` counts both lists together. `aligned`: q starts at, and steps by, multiples of 16 bytes; `ragged`: the
    lengths of lists are in memory; `compact`: the second cache has the compact format of `record`. `d_head` is the
    width after W_UV, 0 without it. `fp8_out`: results are e4m3 codes with scales. `math` is "exact" or "fp8". A
    batch-invariant call cuts each list into pieces of `piece_tiles`; 0 for others.
    """

    queries: int
    h_q: int
    topk: int
    dtype: str
    record: str
    aligned: bool = True
    ragged: bool = False
    d_head: int = 0
    compact: bool = False
    math: str = "exact"
    piece_tiles: int = 0
    fp8_out: bool = False

    @property
    def tiles(self) -> int:
        """The most tiles of a query."""
        return -(-self.topk // TILE_TOKENS)

    @property
    def pieces(self) -> Pieces | None:
        """Division of a batch-invariant call."""
        return Pieces.of(self.piece_tiles, self.tiles, self.queries)


class SparseDecodeOptions(NamedTuple):
    """A call's arguments other than arrays: as passed, then as resolved by the checks."""

    scale: float
    math: str
    kv_scale: float
    kv_format: str | None
    batch_invariant: bool
    split_tokens: int
    lse_base: str
    empty_lse: float
    out_dtype: str | None
    scales: str
    kernel: str | None
