"""Check of logits: a few queries against the float64 oracle, element by element.

What may be off is a part of the sum of the terms' magnitudes, which may cancel: the tensor cores cut off bits of 8-bit
products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import reference
from mla_cupy.reference.indexer_records import page_parts

from ...core.device import Device
from ...core.tolerance import SampledVerdict, spaced
from .cases import PAGE_SIZE, LogitsCase
from .inputs import SCALE_BYTES, LogitsInputs

Array = npt.NDArray[Any]
QUERIES = 5
RELATIVE = 2.0**-11


@dataclass(frozen=True)
class Sample:
    """Expected logits of one query, within `allowed`."""

    place: tuple[int, ...]
    want: Array
    allowed: Array


def expect(case: LogitsCase, dtype: str, inputs: LogitsInputs, device: Device) -> list[Sample]:
    """The oracle's logits of a few queries, and of their magnitudes."""
    chosen = spaced(max(1, case.b) * case.s_q, QUERIES)
    sample_of = _paged_sample if case.b else _prefill_sample
    return [sample_of(case, inputs.host, int(row)) for row in chosen]


def _prefill_sample(case: LogitsCase, host: dict[str, Array], row: int) -> Sample:
    one: dict[str, Any] = {name: x[row : row + 1] if name not in ("k", "k_scale") else x for name, x in host.items()}
    absolute = {**one, "weights": np.abs(one["weights"]), "q": _absolute(one["q"]), "k": _absolute(one["k"])}
    return Sample((row,), reference.indexer_logits(**one)[0], RELATIVE * reference.indexer_logits(**absolute)[0])


def _paged_sample(case: LogitsCase, host: dict[str, Array], row: int) -> Sample:
    n, i = divmod(row, case.s_q)
    pages = host["block_table"][n]
    cache = host["cache"][pages]
    one = {
        "q": host["q"][n : n + 1, i : i + 1],
        "cache": cache,
        "weights": host["weights"][n : n + 1, i : i + 1],
        "seqlens": host["seqlens"][n : n + 1] - (case.s_q - 1 - i),
        "block_table": np.arange(len(pages))[None],
    }
    magnitudes = cache.copy()
    if case.e2m1:
        code_bytes = PAGE_SIZE * (case.key_bytes - SCALE_BYTES)
        magnitudes.reshape(len(pages), -1)[:, :code_bytes] &= 0x77  # two codes a byte
    else:
        page_parts(magnitudes[:, :, 0])[0].view(np.uint8)[...] &= 0x7F
    absolute = {**one, "weights": np.abs(one["weights"]), "q": _absolute(one["q"]), "cache": magnitudes}
    want, sums = (reference.indexer_logits_paged(**arrays)[0, 0] for arrays in (one, absolute))
    return Sample((n, i), want, RELATIVE * sums)


def _absolute(x: Array) -> Array:
    return x & 0x7F if x.dtype == np.uint8 else np.abs(x)


def judge(expected: Sequence[Sample], outputs: Any, dtype: str, device: Device) -> SampledVerdict:
    """Compares what was written with the samples."""
    worst, reasons = 0.0, []
    for sample in expected:
        got = device.to_host(outputs.logits[sample.place]).astype(np.float64)[: len(sample.want)]
        seen = np.isfinite(sample.want)
        if not np.array_equal(np.isneginf(got), ~seen):
            reasons.append(f"logits[{sample.place}] are not -inf exactly where the query sees no key")
            continue
        excess = np.abs(got[seen] - sample.want[seen]) / np.maximum(sample.allowed[seen], np.finfo(np.float32).tiny)
        error = float(np.max(excess, initial=0.0)) if not np.isnan(excess).any() else np.inf
        worst = max(worst, error)
        if error > 1:
            reasons.append(f"logits[{sample.place}] differ by {error:.3g} times what is allowed")
    return SampledVerdict(
        not reasons, "; ".join(reasons), {"logits": worst}, {"logits": 1.0}, {"logits": len(expected)}
    )
