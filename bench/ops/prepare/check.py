"""Check of bytes: those of a few tokens equal the oracle's; with computed angles, all but a few of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import reference
from mla_cupy.cache_formats import FORMATS
from mla_cupy.ops import backend

from ...core.device import Device
from ...core.tolerance import SampledVerdict, spaced
from ..cache.inputs import as_cache
from .cases import PAGE_SIZE, MlaPrepareCase
from .inputs import KV_SCALE, MlaPrepareInputs, MlaPrepareOutputs

Array = npt.NDArray[Any]
TOKENS = 4
FEW = 0.01
"""Share of bytes in which computed angles may differ: roundings that go the other way."""


@dataclass(frozen=True)
class Sample:
    """The bytes of a row of a result. `mask`: those that count; `few`: how many of them may differ."""

    result: str
    row: int
    expected: Array
    mask: Array
    few: float


def expect(case: MlaPrepareCase, dtype: str, inputs: MlaPrepareInputs, device: Device) -> list[Sample]:
    """Compute the oracle's bytes from a few tokens of the inputs. What queries become in place is not sampled."""
    chosen, few = spaced(case.n, TOKENS), FEW if case.theta else 0.0
    own: dict[str, Any] = {
        name: x if name in ("cos", "sin") else x[chosen] for name, x in inputs.host.items() if name != "slots"
    }
    pages = np.zeros((0, 0), np.uint8)
    if case.record:
        pages = np.zeros((len(chosen), FORMATS[case.record].page_bytes(PAGE_SIZE)), np.uint8)
        own |= {name: device.take(inputs.arguments[name], chosen) for name in ("latent", "rope")}
        own["slots"] = np.arange(len(chosen)) * PAGE_SIZE + inputs.host["slots"][chosen] % PAGE_SIZE
        own["cache"] = as_cache(FORMATS[case.record], pages)
    numbers: dict[str, Any] = {"theta": inputs.arguments.get("theta"), "quantise": case.kind == "codes"}
    numbers["kv_scale"] = KV_SCALE if case.record == "fp8" else 1.0
    out, scales, _ = reference.mla_prepare(device.take(inputs.q, chosen), **own, **numbers)
    found: list[Sample] = []
    results: dict[str, tuple[Any, str]] = {}
    if case.kind != "inplace":
        results["queries"] = (out, "uint8" if case.kind == "codes" else dtype)
    if case.kind == "codes":
        results["q_scales"] = (scales, "float32")
    for name, (x, kind) in results.items():
        for at, row in zip(chosen, backend.rounded([x], [kind])[0], strict=True):
            octets = np.ascontiguousarray(row).view(np.uint8)
            found.append(Sample(name, int(at), octets, np.ones(octets.shape, bool), few))
    return found + (_pages(case, inputs.host["slots"][chosen], pages, few) if case.record else [])


def _pages(case: MlaPrepareCase, slots: Array, pages: Array, few: float) -> list[Sample]:
    """Samples of pages, of which the bytes of one token count."""
    record = FORMATS[case.record]
    marks = np.zeros_like(pages)
    for field in record.fields:
        view = reference.cache.field_view(as_cache(record, marks), record, field)
        view[np.arange(len(slots)), slots % PAGE_SIZE] = 1
    rows = zip(slots // PAGE_SIZE, pages, marks, strict=True)
    return [Sample("pages", int(page), octets, mark.astype(bool), few) for page, octets, mark in rows]


def judge(expected: Sequence[Sample], outputs: MlaPrepareOutputs, dtype: str, device: Device) -> SampledVerdict:
    """Compares what was written with the samples."""
    names = sorted({sample.result for sample in expected})
    wrong, allowed, counts = (dict.fromkeys(names, 0.0) for _ in range(3))
    for sample in expected:
        got = np.ascontiguousarray(device.take(getattr(outputs, sample.result), np.array([sample.row]))[0])
        wrong[sample.result] += int((got.view(np.uint8) != sample.expected)[sample.mask].sum())
        allowed[sample.result] += sample.few * sample.mask.sum()
        counts[sample.result] += 1
    reason = "; ".join(f"{int(n)} bytes of {name} differ" for name, n in wrong.items() if n > allowed[name])
    return SampledVerdict(not reason, reason, wrong, allowed, {name: int(n) for name, n in counts.items()})
