"""Functions of `mla_cupy.ops.prefill_backward` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import jax

from mla_cupy.jax.lowering import run
from mla_cupy.ops.prefill_backward import OPERATION


def mla_prefill_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    *,
    q_rope: jax.Array | None = None,
    k_rope: jax.Array | None = None,
    dlse: jax.Array | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    causal: bool = True,
    scale: float | None = None,
    deterministic: bool = False,
    dq: jax.Array | None = None,
    dk: jax.Array | None = None,
    dv: jax.Array | None = None,
    dq_rope: jax.Array | None = None,
    dk_rope: jax.Array | None = None,
    kernel: str | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Gradients of `mla_prefill` with respect to queries, keys and values.

    With P = exp(scale * q . k - lse), dP = dout . v, delta = sum(out * dout) - dlse and dS = scale * P * (dP - delta):

    dq = dS k,   dk = dS^T q,   dv = P^T dout

    summed over the query heads of a KV head, and the keys' last columns over the heads that share them.

    For arrays of JAX: the notes of `mla_cupy.mla_prefill_backward` hold here, too. `jax.grad` of the forward calls it;
    call it yourself with the merged results of chunks, say.

    Parameters
    ----------
    q, k, v, q_rope, k_rope, cu_seqlens_q, cu_seqlens_kv, causal, scale
        As for the forward.
    out : array, (s_q, h_q, d_v), dtype of q or float32
        As the forward returned it. With `lse`, it may be that of attention to more keys than these, such as the merged
        result of all chunks: then these are the gradients of this chunk's keys and values, and its part of dq.
    dout : array, (s_q, h_q, d_v), dtype of q
        Gradient with respect to `out`. The last axes of both are contiguous.
    lse : array, (s_q, h_q), float32
        As the forward returned it, or merged. Both infinities mark a query without a key: it has no gradient, and
        contributes none. From 4.6e7 on, float32 does not tell how many keys share the largest score: each of these has
        a weight of 1.
    dlse : array, (s_q, h_q), float32, optional
        Gradient with respect to `lse`, as for a loss of its own or for a merge outside.
    deterministic : bool
        Make all results bitwise reproducible: see the notes.
    dq : array, shape and dtype of q, optional
        Whose memory the result takes over.
    dk, dv, dq_rope, dk_rope : array, shapes of k, v, q_rope and k_rope, dtype of q, optional
        Whose memory the results take over.
    kernel : str, optional
        Name of the kernel that makes the gradients of keys, see `mla-cupy list`. Default: the fastest that fits.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    dq : array, shape and dtype of q
        Array of the caller's library; 0 for a query without a key.
    dk, dv : array, shapes of k and v
        0 for a key that no query sees.
    dq_rope, dk_rope : array, shapes of q_rope and k_rope, or None
        None where these are not given.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and the results' memory is untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    It has no gradient.
    """
    arrays = (q, k, v, out, dout, lse, q_rope, k_rope, dlse, cu_seqlens_q, cu_seqlens_kv, dq, dk, dv, dq_rope, dk_rope)
    options = (causal, scale, deterministic, kernel)
    dq, dk, dv, dq_rope, dk_rope = run(OPERATION, arrays, options, exportable)
    return dq, dk, dv, dq_rope, dk_rope
