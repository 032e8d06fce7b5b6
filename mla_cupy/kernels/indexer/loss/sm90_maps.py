"""Tensor maps of the losses' kernels for Hopper: boxes of rows, in pieces that are as wide as the swizzle."""

from __future__ import annotations

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels.indexer.loss.problem import TILE_KEYS
from mla_cupy.kernels.pipeline import Call
from mla_cupy.runtime.tensormap import TensorMapSpec

PIECE_BYTES = 128
"""Width of a TMA copy: the span of the swizzle. Beyond a shorter row it writes zeros."""
PIECE_COLUMNS = PIECE_BYTES // 2
"""Columns of 16 bits in a piece."""
FINITE_KEYS = "finite_keys"
"""The part of the workspace with the index keys for the gradients."""
DECODED_QUERIES = "decoded_queries"
"""Name of the workspace's decoded index queries of a chunk's tokens, where queries are codes."""
FINITE_VALUES, NONFINITE_TILES = "finite_values", "nonfinite_tiles"
"""Names of the workspace's copy of the values, and of its flags of tiles of keys with NaN or infinities."""

Maps = tuple[tuple[str, TensorMapSpec], ...]


def pieces(width: int) -> int:
    """Number of pieces of a row."""
    return -(-width // PIECE_COLUMNS)


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
        box=(PIECE_BYTES // nbytes, *box),
    )


def key_map(k: View) -> TensorMapSpec:
    """Keys as (heads, keys, width), of one head where there is no such axis, fetched in tiles."""
    if len(k.shape) == 2:
        k = k._replace(shape=(k.shape[0], 1, k.shape[1]), strides=(k.strides[0], 0, k.strides[1]))
    return query_map(k, (TILE_KEYS, 1))


def finite_key_map(call: Call) -> tuple[str, TensorMapSpec]:
    """The contiguous copy of the index keys."""
    keys = call.view("index_k")
    return FINITE_KEYS, key_map(keys._replace(ptr=0, strides=(keys.shape[1], 1), dtype="bfloat16"))


def gradient_query_map(call: Call, tokens: int, box: tuple[int, int]) -> tuple[str, TensorMapSpec]:
    """Index queries, or the contiguous copy of a chunk's."""
    q = call.view("index_q")
    if q.dtype == "bfloat16":
        return "index_q", query_map(q, box)
    _, heads, width = q.shape
    copy = q._replace(ptr=0, shape=(tokens, heads, width), strides=(heads * width, width, 1), dtype="bfloat16")
    return DECODED_QUERIES, query_map(copy, box)


def finite_value_map(call: Call) -> tuple[str, TensorMapSpec]:
    """The copy of the values, with rows that start at multiples of 16 bytes."""
    values = call.view("v")
    shape = values.shape[0], values.shape[-1]
    return FINITE_VALUES, key_map(values._replace(ptr=0, shape=shape, strides=(finite_value_stride(shape[1]), 1)))


def finite_value_stride(value_dim: int) -> int:
    """Elements between two rows of the copy of the values."""
    return -(-value_dim // 8) * 8
