"""Pages of a paged cache: copies of them, and the block tables that name them."""

from __future__ import annotations

from typing import Any

from mla_cupy.cache_formats import words_before_changes
from mla_cupy.errors import ArgumentError, ShapeError, explain
from mla_cupy.kernels.cache import COPY_PAGES, UPDATE
from mla_cupy.kernels.cache.pipeline import CopyPagesOptions, UpdateOptions
from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.checks import is_integer
from mla_cupy.ops.operation import Examined, Input, NoOptions, Operation, Views, present
from mla_cupy.ops.schema import steps_by_16_bytes


def cache_copy_pages(pool: Any, pairs: Any, *, stream: Any = None) -> None:
    """Copy pages within each layer of a pool, in place.

    Parameters
    ----------
    pool : array, (num_layers, num_pages, page_bytes), uint8
        The last axis is contiguous; layers and pages may be any distance apart. Multiples of 16 bytes are fastest.
    pairs : array, (n, 2), int32
        (source, destination). Read on the device, so that a captured call copies what they say at each replay. A pair
        with a page outside of the pool, such as (-1, -1), is skipped. No page may be both a destination and anything
        else: what such a page then holds is not defined.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and the pool is untouched.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> pool = np.arange(6, dtype=np.uint8).reshape(2, 3, 1)
    >>> mla_cupy.cache_copy_pages(pool, np.array([[0, 2]], np.int32))
    >>> pool[:, 2, 0].tolist()
    [0, 3]
    """
    run(Invocation(COPY_PAGES_OPERATION, (pool, pairs), stream=stream))


def cache_update(
    packed: Any,
    table: Any,
    seqlens: Any,
    step_table: Any,
    step_seqlens: Any,
    slots: Any,
    positions: Any,
    *,
    page_size: int,
    stream: Any = None,
) -> None:
    """Bring a block table on the device up to date, gather the rows of a step, and place its tokens.

    For `PagedKVCache`.

    Parameters
    ----------
    packed : array, (words,), int32
        One upload, see `cuda_src/cache/update.cu`: [rows of the step, all rows, 0, ...], then rows (max_rows,), lengths
        (max_rows,), first changes (max_rows + 1,), first tokens (max_rows + 1,), and changes (column, page). The rows
        of the step come first. Rows must differ; those outside of the table, and columns outside of it, are skipped.
    table : array, (max_rows, max_pages), int32
    seqlens : array, (max_rows,), int32
        Both are changed in place, by sequence.
    step_table : array, (max_rows, max_pages), int32
    step_seqlens : array, (max_rows,), int32
        The rows of the step, in its order; of the table as many columns as the length takes.
    slots, positions : array, (max_tokens,), int32
        Where the step's tokens go, and their positions: the last ones of each row; -1 if there is no such place.
    page_size : int
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.
    """
    arrays = (packed, table, seqlens, step_table, step_seqlens, slots, positions)
    run(Invocation(UPDATE_OPERATION, arrays, (page_size,), stream=stream))


def _examine_copy(views: Views, given: NoOptions) -> Examined:
    pool = present(views, "pool")
    return Examined(None, CopyPagesOptions(steps_by_16_bytes(pool) and pool.shape[2] % 16 == 0))


def _examine_update(views: Views, given: UpdateOptions) -> Examined:
    packed, table = present(views, "packed"), present(views, "table")
    if not (is_integer(given.page_size) and given.page_size > 0):
        raise ArgumentError(explain("page_size", repr(given.page_size), "a whole number from 1 on"))
    least = words_before_changes(table.shape[0])
    if packed.shape[0] < least:
        raise ShapeError(explain("packed.shape[0]", packed.shape[0], f"at least {least}, before the changes"))
    return Examined(None, given._replace(page_size=int(given.page_size)))


COPY_PAGES_OPERATION = Operation(
    "cache_copy_pages",
    inputs=(
        Input("pool", "num_layers num_pages page_bytes", ("uint8",), contiguous=True, written=True),
        Input("pairs", "n two", ("int32",)),
    ),
    outputs=(),
    sizes={"two": (2,)},
    options=NoOptions,
    examine=_examine_copy,
    pipeline=COPY_PAGES,
    on_pages=True,
)

UPDATE_OPERATION = Operation(
    "cache_update",
    inputs=(
        Input("packed", "words", ("int32",), contiguous=True),
        Input("table", "max_rows max_pages", ("int32",), contiguous=True, written=True),
        Input("seqlens", "max_rows", ("int32",), contiguous=True, written=True),
        Input("step_table", "max_rows max_pages", ("int32",), contiguous=True, written=True),
        Input("step_seqlens", "max_rows", ("int32",), contiguous=True, written=True),
        Input("slots", "max_tokens", ("int32",), contiguous=True, written=True),
        Input("positions", "max_tokens", ("int32",), contiguous=True, written=True),
    ),
    outputs=(),
    options=UpdateOptions,
    examine=_examine_update,
    pipeline=UPDATE,
    on_pages=True,
    internal=True,
)
