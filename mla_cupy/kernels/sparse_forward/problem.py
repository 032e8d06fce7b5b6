"""Problem and options of the sparse forward, which its kernels share on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mla_cupy.kernels.attention.kernel import AttentionKernel
from mla_cupy.kernels.decode.schedule_pieces import Pieces
from mla_cupy.kernels.pipeline import Call
from mla_cupy.runtime.tensormap import TensorMapSpec
from mla_cupy.shapes import D_QK, D_V, TILE_TOKENS

HEAD_DIMS_QK = (D_QK, D_V)
"""Widths of a key: with and without its RoPE part."""


@dataclass(frozen=True)
class SparseForwardProblem:
    """Sizes and dtypes that decide which kernels run and how: no pointers, no device.

    `aligned`: q and kv start at, and step by, multiples of 16 bytes. `record` is the FP8 format of kv, "" for rows of
    `dtype`. `math` is "exact" or "fp8". A batch-invariant call cuts each list into pieces of `piece_tiles`; 0 for
    others.
    """

    s_q: int
    s_kv: int
    h_q: int
    topk: int
    d_qk: int
    dtype: str
    aligned: bool = True
    record: str = ""
    math: str = "exact"
    piece_tiles: int = 0

    @property
    def pieces(self) -> Pieces | None:
        """Division of a batch-invariant call."""
        return Pieces.of(self.piece_tiles, -(-self.topk // TILE_TOKENS), self.s_q)

    @property
    def rows(self) -> int:
        """Query rows that share keys."""
        return self.h_q


class SparseForwardOptions(NamedTuple):
    """A call's arguments other than arrays: as passed, then as resolved by the checks."""

    scale: float
    causal: bool
    relative: bool
    math: str
    kv_scale: float
    kv_format: str | None
    batch_invariant: bool
    split_tokens: int
    lse_base: str
    empty_lse: float
    out_dtype: str | None
    kernel: str | None


NamedMaps = tuple[tuple[str, TensorMapSpec], ...]
"""Tensor maps and their arrays."""


@dataclass(frozen=True)
class MappedKernel(AttentionKernel[SparseForwardProblem]):
    """A kernel of the sparse forward that fetches by TMA: `maps(problem, kv, call)`, where `kv` names the rows."""

    maps: Callable[[SparseForwardProblem, str, Call], NamedMaps] = lambda problem, kv, call: ()
