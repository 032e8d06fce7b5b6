"""The preparation before decode in one launch: RoPE, queries in e4m3, tokens in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import mla_cupy
from mla_cupy import reference
from mla_cupy.cache_formats import FORMATS, LATENT_FORMATS
from mla_cupy.ops import backend

from ..core.cost import D_QK, ELEMENT_BYTES, SINGLE_BYTES, Cost
from ..core.device import Device
from ..core.implementation import OWN, Choices, Known, Own, Prepared, copies
from ..core.operation import BenchOperation, Case
from ..core.recorders import Call
from ..core.tolerance import spaced
from .cache import ByteSample, as_cache, judge_bytes, page_samples, row_samples

Array = npt.NDArray[Any]
KINDS = ("inplace", "new", "codes")
PAGE_SIZE = 64
MAX_POSITION = 4096
D_ROPE = 64
BASE = 10000.0
KV_SCALE = 0.1
TOKENS = 4  # that are checked
FEW = 0.01
"""Share of bytes in which computed angles may differ: roundings that go the other way."""

# ---- Cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MlaPrepareCase(Case):
    """`n` tokens of `h` heads: the RoPE part turns where it lies, or with all columns into a new array, or codes.

    The tokens go to the pages of `record`, all over them; without one there are queries alone.
    """

    kind: str
    record: str
    n: int
    h: int
    theta: bool = False

    op = "mla_prepare"

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.record or 'none'}-n{self.n}-h{self.h}" + "-theta" * self.theta

    @property
    def d(self) -> int:
        """Width of the queries: what the record's keys have."""
        return FORMATS[self.record].d_qk if self.record else D_QK

    @property
    def cost(self) -> Cost:
        """Bytes that are read and written once, of queries and tokens; RoPE's tables and positions once."""
        of_query = {
            "inplace": 2 * D_ROPE * ELEMENT_BYTES,
            "new": 2 * self.d * ELEMENT_BYTES,
            "codes": self.d * (ELEMENT_BYTES + 1) + SINGLE_BYTES,
        }[self.kind]
        tables = 0 if self.theta else 2 * min(self.n, MAX_POSITION) * D_ROPE // 2 * SINGLE_BYTES
        of_token = SINGLE_BYTES  # its position
        if self.record:
            of_token += SINGLE_BYTES + self.d * ELEMENT_BYTES + FORMATS[self.record].token_bytes
        return Cost(0, self.n * (self.h * of_query + of_token) + tables)


CASES = (
    MlaPrepareCase("inplace", "bf16", 128, 128),
    MlaPrepareCase("inplace", "fp8", 128, 128),
    MlaPrepareCase("inplace", "v32", 128, 128),
    MlaPrepareCase("inplace", "bf16", 128, 16),
    MlaPrepareCase("inplace", "bf16", 128, 128, theta=True),
    MlaPrepareCase("codes", "fp8", 128, 128),
    MlaPrepareCase("codes", "fp8", 8192, 128),
    MlaPrepareCase("codes", "", 8192, 128),
    MlaPrepareCase("inplace", "v32", 8192, 128),
    MlaPrepareCase("new", "v4", 8192, 128),
)


def case_of(kind: str, record: str, n: str, h: str, theta: str | None) -> MlaPrepareCase:
    known = [layout.name for layout in LATENT_FORMATS if layout.d_rope]
    if kind not in KINDS or record not in (*known, "none"):
        raise ValueError(f"expected one of {', '.join(KINDS)}, and none or one of {', '.join(known)}")
    if min(int(n), int(h)) < 1:
        raise ValueError("every size must be at least 1")
    return MlaPrepareCase(kind, "" if record == "none" else record, int(n), int(h), bool(theta))


# ---- Inputs and outputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MlaPrepareInputs:
    """One set of inputs.

    Attributes
    ----------
    q : array
        Memory of the calls: with "inplace" it is changed.
    arguments : dict
        Further arguments of the public call, by name.
    pool : array or None
        The bytes of the pages.
    host : dict
        Positions, slots and RoPE's tables in NumPy.
    """

    q: Any
    arguments: dict[str, Any]
    pool: Any
    host: dict[str, Array]


@dataclass(frozen=True)
class MlaPrepareOutputs:
    """Results of a call; None where there is none, or where the queries' own place holds it."""

    queries: Any
    q_scales: Any
    pages: Any


def make_inputs(case: MlaPrepareCase, dtype: str, seed: int, device: Device) -> MlaPrepareInputs:
    """Normal numbers, positions one after another, slots all over the pages."""
    rng = np.random.default_rng(seed)
    angles = np.arange(MAX_POSITION)[:, None] * BASE ** -(np.arange(D_ROPE // 2) / (D_ROPE // 2))
    host: dict[str, Array] = {"positions": (np.arange(case.n) % MAX_POSITION).astype(np.int32)}
    if not case.theta:
        host |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    arguments: dict[str, Any] = {"theta": BASE} if case.theta else {}
    pool = None
    if case.record:
        record = FORMATS[case.record]
        pages = 2 * -(-case.n // PAGE_SIZE)
        pool = device.empty((pages, record.page_bytes(PAGE_SIZE)), "uint8")
        host["slots"] = rng.permutation(pages * PAGE_SIZE)[: case.n].astype(np.int32)
        arguments |= {
            "latent": device.normal((case.n, record.d_latent), dtype, 3 * seed + 1),
            "rope": device.normal((case.n, record.d_rope), dtype, 3 * seed + 2),
            "cache": as_cache(record, pool),
            "kv_scale": KV_SCALE if case.record == "fp8" else 1.0,
        }
    arguments |= {name: device.upload(x) for name, x in host.items()}
    q = device.normal((case.n, case.h, case.d), dtype, 3 * seed)
    return MlaPrepareInputs(q, arguments, pool, host)


# ---- What is timed ---------------------------------------------------------------------------------------------------


class MlaPrepare(Own):
    """One launch; the figure `copy` reads and writes together what it does."""

    def prepare(self, case: MlaPrepareCase, dtype: str, sets: Sequence[MlaPrepareInputs], device: Device) -> Prepared:
        made = [_call(case, dtype, inputs, device) for inputs in sets]
        calls, results = [call for call, _ in made], [outputs for _, outputs in made]
        return self.prepared(calls, results, device, figures=copies(case.cost.nbytes, len(sets), device))


def _call(case: MlaPrepareCase, dtype: str, inputs: MlaPrepareInputs, device: Device) -> tuple[Call, MlaPrepareOutputs]:
    """A call, and what it writes beside the queries."""
    results: dict[str, Any] = {"out": inputs.q}
    if case.kind != "inplace":
        codes = case.kind == "codes"
        results["out"] = device.empty((case.n, case.h, case.d), "uint8" if codes else dtype)
        if codes:
            results |= {"q_scales": device.empty((case.n, case.h), "float32"), "quantise": True}
    queries = None if case.kind == "inplace" else results["out"]
    outputs = MlaPrepareOutputs(queries, results.get("q_scales"), inputs.pool)
    return partial(mla_cupy.mla_prepare, inputs.q, **inputs.arguments, **results), outputs


# ---- Check -----------------------------------------------------------------------------------------------------------


def expect(case: MlaPrepareCase, dtype: str, inputs: MlaPrepareInputs, device: Device) -> list[ByteSample]:
    """The oracle's bytes of a few tokens. What queries become in place is not sampled."""
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
    found: list[ByteSample] = []
    if case.kind != "inplace":
        kind = "uint8" if case.kind == "codes" else dtype
        found += row_samples("queries", chosen, backend.rounded([out], [kind])[0], few)
    if case.kind == "codes":
        found += row_samples("q_scales", chosen, backend.rounded([scales], ["float32"])[0], few)
    if case.record:
        found += page_samples("pages", FORMATS[case.record], inputs.host["slots"][chosen], pages, few)
    return found


# ---- The operation ---------------------------------------------------------------------------------------------------


def implementations(choices: Choices) -> Known:
    """Only ours: what engines do is several operations."""
    return {OWN: MlaPrepare}


PREPARE = BenchOperation(
    name="prepare",
    title="before decode: RoPE, queries in e4m3, tokens in the cache, in one launch",
    examples="""examples:
  run prepare                             all cases, each with a copy of the same size
  run prepare --case codes-fp8-n64-h16    any other sizes, named in the same form
""",
    suites={"targets": CASES, "quick": (CASES[0], CASES[5])},
    case_form="<inplace, new or codes>-<record or none>-n<N>-h<N>[-theta]",
    pattern=r"([a-z]+)-([a-z0-9]+)-n(\d+)-h(\d+)(-theta)?",
    case_of=case_of,
    inputs=make_inputs,
    expect=expect,
    judge=judge_bytes,
    results=("queries", "q_scales", "pages"),
    implementations=implementations,
)
