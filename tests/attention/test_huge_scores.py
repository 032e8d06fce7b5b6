"""Scores of any finite size, in every attention kernel: the result is finite, and the oracle's.

All scores of a head are small integers times a number that the head has of its own, from 1 to as much as float32 and
the dtype of the queries hold: ordinary rows lie beside huge ones, in the same warps. So scores are equal or far apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import mla_cupy
from mla_cupy import ArgumentError, UnsupportedDeviceError, dtypes, reference
from mla_cupy.cache_formats import FORMATS
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.dense import DENSE
from mla_cupy.kernels.sparse_decode import SPARSE_DECODE
from mla_cupy.kernels.sparse_forward import SPARSE_FORWARD
from tests.cache.inputs import empty_cache
from tests.support.flat import flat
from tests.support.kernels import cc_of, has_sizes
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated

Array = npt.NDArray[Any]

PAGE = 64
#: A scale with many bits, so that products with it are rounded.
SCALE = 0.7213
#: log2 of the heads' query elements.
EXPONENTS = {
    "bfloat16": (0, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 40, 60, 90, 119),
    "float16": (-12, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10),
    "float8_e4m3fn": (-6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 8),
}
#: log2 of factors of the scale; for float16 and e4m3, 2^31 is in the middle of the first one's range.
SHIFTS = {"bfloat16": (0,), "float16": (28, 12, 60), "float8_e4m3fn": (28, 6, 60)}


@dataclass(frozen=True)
class HugeCase:
    """A call. Tokens of equal scores have different values, unless `split`: partial results cannot tell them apart.

    If `ordinary`, the middle of the longer sequence has scores of 0, and what is before and after it other ones.
    """

    operation: str
    kernel: str
    dtype: str = "bfloat16"
    heads: int = 16
    d_qk: int = 576
    record: str = ""
    math: str = "exact"
    lengths: tuple[int, int] = (5, 67)
    shift: int = 0
    split: bool = False
    sink: bool = False
    ordinary: bool = False

    @property
    def starts(self) -> Array:
        return np.cumsum([0, *self.lengths], dtype=np.int32)

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"scale": float(np.float32(SCALE * 2.0**self.shift))}
        if self.sink:
            sinks = np.array([0.5, -np.inf, 4e9, -4e9, 3e37, -1e20], np.float32)
            options["attn_sink"] = np.resize(sinks, self.heads)
        return options | ({"math": self.math} if self.math != "exact" else {})


def integers(case: HugeCase) -> Array:
    """One integer per token: all equal in one sequence; in the other small, except for a large one and its negative."""
    same, long = case.lengths
    mixed = np.random.default_rng(long).integers(-3, 4, long)
    mixed[[3, long - 2]] = -13, 13
    if case.ordinary:
        mixed[:] = np.where(abs(np.arange(long) - long // 2) < 20, 0, -5)
    return np.concatenate([np.full(same, 5), mixed])


def tokens(case: HugeCase) -> Array:
    """Keys of all sequences; column d_qk - 64 has the integers."""
    of = integers(case)
    rng = np.random.default_rng(3)
    rows: Array = (
        rng.integers(-4, 5, (27, case.d_qk))[of + 13] if case.split else rng.integers(-4, 5, (len(of), case.d_qk))
    )
    rows[:, case.d_qk - 64] = of
    return rows.astype(np.float32)


def queries(case: HugeCase, shape: tuple[int, ...], d_qk: int) -> Array:
    """Each head sees its power of two times the tokens' integers, every other two heads negated.

    Three of four heads of the seesaw are ordinary ones: it does huge rows again, which takes the simulator long.
    """
    steps = np.array(EXPONENTS[case.dtype])
    apart = 4 if "decode_sm90_seesaw" in case.kernel else 1
    exponents = np.full(case.heads, steps[0])
    exponents[::apart] = np.resize(steps[:: max(1, len(steps) * apart // case.heads)], len(exponents[::apart]))
    q = np.zeros((*shape, case.heads, d_qk), np.float32)
    q[..., d_qk - 64] = np.ldexp(np.where(np.arange(case.heads) // 2 % 2, -1.0, 1.0), exponents)
    return q.astype(dtypes.numpy_dtype(case.dtype))


# ---- The calls -------------------------------------------------------------------------------------------------
Call = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def cache_of(case: HugeCase, slots: Array, pages: int) -> Array:
    """The tokens at `slots`; all else is NaN."""
    rows = tokens(case)
    if not case.record:
        cache = np.full((pages * PAGE, case.d_qk), np.nan, dtypes.numpy_dtype(case.dtype))
        cache[slots] = rows.astype(cache.dtype)
        return cache.reshape(pages, PAGE, case.d_qk)
    record = FORMATS[case.record]
    cache = empty_cache(record, pages, PAGE)
    cache[...] = 0xFF
    parts = (rows[:, : record.d_latent], rows[:, record.d_latent :])
    reference.cache_append(*(part.astype(dtypes.numpy_dtype("bfloat16")) for part in parts), cache, slots)
    return cache


def decode(case: HugeCase) -> Call:
    pages = [-(-length // PAGE) for length in case.lengths]
    table = np.full((2, max(pages)), 10**9, np.int32)
    table[0, : pages[0]], table[1, : pages[1]] = range(pages[0]), range(pages[0], sum(pages))
    slots = np.concatenate([np.arange(n) + PAGE * int(table[i, 0]) for i, n in enumerate(case.lengths)])
    q, cache = queries(case, (2, 1), case.d_qk), cache_of(case, slots, sum(pages))
    arguments = (q, cache, table, np.array(case.lengths, np.int32))
    return flat(mla_cupy.mla_decode), reference.mla_decode, arguments, case.options


def lists(case: HugeCase) -> Array:
    """Each of two queries has the tokens of one sequence, in any order."""
    found = np.full((2, 1, -(-max(case.lengths) // 64) * 64), -1, np.int32)
    for i, length in enumerate(case.lengths):
        found[i, 0, :length] = np.random.default_rng(i).permutation(length) + case.starts[i]
    return found


def sparse_decode(case: HugeCase) -> Call:
    cache = cache_of(case, np.arange(case.starts[-1]), -(-int(case.starts[-1]) // PAGE))
    arguments = (queries(case, (2, 1), case.d_qk), cache, lists(case))
    return flat(mla_cupy.sparse_mla_decode), reference.sparse_mla_decode, arguments, case.options


def sparse_forward(case: HugeCase) -> Call:
    kv = cache_of(case, np.arange(case.starts[-1]), -(-int(case.starts[-1]) // PAGE))
    kv = kv.reshape(-1, 1, kv.shape[-1])[: case.starts[-1]]
    arguments = (queries(case, (2,), case.d_qk), kv, lists(case))
    return flat(mla_cupy.sparse_mla_forward), reference.sparse_mla_forward, arguments, case.options


def prefill(case: HugeCase) -> Call:
    """Three queries of each sequence; the first ones do not see the last tokens."""
    dtype, shape = dtypes.numpy_dtype(case.dtype), (int(case.starts[-1]), case.heads)
    k = np.zeros((*shape, 192), np.float32)
    k[..., 128] = integers(case)[:, None]
    v = np.random.default_rng(5).integers(-4, 5, (*shape, 128)).astype(np.float32)
    of_sequences = {"cu_seqlens_q": np.array([0, 3, 6], np.int32), "cu_seqlens_kv": case.starts}
    arguments = (queries(case, (6,), 192), k.astype(dtype), v.astype(dtype))
    return flat(mla_cupy.mla_prefill), reference.mla_prefill, arguments, case.options | of_sequences


OPERATIONS: dict[str, tuple[Any, Callable[[HugeCase], Call]]] = {
    "decode": (DECODE, decode),
    "sparse_decode": (SPARSE_DECODE, sparse_decode),
    "sparse_forward": (SPARSE_FORWARD, sparse_forward),
    "prefill": (DENSE, prefill),
}
KERNELS = [(operation, kernel.name) for operation, (family, _) in OPERATIONS.items() for kernel in family.kernels]
IN_99KB = [
    pytest.param(operation, kernel, id=f"{operation}-{kernel}-99kb", marks=pytest.mark.in_99kb)
    for operation, kernel in KERNELS
    if has_sizes(kernel)
]
#: Those that a Hopper has. What the kernels without WGMMA need, it has, too.
ON_HOPPER = [*((operation, kernel) for operation, kernel in KERNELS if "sm100" not in kernel), *IN_99KB]


def candidates(operation: str, kernel: str) -> Iterator[HugeCase]:
    """Calls that a kernel of this name may take, with few heads first."""
    fp8, dense = "fp8" in kernel, operation == "prefill"
    records = ("v32", "v4", "fp8") if "records" in kernel or operation == "sparse_decode" or fp8 else ("",)
    sizes = (4,) if dense else (16, 64, 128)
    half = ("float8_e4m3fn",) if fp8 and dense else ("bfloat16", "float16")
    for dtype, record, heads in itertools.product(half, ("",) if dense else records, sizes):
        for d_qk in (FORMATS[record].d_qk,) if record else (576, 320):
            math = "fp8" if fp8 and not dense else "exact"
            yield HugeCase(operation, kernel, dtype, heads, d_qk, record, math, shift=SHIFTS[dtype][0])


def run_first(cases: Iterator[HugeCase], sm_count: int = 1) -> None:
    """The first case that the kernel takes; on the GPU with `sm_count` 0."""
    for case in cases:
        function, oracle, arguments, options = OPERATIONS[case.operation][1](case)
        place = simulated(sm_count, cc_of(case.kernel), mode="random") if sm_count else nullcontext()
        try:
            with place:
                got = function(*arguments, **options, kernel=case.kernel)
        except (ArgumentError, UnsupportedDeviceError):
            continue
        return check(case, got, oracle(*arguments, **options))
    raise AssertionError("the kernel takes no case")


def check(case: HugeCase, got: tuple[Array, ...], exact: tuple[Array, ...]) -> None:
    """Values are at most 4."""
    out, lse = (np.asarray(x, np.float64) for x in got[:2])
    loose = 0.15 if "fp8" in (case.math, case.record) or case.dtype == "float8_e4m3fn" else 0.03
    np.testing.assert_allclose(out, exact[0], rtol=0, atol=4 * loose)
    np.testing.assert_allclose(lse, exact[1], rtol=2.0**-20, atol=loose)


# ---- Beside other options ---------------------------------------------------------------------------------------
def angles(s_q: int) -> dict[str, Array]:
    """Angles of `out_rope`, for one position each."""
    turns = np.random.default_rng(8).uniform(0, 6, (4, 32))
    return {"out_cos": np.cos(turns).astype(np.float32), "out_sin": np.sin(turns).astype(np.float32),
            "out_positions": np.resize(np.arange(4, dtype=np.int32), (2, s_q))}  # fmt: skip


def with_options(case: HugeCase, name: str) -> Call:
    """Three queries a sequence; a mask of prefill hides the largest key of every second query."""
    function, oracle, (q, *rest), options = OPERATIONS[case.operation][1](case)
    if case.operation == "prefill":
        keys = max(case.lengths)
        if name == "mask":
            seen = np.random.default_rng(9).integers(0, 2, (6, -(-keys // 128) * 128))
            seen[:, 0], seen[::2, keys - 2] = 1, 0
            options["mask"] = np.packbits(seen, axis=1, bitorder="little")
        else:
            options["state_out"] = np.ones((6, case.heads, 128), q.dtype)
            options["state_lse"] = np.resize(np.array([1.0, 1e9, -np.inf], np.float32), (6, case.heads))
        return function, oracle, (q, *rest), options
    q = np.repeat(q, 3, axis=1)
    options |= {"window": {"window": 9}, "out_rope": angles(3), "float32": {"out_dtype": "float32"}}.get(name, {})
    if name == "tree_mask":
        options["tree_mask"] = np.resize(np.array([1, 3, 5], np.uint64), (2, 3))
    return function, oracle, (q, *rest), options


BESIDE = [
    *(("decode", "decode_sm90_seesaw", option) for option in ("tree_mask", "float32")),
    ("decode", "attention_mma_small", "narrow"),
    *(
        ("decode", kernel, option)
        for kernel in ("decode_sm90_small", "decode_sm90_seesaw")
        for option in ("window", "out_rope")
    ),
    *(("prefill", kernel, option) for kernel in ("dense_mma", "dense_sm90") for option in ("mask", "state")),
]


def run_beside(operation: str, kernel: str, option: str, place: AbstractContextManager[Any]) -> None:
    heads, d_qk = 16 if "seesaw" in kernel else 8, {"out_rope": 512, "narrow": 320}.get(option, 576)
    case = HugeCase(operation, kernel, heads=heads, d_qk=d_qk, lengths=(5, 67))
    function, oracle, arguments, options = with_options(case, option)
    exact = oracle(*arguments, **{name: x for name, x in options.items() if name != "out_dtype"})
    with place:
        check(case, function(*arguments, **options, kernel=kernel), exact)


# ---- Tests -----------------------------------------------------------------------------------------------------
@pytest.mark.one_in(16)
@pytest.mark.parametrize(("operation", "kernel"), [*KERNELS, *IN_99KB])
def test_every_kernel(operation: str, kernel: str) -> None:
    run_first(candidates(operation, kernel))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("operation", "kernel", "option"), BESIDE)
def test_beside_other_options(operation: str, kernel: str, option: str) -> None:
    run_beside(operation, kernel, option, simulated(2, cc_of(kernel), mode="random"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("operation", "kernel"),
    [
        ("prefill", "dense_sm90"),
        ("prefill", "dense_sm90_fp8"),
        ("decode", "decode_sm90_seesaw"),
    ],
)
def test_ordinary_scores_between_huge_ones(operation: str, kernel: str) -> None:
    """Rows whose first and last tiles have huge scores below 0, and whose largest scores are 0."""
    cases = (replace(case, lengths=(5, 300), ordinary=True) for case in candidates(operation, kernel))
    run_first(replace(case, heads=8) if operation == "prefill" else case for case in cases)


def run_seesaw() -> None:
    """Each sequence has three queries; the first two do not see its last tokens."""
    case = HugeCase("decode", "decode_sm90_seesaw", sink=True)
    function, oracle, arguments, options = with_options(case, "")
    exact = oracle(*arguments, **options)
    with simulated(2, cc_of(case.kernel), mode="late"):
        check(case, function(*arguments, **options, kernel=case.kernel), exact)


test_is_caught, test_as_it_is = mutant_suite(
    "decode_sm90_seesaw",
    [run_seesaw],
    {},
    [
        Mutant("rows are not noted", "decode/sm90_seesaw.cu", "if (is_huge(rows.max[r]))", "if (false)"),
        Mutant("the sink does not count again", "decode/sm90_huge_rows.cuh", "sum += ex2_approx", "ex2_approx"),
    ],
)


test_is_caught_of_prefill, test_as_it_is_of_prefill = mutant_suite(
    "dense_sm90",
    [partial(test_ordinary_scores_between_huge_ones, "prefill", "dense_sm90")],
    {},
    [Mutant("rows begin at the lowest maximum", "dense_sm90", "rows.reset(kFirstMax)", "rows.reset()")],
)


@pytest.mark.gpu
@pytest.mark.parametrize(("operation", "kernel", "option"), BESIDE)
def test_beside_other_options_on_a_gpu(hopper: object, operation: str, kernel: str, option: str) -> None:
    run_beside(operation, kernel, option, nullcontext())


def variants(case: HugeCase) -> Iterator[HugeCase]:
    """Three tiles and more, all sizes that the dtype has, requests that are split, and sinks."""
    for split, shift in itertools.product((False, True), SHIFTS[case.dtype]):
        sink = split and case.operation != "prefill" and "cluster" not in case.kernel
        yield replace(case, lengths=(70, 200), shift=shift, split=split, sink=sink)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize(("operation", "kernel"), [*KERNELS, *IN_99KB])
def test_every_size(operation: str, kernel: str, dtype: str) -> None:
    for number in range(2 * len(SHIFTS[dtype])):
        cases = [[*variants(case)][number] for case in candidates(operation, kernel) if case.dtype == dtype]
        if not cases:
            pytest.skip(f"the kernel takes no queries in {dtype}")
        run_first(iter(cases), sm_count=3)


@pytest.mark.gpu
@pytest.mark.parametrize(("operation", "kernel"), ON_HOPPER)
def test_on_a_gpu(hopper: object, operation: str, kernel: str) -> None:
    """A GPU has multiprocessors enough to split every request."""
    dtype = next(candidates(operation, kernel)).dtype
    for number in range(2 * len(SHIFTS[dtype])):
        cases = ([*variants(case)][number] for case in candidates(operation, kernel) if case.dtype == dtype)
        run_first((replace(case, split=True) for case in cases), 0)
