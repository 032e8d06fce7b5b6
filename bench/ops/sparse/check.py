"""Whether the results of a sparse operation are right: samples against the float64 oracle.

Forward and dq: a few queries with all their heads. dkv: a few rows of kv, each summed over all queries that select it.
Everything else is only checked to be finite. Each sample has its own tolerance, that of the project's tests: at most
twice the error that the oracle makes with the kernels' own roundings, plus one unit in the last place of its largest
value. A row of kv that no query selects must have a gradient of exactly 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import reference
from mla_cupy.formats import round_to

from .check import EPSILON, LSE_RELATIVE, distance, spaced
from .device import Device
from .errors import BenchError
from .sparse_cases import SparseCase
from .sparse_inputs import GradientInputs, Gradients, SparseInputs, SparseOutputs

Array = npt.NDArray[Any]
QUERIES = 5
CHUNK = 256  # queries whose gradients with respect to one row of kv are computed at a time


@dataclass(frozen=True)
class Sample:
    """What one row of one output must be, and how close."""

    output: str
    row: int
    want: Array  # float64
    tolerance: float


@dataclass(frozen=True)
class Verdict:
    """For each output the error of the worst sample, and the tolerance it was held to."""

    ok: bool
    reason: str
    errors: dict[str, float]
    tolerances: dict[str, float]
    samples: dict[str, int]


def expect_forward(case: SparseCase, dtype: str, inputs: SparseInputs, device: Device) -> list[Sample]:
    """The oracle's out, lse and max_logits of a few queries."""
    queries = spaced(case.s_q, QUERIES)
    arguments = device.take(inputs.q, queries), device.to_host(inputs.kv), inputs.host_indices[queries]
    want = reference.sparse_mla_forward(*arguments, scale=case.scale)
    rounded = reference.sparse_mla_forward(*arguments, scale=case.scale, rounding=dtype)
    outputs = dict(zip(("out", "lse", "max_logits"), zip(want, rounded, strict=True), strict=True))
    return [
        Sample(name, int(query), exact[at], _tolerance(name, exact[at], near[at], dtype))
        for name, (exact, near) in outputs.items()
        for at, query in enumerate(queries)
    ]


def expect_backward(case: SparseCase, dtype: str, inputs: GradientInputs, device: Device) -> list[Sample]:
    """The oracle's dq of a few queries and dkv of a few rows; before that, whether `out` and `lse` are right."""
    forward = expect_forward(case, dtype, inputs, device)
    verdict = judge(forward, SparseOutputs(inputs.out, inputs.lse, None), device)
    if not verdict.ok:
        raise BenchError(f"the forward that gives the backward its out and lse is wrong: {verdict.reason}")
    return [*_expect_dq(case, dtype, inputs, device), *_expect_dkv(case, dtype, inputs, device)]


def _expect_dq(case: SparseCase, dtype: str, inputs: GradientInputs, device: Device) -> Iterable[Sample]:
    queries = spaced(case.s_q, QUERIES)
    arguments = _backward_arguments(inputs, device.to_host(inputs.kv), queries, inputs.host_indices[queries], device)
    want, *_ = reference.sparse_mla_backward(*arguments, scale=case.scale)
    near, *_ = reference.sparse_mla_backward(*arguments, scale=case.scale, rounding=dtype)
    for at, query in enumerate(queries):
        yield Sample("dq", int(query), want[at], _tolerance("dq", want[at], near[at], dtype))


def _expect_dkv(case: SparseCase, dtype: str, inputs: GradientInputs, device: Device) -> Iterable[Sample]:
    """The gradient of one row needs this row alone, because lse is given: as if it were the only row of kv."""
    for row in _sampled_rows(case):
        key = device.take(inputs.kv, np.array([row]))
        (queries,) = np.nonzero((inputs.host_indices == row).any(axis=1))
        want, near = np.zeros(case.d_qk), np.zeros(case.d_qk)
        for start in range(0, len(queries), CHUNK):
            some = queries[start : start + CHUNK]
            arguments = _backward_arguments(inputs, key, some, np.zeros((len(some), 1), np.int32), device)
            want += reference.sparse_mla_backward(*arguments, scale=case.scale)[1][0]
            near += reference.sparse_mla_backward(*arguments, scale=case.scale, rounding=dtype, dkv_dtype="float32")[1][
                0
            ]
        yield Sample("dkv", row, want, _tolerance("dkv", want, round_to(near, dtype), dtype))


def _sampled_rows(case: SparseCase) -> list[int]:
    """The first, one in the middle, one near the end that few queries can see, and the last, which one can see."""
    return sorted({0, case.s_kv // 2, max(0, case.s_kv - 1 - case.s_q // 16), case.s_kv - 1})


def _backward_arguments(
    inputs: GradientInputs, kv: Array, queries: npt.NDArray[np.int64], indices: Array, device: Device
) -> tuple[Array, ...]:
    q, out, dout, lse = (device.take(array, queries) for array in (inputs.q, inputs.out, inputs.dout, inputs.lse))
    return q, kv, out, dout, lse, indices


def _tolerance(output: str, want: Array, near: Array, dtype: str) -> float:
    finite = np.abs(want[np.isfinite(want)])
    largest = float(finite.max(initial=0))
    if output in ("lse", "max_logits"):
        return 2 * distance(near, want) + LSE_RELATIVE * max(1.0, largest)
    return 2 * distance(near, want) + EPSILON[dtype] * largest


def judge(samples: Sequence[Sample], outputs: SparseOutputs | Gradients, device: Device) -> Verdict:
    """Compares what was written with the samples; an output that is None is passed over."""
    arrays = {name: array for name, array in vars(outputs).items() if array is not None}
    worst: dict[str, tuple[float, float, float]] = {}  # error in units of the tolerance, error, tolerance
    reasons = []
    for sample in (sample for sample in samples if sample.output in arrays):
        error = distance(device.to_host(arrays[sample.output][sample.row]), sample.want)
        if not error <= sample.tolerance:  # also where it is NaN
            place = f"{sample.output}[{sample.row}]"
            reasons.append(f"{place} differs by {error:.3g}, more than {sample.tolerance:.3g}")
        found = (_ratio(error, sample.tolerance), error, sample.tolerance)
        worst[sample.output] = max(worst.get(sample.output, found), found)
    for name in ("out", "dq", "dkv"):
        if name in arrays and (count := device.count_not_finite(arrays[name])):
            reasons.append(f"{count} values of {name} are not finite or were never written")
    return Verdict(
        ok=not reasons,
        reason="; ".join(reasons),
        errors={name: error for name, (_, error, _) in worst.items()},
        tolerances={name: tolerance for name, (*_, tolerance) in worst.items()},
        samples={name: sum(sample.output == name for sample in samples) for name in worst},
    )


def _ratio(error: float, tolerance: float) -> float:
    if error <= tolerance:
        return error / tolerance if tolerance else 0.0
    return error / tolerance if tolerance and np.isfinite(error) else np.inf
