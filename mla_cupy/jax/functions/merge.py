"""Functions of `mla_cupy.ops.merge` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from mla_cupy.jax.lowering import run
from mla_cupy.ops.merge import OPERATION


def merge_states(
    outs: jax.Array,
    lses: jax.Array,
    *,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    out_dtype: Any = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Merge n partial results of the same queries, over disjoint sets of keys, into the attention over all of them.

    lse = log(sum_n exp(lses[n])),  out = sum_n exp(lses[n] - lse) * outs[n]

    For arrays of JAX: the notes of `mla_cupy.merge_states` hold here, too.

    Parameters
    ----------
    outs : array, (n, b, s_q, h_q, d), bfloat16, float16 or float32
        Partial outputs, each normalised over its own keys; the last axis is contiguous.
    lses : array, (n, b, h_q, s_q), float32
        Their log-sum-exps. Both infinities mean that the row saw no key; its `outs` is then not read.
    lse_base : str
        "e" or "2": base of `lses` and of the result.
    empty_lse : float
        `lse` of a row that is empty in all states; its `out` is 0.
    out : array, (b, s_q, h_q, d), optional
        Whose memory the result takes over.
    lse : array, (b, h_q, s_q), float32, optional
        Whose memory the result takes over.
    out_dtype : str or dtype, optional
        A 16-bit dtype or "float32". Default: the dtype of `out`, or of `outs`.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    out : array, (b, s_q, h_q, d)
    lse : array, (b, h_q, s_q), float32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient.
    """
    arrays = (outs, lses, out, lse)
    options = (lse_base, empty_lse, out_dtype)
    out, lse = run(OPERATION, arrays, options, exportable)
    return out, lse
