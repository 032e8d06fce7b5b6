"""The indexer's preparation: index queries turned, transformed and quantised, and keys with their LayerNorm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import mla_cupy
from mla_cupy import reference
from mla_cupy.reference.cache import to_e4m3

from ..core.cost import ELEMENT_BYTES, SINGLE_BYTES, Cost
from ..core.device import Device
from ..core.implementation import OWN, Choices, Known, Own, Prepared, copies
from ..core.operation import BenchOperation, Case
from ..core.recorders import Call
from ..core.tolerance import SampledVerdict, spaced

Array = npt.NDArray[Any]
HEAD_DIMS = (32, 64, 128)
MAX_POSITION = 4096
DTYPE = "bfloat16"
TOKENS = 3  # that are checked

# ---- Cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IndexerPrepareCase(Case):
    """Vectors of `s_q` tokens and `h` heads; with `keys` also the tokens' keys, before their LayerNorm."""

    s_q: int
    h: int
    d: int = 128
    keys: bool = False

    @property
    def op(self) -> str:
        return "indexer_prepare" if self.keys else "indexer_prepare_q"

    @property
    def name(self) -> str:
        return f"sq{self.s_q}-h{self.h}" + ("" if self.d == 128 else f"-d{self.d}") + "-keys" * self.keys

    @property
    def rope_pairs(self) -> int:
        """Half of each vector turns."""
        return self.d // 4

    @property
    def cost(self) -> Cost:
        """A vector in and its codes out, a weight in and out; RoPE's tables and positions once. FLOPs do not count."""
        per_vector = self.d * ELEMENT_BYTES + self.d + 2 * SINGLE_BYTES
        tables = 2 * min(self.s_q, MAX_POSITION) * self.rope_pairs * SINGLE_BYTES
        keys = self.s_q * (per_vector - SINGLE_BYTES) if self.keys else 0
        return Cost(0, self.s_q * self.h * per_vector + keys + tables + SINGLE_BYTES * self.s_q)


CASES = (
    IndexerPrepareCase(4096, 64),
    IndexerPrepareCase(64, 64),
    IndexerPrepareCase(4096, 1),
    IndexerPrepareCase(128, 64, keys=True),
    IndexerPrepareCase(4096, 64, keys=True),
)


def case_of(s_q: str, h: str, d: str | None, keys: str | None) -> IndexerPrepareCase:
    case = IndexerPrepareCase(int(s_q), int(h), int(d or 128), bool(keys))
    if min(case.s_q, case.h) < 1 or case.d not in HEAD_DIMS:
        raise ValueError(f"every size must be at least 1, d one of {HEAD_DIMS}")
    return case


# ---- Inputs and outputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IndexerPrepareInputs:
    """One set of inputs: the queries, and the other arguments of the public call by name, on the device and off."""

    q: Any
    arguments: dict[str, Any]
    host: dict[str, Array]


@dataclass(frozen=True)
class PreparedQueries:
    """Results of a call."""

    codes: Any
    folded: Any
    k_codes: Any = None  # without keys
    k_scale: Any = None


def make_inputs(case: IndexerPrepareCase, dtype: str, seed: int, device: Device) -> IndexerPrepareInputs:
    """Normal queries and weights, always bfloat16; the tokens' positions follow each other."""
    rng = np.random.default_rng(seed)
    angles = np.arange(MAX_POSITION)[:, None] * 10000.0 ** -(np.arange(case.rope_pairs) / case.rope_pairs)
    host: dict[str, Array] = {
        "weights": rng.standard_normal((case.s_q, case.h), np.float32),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "positions": (np.arange(case.s_q) % MAX_POSITION).astype(np.int32),
    }
    if case.keys:
        host["norm_weight"], host["norm_bias"] = rng.standard_normal((2, case.d), np.float32)
    arguments = {name: device.upload(x) for name, x in host.items()}
    if case.keys:
        arguments["k"] = device.normal((case.s_q, case.d), DTYPE, seed + 1000)
    return IndexerPrepareInputs(device.normal((case.s_q, case.h, case.d), DTYPE, seed), arguments, host)


# ---- What is timed ---------------------------------------------------------------------------------------------------


class IndexerPrepare(Own):
    """One launch; the figure `copy` reads and writes together what it does."""

    def prepare(
        self, case: IndexerPrepareCase, dtype: str, sets: Sequence[IndexerPrepareInputs], device: Device
    ) -> Prepared:
        made = [_call(case, inputs, device) for inputs in sets]
        calls, results = [call for call, _ in made], [outputs for _, outputs in made]
        return self.prepared(calls, results, device, figures=copies(case.cost.nbytes, len(sets), device))


def _call(case: IndexerPrepareCase, inputs: IndexerPrepareInputs, device: Device) -> tuple[Call, PreparedQueries]:
    """A call, and where its results go."""
    results = {
        "codes": device.empty((case.s_q, case.h, case.d), "uint8"),
        "folded": device.empty((case.s_q, case.h), "float32"),
    }
    if not case.keys:
        return partial(mla_cupy.indexer_prepare_q, inputs.q, **inputs.arguments, **results), PreparedQueries(**results)
    results["k_codes"] = device.empty((case.s_q, case.d), "uint8")
    results["k_scale"] = device.empty((case.s_q,), "float32")
    call = partial(mla_cupy.indexer_prepare, inputs.q, **inputs.arguments, **results, return_k=True)
    return call, PreparedQueries(**results)


# ---- Check -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """The expected results of a token by name, equal bit by bit."""

    token: int
    results: dict[str, Array]


def expect(case: IndexerPrepareCase, dtype: str, inputs: IndexerPrepareInputs, device: Device) -> list[Sample]:
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


# ---- The operation ---------------------------------------------------------------------------------------------------


def implementations(choices: Choices) -> Known:
    """Only ours: what models do is a chain of operations."""
    return {OWN: IndexerPrepare}


INDEXER_PREPARE = BenchOperation(
    name="indexer-prepare",
    title="indexer preparation: RoPE, Hadamard, e4m3 codes of index queries, keys with their LayerNorm",
    examples="""examples:
  run indexer-prepare                     all cases, each with a copy of the same size
  run indexer-prepare --case sq64-h64-keys  queries and keys in one launch
  run indexer-prepare --case sq512-h32    any other shape, named in the same form
""",
    suites={"targets": CASES, "quick": CASES[:1]},
    case_form="sq<N>-h<N>[-d<N>][-keys]",
    pattern=r"sq(\d+)-h(\d+)(?:-d(\d+))?(-keys)?",
    case_of=case_of,
    inputs=make_inputs,
    expect=expect,
    judge=judge,
    results=("codes", "folded", "k_codes", "k_scale"),
    implementations=implementations,
)
