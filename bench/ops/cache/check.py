"""Check of bytes: those of a few tokens equal the oracle's, and those of a few pages their source's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import reference
from mla_cupy.cache_formats import FORMATS
from mla_cupy.dtypes import numpy_dtype

from ...core.device import Device
from ...core.tolerance import SampledVerdict, spaced
from .cases import PAGE_SIZE, CacheCase
from .inputs import CacheInputs, CacheOutputs, as_cache

Array = npt.NDArray[Any]
SAMPLES = 5


@dataclass(frozen=True)
class Sample:
    """The expected bytes of a row or a page of what is written. `mask`: those that count."""

    row: int
    expected: Array
    mask: Array


def expect(case: CacheCase, dtype: str, inputs: CacheInputs, device: Device) -> list[Sample]:
    """Compute the oracle's bytes from a few tokens of the inputs."""
    record = FORMATS[case.record]
    if case.kind == "copy":
        pairs = device.to_host(inputs.pairs)[spaced(case.pages, SAMPLES)]
        pages = device.take(inputs.pool[0], pairs[:, 0])
        to = pairs[:, 1] - case.pages  # in the second half
        return [Sample(int(at), page, np.ones(page.shape, bool)) for at, page in zip(to, pages, strict=True)]
    chosen = spaced(case.tokens, SAMPLES)
    latent, rope = (device.take(x, chosen) for x in (inputs.latent, inputs.rope))
    slots = inputs.host_slots[chosen]
    page_bytes = np.zeros((len(chosen), record.page_bytes(PAGE_SIZE)), np.uint8)
    marks = np.zeros_like(page_bytes)  # a page for each token: which bytes are its own
    own = np.arange(len(chosen)) * PAGE_SIZE + slots % PAGE_SIZE
    reference.cache_append(latent, rope, as_cache(record, page_bytes), own)
    if case.kind == "gather":
        rows = reference.cache_gather(as_cache(record, page_bytes), own)[0].astype(numpy_dtype(dtype))
        octets = np.ascontiguousarray(rows).view(np.uint8)
        return [Sample(int(at), octet, np.ones(octet.shape, bool)) for at, octet in zip(chosen, octets, strict=True)]
    for field in record.fields:
        view = reference.cache.field_view(as_cache(record, marks), record, field)
        view[np.arange(len(chosen)), slots % PAGE_SIZE] = 1
    found = zip(slots // PAGE_SIZE, page_bytes, marks, strict=True)
    return [Sample(int(page), octets, mark.astype(bool)) for page, octets, mark in found]


def judge(expected: Sequence[Sample], outputs: CacheOutputs, dtype: str, device: Device) -> SampledVerdict:
    """Compares what was written with the samples."""
    wrong = 0
    for sample in expected:
        got = np.ascontiguousarray(device.take(outputs.written, np.array([sample.row]))[0]).view(np.uint8)
        wrong += int((got != sample.expected)[sample.mask].sum())
    reason = f"{wrong} bytes differ" if wrong else ""
    return SampledVerdict(not wrong, reason, {"written": float(wrong)}, {"written": 0.0}, {"written": len(expected)})
