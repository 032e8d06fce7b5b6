"""The logits of the lightning indexer: queries of one sequence, or the next tokens of sequences in pages.

The check compares a few queries with the float64 oracle, element by element. What may be off is a part of the sum of
the terms' magnitudes, which may cancel: the tensor cores cut off bits of 8-bit products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import mla_cupy
from mla_cupy import reference
from mla_cupy.reference.indexer_records import page_parts

from ..core.cost import ELEMENT_BYTES, SINGLE_BYTES, Cost
from ..core.device import Device
from ..core.implementation import OWN, Choices, Known, Own, Prepared, own_kernels, with_kernel
from ..core.operation import BenchOperation, Case
from ..core.recorders import Call
from ..core.tolerance import SampledVerdict, spaced

Array = npt.NDArray[Any]

# ---- Cases -----------------------------------------------------------------------------------------------------------

PAGE_SIZE = 64
HEAD_DIMS = (32, 64, 128)


@dataclass(frozen=True)
class LogitsCase(Case):
    """`b` is 0 for queries that are the last of one sequence's `s_kv` tokens; `full`: each sees all keys.

    `float16`: our kernel adds up products in float16; a peer does what it does. `e2m1`: the keys of pages are, in
    records of 68 bytes.

    The microseconds are the best peer's on one H200 on one day, and our target there; for orientation only.
    """

    s_q: int
    s_kv: int
    h: int = 64
    d: int = 128
    full: bool = False
    bf16: bool = False
    b: int = 0
    float16: bool = False
    e2m1: bool = False
    peer_us: float | None = field(default=None, compare=False)
    target_us: float | None = field(default=None, compare=False)

    @property
    def op(self) -> str:
        return "indexer_logits_paged" if self.b else "indexer_logits"

    @property
    def seen(self) -> dict[str, float | None]:
        return {"DeepGEMM": self.peer_us, "target": self.target_us}

    @property
    def name(self) -> str:
        name = f"sq{self.s_q}-skv{self.s_kv}-h{self.h}"
        if self.b:
            return f"b{self.b}-{name}" + "-e2m1" * self.e2m1
        if self.d != 128:
            name += f"-d{self.d}"
        flags = {"-full": self.full, "-bf16": self.bf16, "-float16": self.float16}
        return name + "".join(text for text, there in flags.items() if there)

    @property
    def keys_of_first(self) -> int:
        """Number of keys that the first query sees; each one after it sees one more, unless `full`."""
        return self.s_kv if self.full else max(0, self.s_kv - self.s_q + 1)

    @property
    def key_bytes(self) -> int:
        """Bytes of a key's record in pages: its codes, and a scale or four exponents."""
        return (self.d // 2 if self.e2m1 else self.d) + SINGLE_BYTES

    @property
    def num_keys(self) -> int:
        """Columns of the result."""
        return -(-self.s_kv // PAGE_SIZE) * PAGE_SIZE if self.b else self.s_kv

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        sequences = max(1, self.b)
        if self.full:
            return sequences * self.s_q * self.s_kv
        return sequences * sum(max(0, self.s_kv - i) for i in range(self.s_q))

    @property
    def cost(self) -> Cost:
        """A product and an addition per pair, head and element; every array moves once, the result as a whole."""
        sequences = max(1, self.b)
        rows, element = sequences * self.s_q, ELEMENT_BYTES if self.bf16 else 1
        keys = sequences * self.s_kv * (self.d * element if self.bf16 else self.key_bytes)
        queries = rows * self.h * (self.d * element + SINGLE_BYTES)
        return Cost(2 * self.pairs * self.h * self.d, keys + queries + SINGLE_BYTES * rows * self.num_keys)

    def shape(self) -> dict[str, Any]:
        sizes = super().shape()
        return sizes if self.e2m1 else {name: size for name, size in sizes.items() if name != "e2m1"}


CASES = (
    LogitsCase(4096, 4096, peer_us=167, target_us=155),
    LogitsCase(4096, 32768, peer_us=1850, target_us=1710),
    LogitsCase(1, 32768, b=64),
    LogitsCase(1, 131072, b=1),
    LogitsCase(4096, 32768, full=True),
    LogitsCase(4096, 32768, 32),
    LogitsCase(4096, 32768, 128),
    LogitsCase(4096, 32768, bf16=True),
    LogitsCase(64, 131072),
    LogitsCase(2, 32768, b=64),
    LogitsCase(4, 8192, b=128),
    LogitsCase(1, 32768, 32, b=64),
    LogitsCase(4096, 4096, float16=True),
    LogitsCase(4096, 32768, float16=True),
)
# Keys in e2m1, and the same keys in e4m3.
E2M1 = tuple(
    LogitsCase(s_q, s_kv, h, b=b, e2m1=e2m1)
    for b, s_q, s_kv, h in (
        (64, 1, 32768, 64),
        (64, 2, 32768, 64),
        (64, 1, 32768, 32),
        (64, 1, 4096, 64),
        (1, 1, 131072, 64),
    )
    for e2m1 in (False, True)
)


def case_of(
    b: str | None, s_q: str, s_kv: str, h: str, d: str | None, full: str | None, kind: str | None
) -> LogitsCase:
    """`kind` is "-bf16", "-float16", "-e2m1", or None for e4m3."""
    sizes = int(s_q), int(s_kv), int(h)
    case = LogitsCase(
        *sizes, int(d or 128), bool(full), kind == "-bf16", int(b or 0), kind == "-float16", kind == "-e2m1"
    )
    if (
        min(sizes) < 1
        or case.d not in HEAD_DIMS
        or (b and case.b < 1)
        or (case.b and (full or kind not in (None, "-e2m1") or case.d != 128))
    ):
        raise ValueError(f"every size must be at least 1, d one of {HEAD_DIMS}; paged only e4m3 of 128")
    if case.e2m1 and not case.b:
        raise ValueError("keys in e2m1 must be paged")
    return case


# ---- Inputs and outputs ----------------------------------------------------------------------------------------------

POOL = 8192  # rows of codes that are drawn; the others repeat them in random order
SCALE_BYTES = 4


@dataclass(frozen=True)
class LogitsInputs:
    """One set of inputs: the arguments of the public call by name, on the device and in NumPy."""

    arguments: dict[str, Any]
    host: dict[str, Array]


@dataclass(frozen=True)
class LogitsOutputs:
    """Results of a call, -inf where a query does not see a key; and the part of it that every query sees."""

    logits: Any
    shared: Any


def outputs_of(case: LogitsCase, logits: Any) -> LogitsOutputs:
    """The result with its finite part."""
    return LogitsOutputs(logits, logits[..., : case.keys_of_first])


def make_inputs(case: LogitsCase, dtype: str, seed: int, device: Device) -> LogitsInputs:
    """Normal queries, keys and weights; scales from 0.5 to 2. `dtype` is the bench's: cases name their own."""
    rng = np.random.default_rng(seed)
    host = _paged(case, rng) if case.b else _prefill(case, rng)
    return LogitsInputs({name: device.upload(x) for name, x in host.items()}, host)


def codes(rng: np.random.Generator, *shape: int) -> Array:
    """Rows of e4m3 codes of normal numbers."""
    count = min(POOL, math.prod(shape[:-1]))
    pool = rng.standard_normal((count, shape[-1]), np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    rows: Array = pool[rng.integers(0, count, shape[:-1])]
    return rows


def _weights(rng: np.random.Generator, *shape: int) -> Array:
    made: Array = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
    return made


def _prefill(case: LogitsCase, rng: np.random.Generator) -> dict[str, Array]:
    ends = np.full(case.s_q, case.s_kv) if case.full else np.arange(case.s_q) + case.s_kv - case.s_q + 1
    arrays = {
        "weights": _weights(rng, case.s_q, case.h),
        "ks": np.zeros(case.s_q, np.int32),
        "ke": np.maximum(ends, 0).astype(np.int32),
    }
    if case.bf16:
        shapes = {"q": (case.s_q, case.h, case.d), "k": (case.s_kv, case.d)}
        return arrays | {
            name: rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()
        }
    scales = rng.uniform(0.5, 2.0, case.s_kv).astype(np.float32)
    return arrays | {
        "q": codes(rng, case.s_q, case.h, case.d),
        "k": codes(rng, case.s_kv, case.d),
        "k_scale": scales,
    }


def _paged(case: LogitsCase, rng: np.random.Generator) -> dict[str, Array]:
    pages = case.num_keys // PAGE_SIZE
    code_bytes = case.key_bytes - SCALE_BYTES
    cache = np.empty((case.b * pages, PAGE_SIZE * case.key_bytes), np.uint8)
    codes_of, scales = cache[:, : PAGE_SIZE * code_bytes], cache[:, PAGE_SIZE * code_bytes :]
    codes_of[...] = codes(rng, case.b * pages, PAGE_SIZE, code_bytes).reshape(len(cache), -1)
    if case.e2m1:  # any byte is two codes; exponents stand for 1/4 to 2
        scales[...] = rng.integers(125, 129, scales.shape, np.uint8)
    else:
        scales.view(np.float32)[...] = rng.uniform(0.5, 2.0, (len(cache), PAGE_SIZE))
    return {
        "q": codes(rng, case.b, case.s_q, case.h, case.d),
        "cache": cache.reshape(-1, PAGE_SIZE, 1, case.key_bytes),
        "weights": _weights(rng, case.b, case.s_q, case.h),
        "seqlens": np.full(case.b, case.s_kv, np.int32),
        "block_table": rng.permutation(case.b * pages).reshape(case.b, pages).astype(np.int32),
    }


# ---- What is timed ---------------------------------------------------------------------------------------------------

GENERIC = "indexer_logits_generic"  # without tensor cores
MMA = "indexer_logits_mma"  # with the tensor cores of Ampere and newer GPUs


class IndexerLogits(Own):
    """The call of an indexer; the figure `not_clean` is without -inf outside the ranges."""

    def prepare(self, case: LogitsCase, dtype: str, sets: Sequence[LogitsInputs], device: Device) -> Prepared:
        shape = (case.b, case.s_q, case.num_keys) if case.b else (case.s_q, case.num_keys)
        made = [device.empty(shape, "float32") for _ in sets]
        public: Callable[..., Any] = mla_cupy.indexer_logits_paged if case.b else mla_cupy.indexer_logits
        function = with_kernel(public, self._kernel)
        chosen = {"accumulate": "float16"} if case.float16 else {}

        def calls(**options: Any) -> list[Call]:
            return [
                partial(function, **inputs.arguments, logits=logits, **chosen, **options)
                for inputs, logits in zip(sets, made, strict=True)
            ]

        results = [outputs_of(case, logits) for logits in made]
        figures = {"not_clean": calls(clean=False)} if self.name == OWN else {}
        return self.prepared(calls(), results, device, figures=figures)


# ---- Check -----------------------------------------------------------------------------------------------------------

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


# ---- The operation ---------------------------------------------------------------------------------------------------


def implementations(choices: Choices) -> Known:
    """Everything that computes the indexer's logits."""
    from ..peers.deep_gemm import DeepGemm

    return {
        **own_kernels(IndexerLogits, choices, GENERIC, [MMA]),
        "deep_gemm": choices.from_dir(DeepGemm, "deep_gemm"),
    }


INDEXER_LOGITS = BenchOperation(
    name="indexer-logits",
    title="indexer logits: each query's score for the keys that it sees, in prefill and in paged decode",
    examples="""examples:
  run indexer-logits --peers-dir peers           all cases with DeepGEMM beside us
  run indexer-logits --quick --peers-dir peers   two of prefill, two of paged decode
  run indexer-logits --case b8-sq2-skv4096-h64   any other shape, named in the same form
""",
    peers="deep_gemm (imports torch, compiles with nvcc and needs --peers-dir), indexer_logits_mma, generic; or none. "
    "Default: deep_gemm where --peers-dir is given",
    suites={"targets": CASES, "quick": CASES[:4], "e2m1": E2M1},
    case_form="sq<N>-skv<N>-h<N>[-d<N>][-full][-bf16|-float16], or paged b<N>-sq<N>-skv<N>-h<N>[-e2m1]",
    pattern=r"(?:b(\d+)-)?sq(\d+)-skv(\d+)-h(\d+)(?:-d(\d+))?(-full)?(-bf16|-float16|-e2m1)?",
    case_of=case_of,
    inputs=make_inputs,
    expect=expect,
    judge=judge,
    results=("shared",),
    implementations=implementations,
    peers_from_dir=("deep_gemm",),
)
