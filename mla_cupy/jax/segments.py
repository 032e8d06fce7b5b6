"""Packed sequences as JAX's libraries tell them: an id for each token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mla_cupy.errors import DTypeError, ShapeError, explain
from mla_cupy.jax.arguments import as_jax
from mla_cupy.ops.checks import check_count
from mla_cupy.shapes import MAX_TOKENS

__all__ = ["segment_starts"]


def segment_starts(segment_ids: jax.Array, max_sequences: int) -> jax.Array:
    """Find where packed sequences start: `cu_seqlens_q` and `cu_seqlens_kv` of `mla_prefill` and of sparse attention.

    Consecutive tokens with the same id form a sequence. It is computed on the device, also inside `jit`: the host never
    looks at the ids. It has no derivative.

    Parameters
    ----------
    segment_ids : array, (tokens,) or (rows, tokens), integers
        The id of each token; 0 and below is padding. Rows lie one after another, and no sequence goes on in the next.
    max_sequences : int
        The most sequences that there may be, padding between two sequences counted as one. Tokens of further ones are
        of no sequence.

    Returns
    -------
    array, (max_sequences + 1,), int32
        Where the sequences start, then where the last one ends, as often as is left. Padding before the first sequence
        and behind the last one is of no sequence, so that its queries see no key, and get 0; padding in between attends
        to itself.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        If an argument does not fit.

    Notes
    -----
    Ids only separate neighbours: a sequence whose id comes again later is another one. Where queries and keys have ids
    of their own, the n-th sequence of the queries attends to the n-th one of the keys.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import mla_cupy.jax as mla
    >>> jax.jit(mla.segment_starts, static_argnums=1)(jnp.array([1, 1, 1, 2, 2, 0, 0]), 3).tolist()
    [0, 3, 5, 5]
    """
    ids = as_jax("segment_ids", segment_ids)
    if ids is None or not jnp.issubdtype(ids.dtype, jnp.integer):
        got = "None" if ids is None else ids.dtype
        raise DTypeError(explain("segment_ids" if ids is None else "segment_ids.dtype", got, "an array of integers"))
    if ids.ndim not in (1, 2):
        raise ShapeError(explain("segment_ids.ndim", ids.ndim, "1 or 2: (tokens,) or (rows, tokens)"))
    count = check_count("max_sequences", max_sequences, 1, MAX_TOKENS)
    return _starts(jax.lax.stop_gradient(ids), count)


def _starts(ids: Any, count: int) -> jax.Array:
    begins = jnp.ones(ids.shape, bool).at[..., 1:].set(ids[..., 1:] != ids[..., :-1]).reshape(-1)
    there = (ids > 0).reshape(-1)
    places = jnp.arange(ids.size, dtype=jnp.int32)
    end = jnp.max(jnp.where(there, places + 1, 0), initial=0)
    begins &= (places < end) & (jnp.cumsum(there) > 0)
    found = jnp.full(count + 1, end, jnp.int32)
    return found.at[jnp.where(begins, jnp.cumsum(begins) - 1, count + 1)].set(places, mode="drop")
