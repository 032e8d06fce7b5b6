"""Sparse decode: the next tokens of sequences, each with top-k tokens of a paged FP8 cache.

The check compares all heads of a few queries with the float64 oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

import mla_cupy
from mla_cupy import reference
from mla_cupy.cache_formats import FORMATS, CacheFormat
from mla_cupy.dtypes import numpy_dtype

from ..core.cost import D_V, ELEMENT_BYTES, SINGLE_BYTES, Cost
from ..core.device import Device
from ..core.implementation import Choices, Known, Own, Prepared, batch_invariant, own_kernels, with_kernel
from ..core.operation import BenchOperation, Case
from ..core.recorders import Call
from ..core.samples import Sample, judge, samples
from ..core.tolerance import spaced
from .sparse import QUERIES

Array = npt.NDArray[Any]

# ---- Cases -----------------------------------------------------------------------------------------------------------

PAGE_SIZE = 64
POOL_TOKENS = 1 << 20  # 688 MB of the larger record: far more than an L2 holds
# Records of the two caches. Cases of V4.1 have a sink, too, as its layers do; of "fp8" both products are in FP8.
KINDS = {
    **{name: (name, name) for name in ("v32", "v32-nope", "v4", "v41", "fp8")},
    "v41-fp4": ("v41", "v41-fp4"),
}


@dataclass(frozen=True)
class SparseDecodeCase(Case):
    """`extra` is the top-k in a second cache; each cache has `pool` tokens. `kind` is one of `KINDS`.

    The microseconds are the best peer's on one H200 on one day, and our target there; for orientation only.
    """

    b: int
    s_q: int
    h_q: int
    topk: int = 2048
    extra: int = 0
    kind: str = "v32"
    pool: int = POOL_TOKENS
    peer_us: float | None = field(default=None, compare=False)
    target_us: float | None = field(default=None, compare=False)

    op = "sparse_mla_decode"

    @property
    def seen(self) -> dict[str, float | None]:
        return {"best peer": self.peer_us, "target": self.target_us}

    @property
    def name(self) -> str:
        name = f"b{self.b}-sq{self.s_q}-hq{self.h_q}-topk{self.topk}"
        name += f"-extra{self.extra}" if self.extra else ""
        name += "" if self.kind == "v32" else f"-{self.kind}"
        return name if self.pool == POOL_TOKENS else f"{name}-pool{self.pool}"

    @property
    def record(self) -> str:
        """Record of the first cache."""
        return KINDS[self.kind][0]

    @property
    def extra_record(self) -> str:
        """Record of the second cache."""
        return KINDS[self.kind][1]

    @property
    def math(self) -> str:
        """Arithmetic of our own call, and of the oracle."""
        return "fp8" if self.record == "fp8" else "exact"

    @property
    def has_sink(self) -> bool:
        """True of calls with a sink."""
        return self.record == "v41"

    @property
    def d_qk(self) -> int:
        """Width of a query."""
        return FORMATS[self.record].d_qk

    @property
    def scale(self) -> float:
        return float(self.d_qk**-0.5)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a selected token."""
        return self.b * self.s_q * (self.topk + self.extra)

    @property
    def cost(self) -> Cost:
        """Every entry of a list is a token of its own: most are, in a pool of this size."""
        rows = self.b * self.s_q * self.h_q
        lists = (self.topk, self.record), (self.extra, self.extra_record)
        records = self.b * self.s_q * sum(entries * read_bytes(FORMATS[record]) for entries, record in lists)
        return Cost(
            flops=2 * self.pairs * self.h_q * (self.d_qk + D_V),
            nbytes=records + ELEMENT_BYTES * rows * (self.d_qk + D_V) + SINGLE_BYTES * self.pairs,
            l2_bytes=records,
        )

    def shape(self) -> dict[str, Any]:
        names = ("b", "s_q", "h_q", "topk", "extra", "record", "pool", "d_qk")
        mixed = {} if self.extra_record == self.record else {"extra_record": self.extra_record}
        mixed |= {"math": self.math} if self.math != "exact" else {}
        return {**{name: getattr(self, name) for name in names}, "d_v": D_V, **mixed}


def read_bytes(record: CacheFormat) -> int:
    """Bytes of a token that are not reserved."""
    return sum(field.nbytes for field in record.fields if field.name != "reserved")


CASES = (
    # b, s_q, h_q; the peer is FlashMLA, which takes 64 or 128 heads
    SparseDecodeCase(128, 2, 128, peer_us=415, target_us=332),
    SparseDecodeCase(128, 1, 64, peer_us=118, target_us=91),
    SparseDecodeCase(128, 1, 16, peer_us=118, target_us=69),
    SparseDecodeCase(128, 1, 8, peer_us=118, target_us=69),
    SparseDecodeCase(128, 1, 32, peer_us=118),
    SparseDecodeCase(128, 2, 128, 128, 1024, "v4"),
    SparseDecodeCase(128, 1, 64, 128, 1024, "v4"),
    SparseDecodeCase(128, 1, 16, 128, 1024, "v4"),
    SparseDecodeCase(4, 1, 128),
    SparseDecodeCase(1, 1, 64),
    SparseDecodeCase(1, 1, 16),
)
# A window of 128 tokens and 1,024 compressed ones, as in V4.1's layers, and the same for V4.
MIXED = tuple(
    SparseDecodeCase(128, 1, h_q, 128, 1024, kind) for kind in ("v41-fp4", "v41", "v4") for h_q in (64, 16, 128)
)
# FP8 matmuls, for the shapes with converted tokens above.
CODED = tuple(
    SparseDecodeCase(b, s_q, h_q, kind="fp8")
    for b, s_q, h_q in ((128, 2, 128), (128, 1, 64), (128, 1, 16), (4, 1, 128))
)


def case_of(
    b: str, s_q: str, h_q: str, topk: str, extra: str | None, kind: str | None, pool: str | None
) -> SparseDecodeCase:
    sizes = (int(b), int(s_q), int(h_q), int(topk))
    case = SparseDecodeCase(*sizes, int(extra or 0), kind or "v32", int(pool or POOL_TOKENS))
    if case.kind == "fp8" and case.extra:
        raise ValueError("fp8 has one cache")
    if min(*sizes, case.pool) < 1 or case.pool % PAGE_SIZE:
        raise ValueError(f"every size must be at least 1, and the pool whole pages of {PAGE_SIZE}")
    return case


# ---- Inputs and outputs ----------------------------------------------------------------------------------------------

DRAWN_PAGES = 64  # pages of records that are drawn; a pool repeats them in random order


@dataclass(frozen=True)
class Source:
    """A cache and the slots that each query selects from it, on the device; and the slots in NumPy."""

    cache: Any  # (num_pages, 64, bytes of a token) uint8
    indices: Any  # (b, s_q, topk) int32
    host_indices: Array


@dataclass(frozen=True)
class SparseDecodeInputs:
    """One set of inputs: one source, or two; a sink, or none."""

    q: Any  # (b, s_q, h_q, d_qk)
    sources: tuple[Source, ...]
    sink: Any = None  # (h_q,) float32


@dataclass(frozen=True)
class SparseDecodeOutputs:
    """Results of a call; lse in natural units."""

    out: Any  # (b s_q, h_q, 512)
    lse: Any  # (b s_q, h_q)


_POOLS: WeakKeyDictionary[Any, dict[tuple[str, int, int], Any]] = WeakKeyDictionary()


def make_inputs(case: SparseDecodeCase, dtype: str, seed: int, device: Device) -> SparseDecodeInputs:
    """Normal queries and latents, scales that are powers of two; slots uniformly from the pool."""
    rng = np.random.default_rng(seed)
    sources = []
    for number, (topk, record) in enumerate(((case.topk, case.record), (case.extra, case.extra_record))):
        if topk:
            indices = rng.integers(0, case.pool, (case.b, case.s_q, topk), np.int32)
            sources.append(Source(_pool(case, record, number, device), device.upload(indices), indices))
    q = device.normal((case.b, case.s_q, case.h_q, case.d_qk), dtype, seed + 1)
    sink = device.upload(rng.standard_normal(case.h_q, np.float32)) if case.has_sink else None
    return SparseDecodeInputs(q, tuple(sources), sink)


def _pool(case: SparseDecodeCase, record: str, number: int, device: Device) -> Any:
    """Pools on the device: kept until another case needs others."""
    held = _POOLS.setdefault(device, {})
    for other in [key for key in held if key[0] not in (case.record, case.extra_record) or key[1] != case.pool]:
        del held[other]
    key = (record, case.pool, number)
    if key not in held:
        rows = device.upload(host_pages(*key))
        tokens = rows[:, : PAGE_SIZE * FORMATS[record].token_bytes]
        held[key] = tokens.reshape(len(rows), PAGE_SIZE, FORMATS[record].token_bytes)
    return held[key]


@functools.lru_cache(maxsize=2)
def host_pages(record: str, tokens: int, seed: int) -> Array:
    """A pool's pages in NumPy: rows of the stride that the record's convention wants."""
    drawn = _drawn(record, seed)
    chosen: Array = drawn[np.random.default_rng(seed).integers(0, len(drawn), tokens // PAGE_SIZE)]
    return chosen


def host_cache(record: str, rows: Array) -> Array:
    """Cache as an array of tokens."""
    nbytes = FORMATS[record].token_bytes
    return rows[:, : PAGE_SIZE * nbytes].reshape(len(rows), PAGE_SIZE, nbytes)


def _drawn(record: str, seed: int) -> Array:
    layout, rng = FORMATS[record], np.random.default_rng(seed)
    count = DRAWN_PAGES * PAGE_SIZE
    rows = np.zeros((DRAWN_PAGES, layout.page_bytes(PAGE_SIZE)), np.uint8)
    shapes = (count, layout.d_latent), (count, layout.d_rope)
    latent, rope = (rng.standard_normal(shape, np.float32).astype(numpy_dtype("bfloat16")) for shape in shapes)
    cache = host_cache(record, rows)
    reference.cache_append(latent, rope if layout.d_rope else None, cache, np.arange(count), kv_format=record)
    return rows


# ---- What is timed ---------------------------------------------------------------------------------------------------

GENERIC = "sparse_decode_generic"  # without tensor cores
#: Kernels to be compared with the one that is chosen: Hopper's two, and the one of GPUs without WGMMA.
NAMED = "sparse_decode_sm90", "sparse_decode_sm90_small", "sparse_decode_mma"


class SparseDecode(Own):
    """The call of a decoding step: attention and merge."""

    def unsupported(self, case: SparseDecodeCase, dtype: str) -> str | None:
        return "converts" if case.math != "exact" and self._kernel in (GENERIC, *NAMED) else None

    def prepare(
        self, case: SparseDecodeCase, dtype: str, sets: Sequence[SparseDecodeInputs], device: Device
    ) -> Prepared:
        rows = case.b, case.s_q, case.h_q
        results = [(device.empty((*rows, D_V), dtype), device.empty(rows, "float32")) for _ in sets]
        decode = partial(with_kernel(mla_cupy.sparse_mla_decode, self._kernel), **self._options)

        def call(inputs: SparseDecodeInputs, out: object, lse: object) -> Call:
            first, *more = inputs.sources
            extra = {"extra_kv_cache": more[0].cache, "extra_indices": more[0].indices} if more else {}
            if inputs.sink is not None:
                extra["attn_sink"] = inputs.sink
            if case.math != "exact":  # older trees know one
                extra["fp8"] = mla_cupy.Fp8("fp8")
            return partial(decode, inputs.q, first.cache, first.indices, **extra, scale=case.scale, out=out, lse=lse)

        calls = [call(inputs, *result) for inputs, result in zip(sets, results, strict=True)]
        outputs = [flat(case, *result) for result in results]
        return self.prepared(calls, outputs, device, includes="attention and merge")


def flat(case: SparseDecodeCase, out: object, lse: object) -> SparseDecodeOutputs:
    """Results with one axis of queries."""
    queries = case.b * case.s_q
    arrays = (x.reshape(queries, case.h_q, *more) for x, more in ((out, (D_V,)), (lse, ())))  # type: ignore[attr-defined]
    return SparseDecodeOutputs(*arrays)


# ---- Check -----------------------------------------------------------------------------------------------------------


def expect(case: SparseDecodeCase, dtype: str, inputs: SparseDecodeInputs, device: Device) -> list[Sample]:
    """The oracle's out and lse, with the tolerance of kernels that round weights to `dtype`."""
    queries = spaced(case.b * case.s_q, QUERIES)
    rows = inputs.q.reshape(case.b * case.s_q, case.h_q, case.d_qk)
    call: dict[str, Any] = {"q": device.take(rows, queries)[:, None]}
    kinds = ("", case.record), ("extra_", case.extra_record)
    for number, (source, (prefix, record)) in enumerate(zip(inputs.sources, kinds, strict=False)):
        lists = source.host_indices.reshape(case.b * case.s_q, -1)[queries, None]
        call[prefix + "kv_cache"] = host_cache(record, host_pages(record, case.pool, number))
        call[prefix + "indices"] = lists
    if case.has_sink:
        call["attn_sink"] = device.to_host(inputs.sink)
    call["math"] = case.math
    want, near = (
        [x[:, 0] for x in reference.sparse_mla_decode(**call, scale=case.scale, rounding=rounding)]
        for rounding in (None, dtype)
    )
    outputs = zip(("out", "lse"), want, near, strict=True)
    return [sample for name, exact, rounded in outputs for sample in samples(name, queries, exact, rounded, dtype)]


# ---- The operation ---------------------------------------------------------------------------------------------------


def implementations(choices: Choices) -> Known:
    """Everything that computes `sparse_mla_decode`."""
    from ..peers.flashmla_sparse_decode import FlashMlaSparseDecode

    return {
        **own_kernels(SparseDecode, choices, GENERIC, NAMED),
        **batch_invariant(SparseDecode),
        "flashmla": choices.from_dir(FlashMlaSparseDecode, "flashmla"),
    }


SPARSE_DECODE = BenchOperation(
    name="sparse-decode",
    title="sparse decode: each query attends to the tokens of a paged FP8 cache that its indices select",
    examples="""examples:
  run sparse-decode --peers-dir peers                  all cases with FlashMLA beside us
  run sparse-decode --quick --peers flashmla --peers-dir peers
  run sparse-decode --case b64-sq1-hq24-topk512        any other shape, named in the same form
""",
    peers="flashmla (imports torch and needs --peers-dir), generic, batch_invariant, batch_invariant_256 "
    f"(pieces of 4,096 or 256 tokens), {', '.join(NAMED)}; or none. "
    "Default: flashmla where --peers-dir is given",
    suites={
        "targets": CASES,
        "quick": CASES[:4],
        "mixed": MIXED,
        "fp8": CODED,
    },
    case_form="b<N>-sq<N>-hq<N>-topk<N>[-extra<N>][-v32-nope|-v4|-v41|-v41-fp4|-fp8][-pool<N>]",
    pattern=r"b(\d+)-sq(\d+)-hq(\d+)-topk(\d+)(?:-extra(\d+))?(?:-(v32-nope|v4|v41|v41-fp4|fp8))?(?:-pool(\d+))?",
    case_of=case_of,
    inputs=make_inputs,
    expect=expect,
    judge=judge,
    implementations=implementations,
    peers_from_dir=("flashmla",),
)
