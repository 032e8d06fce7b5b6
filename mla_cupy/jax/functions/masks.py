"""Functions of `mla_cupy.ops.masks` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import jax

from mla_cupy.jax.lowering import run
from mla_cupy.ops.masks import OPERATION


def prefill_mask(
    indices: jax.Array,
    max_keys: int,
    *,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    relative: bool = False,
    mask: jax.Array | None = None,
    exportable: bool = False,
) -> jax.Array:
    """Make the mask with which `mla_prefill` attends to the keys that indices select, such as those of the indexer.

    Bit j % 8 of mask[i, j // 8] is 1 if indices[i] has key j of query i's sequence, and 0 otherwise.

    For arrays of JAX: the notes of `mla_cupy.prefill_mask` hold here, too.

    Parameters
    ----------
    indices : array, (s_q, topk) or (s_q, 1, topk), int32
        The keys of each query, in any order, as `indexer_select` and `indexer_topk` return them. Any topk, any strides.
        Entries that are no key of the query's sequence are skipped, -1 being the usual mark; a key may occur more than
        once.
    max_keys : int
        The most keys that a sequence has; one sequence: s_kv. Keys that have no bit are skipped as well.
    cu_seqlens_q, cu_seqlens_kv : array, (b + 1,), int32, optional
        Where the sequences begin, as for `mla_prefill`. A query of no sequence gets no key. Both or none; default: one
        sequence.
    relative : bool
        True if indices count from the first key of the query's sequence, False if from the first of all keys. Pass the
        same as to `indexer_select` or `indexer_topk`.
    mask : array, (s_q, mask_bytes), uint8, optional
        Whose memory the result takes over.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    array, (s_q, mask_bytes), uint8
        Array of the caller's library; mask_bytes is 16 for every 128 keys of `max_keys`, rounded up.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient.
    """
    arrays = (indices, cu_seqlens_q, cu_seqlens_kv, mask)
    options = (max_keys, relative)
    (mask,) = run(OPERATION, arrays, options, exportable)
    return mask
