"""The paged cache: tokens appended, read back as rows, and pages copied; and the check of its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import mla_cupy
from mla_cupy import reference
from mla_cupy.cache_formats import FORMATS, LATENT_FORMATS, CacheFormat
from mla_cupy.dtypes import numpy_dtype

from ..core.cost import ELEMENT_BYTES, Cost
from ..core.device import Device
from ..core.implementation import OWN, Choices, Known, Own, Prepared, copies
from ..core.operation import BenchOperation, Case
from ..core.recorders import Call
from ..core.tolerance import SampledVerdict, spaced

Array = npt.NDArray[Any]
PAGE_SIZE = 64
KINDS = {"append": "cache_append", "gather": "cache_gather", "copy": "cache_copy_pages"}
SLOT_BYTES = 4
SAMPLES = 5

# ---- Cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheCase(Case):
    """`tokens` are written, read, or belong to copied pages.

    Pages are in random order, and their tokens side by side, as a prompt's step has them; `scattered` ones are not.
    """

    kind: str
    record: str
    tokens: int
    scattered: bool = False

    @property
    def op(self) -> str:
        return KINDS[self.kind]

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.record}-n{self.tokens}" + "-scattered" * self.scattered

    @property
    def pages(self) -> int:
        """The number of pages that the tokens fill."""
        return self.tokens // PAGE_SIZE

    @property
    def cost(self) -> Cost:
        """A record and a 16-bit row per token, one read and the other written, and a slot; or a record, both."""
        record = FORMATS[self.record]
        row = record.d_qk * ELEMENT_BYTES + SLOT_BYTES
        return Cost(0, self.tokens * (record.token_bytes + (record.token_bytes if self.kind == "copy" else row)))

    def shape(self) -> dict[str, Any]:
        return {**super().shape(), "page_size": PAGE_SIZE}


CASES = (
    *(CacheCase("append", record, tokens) for record in ("v32", "v4", "bf16") for tokens in (8192, 65536)),
    *(CacheCase("gather", record, tokens) for record in ("v32", "v4", "bf16") for tokens in (8192, 65536)),
    *(CacheCase("copy", "v32", tokens) for tokens in (8192, 65536)),
    *(CacheCase(kind, record, 65536, scattered=True) for kind in ("append", "gather") for record in ("v32", "v4")),
    CacheCase("append", "v32", 128, scattered=True),  # a step of decoding
)


def case_of(kind: str, record: str, tokens: str, scattered: str | None) -> CacheCase:
    known = [layout.name for layout in LATENT_FORMATS if layout.d_rope and layout.name != "fp8"]
    if kind not in KINDS or record not in known:
        raise ValueError(f"expected one of {', '.join(KINDS)}, and a record of {', '.join(known)}")
    case = CacheCase(kind, record, int(tokens), bool(scattered))
    if case.tokens < 1 or (kind == "copy" and (case.tokens % PAGE_SIZE or case.scattered)):
        raise ValueError(f"one token at least, and whole pages of {PAGE_SIZE} to copy")
    return case


# ---- Inputs and outputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheInputs:
    """One set of inputs. The first half of the pool has tokens, unless these are to be appended; the other is empty."""

    latent: Any  # (n, d_latent)
    rope: Any  # (n, 64)
    pool: Any  # (1, pages, page_bytes) uint8: a layer
    cache: Any  # (pages, 64, width): the same memory
    slots: Any  # (n,) int32
    pairs: Any  # (pages / 2, 2) int32
    host_slots: Array


@dataclass(frozen=True)
class CacheOutputs:
    """Results of a call: rows, or the bytes of pages."""

    written: Any


def make_inputs(case: CacheCase, dtype: str, seed: int, device: Device) -> CacheInputs:
    """Normal tokens, in the first half of the pool; each of its pages to one of the second half."""
    record, rng = FORMATS[case.record], np.random.default_rng(seed)
    half = -(-case.tokens // PAGE_SIZE)
    pool = device.empty((1, 2 * half, record.page_bytes(PAGE_SIZE)), "uint8")
    slots = _slots(rng, half, case)
    pairs = np.stack([rng.permutation(half), half + rng.permutation(half)], axis=1).astype(np.int32)
    inputs = CacheInputs(
        latent=device.normal((case.tokens, record.d_latent), dtype, 2 * seed + 1),
        rope=device.normal((case.tokens, record.d_rope), dtype, 2 * seed + 2),
        pool=pool,
        cache=as_cache(record, pool[0]),
        slots=device.upload(slots),
        pairs=device.upload(pairs),
        host_slots=slots,
    )
    if case.kind != "append":
        with device.current():
            mla_cupy.cache_append(inputs.latent, inputs.rope, inputs.cache, inputs.slots)
    return inputs


def _slots(rng: np.random.Generator, pages: int, case: CacheCase) -> Array:
    if case.scattered:
        return rng.permutation(pages * PAGE_SIZE)[: case.tokens].astype(np.int32)
    slots = rng.permutation(pages)[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)
    return slots.reshape(-1)[: case.tokens].astype(np.int32)


def as_cache(record: CacheFormat, pages: Any) -> Any:
    """The pages of a layer as an array of tokens: the operations take pages of any stride."""
    tokens = pages[:, : PAGE_SIZE * record.token_bytes]
    if record.dtype != "uint8":
        tokens = tokens.view(numpy_dtype(record.dtype))
    return tokens.reshape(len(pages), PAGE_SIZE, record.width)


# ---- What is timed ---------------------------------------------------------------------------------------------------


class Cache(Own):
    """One launch; the figure `copy` reads and writes together what it does."""

    def prepare(self, case: CacheCase, dtype: str, sets: Sequence[CacheInputs], device: Device) -> Prepared:
        made = [_call(case, dtype, inputs, device) for inputs in sets]
        calls, results = [call for call, _ in made], [CacheOutputs(written) for _, written in made]
        return self.prepared(calls, results, device, figures=copies(case.cost.nbytes, len(sets), device))


def _call(case: CacheCase, dtype: str, inputs: CacheInputs, device: Device) -> tuple[Call, Any]:
    """A call, and what it writes."""
    if case.kind == "append":
        append = partial(mla_cupy.cache_append, inputs.latent, inputs.rope, inputs.cache, inputs.slots)
        return append, inputs.pool[0]
    if case.kind == "gather":
        rows = device.empty((case.tokens, FORMATS[case.record].d_qk), dtype)
        return partial(mla_cupy.cache_gather, inputs.cache, inputs.slots, out=rows), rows
    return partial(mla_cupy.cache_copy_pages, inputs.pool, inputs.pairs), inputs.pool[0][case.pages :]


# ---- Check -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByteSample:
    """The expected bytes of a row of a result. `mask`: those that count; `few`: the share of these that may differ."""

    result: str
    row: int
    expected: Array
    mask: Array
    few: float = 0.0


def expect(case: CacheCase, dtype: str, inputs: CacheInputs, device: Device) -> list[ByteSample]:
    """The oracle's bytes of a few tokens, and of a copy the bytes of a few source pages."""
    record = FORMATS[case.record]
    if case.kind == "copy":
        pairs = device.to_host(inputs.pairs)[spaced(case.pages, SAMPLES)]
        pages = device.take(inputs.pool[0], pairs[:, 0])
        return row_samples("written", pairs[:, 1] - case.pages, pages)  # in the second half
    chosen = spaced(case.tokens, SAMPLES)
    latent, rope = (device.take(x, chosen) for x in (inputs.latent, inputs.rope))
    slots = inputs.host_slots[chosen]
    pages = np.zeros((len(chosen), record.page_bytes(PAGE_SIZE)), np.uint8)  # a page for each token
    own = np.arange(len(chosen)) * PAGE_SIZE + slots % PAGE_SIZE
    reference.cache_append(latent, rope, as_cache(record, pages), own)
    if case.kind == "gather":
        rows = reference.cache_gather(as_cache(record, pages), own)[0].astype(numpy_dtype(dtype))
        return row_samples("written", chosen, rows)
    return page_samples("written", record, slots, pages)


def row_samples(result: str, places: Iterable[int], rows: Array, few: float = 0.0) -> list[ByteSample]:
    """Whole rows of a result."""
    octets = [np.ascontiguousarray(row).view(np.uint8) for row in rows]
    return [ByteSample(result, int(at), x, np.ones(x.shape, bool), few) for at, x in zip(places, octets, strict=True)]


def page_samples(result: str, record: CacheFormat, slots: Array, pages: Array, few: float = 0.0) -> list[ByteSample]:
    """Pages of a result; in each the bytes of one token count, the one in `slots`, (n,)."""
    marks = np.zeros_like(pages)
    for field in record.fields:
        view = reference.cache.field_view(as_cache(record, marks), record, field)
        view[np.arange(len(slots)), slots % PAGE_SIZE] = 1
    rows = zip(slots // PAGE_SIZE, pages, marks, strict=True)
    return [ByteSample(result, int(page), octets, mark.astype(bool), few) for page, octets, mark in rows]


def judge_bytes(expected: Sequence[ByteSample], outputs: Any, dtype: str, device: Device) -> SampledVerdict:
    """Compares what was written with the samples."""
    names = sorted({sample.result for sample in expected})
    wrong, allowed = (dict.fromkeys(names, 0.0) for _ in range(2))
    counts = dict.fromkeys(names, 0)
    for sample in expected:
        got = np.ascontiguousarray(device.take(getattr(outputs, sample.result), np.array([sample.row]))[0])
        wrong[sample.result] += int((got.view(np.uint8) != sample.expected)[sample.mask].sum())
        allowed[sample.result] += sample.few * sample.mask.sum()
        counts[sample.result] += 1
    reason = "; ".join(f"{int(n)} bytes of {name} differ" for name, n in wrong.items() if n > allowed[name])
    return SampledVerdict(not reason, reason, wrong, allowed, counts)


# ---- The operation ---------------------------------------------------------------------------------------------------


def implementations(choices: Choices) -> Known:
    """Only ours."""
    return {OWN: Cache}


CACHE = BenchOperation(
    name="cache",
    title="paged cache: tokens quantised into it, read back, and pages copied",
    examples="""examples:
  run cache                          all cases, each with a copy of the same size
  run cache --case gather-v4-n1000   any other number of tokens, named in the same form
""",
    suites={
        "targets": CASES,
        "quick": tuple(case for case in CASES if case.record == "v32" and case.tokens == 65536),
    },
    case_form="<append, gather or copy>-<record>-n<N>[-scattered]",
    pattern=r"([a-z]+)-([a-z0-9]+)-n(\d+)(-scattered)?",
    case_of=case_of,
    inputs=make_inputs,
    expect=expect,
    judge=judge_bytes,
    results=("written",),
    implementations=implementations,
)
