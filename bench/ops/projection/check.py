"""Check of a result: some tokens of some heads against the float64 oracle; the rest is finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import reference
from mla_cupy.dtypes import round_to

from ...core.device import Device
from ...core.tolerance import SampledVerdict, distance, epsilon, spaced
from .cases import ProjectionCase
from .inputs import ProjectionInputs, ProjectionOutputs

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Expected:
    """The correct values of one token and head, and what rounding merged results may change."""

    token: int
    head: int
    exact: Array
    error: float


def expect(case: ProjectionCase, dtype: str, inputs: ProjectionInputs, device: Device) -> list[Expected]:
    """The oracle's values for a few tokens and heads."""
    found = []
    for head in spaced(case.h_q).tolist():
        for token in spaced(case.tokens).tolist():
            exact, rounded = (_expected(case, inputs, device, token, head, x) for x in (None, dtype))
            found.append(Expected(token, head, exact, distance(round_to(rounded, dtype), exact)))
    return found


def _expected(
    case: ProjectionCase, inputs: ProjectionInputs, device: Device, token: int, head: int, rounding: str | None
) -> Array:
    heads, tokens = slice(head, head + 1), slice(token, token + 1)
    if not case.states:
        q_nope = device.to_host(inputs.q_nope[tokens, heads])
        absorbed: Array = reference.absorb(q_nope, device.to_host(inputs.w_uk[heads]))[0][0, 0]
        return absorbed
    outs, w_uv = device.to_host(inputs.outs[:, tokens, :, heads]), device.to_host(inputs.w_uv[heads])
    lses = None if inputs.lses is None else device.to_host(inputs.lses[:, tokens, heads])
    projected: Array = reference.merge_project(outs, w_uv, lses, rounding=rounding)[0][0, 0, 0]
    return projected


def judge(expected: Sequence[Expected], outputs: ProjectionOutputs, dtype: str, device: Device) -> SampledVerdict:
    """Compares what was written with the samples."""
    errors = [distance(device.to_host(outputs.out[one.token, one.head]), one.exact) for one in expected]
    largest = max(float(np.abs(one.exact).max()) for one in expected)
    tolerance = 2 * max(one.error for one in expected) + epsilon(dtype) * largest
    reasons = [] if max(errors) <= tolerance else [f"out differs by {max(errors):.3g}, more than {tolerance:.3g}"]
    if count := device.count_not_finite(outputs.out):
        reasons.append(f"{count} values of out are not finite or were never written")
    sizes = {"out": max(errors)}, {"out": tolerance}, {"out": len(expected)}
    return SampledVerdict(not reasons, "; ".join(reasons), *sizes)
