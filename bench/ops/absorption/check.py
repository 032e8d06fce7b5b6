"""Check of a result: some queries of some heads against the float64 oracle; the rest is finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import reference
from mla_cupy.dtypes import round_to

from ...core.cost import D_QK, D_V
from ...core.device import Device
from ...core.tolerance import SampledVerdict, distance, epsilon, spaced
from .cases import D_NOPE, AbsorptionCase
from .inputs import AbsorptionInputs, Outputs

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Expected:
    """The correct values of one query and head, of attention alone and of both whole forms."""

    query: int
    head: int
    latent: Array  # (512,), float64
    latent_error: float  # of the oracle with the kernels' roundings
    out: Array  # (128,)
    out_error: float  # of the oracle with the roundings of either form


def expect(case: AbsorptionCase, dtype: str, inputs: AbsorptionInputs, device: Device) -> list[Expected]:
    """The oracle's values for a few queries and heads."""
    pages = device.take(inputs.kv_cache, inputs.host_table[0])
    rows = pages.reshape(-1, D_QK)[: case.s_kv]
    found = []
    for head in spaced(case.h_q).tolist():
        weights = device.to_host(inputs.weights[:, head])
        for i in spaced(case.s_q).tolist():
            seen = rows[: case.s_kv - case.s_q + i + 1]
            absorbed = device.to_host(inputs.q[0, i, head])
            query = device.to_host(inputs.queries[i, head])
            found.append(
                Expected(i, head, *_alone(case, dtype, absorbed, seen), *_whole(case, dtype, query, seen, weights))
            )
    return found


def _attend(case: AbsorptionCase, query: Array, keys: Array, values: Array, rounding: str | None = None) -> Array:
    operands = query[None, None], keys[:, None], values[:, None]
    out: Array = reference.mla_prefill(*operands, causal=False, scale=case.scale, rounding=rounding)[0]
    found: Array = out[0, 0]
    return found


def _alone(case: AbsorptionCase, dtype: str, query: Array, rows: Array) -> tuple[Array, float]:
    exact = _attend(case, query, rows, rows[:, :D_V])
    return exact, distance(_attend(case, query, rows, rows[:, :D_V], dtype), exact)


def _whole(case: AbsorptionCase, dtype: str, query: Array, rows: Array, weights: Array) -> tuple[Array, float]:
    """Un-absorbed without roundings; its distance from both forms with those of 16 bits in between."""
    expanded = rows[:, :D_V].astype(np.float64) @ weights.astype(np.float64)

    def per_head(expanded: Array, rounding: str | None = None) -> Array:
        keys = np.concatenate([expanded[:, :D_NOPE], rows[:, D_V:]], axis=1)
        return _attend(case, query, keys, expanded[:, D_NOPE:], rounding)

    exact = per_head(expanded)
    unabsorbed = per_head(round_to(expanded, dtype), dtype)
    latent = round_to(weights[:, :D_NOPE].astype(np.float64) @ query[:D_NOPE].astype(np.float64), dtype)
    attended = _attend(case, np.concatenate([latent, query[D_NOPE:]]), rows, rows[:, :D_V], dtype)
    absorbed = round_to(round_to(attended, dtype) @ weights[:, D_NOPE:].astype(np.float64), dtype)
    return exact, max(distance(unabsorbed, exact), distance(absorbed, exact))


def judge(expected: Sequence[Expected], outputs: Outputs, dtype: str, device: Device) -> SampledVerdict:
    """Compares what was written with the samples of its kind."""
    alone = outputs.out.ndim == 4
    wanted = [(one.latent, one.latent_error) if alone else (one.out, one.out_error) for one in expected]
    whole = outputs.out[0] if alone else outputs.out
    errors = [
        distance(device.to_host(whole[one.query, one.head]), exact)
        for one, (exact, _) in zip(expected, wanted, strict=True)
    ]
    largest = max(float(np.abs(exact).max()) for exact, _ in wanted)
    tolerance = 2 * max(error for _, error in wanted) + epsilon(dtype) * largest
    reasons = [] if max(errors) <= tolerance else [f"out differs by {max(errors):.3g}, more than {tolerance:.3g}"]
    if count := device.count_not_finite(outputs.out):
        reasons.append(f"{count} values of out are not finite or were never written")
    sizes = {"out": max(errors)}, {"out": tolerance}, {"out": len(expected)}
    return SampledVerdict(not reasons, "; ".join(reasons), *sizes)
