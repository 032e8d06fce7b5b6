"""Functions of `mla_cupy.ops.projection` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from mla_cupy.jax.lowering import run
from mla_cupy.ops.projection import ABSORB_OPERATION, MERGE_OPERATION


def absorb(
    q_nope: jax.Array,
    w_uk: jax.Array,
    *,
    q_rope: jax.Array | None = None,
    out: jax.Array | None = None,
    exportable: bool = False,
) -> jax.Array:
    """Multiply queries by W_UK, to the absorbed queries that decode takes: q[t, h] = q_nope[t, h] w_uk[h].

    For arrays of JAX: the notes of `mla_cupy.absorb` hold here, too.

    Parameters
    ----------
    q_nope : array, (t, h_q, d_nope), bfloat16 or float16
        The part of the queries without RoPE; d_nope is 64, 128, 192 or 256. A contiguous last axis, a start and other
        strides that are multiples of 16 bytes: columns of whole queries are such an array.
    w_uk : array, (h_q, d_nope, 512), dtype of q_nope
        The keys' half of kv_b_proj, as it lies in the weights: `kv_b_proj.reshape(h_q, -1, 512)[:, :d_nope]`. Strides
        as for q_nope.
    q_rope : array, (t, h_q, 64), dtype of q_nope, optional
        The part with RoPE, which becomes the last columns of the result. Strides as for q_nope.
    out : array, (t, h_q, 512), or (t, h_q, 576) with a `q_rope`, dtype of q_nope, optional
        Whose memory the result takes over.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    array, (t, h_q, 512), or (t, h_q, 576) with a `q_rope`
        Reshape it to (b, s_q, h_q, ...) for decode.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient.
    """
    arrays = (q_nope, w_uk, q_rope, out)
    options = ()
    (out,) = run(ABSORB_OPERATION, arrays, options, exportable)
    return out


def merge_project(
    outs: jax.Array,
    w_uv: jax.Array,
    *,
    lses: jax.Array | None = None,
    gate: jax.Array | None = None,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    out_dtype: Any = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Merge n partial results of the same queries, and multiply them by W_UV and by the sigmoid of a gate.

    merged, lse = merge_states(outs, lses)
    out[b, s, h, d] = sum_c merged[b, s, h, c] * w_uv[h, d, c] * sigmoid(gate[b, s, h, d])

    For arrays of JAX: the notes of `mla_cupy.merge_project` hold here, too.

    Parameters
    ----------
    outs : array, (n, b, s_q, h_q, 512), bfloat16, float16 or float32
        Partial results as for `merge_states`, n up to 256: a contiguous last axis, a start and other strides that are
        multiples of 16 bytes.
    w_uv : array, (h_q, d_head, 512), bfloat16 or float16
        The values' half of kv_b_proj, as it lies in the weights: `kv_b_proj.reshape(h_q, -1, 512)[:, d_nope:]`; d_head
        is 64, 128, 192 or 256. Strides as for outs.
    lses : array, (n, b, h_q, s_q), float32, optional
        Their log-sum-exps, as for `merge_states`. May be left out where n is 1.
    gate : array, (b, s_q, h_q, d_head), dtype of w_uv, optional
        What the sigmoid is applied to. Strides as for outs.
    lse_base : str
        "e" or "2": base of `lses` and of the result.
    empty_lse : float
        `lse` of a row that is empty in all states; its `out` is 0.
    out : array, (b, s_q, h_q, d_head), optional
        Whose memory the result takes over.
    lse : array, (b, h_q, s_q), float32, optional
        Whose memory the result takes over.
    out_dtype : str or dtype, optional
        The dtype of w_uv or "float32". Default: the dtype of `out`, or of w_uv.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    out : array, (b, s_q, h_q, d_head)
    lse : array, (b, h_q, s_q), float32
        None without `lses`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient.
    """
    arrays = (outs, w_uv, lses, gate, out, lse)
    options = (lse_base, empty_lse, out_dtype)
    out, lse = run(MERGE_OPERATION, arrays, options, exportable)
    return out, lse
