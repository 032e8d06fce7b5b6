"""Probes of forward kernels: decode, prefill and the indexer's logits against the oracle, small, then larger.

They cover the mma.sync kernels, except for lists of tokens, and dense decode and the logits with tcgen05.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

import mla_cupy
from mla_cupy import dtypes, reference
from mla_cupy.cache_formats import FORMATS
from mla_cupy.kernels.attention import mma
from mla_cupy.kernels.attention.kernel import AttentionKernel
from mla_cupy.kernels.attention.records import DENSE_RECORDS
from mla_cupy.kernels.decode import records, sm100, sm100_fp8
from mla_cupy.kernels.dense import table as dense
from mla_cupy.kernels.indexer.logits import sm100 as logits_sm100
from mla_cupy.kernels.indexer.logits.mma import KERNEL as LOGITS
from mla_cupy.kernels.spec import KernelSpec
from mla_cupy.reference.indexer_records import SCALE_BYTES, page_parts
from mla_cupy.runtime.build import BuildRequest
from mla_cupy.selftest.calls import CALL_SECONDS, D_QK, D_V, SCALE, compare
from mla_cupy.selftest.probe import Array, Finding, Machine, random

PAGE_SIZE = 64
WIDE_HEADS = 64
D_INDEX = 128
"""Codes of a key of the indexer, but where others are named."""


class Sizes(NamedTuple):
    """Sizes of one call: requests or query tokens, and the keys of each."""

    queries: int
    keys: int


class Problem(NamedTuple):
    """Arguments of a call by name, and its result in float64."""

    arguments: dict[str, Array]
    exact: Array


@dataclass(frozen=True)
class MmaProbe:
    """Two calls of one kernel; results must match the oracle and each other, bit by bit."""

    name: str
    about: str
    kernel: str
    function: Callable[..., Any] = field(repr=False)
    problem: Callable[[Sizes], Problem] = field(repr=False)
    on_gpu: Sizes
    simulated: Sizes
    archs: tuple[str, ...]
    needs: tuple[str, ...] = ()
    seconds: float = CALL_SECONDS

    def requests(self, arch: str) -> list[BuildRequest]:
        """Empty: the call compiles what it needs."""
        return []

    def run(self, machine: Machine) -> Finding:
        """Call twice, compare."""
        problem = self.problem(self.simulated if machine.simulated else self.on_gpu)
        placed = {name: machine.upload(x) for name, x in problem.arguments.items()}
        first, second = (machine.download(self._result(placed)) for _ in range(2))
        error, difference = compare("result", *_seen(first, problem.exact))
        changed = int((first.view(np.uint8) != second.view(np.uint8)).sum())
        if changed and not difference:
            difference = f"{changed} bytes of {first.nbytes} changed from the first call to the second"
        return Finding(difference, f"2 calls: error {error:.1e} of the largest")

    def _result(self, placed: dict[str, Any]) -> Any:
        got = self.function(**placed, kernel=self.kernel)
        return got[0] if isinstance(got, tuple) else got


def _seen(got: Array, exact: Array) -> tuple[Array, Array]:
    """Result and oracle, with zeros where both are -inf, as logits of keys that a token does not see."""
    hidden = np.isneginf(got) & np.isneginf(exact)
    return np.where(hidden, 0, got), np.where(hidden, 0, exact)


@functools.lru_cache(maxsize=2)
def _decode(sizes: Sizes, heads: int, dtype: str, d_qk: int = D_QK) -> Problem:
    """Requests of different lengths, with pages in any order."""
    rng, kind = random(f"decode {sizes} {heads} {dtype} {d_qk}"), dtypes.numpy_dtype(dtype)
    pages = -(-sizes.keys // PAGE_SIZE)
    cache = rng.standard_normal((sizes.queries * pages, PAGE_SIZE, 1, d_qk), np.float32).astype(kind)
    arguments: dict[str, Any] = {
        "q": rng.standard_normal((sizes.queries, 1, heads, d_qk), np.float32).astype(kind),
        "kv_cache": cache,
        "block_table": rng.permutation(len(cache)).astype(np.int32).reshape(sizes.queries, pages),
        "seqlens": (sizes.keys - np.arange(sizes.queries)).astype(np.int32),
    }
    return Problem(arguments, reference.mla_decode(**arguments, scale=SCALE)[0])


def random_records(rng: np.random.Generator, name: str, pages: int, kind: Any, mean: float = 0.0) -> Array:
    """A cache of FP8 tokens, full of keys, latents around a mean; `kind` is the dtype before quantisation."""
    record = FORMATS[name]
    room, page_bytes = pages * PAGE_SIZE, -(-record.page_bytes(PAGE_SIZE) // 16) * 16
    strides = (page_bytes, record.token_bytes, 1)
    memory = np.zeros(pages * page_bytes, np.uint8)
    cache: Array = np.ndarray((pages, PAGE_SIZE, record.width), dtypes.numpy_dtype(record.dtype), memory, 0, strides)
    latent = (rng.standard_normal((room, record.d_latent), np.float32) + np.float32(mean)).astype(kind)
    rope = rng.standard_normal((room, record.d_rope), np.float32).astype(kind)
    reference.cache_append(latent, rope, cache, np.arange(room))
    return cache


@functools.lru_cache(maxsize=2)
def _decode_records(sizes: Sizes, heads: int, dtype: str, record: str, math: str = "exact") -> Problem:
    """The last two query tokens of requests of different lengths, with pages in any order.

    With math="fp8" values have a common mean: tensor cores that cut sums of e4m3 products off lose some of it, more
    with each token, and nothing of sums around 0. Queries are small, so that every token counts.
    """
    rng, kind = random(f"decode {record} {sizes} {heads} {dtype} {math}"), dtypes.numpy_dtype(dtype)
    pages = -(-sizes.keys // PAGE_SIZE)
    cache = random_records(rng, record, sizes.queries * pages, kind, mean=float(math == "fp8"))
    size = np.float32(1 if math == "exact" else 0.3)
    q = rng.standard_normal((sizes.queries, 2, heads // 2, FORMATS[record].d_qk), np.float32) * size
    arguments: dict[str, Any] = {
        "q": q.astype(kind),
        "kv_cache": cache,
        "block_table": rng.permutation(len(cache)).astype(np.int32).reshape(sizes.queries, pages),
        "seqlens": (sizes.keys - np.arange(sizes.queries)).astype(np.int32),
    }
    return Problem(arguments, reference.mla_decode(**arguments, scale=SCALE, math=math)[0])


@functools.lru_cache(maxsize=2)
def _logits(sizes: Sizes, heads: int, dtype: str, d: int = D_INDEX) -> Problem:
    """Tokens that see all keys."""
    rng, kind = random(f"logits {sizes} {heads} {dtype} {d}"), dtypes.numpy_dtype(dtype)
    arguments: dict[str, Any] = {
        "q": rng.standard_normal((sizes.queries, heads, d), np.float32).astype(kind),
        "k": rng.standard_normal((sizes.keys, d), np.float32).astype(kind),
        "weights": rng.standard_normal((sizes.queries, heads), np.float32),
    }
    if dtype == "float8_e4m3fn":  # as bytes: not every library has the dtype
        arguments |= {name: arguments[name].view(np.uint8) for name in ("q", "k")}
    return Problem(arguments, reference.indexer_logits(**arguments))


@functools.lru_cache(maxsize=2)
def _logits_paged(sizes: Sizes, heads: int, tokens: int) -> Problem:
    """The next tokens of sequences of different lengths, with pages in any order; nothing else is in the pages."""
    rng = random(f"paged logits {sizes} {heads} {tokens}")
    pages = -(-sizes.keys // PAGE_SIZE)
    cache = np.zeros((sizes.queries * pages, PAGE_SIZE, D_INDEX + SCALE_BYTES), np.uint8)
    codes, scales = page_parts(cache)
    codes[...] = rng.standard_normal(codes.shape, np.float32).astype(codes.dtype)
    scales[...] = rng.uniform(0.5, 2.0, scales.shape)
    q = rng.standard_normal((sizes.queries, tokens, heads, D_INDEX), np.float32)
    arguments: dict[str, Any] = {
        "q": q.astype(codes.dtype).view(np.uint8),
        "cache": cache,
        "weights": rng.standard_normal((sizes.queries, tokens, heads), np.float32),
        "seqlens": (sizes.keys - np.arange(sizes.queries)).astype(np.int32),
        "block_table": rng.permutation(len(cache)).astype(np.int32).reshape(sizes.queries, pages),
    }
    return Problem(arguments, reference.indexer_logits_paged(**arguments))


@functools.lru_cache(maxsize=2)
def _prefill(sizes: Sizes, dtype: str, d_qk: int) -> Problem:
    """One sequence of two heads; the queries are its last tokens."""
    rng, kind = random(f"prefill {sizes} {dtype} {d_qk}"), dtypes.numpy_dtype(dtype)
    shapes = {"q": (sizes.queries, 2, d_qk), "k": (sizes.keys, 2, d_qk), "v": (sizes.keys, 2, 128)}
    arguments: dict[str, Any] = {
        name: rng.standard_normal(shape, np.float32).astype(kind) for name, shape in shapes.items()
    }
    return Problem(arguments, reference.mla_prefill(**arguments)[0])


def _probe(
    kernel: KernelSpec[Any],
    stage: str,
    label: str,
    about: str,
    function: Callable[..., Any],
    problem: Callable[[Sizes], Problem],
    on_gpu: Sizes,
    simulated: Sizes,
    needs: tuple[str, ...] = (),
) -> MmaProbe:
    """One call of one block, or a whole one, which needs the kernel's blocks."""
    if stage == "kernel":
        needs = (f"block/{kernel.name}/*",)
    name, about = f"{stage}/{kernel.name}/{label}", f"{about}, against the oracle"
    return MmaProbe(name, about, kernel.name, function, problem, on_gpu, simulated, kernel.archs, needs)


def _decode_probes(kernel: AttentionKernel[Any]) -> Iterator[MmaProbe]:
    heads = kernel.block_rows if kernel.block_rows in mma.SMALL_ROWS else WIDE_HEADS
    for stage, dtype, on_gpu in (
        ("block", "bfloat16", Sizes(1, 90)),
        ("block", "float16", Sizes(1, 90)),
        ("kernel", "bfloat16", Sizes(32, 4096)),
    ):
        yield _probe(
            kernel,
            stage,
            dtype,
            f"mla_decode, {heads} heads, {on_gpu.queries} requests of {on_gpu.keys} tokens",
            functools.partial(mla_cupy.mla_decode, scale=SCALE),
            functools.partial(_decode, heads=heads, dtype=dtype),
            on_gpu,
            Sizes(1, 90) if stage == "block" else Sizes(2, 140),
        )


def _tcgen05_decode_probes() -> Iterator[MmaProbe]:
    """Each number of rows of a block, then several blocks, which a schedule cuts; the same of pairs."""
    blocks = [(f"{heads}heads", "bfloat16", heads, D_QK) for heads in sm100.BLOCK_ROWS]
    blocks += [("float16", "float16", 64, D_QK), ("without-rope", "bfloat16", 32, D_V)]
    calls = [(f"{heads}heads", "bfloat16", heads, D_QK) for heads in (16, 64, 128)]
    yield from _tcgen05_decode_probes_of(sm100.KERNEL, blocks, calls, ("tmem/*", "mma/*", "copy/*", "stmatrix/*"))
    pairs = [
        ("128heads", "bfloat16", 128, D_QK),
        ("float16", "float16", 96, D_QK),
        ("without-rope", "bfloat16", 128, D_V),
    ]
    whole = [("128heads", "bfloat16", 128, D_QK)]
    yield from _tcgen05_decode_probes_of(sm100.JOINT, pairs, whole, ("tmem/*", "mma.pair/*", "copy/*"))


def _tcgen05_decode_probes_of(
    kernel: AttentionKernel[Any],
    blocks: list[tuple[str, str, int, int]],
    calls: list[tuple[str, str, int, int]],
    instructions: tuple[str, ...],
) -> Iterator[MmaProbe]:
    for stage, variants, on_gpu, simulated in (
        ("block", blocks, Sizes(1, 200), Sizes(1, 130)),
        ("kernel", calls, Sizes(32, 4096), Sizes(2, 140)),
    ):
        for label, dtype, heads, d_qk in variants:
            yield _probe(
                kernel,
                stage,
                label,
                f"mla_decode, {heads} heads, {on_gpu.queries} requests of {on_gpu.keys} tokens",
                functools.partial(mla_cupy.mla_decode, scale=SCALE),
                functools.partial(_decode, heads=heads, dtype=dtype, d_qk=d_qk),
                on_gpu,
                simulated,
                instructions,
            )


def _tcgen05_records_probes() -> Iterator[MmaProbe]:
    """One block of each build, then several blocks, which a schedule cuts."""
    kernel = records.SM100
    builds = [
        (record, dtype, rows)
        for record in DENSE_RECORDS
        for dtype in dtypes.HALF
        for rows in records.BLACKWELL_BLOCK_ROWS
    ]
    for stage, variants, on_gpu, simulated in (
        ("block", builds, Sizes(1, 200), Sizes(1, 70)),
        ("kernel", [one for one in builds if one[1] == "bfloat16"], Sizes(32, 4096), Sizes(2, 70)),
    ):
        for record, dtype, rows in variants:
            yield _probe(
                kernel,
                stage,
                f"{record}-{dtype}-{rows}rows",
                f"mla_decode of {record}, {rows} rows, {on_gpu.queries} requests of {on_gpu.keys} tokens",
                functools.partial(mla_cupy.mla_decode, scale=SCALE),
                functools.partial(_decode_records, heads=rows, dtype=dtype, record=record),
                on_gpu,
                simulated,
                ("tmem/*", "mma/*", "stmatrix/*"),
            )


def _tcgen05_fp8_probes() -> Iterator[MmaProbe]:
    """One block of each build for queries in 16 bits, then several blocks, with sums over thousands of tokens."""
    kernel = sm100_fp8.KERNEL
    builds = [(dtype, rows) for dtype in dtypes.HALF for rows in sm100_fp8.BLOCK_ROWS]
    for stage, variants, on_gpu, simulated in (
        ("block", builds, Sizes(1, 200), Sizes(1, 70)),
        ("kernel", builds[:1], Sizes(32, 8192), Sizes(2, 70)),
    ):
        for dtype, rows in variants:
            yield _probe(
                kernel,
                stage,
                f"{dtype}-{rows}rows",
                f'mla_decode with Fp8("fp8"), {rows} rows, {on_gpu.queries} requests of {on_gpu.keys} tokens whose '
                "values have a mean",
                functools.partial(mla_cupy.mla_decode, scale=SCALE, fp8=mla_cupy.Fp8("fp8")),
                functools.partial(_decode_records, heads=rows, dtype=dtype, record="fp8", math="fp8"),
                on_gpu,
                simulated,
                ("tmem/*", "mma.f8f6f4/*", "copy/load/*"),
            )


def _records_probes() -> Iterator[MmaProbe]:
    """Each record and each number of rows of a block; then several blocks, which a schedule cuts."""
    builds = [("v32", "bfloat16", 16), ("fp8", "bfloat16", 32), ("v4", "float16", 32)]
    for stage, variants, on_gpu, simulated in (
        ("block", builds, Sizes(1, 200), Sizes(1, 40)),
        ("kernel", builds[:1], Sizes(32, 4096), Sizes(2, 70)),
    ):
        for record, dtype, rows in variants:
            yield _probe(
                records.MMA,
                stage,
                f"{record}-{dtype}-{rows}rows",
                f"mla_decode of {record}, {rows} rows, {on_gpu.queries} requests of {on_gpu.keys} tokens",
                functools.partial(mla_cupy.mla_decode, scale=SCALE),
                functools.partial(_decode_records, heads=rows, dtype=dtype, record=record),
                on_gpu,
                simulated,
            )


def _prefill_probes() -> Iterator[MmaProbe]:
    """Keys with and without RoPE columns; then several tiles of queries."""
    for stage, dtype, d_qk, on_gpu, simulated in (
        ("block", "bfloat16", 192, Sizes(100, 300), Sizes(20, 70)),
        ("block", "float16", 128, Sizes(100, 300), Sizes(20, 70)),
        ("kernel", "bfloat16", 192, Sizes(1024, 2048), Sizes(140, 150)),
    ):
        yield _probe(
            dense.MMA,
            stage,
            f"{dtype}-{d_qk}",
            f"mla_prefill, {on_gpu.queries} queries, {on_gpu.keys} keys of {d_qk} columns",
            mla_cupy.mla_prefill,
            functools.partial(_prefill, dtype=dtype, d_qk=d_qk),
            on_gpu,
            simulated,
        )


def _logits_probes() -> Iterator[MmaProbe]:
    for stage, dtype, on_gpu in (
        ("block", "float8_e4m3fn", Sizes(1, 40)),
        ("block", "bfloat16", Sizes(1, 40)),
        ("kernel", "float8_e4m3fn", Sizes(64, 8192)),
    ):
        yield _probe(
            LOGITS,
            stage,
            dtype,
            f"indexer_logits, 64 heads, {on_gpu.queries} tokens and {on_gpu.keys} keys",
            mla_cupy.indexer_logits,
            functools.partial(_logits, heads=64, dtype=dtype),
            on_gpu,
            Sizes(1, 40),
        )


def _tcgen05_logits_probes() -> Iterator[MmaProbe]:
    """Each build; heads that fill whole chunks of columns, and others, some for one stage of queries."""
    kernel = logits_sm100.KERNEL
    instructions = ("tmem/ld/32x32b*", "mma.f8f6f4/*", "copy/load/*")
    of_keys = [(f"{d}codes-{heads}heads", heads, d) for d, heads in ((128, 64), (128, 20), (64, 72), (32, 20))]
    of_pages = [(f"{n}tokens-{heads}heads", heads, n) for n, heads in ((2, 64), (1, 64), (4, 20), (8, 72))]
    for stage, on_gpu, simulated in (
        ("block", Sizes(3, 300), Sizes(2, 140)),
        ("kernel", Sizes(64, 8192), Sizes(9, 140)),
    ):
        for label, heads, d in of_keys if stage == "block" else of_keys[:1]:
            yield _probe(
                kernel,
                stage,
                label,
                f"indexer_logits, {heads} heads, {on_gpu.queries} tokens and {on_gpu.keys} keys",
                mla_cupy.indexer_logits,
                functools.partial(_logits, heads=heads, dtype="float8_e4m3fn", d=d),
                on_gpu,
                simulated,
                instructions,
            )
        for label, heads, tokens in of_pages if stage == "block" else of_pages[:1]:
            yield _probe(
                kernel,
                stage,
                label,
                f"indexer_logits_paged, {heads} heads, {tokens} next tokens of {on_gpu.queries} sequences of "
                f"{on_gpu.keys} keys",
                mla_cupy.indexer_logits_paged,
                functools.partial(_logits_paged, heads=heads, tokens=tokens),
                on_gpu,
                simulated,
                instructions,
            )


def probes() -> list[MmaProbe]:
    """Probes of every kernel, first of one block."""
    of_decode = (probe for kernel in mma.KERNELS for probe in _decode_probes(kernel))
    with_mma = (*of_decode, *_records_probes(), *_prefill_probes())
    with_tcgen05 = (*_tcgen05_decode_probes(), *_tcgen05_records_probes(), *_tcgen05_fp8_probes())
    with_tcgen05 += tuple(_tcgen05_logits_probes())
    return [*with_mma, *with_tcgen05, *_logits_probes()]
