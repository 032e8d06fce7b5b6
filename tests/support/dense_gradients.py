"""Problems for the backward of dense attention, the oracle's answers, and the tolerance rule for each gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from mla_cupy import dtypes
from mla_cupy.kernels.dense.problem import D_ROPE
from mla_cupy.reference import mla_prefill_backward
from mla_cupy.reference.prefill import joined, seen_keys
from tests.support.dense_cases import DenseCase, DenseInputs, make
from tests.support.gradients import BUDGET, CANCELLED
from tests.support.tolerance import check_out

Array = np.ndarray[Any, Any]
NAMES = ("dq", "dk", "dv", "dq_rope", "dk_rope")


@dataclass(frozen=True, eq=False)
class GradientInputs:
    """The arrays of a call: the forward's, its results, and their gradients."""

    forward: DenseInputs
    out: Array
    dout: Array
    lse: Array
    options: dict[str, Any] = field(repr=False)

    @property
    def case(self) -> DenseCase:
        return self.forward.case

    @property
    def arguments(self) -> tuple[Array, ...]:
        return (*self.forward.arguments, self.out, self.dout, self.lse)

    @cached_property
    def exact(self) -> tuple[Array | None, ...]:
        return mla_prefill_backward(*self.arguments, **self.options)

    @cached_property
    def rounded(self) -> tuple[Array | None, ...]:
        return mla_prefill_backward(*self.arguments, **self.options, rounding=self.case.dtype)


def make_gradients(case: DenseCase, *, dlse: bool = False, out_dtype: str = "") -> GradientInputs:
    """The arrays of a case. What belongs to a query without a key is NaN.

    With a state, `out` and `lse` are merged ones; the gradients still belong to the case's keys alone.
    """
    inputs = make(case)
    exact_out, exact_lse = inputs.exact
    rng = np.random.default_rng(case.seed + 1)
    kind = dtypes.numpy_dtype(case.dtype)
    out = np.asarray(exact_out).astype(dtypes.numpy_dtype(out_dtype or case.dtype))
    dout = rng.standard_normal(out.shape, np.float32).astype(kind)
    options = {name: x for name, x in inputs.options.items() if not name.startswith("state")}
    lse = np.asarray(exact_lse).astype(np.float32)
    if dlse:
        options["dlse"] = rng.standard_normal(lse.shape, np.float32)
    blind = np.ones(len(out), bool)
    starts = options.get("cu_seqlens_q"), options.get("cu_seqlens_kv")
    for row in seen_keys(len(inputs.q), len(inputs.k), *starts, case.causal):
        blind[row.query] = row.begin == row.end
    for array in (inputs.q, options.get("q_rope"), out, dout, options.get("dlse")):
        if array is not None:
            array[blind] = np.nan
    return GradientInputs(inputs, out, dout, lse, options)


def moved(inputs: GradientInputs, **arrays: Any) -> GradientInputs:
    """The problem with some of q, k and v in other arrays."""
    return replace(inputs, forward=replace(inputs.forward, **arrays))


def check_gradients(got: Sequence[Any], inputs: GradientInputs, names: Sequence[str] = NAMES) -> None:
    """Assert the rule for all gradients, or the named ones; only passed arrays have any."""
    sizes = terms(inputs)
    for name, mine, exact, rounded in zip(NAMES, got, inputs.exact, inputs.rounded, strict=True):
        if name not in names:
            continue
        if exact is None or rounded is None:
            assert mine is None, name
            continue
        least = CANCELLED * sizes[name].reshape(*exact.shape[:-1], 1)
        check_out(mine, exact, rounded, inputs.case.dtype, budget=BUDGET, least_unit=least, name=name)


@np.errstate(all="ignore")
def terms(inputs: GradientInputs) -> dict[str, Array]:
    """Size of the rows of each gradient without cancellation."""
    case, options = inputs.case, inputs.options
    queries, keys = joined(inputs.forward.q, options.get("q_rope")), joined(inputs.forward.k, options.get("k_rope"))
    queries, keys, values, dout = (x.astype(np.float32) for x in (queries, keys, inputs.forward.v, inputs.dout))
    scale = np.float32(case.scale or case.d_qk**-0.5)
    delta = np.abs(inputs.out.astype(np.float32) * dout).sum(axis=-1) + np.abs(options.get("dlse", np.float32(0)))
    dq, dk, dv = np.zeros_like(queries), np.zeros_like(keys), np.zeros_like(values)
    starts = options.get("cu_seqlens_q"), options.get("cu_seqlens_kv")
    for row in seen_keys(len(queries), len(keys), *starts, case.causal):
        for h in np.flatnonzero(~np.isinf(inputs.lse[row.query])):
            at, seen = (row.query, h), (slice(row.begin, row.end), h * case.heads_kv // case.h_q)
            weights = np.exp(scale * (keys[seen] @ queries[at]) - inputs.lse[at])
            d_scores = scale * weights * (np.abs(values[seen]) @ np.abs(dout[at]) + delta[at])
            dq[at] = d_scores @ np.abs(keys[seen])
            dk[seen] += np.outer(d_scores, np.abs(queries[at]))
            dv[seen] += np.outer(weights, np.abs(dout[at]))
    narrow = case.d_qk - D_ROPE
    parts = {"dq": dq, "dk": dk, "dv": dv, "dq_rope": dq[..., narrow:], "dk_rope": dk[..., narrow:]}
    if case.k_rope == "shared":
        parts["dk_rope"] = parts["dk_rope"].sum(axis=1)
    return {name: np.nan_to_num(x, nan=0, posinf=0).max(axis=-1) for name, x in parts.items()}
