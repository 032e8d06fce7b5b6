"""Functions of `mla_cupy.ops.indexer.topk` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import jax

from mla_cupy.jax.lowering import run
from mla_cupy.ops.indexer.topk import OPERATION


def indexer_topk(
    logits: jax.Array,
    k: int = 2048,
    *,
    ks: jax.Array | None = None,
    ke: jax.Array | None = None,
    block_table: jax.Array | None = None,
    order: str = "index",
    relative: bool = False,
    page_size: int = 64,
    keep_first: int = 0,
    keep_last: int = 0,
    return_values: bool = True,
    indices: jax.Array | None = None,
    counts: jax.Array | None = None,
    values: jax.Array | None = None,
    kernel: str | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Select the k largest logits of each row, exactly.

    Larger logits come first; of equal ones the lower index does. -0 equals +0, and NaN comes last, after -inf.

    For arrays of JAX: the notes of `mla_cupy.indexer_topk` hold here, too.

    Parameters
    ----------
    logits : array, (s_q, s_kv), float32 or bfloat16
        Scores of every key for every query. The last axis is contiguous.
    k : int
        Number of keys to select: 1 to 8192.
    ks, ke : array, (s_q,), int32, optional
        Row t selects among the keys ks[t] <= s < ke[t]; both are clamped to [0, s_kv]. Default: all. Logits outside are
        not read. ke may have one number for each of b sequences, b dividing s_q, as `indexer_logits_paged` takes
        `seqlens`: it is that of the last of the sequence's s_q / b consecutive rows, and each row before sees one key
        less than the next.
    block_table : array, (b, max_pages), int32, optional
        Return places in a paged cache: key s of a row becomes block_table[., s // page_size] * page_size + s %
        page_size, or -1 past the table's end and where the result is negative or exceeds int32. b divides s_q; each
        sequence has s_q / b consecutive rows.
    order : str
        "index": ascending, as sparse attention reads its rows fastest; "value": the largest logit first, behind the
        keys of `keep_first` and `keep_last`, which come in ascending order, whatever their logits.
    relative : bool
        Count indices from ks[t], as `sparse_mla_forward` does with `cu_seqlens_kv`. Not with `block_table`.
    page_size : int
        Tokens per page of `block_table`.
    keep_first, keep_last : int
        As many keys at the beginning and at the end of each range are selected before all others; where there are more
        than k of them, those with the lowest indices.
    return_values : bool
        Return the logits at the indices, too.
    indices : array, (s_q, k), int32, optional
        Whose memory the result takes over.
    counts : array, (s_q,), int32, optional
        Whose memory the result takes over.
    values : array, (s_q, k), float32, optional
        Whose memory the result takes over.
    kernel : str, optional
        Name of the kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    indices : array, (s_q, k), int32
        -1 from counts[t] on.
    counts : array, (s_q,), int32
        min(k, keys in the range): what `sparse_mla_forward` calls `topk_length`.
    values : array, (s_q, k), float32, or None
        -inf from counts[t] on. None without `return_values`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient.
    """
    arrays = (logits, ks, ke, block_table, indices, counts, values)
    options = (k, order, relative, page_size, keep_first, keep_last, return_values, kernel)
    indices, counts, values = run(OPERATION, arrays, options, exportable)
    return indices, counts, values
