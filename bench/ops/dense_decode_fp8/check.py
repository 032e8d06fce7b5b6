"""Check of dense decode from FP8 records: that of dense decode, and relative errors of the result beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.device import Device
from ..decode import check
from ..decode.check import Expected
from ..decode.inputs import Outputs


@dataclass(frozen=True)
class Fp8Verdict(check.Verdict):
    """Verdict with relative errors of the sampled rows of `out`.

    `out_rms` is the root of the mean square of the differences, `out_bias` how much larger the result is: -0.15 where
    15 % of it are missing. Both are relative to the expected values.
    """

    not_finite: int  # values of the whole result
    out_rms: float
    out_bias: float


def judge(expected: Sequence[Expected], outputs: Outputs, dtype: str, device: Device) -> Fp8Verdict:
    """Compares the outputs with the expected values."""
    verdict = check.judge(expected, outputs, dtype, device)
    want = np.concatenate([e.out.ravel() for e in expected])
    parts = [device.to_host(outputs.out[e.batch])[:, e.heads].astype(np.float64) for e in expected]
    error = np.concatenate([part.ravel() for part in parts]) - want
    size = float(want @ want) or 1.0
    relative = float(np.sqrt(error @ error / size)), float(error @ want / size)
    return Fp8Verdict(
        **vars(verdict), not_finite=device.count_not_finite(outputs.out), out_rms=relative[0], out_bias=relative[1]
    )
