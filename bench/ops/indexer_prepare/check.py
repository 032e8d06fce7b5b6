"""Check of prepared queries and keys: those of a few tokens equal the oracle's byte by byte."""

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
    """The bytes of a token's results by name."""

    token: int
    results: dict[str, Array]


def expect(case: PrepareCase, dtype: str, inputs: PrepareInputs, device: Device) -> list[Sample]:
    """The oracle's results for a few tokens."""
    chosen = spaced(case.s_q, TOKENS)
    of_tokens = ("weights", "positions")
    given: dict[str, Any] = {name: x[chosen] if name in of_tokens else x for name, x in inputs.host.items()}
    made: tuple[Any, ...]
    q = device.take(inputs.q, chosen)
    if case.keys:
        made = reference.indexer_prepare(q, k=device.take(inputs.arguments["k"], chosen), **given)
    else:
        made = reference.indexer_prepare_q(q, **given)
    names = ("codes", "folded", "k_codes", "k_scale")[: len(made)]
    pairs: list[tuple[str, Any]] = list(zip(names, made, strict=True))
    results = {name: to_e4m3(x) if "codes" in name else x.astype(np.float32) for name, x in pairs}
    return [Sample(int(token), {name: x[at] for name, x in results.items()}) for at, token in enumerate(chosen)]


def judge(expected: Sequence[Sample], outputs: PreparedQueries, dtype: str, device: Device) -> SampledVerdict:
    """Compares what was written with the samples."""
    wrong = dict.fromkeys(expected[0].results, 0)
    for sample in expected:
        for name, want in sample.results.items():
            got = device.take(getattr(outputs, name), np.array([sample.token]))[0]
            wrong[name] += int((got.view(f"u{got.itemsize}") != want.view(f"u{want.itemsize}")).sum())
    reason = "; ".join(f"{count} {name} differ" for name, count in wrong.items() if count)
    errors = {name: float(count) for name, count in wrong.items()}
    return SampledVerdict(not reason, reason, errors, dict.fromkeys(wrong, 0.0), dict.fromkeys(wrong, len(expected)))
