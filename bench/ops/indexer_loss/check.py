"""Check of losses and gradients: a few queries against the float64 oracle, and all keys by an identity.

The rows of queries do not interact. What a key's gradient is made of takes all queries after it; but

    sum_s d_index_k[s] . index_k[s] = sum_tj d_index_q[t, j] . index_q[t, j]

as both are the sum of G W max(a, 0) over all pairs. Cases of few tokens are compared with the oracle as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mla_cupy import reference

from ...core.device import Device
from ...core.tolerance import SampledVerdict, spaced
from .cases import LossCase
from .inputs import LossInputs, LossOutputs

Array = npt.NDArray[Any]
QUERIES = 4
FEW_TOKENS = 512
KL_ERROR = 1e-4  # of max(1, kl)
GRADIENT_ERROR = 2.0**-6  # of a row's largest element: bfloat16, of gradients by the scores and of results
#: The largest element is at least taken for this: a query that sees one key has a gradient of rounding errors, and
#: those are larger per head, of scores that are not scaled.
ROUNDED = (1e-4, 1e-2)
SUM_ERROR = 2.0**-8  # of the sum of the products' magnitudes


@dataclass(frozen=True)
class Sample:
    """Expected results of one query; and, in the last of them, a condition on all results together."""

    row: int
    kl: Array  # of each head, if the target is
    d_index_q: Array
    d_weights: Array


@dataclass(frozen=True)
class Whole:
    """The index arrays, and of a case of few tokens the gradient by keys."""

    index_q: Array
    index_k: Array
    d_index_k: Array | None


def expect(case: LossCase, dtype: str, inputs: LossInputs, device: Device) -> list[Any]:
    """The oracle's results of a few queries; then a `Whole`."""
    host = inputs.host
    arguments: dict[str, Any] = dict(host)
    d_index_k = _exact(case, arguments).d_index_k if case.tokens <= FEW_TOKENS else None
    whole = Whole(*_values(host), d_index_k)
    return [*(_sample(case, host, int(row)) for row in spaced(case.tokens, QUERIES)), whole]


def _values(host: dict[str, Array]) -> tuple[Array, Array]:
    """Index queries and keys as numbers."""
    index_q, index_k = host["index_q"], host["index_k"]
    if "q_scale" not in host:
        return index_q, index_k
    index_q, index_k = (x.view(ml_dtypes.float8_e4m3fn).astype(np.float32) for x in (index_q, index_k))
    return index_q * host["q_scale"][..., None], index_k * host["k_scale"][:, None]


def _sample(case: LossCase, host: dict[str, Array], row: int) -> Sample:
    first = row // case.s * case.s
    of_queries = ("q", "index_q", "weights", "q_scale", "lse", "indices")
    one = {name: host[name][row : row + 1] for name in of_queries if name in host}
    of_keys = ("k", "k_rope", "index_k", "k_scale")
    keys = {name: host[name][first : row + 1] for name in of_keys if name in host}
    exact = _exact(case, {**one, **keys})
    assert exact.d_index_q is not None
    assert exact.d_weights is not None
    return Sample(row, np.atleast_1d(exact.kl[0]), exact.d_index_q[0], exact.d_weights[0])


def _exact(case: LossCase, arguments: dict[str, Any]) -> reference.SparseLoss | reference.WarmupLoss:
    if case.topk:
        return reference.indexer_sparse_loss(**arguments)
    return reference.indexer_warmup_loss(**arguments, target="per_head" if case.per_head else "head_sum")


def judge(expected: Sequence[Any], outputs: LossOutputs, dtype: str, device: Device) -> SampledVerdict:
    """Compares what was written with the samples. What is no loss is not judged."""
    if outputs.d_index_k is None:
        return SampledVerdict(True, "", {}, {}, {})
    *samples, whole = expected
    errors = {"d_index_q": 0.0, "d_weights": 0.0}
    for sample in samples:
        if outputs.kl is not None:
            got = np.atleast_1d(device.to_host(outputs.kl[sample.row]))
            error = np.abs(got - sample.kl) / (KL_ERROR * np.maximum(1.0, np.abs(sample.kl)))
            errors["kl"] = max(errors.get("kl", 0.0), float(error.max()))
        for name in ("d_index_q", "d_weights"):
            row = device.to_host(getattr(outputs, name)[sample.row])
            errors[name] = max(errors[name], _error(row, getattr(sample, name), ROUNDED[len(sample.kl) > 1]))
    errors["d_index_k"] = _keys_error(outputs, whole, device)
    errors = {name: np.inf if np.isnan(error) else error for name, error in errors.items()}
    reasons = [f"{name} differs by {error:.3g} times what is allowed" for name, error in errors.items() if error > 1]
    counts = {name: len(samples) for name in errors}
    return SampledVerdict(not reasons, "; ".join(reasons), errors, dict.fromkeys(errors, 1.0), counts)


def _error(got: Array, want: Array, rounded: float = ROUNDED[False]) -> float:
    """The error of one query, in units of the allowed one."""
    unit = max(float(np.abs(want).max()), rounded)
    return float(np.abs(got.astype(np.float64) - want).max()) / (GRADIENT_ERROR * unit)


def _keys_error(outputs: LossOutputs, whole: Whole, device: Device) -> float:
    d_index_k, d_index_q = (device.to_host(x).astype(np.float32) for x in (outputs.d_index_k, outputs.d_index_q))
    by_keys = d_index_k * whole.index_k.astype(np.float32)
    by_queries = d_index_q * whole.index_q.astype(np.float32)
    magnitudes = np.abs(by_keys).sum(dtype=np.float64) + np.abs(by_queries).sum(dtype=np.float64)
    difference = abs(by_keys.sum(dtype=np.float64) - by_queries.sum(dtype=np.float64))
    error = float(difference / (SUM_ERROR * max(magnitudes, 1e-6)))
    return error if whole.d_index_k is None else max(error, _error(d_index_k, whole.d_index_k))
