"""Merging attention over disjoint sets of keys: the specification of `mla_cupy.merge_states`, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.reference.lse import log_of_base


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def merge_states(
    outs: npt.ArrayLike, lses: npt.ArrayLike, *, lse_base: str = "e", empty_lse: float = -np.inf
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Merge n partial results of the same queries into the attention over all their keys.

    lse = log(sum_n exp(lses[n])) and out = sum_n exp(lses[n] - lse) * outs[n].

    Parameters
    ----------
    outs : array, (n, b, s_q, h_q, d_v)
        Partial outputs, each normalised over its own keys.
    lses : array, (n, b, h_q, s_q)
        Their log-sum-exps. Both infinities mark a row without a key; its `outs` is not read.
    lse_base : str
        "e" or "2": the base of `lses` and of the result.
    empty_lse : float
        The `lse` of a row that is empty in every state; its `out` is 0.

    Returns
    -------
    out : array, (b, s_q, h_q, d_v), float64
    lse : array, (b, h_q, s_q), float64
    """
    unit = log_of_base(lse_base)
    states = np.asarray(outs).astype(np.float64)
    natural = np.asarray(lses).astype(np.float64) * unit
    natural = np.where(np.isinf(natural), -np.inf, natural)

    top = natural.max(axis=0, initial=-np.inf)
    top = np.where(top == -np.inf, 0.0, top)
    weights = np.exp(natural - top)
    total = weights.sum(axis=0)
    lse = np.where(total == 0, empty_lse, (top + np.log(total)) / unit)

    per_row = np.swapaxes(weights, -1, -2)[..., None]  # as the rows of `outs`
    row_total = np.swapaxes(total, -1, -2)[..., None]
    out = np.where(per_row == 0, 0.0, per_row * states).sum(axis=0)
    return np.where(row_total == 0, 0.0, out / row_total), lse
