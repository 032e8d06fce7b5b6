"""Functions of `mla_cupy.ops.sparse_backward` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

from typing import Any

import jax

from mla_cupy.jax.lowering import run
from mla_cupy.ops.sparse_backward import OPERATION


def sparse_mla_backward(
    q: jax.Array,
    kv: jax.Array,
    out: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    indices: jax.Array,
    *,
    dlse: jax.Array | None = None,
    d_v: int = 512,
    scale: float | None = None,
    topk_length: jax.Array | None = None,
    attn_sink: jax.Array | None = None,
    causal: bool = False,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    lse_base: str = "e",
    deterministic: bool = False,
    dkv_dtype: Any = None,
    dq: jax.Array | None = None,
    dkv: jax.Array | None = None,
    d_sink: jax.Array | None = None,
    kernel: str | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Gradients of `sparse_mla_forward` with respect to `q`, `kv` and `attn_sink`.

    With P = exp(scale * q . kv[j] - lse_total), lse_total = log(exp(lse) + exp(attn_sink)), dP = dout . kv[j, :512],
    delta = sum(out * dout) and dS = scale * P * (dP - delta):

    dq = dS kv,   dkv = dS^T q + P^T dout (in the first 512 elements),   d_sink = -sum exp(attn_sink - lse_total) delta

    A gradient with respect to `lse` adds scale * exp(scale * q . kv[j] - lse) * dlse to dS.

    For arrays of JAX: the notes of `mla_cupy.sparse_mla_backward` hold here, too. `jax.grad` of the forward calls it;
    call it yourself for options that a gradient has no place for.

    Parameters
    ----------
    q, kv, indices : array
        As for the forward.
    out : array, (s_q, h_q, 512), dtype of q or float32
        As the forward returned it.
    dout : array, (s_q, h_q, 512), dtype of q
        Gradient with respect to `out`. The last axes of both are contiguous.
    lse : array, (s_q, h_q), float32
        As the forward returned it, without the sink. Both infinities mark a query and head without a row: it has no
        gradient. From 4.6e7 on, float32 does not tell how many rows share the largest score: each of these has a weight
        of 1.
    dlse : array, (s_q, h_q), float32, optional
        Gradient with respect to `lse` as it is given, so with lse_base="2" of the logarithm in base 2: as for a loss of
        its own or for a merge of partial results. It has no influence on `d_sink`.
    d_v, scale, topk_length, attn_sink, causal, cu_seqlens_q, cu_seqlens_kv, lse_base
        As for the forward.
    deterministic : bool
        Make the results bitwise reproducible: see the notes.
    dkv_dtype : str or dtype, optional
        "float32" for gradients to be added up; default: the dtype of `dkv`, or of kv.
    dq : array, shape and dtype of q, optional
        Whose memory the result takes over.
    dkv : array, shape of kv, dtype of kv or float32, optional
        Whose memory the result takes over.
    d_sink : array, (h_q,), float32, optional
        Whose memory the result takes over.
    kernel : str, optional
        Name of the main kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    dq : array, shape and dtype of q
        Array of the caller's library.
    dkv : array, shape of kv
        0 in rows that no query selects.
    d_sink : array, (h_q,), float32, or None
        None without `attn_sink`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and `dq` and `dkv` are untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    It has no gradient.
    """
    arrays = (
        q,
        kv,
        out,
        dout,
        lse,
        indices,
        topk_length,
        attn_sink,
        cu_seqlens_q,
        cu_seqlens_kv,
        dlse,
        dq,
        dkv,
        d_sink,
    )
    options = (d_v, scale, causal, lse_base, deterministic, dkv_dtype, kernel)
    dq, dkv, d_sink = run(OPERATION, arrays, options, exportable)
    return dq, dkv, d_sink
