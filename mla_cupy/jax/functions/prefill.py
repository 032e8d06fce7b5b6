"""Functions of `mla_cupy.ops.prefill` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

from typing import Any

import jax

from mla_cupy.jax.gradients.prefill import differentiable


def mla_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_rope: jax.Array | None = None,
    k_rope: jax.Array | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    state_out: jax.Array | None = None,
    state_lse: jax.Array | None = None,
    mask: jax.Array | None = None,
    q_scales: jax.Array | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    causal: bool = True,
    scale: float | None = None,
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    out_dtype: Any = None,
    kernel: str | None = None,
    segment_ids_q: jax.Array | None = None,
    segment_ids_kv: jax.Array | None = None,
    max_segments: int | None = None,
    deterministic: bool = False,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attend from the queries of each sequence to its keys, with keys and values per head (un-absorbed MLA).

    out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j, g]) * v[j, g], where g = h * h_kv // h_q is the KV head of h, and
    j runs over the keys of query i's sequence that it sees.

    For arrays of JAX: the notes of `mla_cupy.mla_prefill` hold here, too.

    Parameters
    ----------
    q : array, (s_q, h_q, d_qk), bfloat16 or float16; or float8_e4m3fn or uint8
        Queries. With `q_rope`, all columns but the last 64. (d_qk, d_v) is (192, 128), (256, 256) or (128, 128). The
        last axis is contiguous; other strides are free (multiples of 16 bytes are fast, on Hopper). The same holds for
        `q_rope`, `k`, `k_rope` and `v`. With queries in e4m3 everything is, `q_rope` and `k_rope` too; (d_qk, d_v) is
        (192, 128), and there is neither state nor mask. uint8 holds e4m3 codes, for libraries without that type.
    k : array, (s_kv, h_kv, d_qk), dtype of q
        Keys. With `k_rope`, all columns but the last 64. h_q is a multiple of h_kv.
    v : array, (s_kv, h_kv, d_v), dtype of q
        Values. Keys and values may be views of one array, such as a projection's (s_kv, h_kv, 128 + 128).
    q_rope : array, (s_q, h_q, 64), dtype of q, optional
        Last 64 columns of the queries.
    k_rope : array, (s_kv, 64), (s_kv, 1, 64) or (s_kv, h_kv, 64), dtype of q, optional
        Last 64 columns of the keys: the same for all heads, or those of each head.
    cu_seqlens_q, cu_seqlens_kv : array, (b + 1,), int32, optional
        Sequence n has the queries from cu_seqlens_q[n] to cu_seqlens_q[n + 1] and the keys from cu_seqlens_kv[n] to
        cu_seqlens_kv[n + 1]. They are read on the device: clamped to [0, s_q] and [0, s_kv], and one below its
        predecessor is raised to it. A query of no sequence sees no key. Both or none; default: one sequence.
    state_out : array, (s_q, h_q, d_v), dtype of q or float32, optional
        The attention of the same queries to other keys, such as those of an earlier chunk. The result is the attention
        to all keys. It may be `out` itself.
    state_lse : array, (s_q, h_q), float32, optional
        Its log-sum-exps. Both infinities mean that the query saw no key; its `state_out` is then not read. It may be
        `lse` itself.
    mask : array, (s_q, mask_bytes), uint8, optional
        Keys of its sequence that each query sees, in all heads, in addition to the limit of `causal`: bit j % 8 (0 is
        the lowest) of byte j // 8 is 1 for key j, counted from the sequence's first key. `prefill_mask` makes one from
        indices; so does `numpy.packbits(seen, axis=1, bitorder="little")`, for a multiple of 128 keys. Rows start at,
        step by, and have multiples of 16 bytes. Keys beyond 8 * mask_bytes are hidden; without `cu_seqlens_kv` the mask
        must have all keys.
    q_scales, k_scales, v_scales : array, (b, h_kv), float32, optional
        Of e4m3: what the numbers of a sequence and KV head are multiplied by, finite, at least 0; q_scales[n, g] is for
        all query heads of KV head g. Any strides, so a broadcast number will do. b is 1 without `cu_seqlens_q`.
        Default: 1.
    causal : bool
        Hide the keys after a query's own position, the queries being the last of their sequence: query i of n sees the
        first s - n + i + 1 of its s keys.
    scale : float, optional
        Factor of the scores: finite, above 0. Default: d_qk**-0.5.
    out : array, (s_q, h_q, d_v), dtype of q (of e4m3: bfloat16 or float16) or float32, optional
        Whose memory the result takes over.
    lse : array, (s_q, h_q), float32, optional
        Whose memory the result takes over.
    out_dtype : str or dtype, optional
        "float32" for results to be merged; of e4m3 any of the three. Default: the dtype of `out`, or of q, or bfloat16
        where that is e4m3.
    kernel : str, optional
        Name of the attention kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    segment_ids_q : array, (s_q,), integers, optional
        In place of `cu_seqlens_q` and `cu_seqlens_kv`: queries attend to the keys whose id is theirs. Tokens of one id
        lie together, and both sides have theirs in one order, or else results are undefined; 0 and below is padding,
        whose results are 0. The device looks at the ids, the host does not.
    segment_ids_kv : array, (s_kv,), integers, optional
        Those of the keys. Default: those of the queries.
    max_segments : int, optional
        The most ids, without padding, that either side has; tokens of further ones count as padding. To be given with
        ids: workspaces grow with it as with the number of sequences, of which there are three for each.
    deterministic : bool
        Whether the gradients are the same in every run: see `mla_cupy.mla_prefill_backward`.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    out : array, (s_q, h_q, d_v)
        Array of the caller's library; 0 for a query without a key.
    lse : array, (s_q, h_q), float32
        log(sum_j exp(scale * q . k[j])), natural; -inf for a query without a key.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and `out` and `lse` are untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    `out` and `lse` are differentiable with respect to queries, keys, values and the state, without a mask and unless
    arrays for them are given.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import mla_cupy.jax as mla
    >>> q, v = jnp.ones((3, 4, 192), jnp.bfloat16), jnp.ones((3, 4, 128), jnp.bfloat16)
    >>> loss = lambda v: mla.mla_prefill(q, jnp.ones_like(q), v)[0].astype(jnp.float32).sum()
    >>> [round(float(x), 2) for x in jax.jit(jax.grad(loss))(v)[:, 0, 0]]  # of the queries: one, a half, a third
    [1.84, 0.83, 0.33]
    """
    arrays = (
        q,
        k,
        v,
        q_rope,
        k_rope,
        cu_seqlens_q,
        cu_seqlens_kv,
        state_out,
        state_lse,
        mask,
        q_scales,
        k_scales,
        v_scales,
        out,
        lse,
    )
    options = (causal, scale, out_dtype, kernel)
    out, lse = differentiable(arrays, options, deterministic, exportable, segment_ids_q, segment_ids_kv, max_segments)
    return out, lse
