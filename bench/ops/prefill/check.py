"""Check of a prefill's result: some queries of some heads against the float64 oracle; the rest is finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import reference

from ...core.device import Device
from ...core.tolerance import LSE_RELATIVE, SampledVerdict, distance, epsilon, spaced
from .cases import D_ROPE, PrefillCase
from .inputs import PrefillInputs, PrefillOutputs

Array = npt.NDArray[Any]
QUERIES = 4


@dataclass(frozen=True)
class Expected:
    """The correct values of one query and head."""

    query: int
    head: int
    out: Array  # (d_v,), float64
    lse: Array  # (), float64
    out_error: float  # of the oracle with the kernels' roundings
    lse_error: float


def expect(case: PrefillCase, dtype: str, inputs: PrefillInputs, device: Device) -> list[Expected]:
    """The oracle's values for a few queries of the first and the last sequence."""
    found = []
    for batch in spaced(case.b, 2).tolist():
        keys = slice(batch * case.s_kv, (batch + 1) * case.s_kv)
        k_rope = device.to_host(inputs.k_rope[keys])
        for head in spaced(case.h_q).tolist():
            kv = device.to_host(inputs.kv[keys, head * case.heads_kv // case.h_q])[:, None]
            for i in spaced(case.s_q, QUERIES).tolist():
                found.append(_expected(case, dtype, inputs, device, kv, k_rope, batch * case.s_q + i, head))
    return found


def _expected(
    case: PrefillCase,
    dtype: str,
    inputs: PrefillInputs,
    device: Device,
    kv: Array,
    k_rope: Array,
    query: int,
    head: int,
) -> Expected:
    """The values of one query, all of whose keys are those of its sequence that it sees."""
    seen = case.s_kv - (case.s_q - 1 - query % case.s_q) if case.causal else case.s_kv
    seen, width = max(0, seen), case.d_qk - D_ROPE
    options: dict[str, Any] = {"k_rope": k_rope[:seen], "causal": False, "scale": case.scale}
    at = slice(query, query + 1), slice(head, head + 1)
    if case.state:
        options["state_out"] = device.to_host(inputs.state_out[at])
        options["state_lse"] = device.to_host(inputs.state_lse[at])
    keys = np.arange(seen)
    if case.topk:
        selected = device.to_host(inputs.indices[at[0]])[0]
        keys = selected[selected >= 0]
        options["k_rope"] = k_rope[keys]
    arguments = device.to_host(inputs.q[at]), kv[keys][..., :width], kv[keys][..., width:]
    out, lse = reference.mla_prefill(*arguments, **options)
    rounded_out, rounded_lse = reference.mla_prefill(*arguments, **options, rounding=dtype)
    return Expected(query, head, out[0, 0], lse[0, 0], distance(rounded_out, out), distance(rounded_lse, lse))


def judge(expected: Sequence[Expected], outputs: PrefillOutputs, dtype: str, device: Device) -> SampledVerdict:
    """Compares what was written with the samples; an lse that is None is skipped."""
    largest = max(float(np.abs(one.out).max()) for one in expected)
    tolerances = {"out": 2 * max(one.out_error for one in expected) + epsilon(dtype) * largest}
    errors = {"out": max(distance(_at(outputs.out, one, device), one.out) for one in expected)}
    if outputs.lse is not None:
        largest = max(1.0, *(abs(float(one.lse)) for one in expected if np.isfinite(one.lse)))
        tolerances["lse"] = 2 * max(one.lse_error for one in expected) + LSE_RELATIVE * largest
        errors["lse"] = max(distance(_at(outputs.lse, one, device), one.lse) for one in expected)
    reasons = [
        f"{name} differs by {error:.3g}, more than {tolerances[name]:.3g}"
        for name, error in errors.items()
        if not error <= tolerances[name]  # also where it is NaN
    ]
    if count := device.count_not_finite(outputs.out):
        reasons.append(f"{count} values of out are not finite or were never written")
    return SampledVerdict(
        ok=not reasons,
        reason="; ".join(reasons),
        errors=errors,
        tolerances=tolerances,
        samples=dict.fromkeys(errors, len(expected)),
    )


def _at(array: Any, one: Expected, device: Device) -> Array:
    """A sample's value."""
    value: Array = device.to_host(array[one.query : one.query + 1, one.head : one.head + 1])[0, 0]
    return value
