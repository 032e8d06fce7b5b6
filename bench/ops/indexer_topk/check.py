"""Check of a selection: a few rows against the oracle. Only ours says which of equal logits it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import reference

from ...core.device import Device
from ...core.tolerance import SampledVerdict, spaced
from .cases import TopkCase
from .inputs import Selection, TopkInputs

Array = npt.NDArray[Any]
ROWS = 3


@dataclass(frozen=True)
class Sample:
    """A row's logits, and which of them the oracle selects."""

    row: int
    logits: Array
    want: Array


def expect(case: TopkCase, dtype: str, inputs: TopkInputs, device: Device) -> list[Sample]:
    """The oracle's indices, ascending, of a few rows."""
    chosen = spaced(case.s_q, ROWS)
    wanted, _, _ = reference.indexer_topk(inputs.host[chosen], k=case.k)
    return [Sample(int(row), inputs.host[row], want) for row, want in zip(chosen, wanted, strict=True)]


def judge(expected: Sequence[Sample], outputs: Selection, dtype: str, device: Device) -> SampledVerdict:
    """Compares what was written with the samples: by index, or by the values at the indices."""
    wrong, reasons = 0, []
    for sample in expected:
        got = device.take(outputs.indices, np.array([sample.row]))[0].astype(np.int64)
        bad = _wrong(sample, got, outputs.lowest_ties)
        wrong += bad
        if bad:
            reasons.append(f"indices[{sample.row}]: {bad} are wrong")
    errors = {"indices": float(wrong)}
    return SampledVerdict(not wrong, "; ".join(reasons), errors, {"indices": 0.0}, {"indices": len(expected)})


def _wrong(sample: Sample, got: Array, lowest_ties: bool) -> int:
    """Number of wrong ones; all of them where they are out of range or not distinct."""
    everything = len(sample.want)
    if (got < 0).any() or (got >= len(sample.logits)).any() or len(np.unique(got)) < everything:
        return everything
    if lowest_ties:
        return int((got != sample.want).sum())
    return int((np.sort(sample.logits[got]) != np.sort(sample.logits[sample.want])).sum())
