"""What the kernels of the warm-up loss for Hopper have in common: what they take, and their tensor maps."""

from __future__ import annotations

from dataclasses import dataclass

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels.indexer.loss_problem import LossProblem
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, needs_alignment, needs_cc
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.tensormap import TensorMapSpec

PIECE_COLUMNS = 64
"""What one TMA copy fetches of a row: the span of the swizzle. Beyond a shorter row it writes zeros."""
TILE_KEYS = 128
MANY_PIECES, FEW_PIECES = 9, 2
INDEX_PIECES = (2, 1)


@dataclass(frozen=True)
class IndexVariant(Variant):
    """Pieces of a row of index queries and keys."""

    index_pieces: int


@dataclass(frozen=True)
class ScoresVariant(IndexVariant):
    """And of queries and keys of the main attention."""

    pieces: int


def pieces(width: int) -> int:
    """Of a row."""
    return -(-width // PIECE_COLUMNS)


def unsupported(problem: LossProblem, device: DeviceInfo) -> Reason | None:
    """Why the kernels cannot take the problem; None if they can."""
    if device.arch not in HOPPER:
        return needs_cc(device, "9.0")
    if problem.per_head:
        return Reason("takes targets that are summed over heads")
    return None if problem.aligned else needs_alignment("queries and keys, of both kinds,")


def query_map(q: View, box: tuple[int, int]) -> TensorMapSpec:
    """Queries as (heads, tokens, width), fetched as boxes of (tokens, heads)."""
    (tokens, heads, width), nbytes = q.shape, TABLE[q.dtype].nbytes
    token, head = (nbytes * stride for stride in q.strides[:2])
    row = -(-nbytes * width // 16) * 16
    return TensorMapSpec(
        q.dtype,
        q.ptr,
        dims=(width, tokens, heads),
        strides_bytes=(token if tokens > 1 else row, head if heads > 1 else row),
        box=(PIECE_COLUMNS, *box),
    )


def key_map(k: View) -> TensorMapSpec:
    """Keys as (1, keys, width), fetched in tiles."""
    (keys, width), nbytes = k.shape, TABLE[k.dtype].nbytes
    stride = nbytes * k.strides[0] if keys > 1 else -(-nbytes * width // 16) * 16
    return TensorMapSpec(
        k.dtype, k.ptr, dims=(width, keys, 1), strides_bytes=(stride, stride), box=(PIECE_COLUMNS, TILE_KEYS, 1)
    )
