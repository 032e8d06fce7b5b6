"""Functions of `mla_cupy.ops.segments` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import jax

from mla_cupy.jax.lowering import run
from mla_cupy.ops.segments import OPERATION


def prefill_segments(
    segment_ids_q: jax.Array,
    max_segments: int,
    *,
    segment_ids_kv: jax.Array | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Find the starts with which `mla_prefill` attends within packed segments, by an id for each token.

    With them each query attends to the keys that have its id, and one that is padding to none. So they are for
    `mla_prefill_backward` and for `prefill_mask`.

    For arrays of JAX: the notes of `mla_cupy.prefill_segments` hold here, too.

    Parameters
    ----------
    segment_ids_q : array, (s_q,), int32
        The queries' ids; 0 and below is padding. Tokens of one id lie together. Any stride.
    max_segments : int
        The most ids, without padding, that either side has. Tokens of further ones count as padding.
    segment_ids_kv : array, (s_kv,), int32, optional
        The keys' ids, in the order of the queries' ids; either side may have some that the other one lacks. Default:
        those of the queries.
    cu_seqlens_q, cu_seqlens_kv : array, (3 * max_segments + 1,), int32, optional
        Whose memory the results take over.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    cu_seqlens_q, cu_seqlens_kv : array, (3 * max_segments + 1,), int32
        Arrays of the caller's library. There are three sequences for each segment of the queries: padding before its
        queries, which has no keys; keys before its keys, which have no queries; and itself. What is left of
        `max_segments` is empty.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient.
    """
    arrays = (segment_ids_q, segment_ids_kv, cu_seqlens_q, cu_seqlens_kv)
    options = (max_segments,)
    cu_seqlens_q, cu_seqlens_kv = run(OPERATION, arrays, options, exportable)
    return cu_seqlens_q, cu_seqlens_kv
