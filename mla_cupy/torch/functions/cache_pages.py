"""Functions of `mla_cupy.ops.cache_pages` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import torch

from mla_cupy.ops.cache_pages import COPY_PAGES_OPERATION, SLOTS_OPERATION
from mla_cupy.ops.call import Invocation, run
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import CACHE_COPY_PAGES, CACHE_SLOTS


def cache_copy_pages(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy pages within each layer of a pool, in place.

    For tensors of PyTorch: the notes of `mla_cupy.cache_copy_pages` hold here, too.

    Parameters
    ----------
    pool : tensor, (num_layers, num_pages, page_bytes), uint8
        The last axis is contiguous; layers and pages may be any distance apart. Multiples of 16 bytes are fastest.
    pairs : tensor, (n, 2), int32
        (source, destination). Read on the device, so that a captured call copies what they say at each replay. A pair
        with a page outside of the pool, such as (-1, -1), is skipped. No page may be a destination twice, or both a
        source and a destination: its contents are then undefined.

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
    if is_plain_call(arrays):
        run(Invocation(COPY_PAGES_OPERATION, arrays, options))
    else:
        call(CACHE_COPY_PAGES, arrays, options)


def cache_slots(
    block_table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    page_size: int,
    max_tokens: int,
    num_pages: int | None = None,
    slots: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the slots of consecutive tokens of each sequence: a chunk to read, or new tokens to write.

    Everything is read on the device, so a captured call follows `starts` and `lengths`, chunk after chunk.

    For tensors of PyTorch: the notes of `mla_cupy.cache_slots` hold here, too.

    Parameters
    ----------
    block_table : tensor, (b, max_pages), int32
        Pages of the sequences, in the order of their tokens.
    starts : tensor, (b,), int32
        First position of each sequence.
    lengths : tensor, (b,), int32
        Number of positions from there on; a negative number means none.
    page_size : int
        Tokens in a page.
    max_tokens : int
        Length of `slots`. If `lengths` ask for more, those at the end are left out.
    num_pages : int, optional
        Pages of the cache: entries of `block_table` outside of [0, num_pages) are no pages. Default: as many as 32-bit
        slots can name.
    slots : tensor, (max_tokens,), int32, optional
        Where the slots go.
    cu_seqlens : tensor, (b + 1,), int32, optional
        Where the starts of the sequences in `slots` go.

    Returns
    -------
    slots : tensor, (max_tokens,), int32
        For `cache_gather` and `cache_append`: page * page_size + place of the tokens of sequence 0, then of sequence 1,
        and so on. A position without a page, in the table or in the cache, is -1, and so are the entries after the last
        token.
    cu_seqlens : tensor, (b + 1,), int32
        For `mla_prefill`: sequence n has the slots from cu_seqlens[n] to cu_seqlens[n + 1]. At most `max_tokens`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient. Tensors for the results are given all or none.
    """
    arrays = (block_table, starts, lengths, slots, cu_seqlens)
    options = (page_size, max_tokens, num_pages)
    if is_plain_call(arrays) and (slots is None) is (cu_seqlens is None):
        slots, cu_seqlens = run(Invocation(SLOTS_OPERATION, arrays, options))
    else:
        slots, cu_seqlens = call(CACHE_SLOTS, arrays, options)
    return slots, cu_seqlens
