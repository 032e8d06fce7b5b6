"""Packed sequences as JAX's libraries tell them: an id for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mla_cupy.errors import ArgumentError, DTypeError, ShapeError, explain
from mla_cupy.jax.arguments import as_jax
from mla_cupy.ops.checks import check_count
from mla_cupy.ops.segments import MAX_SEGMENTS
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
    ids = _integers("segment_ids", segment_ids)
    if ids.ndim not in (1, 2):
        raise ShapeError(explain("segment_ids.ndim", ids.ndim, "1 or 2: (tokens,) or (rows, tokens)"))
    count = check_count("max_sequences", max_sequences, 1, MAX_TOKENS)
    return _starts(jax.lax.stop_gradient(ids), count)


def _integers(argument: str, x: Any) -> Any:
    ids = as_jax(argument, x)
    if ids is None or not jnp.issubdtype(ids.dtype, jnp.integer):
        got = "None" if ids is None else ids.dtype
        raise DTypeError(explain(argument if ids is None else f"{argument}.dtype", got, "an array of integers"))
    return ids


def _starts(ids: Any, count: int) -> jax.Array:
    begins = jnp.ones(ids.shape, bool).at[..., 1:].set(ids[..., 1:] != ids[..., :-1]).reshape(-1)
    there = (ids > 0).reshape(-1)
    places = jnp.arange(ids.size, dtype=jnp.int32)
    end = jnp.max(jnp.where(there, places + 1, 0), initial=0)
    begins &= (places < end) & (jnp.cumsum(there) > 0)
    found = jnp.full(count + 1, end, jnp.int32)
    return found.at[jnp.where(begins, jnp.cumsum(begins) - 1, count + 1)].set(places, mode="drop")


# ---- Ids as arguments of attention ---------------------------------------------------------------------------------


class Segments(NamedTuple):
    """The arguments of a call that say which tokens are of one sequence."""

    segment_ids_q: Any = None
    segment_ids_kv: Any = None
    max_segments: Any = None


def with_starts(given: Mapping[str, Any], segments: Segments) -> dict[str, Any]:
    """The arrays of a call, with starts computed from its tokens' ids if there are any.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        If the ids do not fit the call.
    """
    found = dict(given)
    is_whole = all(getattr(given[name], "ndim", 0) for name in ("q", "k"))  # else the call itself is refused
    if all(x is None for x in segments) or not is_whole:
        return found
    queries, keys, count = _checked(given, segments)
    found["cu_seqlens_q"], found["cu_seqlens_kv"] = packed_starts(queries, keys, count)
    return found


def _checked(given: Mapping[str, Any], segments: Segments) -> tuple[Any, Any, int]:
    ids, of_keys, most = segments
    if ids is None:
        name, value = ("segment_ids_kv", "an array") if of_keys is not None else ("max_segments", most)
        raise ArgumentError(explain(name, value, "None without segment_ids_q", "pass segment_ids_q as well"))
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        if given[name] is not None:
            raise ArgumentError(
                explain(name, "an array, with segment_ids_q", "None", "pass either the starts or the ids")
            )
    if most is None:
        remedy = "pass the largest number of segments of queries or keys"
        raise ArgumentError(explain("max_segments", None, "an integer with segment_ids_q", remedy))
    count = check_count("max_segments", most, 1, MAX_SEGMENTS)
    queries = _of_tokens("segment_ids_q", ids, given["q"], "q")
    if of_keys is None and given["k"].shape[0] != queries.shape[0]:
        expected = f"an array of s_kv={given['k'].shape[0]} ids, beside s_q={queries.shape[0]}"
        raise ShapeError(explain("segment_ids_kv", None, expected))
    return queries, queries if of_keys is None else _of_tokens("segment_ids_kv", of_keys, given["k"], "k"), count


def _of_tokens(name: str, x: Any, tokens: Any, of: str) -> Any:
    """Ids, one for each token of an array."""
    ids = _integers(name, x)
    if ids.shape != tokens.shape[:1]:
        remedy = "pass rows of ids to segment_starts" if ids.ndim == 2 else ""
        raise ShapeError(explain(f"{name}.shape", ids.shape, f"{tokens.shape[:1]}, as {of} has tokens", remedy))
    return jax.lax.stop_gradient(ids)


def packed_starts(ids_q: Any, ids_kv: Any, count: int) -> tuple[jax.Array, jax.Array]:
    """Starts of queries and keys from segment ids: the result of `prefill_segments`, in operations that XLA may fuse.

    Parameters
    ----------
    ids_q, ids_kv : array, (s_q,) and (s_kv,), integers
        0 and below is padding.
    count : int
        The most segments of either side. Tokens of further ones are of no sequence.

    Returns
    -------
    cu_seqlens_q, cu_seqlens_kv : array, (3 * count + 1,), int32
    """
    starts_q, ends_q, names = _segments(ids_q, count)
    starts_kv, ends_kv, names_kv = _segments(ids_kv, count)
    same = (names[:, None] == names_kv[None, :]) & (names > 0)[:, None]
    there, at = same.any(axis=1), same.argmax(axis=1)
    ends = jax.lax.cummax(jnp.where(there, ends_kv[at], 0))
    before = _before(ends)
    starts = jnp.where(there, jnp.maximum(starts_kv[at], before), ends)
    queries = jnp.stack([_before(ends_q), starts_q, starts_q], axis=1)
    keys = jnp.stack([before, before, starts], axis=1)
    return jnp.append(queries.reshape(-1), ends_q[-1]), jnp.append(keys.reshape(-1), ends[-1])


def _before(ends: Any) -> Any:
    return jnp.pad(ends, (1, 0))[:-1]


def _segments(ids: Any, count: int) -> tuple[Any, Any, Any]:
    """Starts, ends and ids of the first segments; the rest of `count` is empty, after the last one, with id 0."""
    there = ids > 0
    begins = there & (ids != jnp.pad(ids, (1, 0))[:-1])
    ended = there & (ids != jnp.pad(ids, (0, 1))[1:])
    numbers, places = jnp.cumsum(begins) - 1, jnp.arange(ids.size, dtype=jnp.int32)
    none = jnp.zeros(count, jnp.int32)
    first, last = jnp.where(begins, numbers, count), jnp.where(ended, numbers, count)
    names = jnp.zeros(count, ids.dtype).at[first].set(ids, mode="drop")
    ends = jax.lax.cummax(none.at[last].set(places + 1, mode="drop"))
    return jnp.where(names > 0, none.at[first].set(places, mode="drop"), ends), ends, names
