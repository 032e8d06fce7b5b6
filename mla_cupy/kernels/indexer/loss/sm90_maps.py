"""What the losses' kernels for Hopper fetch by TMA: boxes of rows, in pieces that are as wide as the swizzle."""

from __future__ import annotations

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels.indexer.loss.problem import TILE_KEYS
from mla_cupy.kernels.pipeline import Call
from mla_cupy.runtime.tensormap import TensorMapSpec

PIECE_COLUMNS = 64
"""What one TMA copy fetches of a row: the span of the swizzle. Beyond a shorter row it writes zeros."""
FINITE_KEYS = "finite_keys"
"""The part of the workspace that the gradients take the index keys from."""
FINITE_VALUES, NONFINITE_TILES = "finite_values", "nonfinite_tiles"
"""Those that the attention takes its values from, and which tiles of keys of them are not whole."""

Maps = tuple[tuple[str, TensorMapSpec], ...]


def pieces(width: int) -> int:
    """How many pieces a row has."""
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
        box=(PIECE_COLUMNS, *box),
    )


def key_map(k: View) -> TensorMapSpec:
    """Keys as (1, keys, width), fetched in tiles."""
    (keys, width), nbytes = k.shape, TABLE[k.dtype].nbytes
    stride = nbytes * k.strides[0] if keys > 1 else -(-nbytes * width // 16) * 16
    return TensorMapSpec(
        k.dtype, k.ptr, dims=(width, keys, 1), strides_bytes=(stride, stride), box=(PIECE_COLUMNS, TILE_KEYS, 1)
    )


def finite_key_map(call: Call) -> tuple[str, TensorMapSpec]:
    """The contiguous copy of the index keys."""
    keys = call.view("index_k")
    return FINITE_KEYS, key_map(keys._replace(ptr=0, strides=(keys.shape[1], 1)))


def finite_value_map(call: Call) -> tuple[str, TensorMapSpec]:
    """The copy of the values, whose rows start at multiples of 16 bytes."""
    values = call.view("v")
    return FINITE_VALUES, key_map(values._replace(ptr=0, strides=(finite_value_stride(values.shape[1]), 1)))


def finite_value_stride(value_dim: int) -> int:
    """Elements between two rows of the copy of the values."""
    return -(-value_dim // 8) * 8
