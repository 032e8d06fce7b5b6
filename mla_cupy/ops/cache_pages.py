"""Pages of a paged cache: copies of them, and the block tables that name them."""

from __future__ import annotations

from typing import Any

from mla_cupy.cache_formats import words_before_changes
from mla_cupy.errors import ShapeError, explain
from mla_cupy.kernels.cache import COPY_PAGES, SLOTS, UPDATE
from mla_cupy.kernels.cache.pipeline import CopyPagesOptions, SlotsOptions, UpdateOptions
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import check_count
from mla_cupy.ops.operation import Examined, Input, NoOptions, Operation, Output, Views, only_int32, present
from mla_cupy.ops.schema import steps_by_16_bytes
from mla_cupy.shapes import MAX_INT32


def cache_copy_pages(pool: Any, pairs: Any, *, stream: Any = None) -> None:
    """Copy pages within each layer of a pool, in place.

    Parameters
    ----------
    pool : array, (num_layers, num_pages, page_bytes), uint8
        The last axis is contiguous; layers and pages may be any distance apart. Multiples of 16 bytes are fastest.
    pairs : array, (n, 2), int32
        (source, destination). They are read on the device, so each replay of a captured call reads them again. Pairs
        with a page outside the pool, such as (-1, -1), are skipped. A page that is a destination twice, or both a
        source and a destination, has undefined contents.
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
    return call(cache_copy_pages, locals())


def cache_slots(
    block_table: Any,
    starts: Any,
    lengths: Any,
    *,
    page_size: int,
    max_tokens: int,
    num_pages: int | None = None,
    slots: Any = None,
    cu_seqlens: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Compute the slots of consecutive tokens of each sequence: a chunk to read, or new tokens to write.

    Everything is read on the device, so each replay of a captured call follows `starts` and `lengths`.

    Parameters
    ----------
    block_table : array, (b, max_pages), int32
        Pages of the sequences, in the order of their tokens.
    starts : array, (b,), int32
        First position of each sequence.
    lengths : array, (b,), int32
        Number of positions from `starts` on; negative numbers count as 0.
    page_size : int
        Tokens in a page.
    max_tokens : int
        Length of `slots`. Tokens beyond it are dropped.
    num_pages : int, optional
        Pages of the cache: entries of `block_table` outside [0, num_pages) are not pages. Default: the most pages that
        32-bit slots can address.
    slots : array, (max_tokens,), int32, optional
        Memory for the slots.
    cu_seqlens : array, (b + 1,), int32, optional
        Memory for the starts of the sequences in `slots`.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    slots : array, (max_tokens,), int32
        For `cache_gather` and `cache_append`: page * page_size + place for the tokens of sequence 0, then of sequence
        1, and so on. Positions without a page, in the table or in the cache, are -1, and so are the entries after the
        last token.
    cu_seqlens : array, (b + 1,), int32
        For `mla_prefill`: sequence n has the slots from cu_seqlens[n] to cu_seqlens[n + 1]. At most `max_tokens`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    Slots are int32, so at most (2^31 - 1) // page_size pages are addressable: later pages do not exist, whatever
    `num_pages` says.

    Exact, and the same from run to run. Guide: "Chunked prefill over the paged cache".

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> table = np.array([[7, 2], [4, 0]], np.int32)
    >>> starts, lengths = np.array([3, 0], np.int32), np.array([2, 3], np.int32)
    >>> slots, cu_seqlens = mla_cupy.cache_slots(table, starts, lengths, page_size=4, max_tokens=6)
    >>> slots.tolist(), cu_seqlens.tolist()
    ([31, 8, 16, 17, 18, -1], [0, 2, 5])
    """
    return call(cache_slots, locals())


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
        The rows of the step, in its order; of the table only the columns that the length covers.
    slots, positions : array, (max_tokens,), int32
        Slots of the step's tokens, the last ones of each row, and their positions; -1 for tokens without a slot.
    page_size : int
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.
    """
    return call(cache_update, locals())


def _examine_copy(views: Views, given: NoOptions) -> Examined:
    pool = present(views, "pool")
    return Examined(None, CopyPagesOptions(steps_by_16_bytes(pool) and pool.shape[2] % 16 == 0))


def _examine_update(views: Views, given: UpdateOptions) -> Examined:
    packed, table = present(views, "packed"), present(views, "table")
    page_size = check_count("page_size", given.page_size, 1, MAX_INT32)
    least = words_before_changes(table.shape[0])
    if packed.shape[0] < least:
        raise ShapeError(explain("packed.shape[0]", packed.shape[0], f"at least {least}, before the changes"))
    return Examined(None, given._replace(page_size=page_size))


def _examine_slots(views: Views, given: SlotsOptions) -> Examined:
    b = present(views, "block_table").shape[0]
    page_size = check_count("page_size", given.page_size, 1, MAX_INT32)
    max_tokens = check_count("max_tokens", given.max_tokens, 0, MAX_INT32)
    num_pages = MAX_INT32 if given.num_pages is None else check_count("num_pages", given.num_pages, 0, MAX_INT32)
    options = SlotsOptions(page_size, max_tokens, min(num_pages, MAX_INT32 // page_size))
    return Examined(None, options, {"max_tokens": max_tokens, "b+1": b + 1})


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

SLOTS_OPERATION = Operation(
    "cache_slots",
    inputs=(
        Input("block_table", "b max_pages", ("int32",)),
        Input("starts", "b", ("int32",)),
        Input("lengths", "b", ("int32",)),
    ),
    outputs=(Output("slots", "max_tokens", only_int32), Output("cu_seqlens", "b+1", only_int32)),
    options=SlotsOptions,
    examine=_examine_slots,
    pipeline=SLOTS,
    on_pages=True,
)
