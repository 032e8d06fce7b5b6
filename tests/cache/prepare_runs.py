"""Calls of `mla_prepare` whose answer the oracle knows byte by byte: for the simulator and for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import mla_cupy
from mla_cupy import reference
from mla_cupy.cache_formats import FORMATS
from mla_cupy.dtypes import numpy_dtype
from mla_cupy.ops import backend
from mla_cupy.reference.cache import from_e4m3
from tests.cache.inputs import Array, empty_cache, tokens
from tests.cache.runs import HOSTILE, HOSTILE_64, assert_same_pages

MARK = 7
"""Value in `out` arrays before a call, and in the gaps between their rows."""


@dataclass(frozen=True)
class PrepareCase:
    """A call.

    Attributes
    ----------
    d : int
        Width of q, which lacks the RoPE part with `q_rope`.
    angles : str
        "tables", "theta", or "" for none.
    record : str
        Of the cache; "" without one.
    strides : str
        "dense"; "gaps": rows apart, at multiples of 16 bytes; "odd": at any element.
    place : str
        "new"; "given" results; "in place" of q and of the tokens' RoPE part.
    hostile : bool
        NaN, infinities, zeros, giants, subnormal numbers, a common mean; hostile slots and positions.
    """

    d: int = 576
    n: int = 5
    h: int = 3
    dtype: str = "bfloat16"
    angles: str = "tables"
    interleaved: bool = True
    q_rope: bool = False
    quantise: bool = False
    q_scale: float | None = None
    record: str = ""
    kv_scale: float = 1.0
    scales: str | None = None
    return_rope: bool = False
    strides: str = "dense"
    place: str = "new"
    hostile: bool = True
    index_dtype: str = "int64"

    def __str__(self) -> str:
        """Id of the test: what differs from the defaults."""
        return "-".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(PrepareCase(), k)) or "default"


CASES = (
    PrepareCase(),
    PrepareCase(interleaved=False, place="in place", dtype="float16"),
    PrepareCase(n=11, h=1, place="in place", record="bf16", return_rope=True),
    PrepareCase(d=64, angles="theta", place="given", strides="gaps", return_rope=True),
    PrepareCase(d=192, angles="theta", interleaved=False, index_dtype="int32"),
    PrepareCase(d=512, strides="odd", place="in place"),
    PrepareCase(d=512, q_rope=True, strides="gaps"),
    PrepareCase(quantise=True, angles=""),
    PrepareCase(quantise=True, dtype="float16", interleaved=False, place="given", strides="gaps"),
    PrepareCase(d=512, q_rope=True, quantise=True, strides="odd", place="given"),
    PrepareCase(d=128, q_rope=True, quantise=True, q_scale=0.3),
    PrepareCase(d=448, q_rope=True, record="v4", quantise=True, n=17, h=2),
    PrepareCase(d=64, record="v32", angles="theta", n=11, interleaved=False, quantise=True, return_rope=True),
    PrepareCase(d=64, record="v32", n=11, dtype="float16", return_rope=True, strides="odd", place="in place"),
    PrepareCase(d=64, record="fp8", kv_scale=0.375, n=11, quantise=True, q_scale=2.0, interleaved=False),
    PrepareCase(d=64, record="fp8", n=3, dtype="float16", strides="gaps"),
    PrepareCase(d=64, record="v32", scales="plain", n=3, index_dtype="int32"),
    PrepareCase(d=64, record="bf16-nope", n=3, h=16),
)


@dataclass
class PrepareInputs:
    """The arrays by name, and the options."""

    arrays: dict[str, Array]
    options: dict[str, Any]


def make(case: PrepareCase, seed: int = 0) -> PrepareInputs:
    rng = np.random.default_rng(seed)
    kind = numpy_dtype(case.dtype)
    arrays: dict[str, Array] = {"q": _rows(rng, case, (case.n, case.h, case.d))}
    if case.q_rope:
        arrays["q_rope"] = _rows(rng, case, (case.n, case.h, 64))
    hostile = HOSTILE_64 if case.index_dtype == "int64" else HOSTILE
    if case.record:
        record, pages = FORMATS[case.record], max(6, case.n // 2)
        room = pages * 4
        latent, rope = tokens(record, case.n, case.dtype, seed)
        arrays |= {"latent": latent} if rope is None else {"latent": latent, "rope": rope}
        arrays["cache"] = empty_cache(record, pages, 4, gap=1)
        slots = rng.permutation(room)[: case.n].astype(np.int64)
        count = min(case.n - 1, len(hostile)) if case.hostile else 0
        slots[case.n - count :] = hostile[:count]
        slots[0] = room if case.hostile and case.n > 3 else slots[0]
        arrays["slots"] = slots.astype(case.index_dtype)
    elif case.return_rope:
        arrays["rope"] = rng.standard_normal((case.n, 64)).astype(kind)
    if case.angles == "tables":
        angles = rng.random((9, 32), np.float32) * 6
        arrays |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    if case.angles:
        arrays["positions"] = rng.integers(-3, 12, case.n).astype(case.index_dtype)
        if case.index_dtype == "int64":
            arrays["positions"][0] = 2**40 + 3  # which 32 bits would take for 3
        if case.angles == "theta":
            arrays["positions"][:2] = (123456, -1)
    names = ("interleaved", "quantise", "q_scale", "return_rope", "kv_scale", "scales")
    options = {name: getattr(case, name) for name in names}
    if case.angles == "theta":
        options["theta"] = 10000.0
    for name in ("q", "q_rope", "latent", "rope"):
        if name in arrays and case.strides != "dense":
            arrays[name] = _apart(arrays[name], case.strides)
    return PrepareInputs(arrays, options)


def _rows(rng: np.random.Generator, case: PrepareCase, shape: tuple[int, ...]) -> Array:
    """Rows of several sizes, some of them with a mean, and some hostile."""
    size = 10.0 ** rng.integers(-4, 4, (*shape[:2], 1))
    x = (rng.standard_normal(shape) + rng.integers(0, 2, (*shape[:2], 1))) * size
    if case.hostile:
        rows = x.reshape(-1, shape[2])
        for at, value in enumerate((np.nan, np.inf, -np.inf, 1e-30, 6e4, 448.0)[: len(rows) - 1]):
            rows[at, (37 * at + 5) % shape[2]] = value
        rows[-1] = 0
    with np.errstate(over="ignore"):
        return x.astype(numpy_dtype(case.dtype))


def _apart(x: Array, strides: str) -> Array:
    """Equal rows with gaps of marks between them."""
    before, after = (8, 24) if strides == "gaps" else (1, 2)
    whole = np.full((*x.shape[:-1], before + x.shape[-1] + after), MARK, x.dtype)
    whole[..., before : before + x.shape[-1]] = x
    return whole[..., before : before + x.shape[-1]]


def check_prepare(case: PrepareCase, to: Callable[[Any], Any], back: Callable[[Any], Array]) -> None:
    """The call on arrays that `to` makes and `back` reads, against the oracle: every byte, gaps included."""
    inputs, clean = make(case), make(case)
    exact = reference.mla_prepare(**clean.arrays, **clean.options)
    kinds = ("uint8" if case.quantise else case.dtype, "float32", case.dtype)
    wanted = backend.rounded(exact, kinds)
    given = {name: to(x) for name, x in inputs.arrays.items()}
    results: dict[str, Any] = {}
    if case.place == "in place":
        results = {"out": given["q"]} if not (case.quantise or case.q_rope) else {}
        results |= {"rope_out": given["rope"]} if case.return_rope else {}
    elif case.place == "given":
        names = ("out", "q_scales", "rope_out")
        results = {
            n: to(_apart(np.full_like(x, MARK), case.strides))
            for n, x in zip(names, wanted, strict=True)
            if x is not None
        }
    got = mla_cupy.mla_prepare(**given, **inputs.options, **results)
    for x, right in zip(got, wanted, strict=True):
        assert (x is None) == (right is None)
        if right is not None:
            assert_rows(case, back(x), right)
    for name, result in results.items():
        assert got[("out", "q_scales", "rope_out").index(name)] is result
    for name, x in inputs.arrays.items():
        if name == "cache":
            assert_cache(case, back(given[name]), clean.arrays[name])
        elif case.place != "in place":
            np.testing.assert_array_equal(back(given[name]).view(np.uint8), np.ascontiguousarray(x).view(np.uint8))


def assert_rows(case: PrepareCase, got: Array, wanted: Array) -> None:
    """Check for equal bytes, except for the bits of NaN; with a GPU's angles within one rounding."""
    got = np.ascontiguousarray(got)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    a, b = ((from_e4m3(x) if x.dtype == np.uint8 else x).astype(np.float64) for x in (got, wanted))
    if case.angles == "theta":
        step = 2.0**-3 if got.dtype == np.uint8 else 2.0**-7
        least = 2.0**-19 * np.abs(b[np.isfinite(b)]).max()
        np.testing.assert_allclose(a, b, rtol=step, atol=least)
        assert ((a != b) & ~np.isnan(b)).mean() < 0.01
    else:
        assert (((a == b) & (np.signbit(a) == np.signbit(b))) | (np.isnan(a) & np.isnan(b))).all()


def assert_cache(case: PrepareCase, got: Array, wanted: Array) -> None:
    if case.angles == "theta":
        differ = np.ascontiguousarray(got).view(np.uint8) != np.ascontiguousarray(wanted).view(np.uint8)
        assert differ.mean() < 0.01
    else:
        assert_same_pages(got, wanted, case.record)
