"""Checks of values, which a call makes only where they are asked for: they copy arrays to the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mla_cupy.runtime import env

__all__ = ["checking"]

_asked = ContextVar("mla_cupy.checking", default=False)
is_asked = _asked.get
"""True inside of `checking`."""


def is_on() -> bool:
    """True inside of `checking`, and in a process with MLA_CUPY_CHECK=1."""
    return _asked.get() or env.get("CHECK") == "1"


@contextmanager
def checking(on: bool = True) -> Iterator[None]:
    """Check the values of indices, lengths, page tables and scales in the calls of a `with` block.

    Each call waits for its arrays, copies these few to the host, and raises ArgumentError for the first bad value
    before anything is launched. `MLA_CUPY_CHECK=1` does the same for a whole process.

    Parameters
    ----------
    on : bool
        False disables the checks inside another block.

    Notes
    -----
    Checks cover: pages, lengths and starts of sequences, and scales in decode; the same and shared prefixes in
    `cascade_decode`; starts and scales in prefill; indices (a row within the limit, or -1), `topk_length` and starts in
    sparse forward and backward; ids in `prefill_segments`.

    The block covers calls of its own thread or asyncio task, including gradients of PyTorch's functions and functions
    that torch.compile has compiled. It does not cover calls captured in a CUDA graph or compiled by jax.jit: set
    MLA_CUPY_CHECK=1 there.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> q, cache = np.ones((1, 1, 16, 576), np.float16), np.ones((4, 64, 576), np.float16)
    >>> table, seqlens = np.array([[2, 9]], np.int32), np.array([100], np.int32)
    >>> with mla_cupy.checking():
    ...     mla_cupy.mla_decode(q, cache, table, seqlens, scale=192**-0.5)
    Traceback (most recent call last):
    mla_cupy.errors.ArgumentError: block_table[0, 1]: got 9, expected a page from 0 to 3
    """
    token = _asked.set(on)
    try:
        yield
    finally:
        _asked.reset(token)
