"""Check of prepared queries: those of a few tokens equal the oracle's byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import reference
from mla_cupy.reference.cache import to_e4m3

from ...core.device import Device
from ...core.tolerance import SampledVerdict, spaced
from .cases import PrepareCase
from .inputs import PreparedQueries, PrepareInputs

Array = npt.NDArray[Any]
TOKENS = 3


@dataclass(frozen=True)
class Sample:
    """The bytes of a token's codes and folded weights."""

    token: int
    codes: Array
    folded: Array


def expect(case: PrepareCase, dtype: str, inputs: PrepareInputs, device: Device) -> list[Sample]:
    """The oracle's results for a few tokens."""
    chosen = spaced(case.s_q, TOKENS)
    q, host = device.take(inputs.q, chosen), inputs.host
    arguments = (host["weights"][chosen], host["cos"], host["sin"], host["positions"][chosen])
    codes, folded = reference.indexer_prepare_q(q, *arguments)
    return [Sample(int(token), to_e4m3(codes[at]), folded[at].astype(np.float32)) for at, token in enumerate(chosen)]


def judge(expected: Sequence[Sample], outputs: PreparedQueries, dtype: str, device: Device) -> SampledVerdict:
    """Compares what was written with the samples."""
    wrong = {"codes": 0, "folded": 0}
    for sample in expected:
        for name in wrong:
            got = device.take(getattr(outputs, name), np.array([sample.token]))[0]
            want = getattr(sample, name)
            wrong[name] += int((got.view(f"u{got.itemsize}") != want.view(f"u{want.itemsize}")).sum())
    reason = "; ".join(f"{count} {name} differ" for name, count in wrong.items() if count)
    errors = {name: float(count) for name, count in wrong.items()}
    return SampledVerdict(not reason, reason, errors, dict.fromkeys(wrong, 0.0), dict.fromkeys(wrong, len(expected)))
