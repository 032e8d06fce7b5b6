"""The indexer's top-k: the largest logits of each query. Only our selection says which of equal logits it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import mla_cupy
from mla_cupy import reference

from ..core.cost import SINGLE_BYTES, Cost
from ..core.device import Device
from ..core.implementation import OWN, Choices, Known, Own, Prepared, with_kernel
from ..core.operation import BenchOperation, Case
from ..core.recorders import Call
from ..core.tolerance import SampledVerdict, spaced

Array = npt.NDArray[Any]
MAX_TOPK = 8192
POOL = 256  # rows of logits that are drawn; the others repeat them in random order
HOT_DIGITS, DIGIT_STEP, DIGIT_SHIFT = 32, 64, 21  # a digit is the upper 11 bits; 64 apart lie in one bank
ROWS = 3  # that are checked

# ---- Cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TopkCase(Case):
    """`hot`: the logits share 32 values of their upper 11 bits, where a histogram of digits collides; else normal."""

    s_q: int
    s_kv: int
    k: int
    hot: bool = False

    op = "indexer_topk"

    @property
    def name(self) -> str:
        return f"sq{self.s_q}-skv{self.s_kv}-k{self.k}" + "-hot" * self.hot

    @property
    def cost(self) -> Cost:
        """One read of the logits, so that the share of the copy rate is how near a call is to it; no FLOP."""
        return Cost(0, SINGLE_BYTES * self.s_q * self.s_kv)


CASES = (
    TopkCase(4096, 32768, 2048),
    TopkCase(4096, 32768, 2048, hot=True),
    TopkCase(64, 131072, 2048),
    TopkCase(1, 131072, 2048),
    TopkCase(4096, 8192, 512),
)


def case_of(s_q: str, s_kv: str, k: str, hot: str | None) -> TopkCase:
    case = TopkCase(int(s_q), int(s_kv), int(k), bool(hot))
    if min(case.s_q, case.s_kv, case.k) < 1 or case.k > min(case.s_kv, MAX_TOPK):
        raise ValueError(f"every size must be at least 1, k at most skv and {MAX_TOPK}")
    return case


# ---- Inputs and outputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TopkInputs:
    """Float32 logits (s_q, s_kv), on the device and in NumPy."""

    logits: Any
    host: Array


@dataclass(frozen=True)
class Selection:
    """Results of a call: indices (s_q, k); `lowest_ties` if ties go to the lowest index."""

    indices: Any
    lowest_ties: bool


def make_inputs(case: TopkCase, dtype: str, seed: int, device: Device) -> TopkInputs:
    """Random logits, always float32."""
    rng = np.random.default_rng(seed)
    shape = min(POOL, case.s_q), case.s_kv
    pool = _hot(rng, *shape) if case.hot else rng.standard_normal(shape, np.float32)
    host = pool[rng.permutation(case.s_q) % len(pool)]
    return TopkInputs(device.upload(host), host)


def _hot(rng: np.random.Generator, *shape: int) -> Array:
    """Random lower bits under one of a few upper digits; all of these are finite."""
    digits = rng.integers(0, HOT_DIGITS, shape, np.uint32) * np.uint32(DIGIT_STEP)
    bits = digits << np.uint32(DIGIT_SHIFT) | rng.integers(0, 1 << DIGIT_SHIFT, shape, np.uint32)
    made: Array = bits.view(np.float32)
    return made


# ---- What is timed ---------------------------------------------------------------------------------------------------


class IndexerTopk(Own):
    """`indexer_topk` with indices in ascending order; the figure `by_value` is with indices in the order of logits."""

    def prepare(self, case: TopkCase, dtype: str, sets: Sequence[TopkInputs], device: Device) -> Prepared:
        indices = [device.empty((case.s_q, case.k), "int32") for _ in sets]
        counts = [device.empty((case.s_q,), "int32") for _ in sets]
        function: Callable[..., Any] = with_kernel(mla_cupy.indexer_topk, self._kernel)

        def calls(**options: Any) -> list[Call]:
            return [
                partial(function, inputs.logits, case.k, return_values=False, indices=to, counts=number, **options)
                for inputs, to, number in zip(sets, indices, counts, strict=True)
            ]

        results = [Selection(found, lowest_ties=True) for found in indices]
        return self.prepared(calls(), results, device, figures={"by_value": calls(order="value")})


# ---- Check -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """The logits of a row, and the indices that the oracle selects, ascending."""

    row: int
    logits: Array
    want: Array


def expect(case: TopkCase, dtype: str, inputs: TopkInputs, device: Device) -> list[Sample]:
    """Samples of a few rows."""
    chosen = spaced(case.s_q, ROWS)
    wanted, _, _ = reference.indexer_topk(inputs.host[chosen], k=case.k)
    return [Sample(int(row), inputs.host[row], want) for row, want in zip(chosen, wanted, strict=True)]


def judge(expected: Sequence[Sample], outputs: Selection, dtype: str, device: Device) -> SampledVerdict:
    """Compares indices, or where ties are undefined the logits at them."""
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


# ---- The operation ---------------------------------------------------------------------------------------------------


def implementations(choices: Choices) -> Known:
    """Everything that selects."""
    from ..peers.torch_topk import TorchTopk

    return {OWN: lambda: IndexerTopk(choices.kernel), "torch": TorchTopk}


INDEXER_TOPK = BenchOperation(
    name="indexer-topk",
    title="indexer top-k: the k largest logits of each query, exactly",
    examples="""examples:
  run indexer-topk --peers torch            all cases with torch.topk beside us
  run indexer-topk --quick                  normal logits, and logits of 32 hot digits
  run indexer-topk --case sq8-skv4096-k64   any other shape, named in the same form
""",
    peers="torch (torch.topk; imports torch); or none. Default: none",
    suites={"targets": CASES, "quick": CASES[:2]},
    case_form="sq<N>-skv<N>-k<N>[-hot]",
    pattern=r"sq(\d+)-skv(\d+)-k(\d+)(-hot)?",
    case_of=case_of,
    inputs=make_inputs,
    expect=expect,
    judge=judge,
    results=("indices",),
    implementations=implementations,
)
