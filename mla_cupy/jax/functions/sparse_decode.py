"""Functions of `mla_cupy.ops.sparse_decode` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from mla_cupy.jax.lowering import run
from mla_cupy.ops.sparse_decode import OPERATION


def sparse_mla_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    indices: jax.Array,
    *,
    topk_length: jax.Array | None = None,
    attn_sink: jax.Array | None = None,
    extra_kv_cache: jax.Array | None = None,
    extra_indices: jax.Array | None = None,
    extra_topk_length: jax.Array | None = None,
    out_cos: jax.Array | None = None,
    out_sin: jax.Array | None = None,
    out_positions: jax.Array | None = None,
    w_uv: jax.Array | None = None,
    gate: jax.Array | None = None,
    scale: float | None = None,
    kv_scale: float = 1,
    math: str = "exact",
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    out_dtype: Any = None,
    kernel: str | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attend from each query to the tokens of a paged FP8 cache that its indices select (absorbed MLA).

    For arrays of JAX: the notes of `mla_cupy.sparse_mla_decode` hold here, too.

    Parameters
    ----------
    q : array, (b, s_q, h_q, d_qk), bfloat16 or float16
        Absorbed queries: d_qk is 576 for the records "v32" and "fp8", 512 for "v4" and "v41". The last axis is
        contiguous, and the first two step evenly.
    kv_cache : array, (num_pages, page_size, 656, 584, 528 or 576), uint8
        An axis of size 1 may stand on either side of the tokens, as for `mla_decode`. Pages of "v32", "v4", "v41" or,
        with math="fp8" only, "fp8": see `cache_append`. The values are the first 512 elements of the keys; with "v4"
        and "v41" these include the RoPE part. Pages start at, and step by, multiples of 16 bytes: pages of "v4" with an
        odd number of tokens need a gap of 8 bytes between them.
    indices : array, (b, s_q, topk), int32
        Slots, page * page_size + token, in any order. Any topk, any strides. Slots outside of the cache are skipped, -1
        being the usual mark; duplicates are counted as often as they occur.
    topk_length : array, (b,), int32, optional
        Only the first topk_length[i] entries of the lists of sequence i are read; clamped to [0, topk].
    attn_sink : array, (h_q,), float32, optional
        Logits of a key without a value, which only lowers `out`. -inf has no effect, +inf makes `out` 0.
    extra_kv_cache, extra_indices, extra_topk_length : array, optional
        A second cache of the same record, or of "v41-fp4" beside "v41", with pages of any size, and lists of more keys
        in it under the same softmax. Cache and indices are given together. Not with "fp8".
    out_cos, out_sin : array, (max_position, 32), float32, optional
        Turn the last 64 columns of `out` back, as for `mla_decode`, where the values include the key's RoPE part: "v4"
        and "v41". Not with a `w_uv`. In 16 bits these columns are rounded once more: they are turned in place, by a
        launch of its own.
    out_positions : array, (b, s_q), int32 or int64, optional
        The queries' rows of these, clamped to them. Given with these, or not at all.
    w_uv, gate : array, optional
        W_UV and a gate, as for `mla_decode`: results are multiplied by them where they would be merged, or after that.
        The first two axes of a gate step evenly.
    scale : float, optional
        Factor of the scores: finite, above 0. Default: d_qk**-0.5.
    kv_scale : float
        Scale of the record "fp8": keys and values are its codes times this. Finite, above 0; 1 for all others.
    math : str
        Arithmetic of both products: "exact", of 16-bit elements, or "fp8" for the record "fp8", on the FP8 tensor cores
        of Hopper: queries and weights are rounded to e4m3, see the notes of `mla_decode`.
    lse_base : str
        "e" or "2": base of the logarithm in `lse`.
    empty_lse : float
        `lse` of a query without a token; its `out` is 0.
    out : array, (b, s_q, h_q, 512), dtype of q or float32, optional
        Whose memory the result takes over.
    lse : array, (b, s_q, h_q), float32, optional
        Whose memory the result takes over.
    out_dtype : str or dtype, optional
        "float32" for results to be merged; default: the dtype of `out`, or of q.
    kernel : str, optional
        Name of the attention kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    out : array, (b, s_q, h_q, 512), or (b, s_q, h_q, d_head) with a `w_uv`
    lse : array, (b, s_q, h_q), float32
        log(sum_j exp(scale * q . k[j])), in base `lse_base`, without the sink.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    It has no gradient: decode serves inference.
    """
    arrays = (
        q,
        kv_cache,
        indices,
        topk_length,
        attn_sink,
        extra_kv_cache,
        extra_indices,
        extra_topk_length,
        out_cos,
        out_sin,
        out_positions,
        w_uv,
        gate,
        out,
        lse,
    )
    options = (scale, kv_scale, math, lse_base, empty_lse, out_dtype, kernel)
    out, lse = run(OPERATION, arrays, options, exportable)
    return out, lse
