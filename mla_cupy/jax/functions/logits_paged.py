"""Functions of `mla_cupy.ops.indexer.logits_paged` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

from typing import Any

import jax

from mla_cupy.jax.lowering import run
from mla_cupy.ops.indexer.logits_paged import OPERATION


def indexer_logits_paged(
    q: jax.Array,
    cache: jax.Array,
    weights: jax.Array,
    seqlens: jax.Array,
    block_table: jax.Array,
    *,
    clean: bool = True,
    logits: jax.Array | None = None,
    out_dtype: Any = None,
    kernel: str | None = None,
    exportable: bool = False,
) -> jax.Array:
    """Score the cached index keys of each sequence for its next tokens.

    logits[n, i, s] = scale[s] * sum_h weights[n, i, h] * max(q[n, i, h] . key[s], 0) for s < length(n, i)

    For arrays of JAX: the notes of `mla_cupy.indexer_logits_paged` hold here, too.

    Parameters
    ----------
    q : array, (b, s_q, h, d), float8_e4m3fn or uint8
        e4m3 codes of 1 to 128 heads, d 32, 64 or 128, of up to 8 next tokens (more: the slow kernel). Strides as for
        `indexer_logits`.
    cache : array, (num_pages, page_size, d + 4), uint8
        Pages of records: in each page, the codes of all its keys, then their float32 scales. A page is contiguous;
        pages lie multiples of 16 bytes apart. An axis of size 1 may stand on either side of the keys, as for
        `mla_decode`. Pages of 64 keys of d = 128 are fast. Keys of 128 elements may have 68 bytes: 64 of e2m1, the
        first of two elements in the lower half of a byte, then, after the codes of all keys, the exponents of four
        scales, of 32 elements each (ue8m0).
    weights : array, (b, s_q, h), float32
        As for `indexer_logits`.
    seqlens : array, (b,) or (b, s_q), int32
        Number of keys that each token sees. With one number n per sequence, token i sees n - s_q + 1 + i keys. Each
        token's number is clamped to [0, max_pages * page_size], after that subtraction.
    block_table : array, (b, max_pages), int32
        The pages of each sequence. Entries that no token needs are not read; a page that does not exist has logits of
        0.
    clean : bool
        Write -inf for keys that a token does not see. Otherwise these logits keep what the memory held.
    logits : array, (b, s_q, max_pages * page_size), float32 or bfloat16, optional
        Whose memory the result takes over.
    out_dtype, kernel : optional
        As for `indexer_logits`.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    array, (b, s_q, max_pages * page_size)
        Array of the caller's library.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and `logits` is untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    It has no gradient.
    """
    arrays = (q, cache, weights, seqlens, block_table, logits)
    options = (clean, out_dtype, kernel)
    (logits,) = run(OPERATION, arrays, options, exportable)
    return logits
