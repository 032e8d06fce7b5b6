"""Dense attention with keys and values per head."""

from __future__ import annotations

from typing import Any

import jax

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
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attention with keys and values per head: see `mla_cupy.mla_prefill`. It has no gradient yet.

    Parameters
    ----------
    q, k, v : array
    q_rope, k_rope, cu_seqlens_q, cu_seqlens_kv, state_out, state_lse : array, optional
    out, lse : array, optional
        Whose memory the results take over.
    exportable : bool
        For `jax.export`.
    **options
        causal, scale, out_dtype, kernel.

    Returns
    -------
    out, lse : array
    """
    out, lse = run("mla_prefill", locals())
    return out, lse
