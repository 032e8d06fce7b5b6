"""Tensor maps of Blackwell's sparse kernels: rows of kv, gathered four at a time, and boxes of the heads of queries.

The `base` of each is the address of the array that a launch names with it.
"""

from __future__ import annotations

from mla_cupy.dtypes import TABLE
from mla_cupy.kernels.pipeline import Call
from mla_cupy.runtime.tensormap import TensorMapSpec

_BOX_COLUMNS = 64
"""Columns of one box: 128 bytes, the span of the swizzle."""


def rows_map(call: Call, name: str, dtype: str, rows: int, columns: int) -> TensorMapSpec:
    """(rows, columns); `tile::gather4` fetches 64 columns of four rows at a time.

    Without a row nothing is fetched, but the map has one: the driver refuses empty ones.
    """
    nbytes = TABLE[dtype].nbytes
    row_bytes = nbytes * (call.stride(name) if rows > 1 else columns)
    return TensorMapSpec(dtype, 0, dims=(columns, max(1, rows)), strides_bytes=(row_bytes,), box=(_BOX_COLUMNS, 1))


def heads_map(call: Call, name: str, dtype: str, sizes: tuple[int, int, int], block_heads: int) -> TensorMapSpec:
    """(queries, heads, columns) in boxes of 64 columns of the heads of a block.

    Strides of axes of size 1 are meaningless, and the driver may reject them.
    """
    queries, heads, columns = sizes
    nbytes = TABLE[dtype].nbytes
    query, head = (nbytes * stride for stride in call.strides(name, 2))
    row_bytes = nbytes * columns
    return TensorMapSpec(
        dtype,
        0,
        dims=(columns, heads, queries),
        strides_bytes=(head if heads > 1 else row_bytes, query if queries > 1 else row_bytes),
        box=(_BOX_COLUMNS, block_heads, 1),
    )
