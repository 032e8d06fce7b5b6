"""Check of a decode result: a sample of its rows against the float64 oracle.

The oracle over a whole large case would take minutes, so it computes a few (sequence, head) pairs: the first, the
middle and the last of each. All other rows are only checked to be finite (the buffers start as NaN). The tolerance is
that of the project's tests: at most twice the error that the oracle makes with the kernels' own roundings, plus one
unit in the last place of the largest value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import reference

from ...core.device import Device
from ...core.tolerance import LSE_RELATIVE, distance, epsilon, spaced
from .cases import DecodeCase
from .inputs import InputSet, Outputs

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Expected:
    """The correct values of some heads of one sequence."""

    batch: int
    heads: Array
    out: Array  # (s_q, heads, d_v), float64
    lse: Array  # (heads, s_q), float64
    out_error: float  # of the oracle with the kernels' roundings
    lse_error: float


@dataclass(frozen=True)
class Verdict:
    """The errors, and the tolerances they were compared with."""

    ok: bool
    reason: str
    out_max: float
    out_tolerance: float
    lse_max: float | None
    lse_tolerance: float
    sampled_rows: int


def expect(case: DecodeCase, dtype: str, inputs: InputSet, device: Device) -> list[Expected]:
    """The oracle's values for the sampled sequences and heads."""
    heads, expected = spaced(case.h_q), []
    for batch in spaced(case.b).tolist():
        q = device.to_host(inputs.q[batch : batch + 1])
        length = inputs.host_seqlens[batch : batch + 1]
        pages = device.take(inputs.kv_cache, inputs.host_table[batch])
        table = np.arange(len(pages), dtype=np.int32)[None]
        arguments = q[:, :, heads], pages, table, length
        options = {"scale": case.scale, "d_v": case.d_v, **case.options}
        out, lse = reference.mla_decode(*arguments, math=case.expected_math, **options)
        rounded_out, rounded_lse = reference.mla_decode(*arguments, math=case.math, **options, rounding=dtype)
        errors = distance(rounded_out, out), distance(rounded_lse, lse)
        expected.append(Expected(batch, heads, out[0], lse[0], *errors))
    return expected


def judge(expected: Sequence[Expected], outputs: Outputs, dtype: str, device: Device) -> Verdict:
    """Compares the outputs with the expected values."""
    unit = epsilon(dtype)
    out_tolerance = 2 * max(e.out_error for e in expected) + unit * max(float(np.abs(e.out).max()) for e in expected)
    lse_scale = max(1.0, *(float(np.abs(e.lse[np.isfinite(e.lse)]).max(initial=0)) for e in expected))
    lse_tolerance = 2 * max(e.lse_error for e in expected) + LSE_RELATIVE * lse_scale

    out_max = max(distance(device.to_host(outputs.out[e.batch])[:, e.heads], e.out) for e in expected)
    lse_max = None
    if outputs.lse is not None:
        lse_max = max(distance(device.to_host(outputs.lse[e.batch])[e.heads], e.lse) for e in expected)
    not_finite = device.count_not_finite(outputs.out)

    reasons = []
    if not out_max <= out_tolerance:  # also where out_max is NaN
        reasons.append(f"out differs by {out_max:.3g}, more than {out_tolerance:.3g}")
    if lse_max is not None and not lse_max <= lse_tolerance:
        reasons.append(f"lse differs by {lse_max:.3g}, more than {lse_tolerance:.3g}")
    if not_finite:
        reasons.append(f"{not_finite} values of out are not finite or were never written")
    rows = sum(e.out.shape[0] * e.out.shape[1] for e in expected)
    return Verdict(not reasons, "; ".join(reasons), out_max, out_tolerance, lse_max, lse_tolerance, rows)
