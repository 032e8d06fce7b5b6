"""Dense attention with keys and values per head, and its gradient."""

from __future__ import annotations

from typing import Any

import jax

from mla_cupy.jax.dense import differentiable
from mla_cupy.jax.lowering import run


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
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    deterministic: bool = False,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attention with keys and values per head: see `mla_cupy.mla_prefill`.

    `out` and `lse` are differentiable with respect to queries, keys, values and the state, without a mask.

    Parameters
    ----------
    q, k, v : array
    q_rope, k_rope, cu_seqlens_q, cu_seqlens_kv, state_out, state_lse, mask : array, optional
    out, lse : array, optional
        Whose memory the results take over. Then there is no gradient.
    deterministic : bool
        Of the gradients: see `mla_cupy.mla_prefill_backward`.
    exportable : bool
        For `jax.export`.
    **options
        causal, scale, out_dtype, kernel.

    Returns
    -------
    out, lse : array

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import mla_cupy.jax as mla
    >>> q, v = jnp.ones((3, 4, 192), jnp.bfloat16), jnp.ones((3, 4, 128), jnp.bfloat16)
    >>> loss = lambda v: mla.mla_prefill(q, jnp.ones_like(q), v)[0].astype(jnp.float32).sum()
    >>> [round(float(x), 2) for x in jax.jit(jax.grad(loss))(v)[:, 0, 0]]  # of the queries: one, a half, a third
    [1.84, 0.84, 0.33]
    """
    if out is not None or lse is not None or mask is not None:
        arguments = {name: x for name, x in locals().items() if name != "deterministic"}
        out, lse = run("mla_prefill", arguments)
        return out, lse
    given = {name: x for name, x in locals().items() if name not in ("deterministic", "exportable", "options")}
    return differentiable(given, options, deterministic, exportable)


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
    dq: jax.Array | None = None,
    dk: jax.Array | None = None,
    dv: jax.Array | None = None,
    dq_rope: jax.Array | None = None,
    dk_rope: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array | None, ...]:
    """Gradients of `mla_prefill`: see `mla_cupy.mla_prefill_backward`.

    `jax.grad` of the forward calls it; call it yourself with the merged results of chunks, say.

    Parameters
    ----------
    q, k, v, out, dout, lse, q_rope, k_rope, dlse, cu_seqlens_q, cu_seqlens_kv : array
    dq, dk, dv, dq_rope, dk_rope : array, optional
        Whose memory the results take over.
    exportable : bool
        For `jax.export`.
    **options
        causal, scale, deterministic, kernel.

    Returns
    -------
    dq, dk, dv : array
    dq_rope, dk_rope : array or None
        None without `q_rope` or `k_rope`.
    """
    return run("mla_prefill_backward", locals())


def prefill_mask(
    indices: jax.Array,
    max_keys: int,
    *,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    mask: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> jax.Array:
    """The mask of the keys that indices select: see `mla_cupy.prefill_mask`.

    Parameters
    ----------
    indices : array
    max_keys : int
    cu_seqlens_q, cu_seqlens_kv : array, optional
    mask : array, optional
        Whose memory the result takes over.
    exportable : bool
        For `jax.export`.
    **options
        relative.

    Returns
    -------
    array
    """
    (mask,) = run("prefill_mask", locals())
    return mask
