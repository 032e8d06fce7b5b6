"""Arrays of queries and of results: an axis of sequences with the same number of queries each, or packed queries."""

from __future__ import annotations

from mla_cupy.dtypes import TABLE
from mla_cupy.kernels.pipeline import Call


def batch_of(call: Call) -> tuple[int, int]:
    """Number of sequences, and of the query tokens of each sequence; of all query tokens where these are packed."""
    b, queries = call.view("seqlens").shape[0], call.view("q").shape
    return b, queries[0] if call.name("cu_seqlens_q") else queries[1]


def query_strides(call: Call, name: str) -> tuple[int, int, int]:
    """The strides of an array of queries or results; packed arrays have no axis of sequences."""
    if not call.name("cu_seqlens_q"):
        return call.strides(name, 3)
    return (0, *call.strides(name, 2))


def position_strides(call: Call) -> tuple[int, int]:
    """The strides of the positions by which results are turned back, in bytes."""
    positions = call.views["out_positions"]
    if positions is None:
        return 0, 0
    strides = [TABLE[positions.dtype].nbytes * stride for stride in positions.strides]
    return (0, strides[0]) if len(strides) == 1 else (strides[0], strides[1])
