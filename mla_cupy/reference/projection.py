"""kv_b_proj around attention: the specification of `mla_cupy.absorb` and `mla_cupy.merge_project`, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.dtypes import round_to
from mla_cupy.reference.merge import merge_states as merged_states

Array = npt.NDArray[Any]


@np.errstate(invalid="ignore", over="ignore", under="ignore")
def absorb(q_nope: npt.ArrayLike, w_uk: npt.ArrayLike, q_rope: npt.ArrayLike | None = None) -> tuple[Array]:
    """Multiply each head's queries by its W_UK, q[t, h] = q_nope[t, h] w_uk[h], and append q_rope[t, h].

    Parameters
    ----------
    q_nope : array, (t, h, d_nope)
    w_uk : array, (h, d_nope, d_v)
    q_rope : array, (t, h, d_rope), optional

    Returns
    -------
    q : array, (t, h, d_v) or (t, h, d_v + d_rope), float64
    """
    left, right = np.asarray(q_nope).astype(np.float64), np.asarray(w_uk).astype(np.float64)
    absorbed: Array = np.einsum("thd,hdc->thc", left, right)
    if q_rope is None:
        return (absorbed,)
    return (np.concatenate([absorbed, np.asarray(q_rope).astype(np.float64)], axis=-1),)


@np.errstate(invalid="ignore", over="ignore", under="ignore")
def projected(
    out: npt.ArrayLike, w_uv: npt.ArrayLike, gate: npt.ArrayLike | None = None, rounding: str | None = None
) -> Array:
    """Multiply results of attention by W_UV, and by the sigmoid of a gate.

    result[b, s, h, d] = sum_c out[b, s, h, c] * w_uv[h, d, c] * sigmoid(gate[b, s, h, d])

    Parameters
    ----------
    out : array, (b, s_q, h, d_v)
    w_uv : array, (h, d_head, d_v)
    gate : array, (b, s_q, h, d_head), optional
    rounding : str, optional
        A dtype to round `out` to before the product, as the kernels do.

    Returns
    -------
    array, (b, s_q, h, d_head), float64
    """
    latents = np.asarray(out).astype(np.float64)
    if rounding is not None:
        latents = round_to(latents, rounding)
    result: Array = np.einsum("bshc,hdc->bshd", latents, np.asarray(w_uv).astype(np.float64))
    if gate is None:
        return result
    gated: Array = result / (1 + np.exp(-np.asarray(gate).astype(np.float64)))
    return gated


def merge_project(
    outs: npt.ArrayLike,
    w_uv: npt.ArrayLike,
    lses: npt.ArrayLike | None = None,
    gate: npt.ArrayLike | None = None,
    *,
    lse_base: str = "e",
    empty_lse: float = -np.inf,
    rounding: str | None = None,
) -> tuple[Array, Array | None]:
    """Merge partial results as `merge_states` does, and multiply them by W_UV and the sigmoid of a gate.

    Parameters
    ----------
    outs : array, (n, b, s_q, h, d_v)
    w_uv : array, (h, d_head, d_v)
    lses : array, (n, b, h, s_q), optional
        Without them n is 1, and nothing is merged.
    gate : array, (b, s_q, h, d_head), optional
    lse_base, empty_lse
        As for `merge_states`.
    rounding : str, optional
        A dtype to round the merged results to before the product.

    Returns
    -------
    out : array, (b, s_q, h, d_head), float64
    lse : array, (b, h, s_q), float64; None without `lses`
    """
    if lses is None:
        return projected(np.asarray(outs)[0], w_uv, gate, rounding), None
    out, lse = merged_states(outs, lses, lse_base=lse_base, empty_lse=empty_lse)
    return projected(out, w_uv, gate, rounding), lse
