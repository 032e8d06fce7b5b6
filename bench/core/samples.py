"""Samples of an operation's results: what the oracle expects of single rows, each with a tolerance of its own.

Everything that is not sampled is only checked to be finite. The tolerance is the same as in the tests: at most twice
the error that the oracle makes with the kernels' own roundings, plus one unit in the last place of the row's largest
value, plus what is left of terms that cancel (dq of a query with one key is 0).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .device import Device
from .tolerance import LSE_RELATIVE, SampledVerdict, distance, epsilon

Array = npt.NDArray[Any]
CANCELLED = 4 * 2.0**-23
"""Error that dP - delta may have, as a share of the magnitudes of what is added up: four float32 units.

Both are float32 sums of 512 products. Tensor cores cut off bits at each step, and delta is added up in another order.
"""
NUMBERS = ("lse", "max_logits")
"""Outputs that are logarithms or scores: infinite where there is nothing."""


@dataclass(frozen=True)
class Sample:
    """Expected values of one row of one output, within `tolerance`."""

    output: str
    row: int | tuple[int, ...]
    want: Array  # float64
    tolerance: float


def samples(
    output: str, rows: Iterable[int], want: Array, near: Array, dtype: str, floors: Array | None = None
) -> list[Sample]:
    """One sample per row, from the oracle's values without and with the kernels' roundings.

    `floors` are added to the tolerances: what a row may be off by because its terms cancel.
    """
    added = np.zeros(len(want)) if floors is None else floors
    return [
        Sample(output, int(row), want[at], tolerance(output, want[at], near[at], dtype) + float(added[at]))
        for at, row in enumerate(rows)
    ]


def tolerance(output: str, want: Array, near: Array, dtype: str) -> float:
    """Distance that a row may have from `want`, where the kernels' roundings alone give `near`."""
    largest = float(np.abs(want[np.isfinite(want)]).max(initial=0))
    if output in NUMBERS:
        return 2 * distance(near, want) + LSE_RELATIVE * max(1.0, largest)
    return 2 * distance(near, want) + epsilon(dtype) * largest


def judge(expected: Sequence[Sample], outputs: Any, dtype: str, device: Device) -> SampledVerdict:
    """Compares what was written with the samples; an output that is None is skipped."""
    arrays = {name: array for name, array in vars(outputs).items() if array is not None}
    worst: dict[str, tuple[float, float, float]] = {}  # error in units of the tolerance, error, tolerance
    reasons = []
    for sample in (sample for sample in expected if sample.output in arrays):
        error = distance(device.to_host(arrays[sample.output][sample.row]), sample.want)
        if not error <= sample.tolerance:  # also where it is NaN
            place = f"{sample.output}[{sample.row}]"
            reasons.append(f"{place} differs by {error:.3g}, more than {sample.tolerance:.3g}")
        found = (_ratio(error, sample.tolerance), error, sample.tolerance)
        worst[sample.output] = max(worst.get(sample.output, found), found)
    for name in arrays:
        if name not in NUMBERS and (count := device.count_not_finite(arrays[name])):
            reasons.append(f"{count} values of {name} are not finite or were never written")
    return SampledVerdict(
        ok=not reasons,
        reason="; ".join(reasons),
        errors={name: error for name, (_, error, _) in worst.items()},
        tolerances={name: tolerance for name, (*_, tolerance) in worst.items()},
        samples={name: sum(sample.output == name for sample in expected) for name in worst},
    )


@dataclass(frozen=True)
class OutSample:
    """Expected values at one place of `out`, and the error of the oracle with the kernels' roundings."""

    place: tuple[int, ...]
    want: Array  # float64
    error: float


def judge_out(expected: Sequence[OutSample], outputs: Any, dtype: str, device: Device) -> SampledVerdict:
    """Compares `out` with the samples, all within one tolerance; without samples it must be finite."""
    errors = [distance(device.to_host(outputs.out[sample.place]), sample.want) for sample in expected] or [0.0]
    largest = max((float(np.abs(sample.want).max()) for sample in expected), default=0.0)
    allowed = 2 * max((sample.error for sample in expected), default=0.0) + epsilon(dtype) * largest
    reasons = [] if max(errors) <= allowed else [f"out differs by {max(errors):.3g}, more than {allowed:.3g}"]
    if count := device.count_not_finite(outputs.out):
        reasons.append(f"{count} values of out are not finite or were never written")
    return SampledVerdict(
        not reasons, "; ".join(reasons), {"out": max(errors)}, {"out": allowed}, {"out": len(expected)}
    )


def _ratio(error: float, tolerance: float) -> float:
    if error <= tolerance:
        return error / tolerance if tolerance else 0.0
    return error / tolerance if tolerance and np.isfinite(error) else np.inf
