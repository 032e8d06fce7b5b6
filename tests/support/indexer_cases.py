"""Inputs of the indexer's logits: random, with hostile ranges, NaN outside them, garbage where nothing is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import dtypes, reference
from mla_cupy.reference.indexer_records import are_e2m1, page_parts

Array = npt.NDArray[Any]
CODES = dtypes.numpy_dtype("float8_e4m3fn")
#: Beyond what a kernel counts.
WILD = (-(2**31), 2**31 - 1)


@dataclass(frozen=True)
class LogitsCase:
    """`ranges` are "random" (with empty and hostile ones), "causal", or "none"; `dtype` may be uint8, for codes.

    `float16`: codes of queries are at most 128 / d; codes of keys use their whole range.
    """

    s_q: int = 5
    s_kv: int = 200
    h: int = 3
    d: int = 128
    dtype: str = "float8_e4m3fn"
    ranges: str = "random"
    scales: bool = True
    seed: int = 0
    float16: bool = False

    @property
    def id(self) -> str:
        options = ("" if self.scales else "-noscale") + ("-float16" if self.float16 else "")
        return f"{self.dtype}-q{self.s_q}-kv{self.s_kv}-h{self.h}-d{self.d}-{self.ranges}{options}"


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Normal numbers, rounded."""
    made = rng.standard_normal(shape, np.float32)
    return as_codes(made) if dtype == "uint8" else made.astype(dtypes.numpy_dtype(dtype))


def as_codes(x: Array) -> Array:
    """The bytes of e4m3."""
    return x.astype(CODES).view(np.uint8)


def ranges(rng: np.random.Generator, case: LogitsCase) -> dict[str, Array]:
    """First and last key of each query."""
    if case.ranges == "none":
        return {}
    if case.ranges == "causal":
        return {"ke": (np.arange(case.s_q) + case.s_kv - case.s_q + 1).astype(np.int32)}
    begins = rng.integers(-3, case.s_kv + 2, case.s_q)
    ends = begins + rng.integers(-2, case.s_kv, case.s_q)
    ends[:: max(2, case.s_q // 2)] = WILD[1]
    begins[1 :: max(2, case.s_q // 2)] = WILD[0]
    return {"ks": begins.astype(np.int32), "ke": ends.astype(np.int32)}


def logits_inputs(case: LogitsCase) -> dict[str, Array]:
    """The arrays of a call, by name. Keys that no query sees are NaN."""
    rng = np.random.default_rng([case.seed, case.s_q, case.s_kv, case.h])
    inputs = {
        "q": values(rng, (case.s_q, case.h, case.d), case.dtype),
        "k": values(rng, (case.s_kv, case.d), case.dtype),
        "weights": rng.standard_normal((case.s_q, case.h), np.float32),
        **ranges(rng, case),
    }
    if case.float16:
        kind = inputs["q"].dtype
        inputs["q"] = as_codes(rng.uniform(-128 / case.d, 128 / case.d, inputs["q"].shape)).view(kind)
        inputs["k"] = as_codes(np.clip(150 * rng.standard_normal(inputs["k"].shape), -448, 448)).view(kind)
    if case.scales:
        inputs["k_scale"] = rng.uniform(0.5, 2.0, case.s_kv).astype(np.float32)
    seen = np.zeros(case.s_kv, bool)
    begins = np.clip(inputs.get("ks", np.zeros(case.s_q)), 0, case.s_kv).astype(int)
    ends = np.clip(inputs.get("ke", np.full(case.s_q, case.s_kv)), 0, case.s_kv).astype(int)
    for begin, end in zip(begins, ends, strict=True):
        seen[begin:end] = True
    inputs["k"][~seen] = 0x7F if case.dtype == "uint8" else np.nan
    if case.scales:
        inputs["k_scale"][~seen] = np.nan
    return inputs


@dataclass(frozen=True)
class PagedCase:
    """`seqlens` belong to the last tokens, or one per token with `per_token`. `e2m1`: keys are e2m1."""

    b: int = 2
    s_q: int = 1
    h: int = 3
    d: int = 128
    page_size: int = 64
    seqlens: tuple[int, ...] = (100, 70)
    per_token: bool = False
    missing_page: bool = False
    dtype: str = "uint8"
    seed: int = 0
    e2m1: bool = False

    @property
    def id(self) -> str:
        options = ("-each" if self.per_token else "") + ("-missing" if self.missing_page else "")
        options += "-e2m1" if self.e2m1 else ""
        lengths = ".".join(map(str, self.seqlens))
        return f"{self.dtype}-b{self.b}-q{self.s_q}-h{self.h}-d{self.d}-page{self.page_size}-{lengths}{options}"


def paged_inputs(case: PagedCase) -> dict[str, Array]:
    """The arrays of a call, by name. The pool is NaN but for the keys of sequences; the table ends in garbage."""
    rng = np.random.default_rng([case.seed, case.b, case.s_q, case.h])
    lengths = np.asarray(case.seqlens, np.int64)
    needed = -(-np.clip(lengths, 0, 1 << 20) // case.page_size)
    max_pages = int(needed.max(initial=0)) + 2
    num_pages = int(needed.sum()) + 2
    table = np.resize(np.array(WILD, np.int32), (case.b, max_pages)).copy()
    cache = np.full((num_pages, case.page_size, 1, (case.d // 2 if case.e2m1 else case.d) + 4), 0x7F, np.uint8)
    codes, scales = page_parts(cache[:, :, 0])
    scales[...] = np.nan
    if case.e2m1:
        exponents = scales.view(np.uint8).reshape(*scales.shape, 4)
        exponents[...] = 0xFF
    order = rng.permutation(num_pages)
    taken = 0
    for n, (length, pages) in enumerate(zip(lengths, needed, strict=True)):
        table[n, :pages] = order[taken : taken + pages]
        for i, page in enumerate(order[taken : taken + pages]):
            count = min(case.page_size, int(length) - i * case.page_size)
            if case.e2m1:
                codes.view(np.uint8)[page, :count] = rng.integers(0, 256, (count, case.d // 2))
                exponents[page, :count] = 127 - rng.integers(0, 15, (count, 4))
                continue
            codes[page, :count] = values(rng, (count, case.d), "float8_e4m3fn")
            scales[page, :count] = rng.uniform(0.5, 2.0, count)
        taken += pages
    if case.missing_page:
        table[0, 0] = num_pages
    if case.per_token:
        lengths = np.maximum(lengths[:, None] - rng.integers(0, 5, (case.b, case.s_q)), -1)
        lengths[:, 0] = np.asarray(case.seqlens)
    return {
        "q": values(rng, (case.b, case.s_q, case.h, case.d), case.dtype),
        "cache": cache,
        "weights": rng.standard_normal((case.b, case.s_q, case.h), np.float32),
        "seqlens": lengths.astype(np.int32),
        "block_table": table,
    }


IN_FLOAT32 = 2.0**-18
"""Error of sums in float32, relative to the sum of the terms' magnitudes."""
IN_FLOAT16 = 2.0**-10
"""Error of products and sums in float16, relative to the same sum."""
ON_TENSOR_CORES = 2.0**-11
"""The error of 8-bit products, where the hardware cuts off bits."""


def check_logits(got: Array, inputs: dict[str, Array], exact: Array, relative: float | None = None) -> None:
    """-inf where it must be; elsewhere off by little of what is summed up, which may cancel, and by the rounding.

    By default by what sums of products of the queries' dtype lose.
    """
    if relative is None:
        relative = ON_TENSOR_CORES if inputs["q"].dtype.itemsize == 1 else IN_FLOAT32
    unseen = np.isneginf(exact)
    np.testing.assert_array_equal(np.isneginf(got.astype(np.float32)), unseen)
    roundoff = dtypes.TABLE[dtypes.dtype_name(got.dtype)].unit_roundoff
    seen = np.where(unseen, 0.0, exact)
    error = np.abs(np.where(unseen, 0.0, got.astype(np.float64)) - seen)
    allowed = relative * np.where(unseen, 0.0, sums_of_magnitudes(inputs)) + 2 * roundoff * np.abs(seen)
    worst = np.argmax(error - allowed) if error.size else 0
    assert (error <= allowed).all(), (
        f"error {error.flat[worst]:.3e} of {seen.flat[worst]:.6g}, {allowed.flat[worst]:.3e} allowed"
    )


def sums_of_magnitudes(inputs: dict[str, Array]) -> Array:
    """The logits of the inputs' absolute values."""
    absolute: dict[str, Any] = {**inputs, "weights": np.abs(inputs["weights"])}
    for name in {"q", "k"} & inputs.keys():
        absolute[name] = _absolute(inputs[name])
    if "cache" not in inputs:
        return reference.indexer_logits(**absolute)
    absolute["cache"] = inputs["cache"].copy()
    codes = page_parts(absolute["cache"].reshape(*inputs["cache"].shape[:2], -1))[0].view(np.uint8)
    codes &= 0x77 if cases_are_e2m1(inputs) else 0x7F
    return reference.indexer_logits_paged(**absolute)


def cases_are_e2m1(inputs: dict[str, Array]) -> bool:
    """True of calls with keys in e2m1."""
    return are_e2m1(inputs["cache"], inputs["q"].shape[-1])


def _absolute(x: Array) -> Array:
    return x & 0x7F if x.dtype == np.uint8 else np.abs(x.astype(np.float32)).astype(x.dtype)
