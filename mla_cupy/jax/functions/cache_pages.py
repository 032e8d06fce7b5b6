"""Functions of `mla_cupy.ops.cache_pages` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import jax

from mla_cupy.jax.lowering import run
from mla_cupy.ops.cache_pages import COPY_PAGES_OPERATION, SLOTS_OPERATION


def cache_copy_pages(pool: jax.Array, pairs: jax.Array, *, exportable: bool = False) -> jax.Array:
    """Return a pool with pages copied in all of its layers.

    For arrays of JAX: the notes of `mla_cupy.cache_copy_pages` hold here, too. Donate the given array to `jax.jit`, and
    XLA changes it in place; otherwise it is copied first.

    Parameters
    ----------
    pool : array, (num_layers, num_pages, page_bytes), uint8
        The last axis is contiguous; layers and pages may be any distance apart. Multiples of 16 bytes are fastest.
    pairs : array, (n, 2), int32
        (source, destination). Read on the device, so that a captured call copies what they say at each replay. A pair
        with a page outside of the pool, such as (-1, -1), is skipped. No page may be a destination twice, or both a
        source and a destination: its contents are then undefined.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    pool : array
        With the changes; in the old one's memory if that is donated.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and the pool is untouched.

    Notes
    -----
    It has no gradient.
    """
    arrays = (pool, pairs)
    options = ()
    (pool,) = run(COPY_PAGES_OPERATION, arrays, options, exportable)
    return pool


def cache_slots(
    block_table: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    *,
    page_size: int,
    max_tokens: int,
    num_pages: int | None = None,
    slots: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Find the slots of consecutive tokens of each sequence: a chunk to read, or new tokens to write.

    Everything is read on the device, so a captured call follows `starts` and `lengths`, chunk after chunk.

    For arrays of JAX: the notes of `mla_cupy.cache_slots` hold here, too.

    Parameters
    ----------
    block_table : array, (b, max_pages), int32
        Pages of the sequences, in the order of their tokens.
    starts : array, (b,), int32
        First position of each sequence.
    lengths : array, (b,), int32
        Number of positions from there on; a negative number means none.
    page_size : int
        Tokens in a page.
    max_tokens : int
        Length of `slots`. If `lengths` ask for more, those at the end are left out.
    num_pages : int, optional
        Pages of the cache: entries of `block_table` outside of [0, num_pages) are no pages. Default: as many as 32-bit
        slots can name.
    slots : array, (max_tokens,), int32, optional
        Whose memory the result takes over.
    cu_seqlens : array, (b + 1,), int32, optional
        Whose memory the result takes over.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    slots : array, (max_tokens,), int32
        For `cache_gather` and `cache_append`: page * page_size + place of the tokens of sequence 0, then of sequence 1,
        and so on. A position without a page, in the table or in the cache, is -1, and so are the entries after the last
        token.
    cu_seqlens : array, (b + 1,), int32
        For `mla_prefill`: sequence n has the slots from cu_seqlens[n] to cu_seqlens[n + 1]. At most `max_tokens`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient.
    """
    arrays = (block_table, starts, lengths, slots, cu_seqlens)
    options = (page_size, max_tokens, num_pages)
    slots, cu_seqlens = run(SLOTS_OPERATION, arrays, options, exportable)
    return slots, cu_seqlens
