"""The starts of packed sequences, by the ids of their tokens."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def prefill_segments(
    segment_ids_q: npt.ArrayLike, max_segments: int, *, segment_ids_kv: npt.ArrayLike | None = None
) -> tuple[Array, Array]:
    """Starts of the sequences in which queries and keys of one id, and no others, attend to each other.

    Parameters
    ----------
    segment_ids_q : array, (s_q,), integers
        0 and below is padding; tokens of one id lie together.
    max_segments : int
        The most ids of either side; tokens of further ones are padding.
    segment_ids_kv : array, (s_kv,), integers, optional
        Ids of the keys; default: the queries' ids.

    Returns
    -------
    cu_seqlens_q, cu_seqlens_kv : array, (3 * max_segments + 1,), int32
        For each segment of the queries three sequences: padding before its queries, without keys; keys before its
        keys, without queries; itself.
    """
    queries = _runs(segment_ids_q)[:max_segments]
    keys = {}
    for name, begin, end in reversed(queries if segment_ids_kv is None else _runs(segment_ids_kv)[:max_segments]):
        keys[name] = begin, end
    starts_q, starts_kv = [0], [0]
    for name, begin, end in queries:
        key_begin, key_end = keys.get(name, (0, 0))
        key_begin = max(key_begin, starts_kv[-1])
        starts_q += [begin, begin, end]
        starts_kv += [starts_kv[-1], key_begin, max(key_begin, key_end)]
    return _filled(starts_q, 3 * max_segments + 1), _filled(starts_kv, 3 * max_segments + 1)


def _runs(ids: npt.ArrayLike) -> list[tuple[int, int, int]]:
    """Id, start and end of each run of one id that is no padding."""
    found, at = [], 0
    for name, tokens in itertools.groupby(np.asarray(ids).tolist()):
        end = at + len(list(tokens))
        found += [(name, at, end)] * (name > 0)
        at = end
    return found


def _filled(starts: list[int], count: int) -> Array:
    """The starts, and the last one as often as is left."""
    return np.array(starts + starts[-1:] * (count - len(starts)), np.int32)
