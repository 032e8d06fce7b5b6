"""The preparation in the simulator against the oracle, byte by byte."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from mla_cupy.kernels.indexer.prepare import quantize
from tests.indexer.prepare.prepare_cases import Array, arrays, both, expected, norm
from tests.support.calls import assert_same
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated

#: (8, 0) has no instruction for e4m3.
PLACES = ((9, 0), (8, 0))
FLAGS = [
    {"interleaved": a, "hadamard": b, "reference_rounding": c, "scales": d}
    for a, b, c, d in itertools.product((False, True), (True, False), (True, False), ("power_of_2", "plain"))
]


@pytest.fixture(autouse=True)
def _groups_take_vectors_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make groups process vectors in turn, as with many of them. `test_one_vector_of_a_group`, and the tests of the
    cache, cover few.
    """
    monkeypatch.setattr(quantize, "MANY_VECTORS", 1)


def check(name: str, inputs: dict[str, Array], cc: tuple[int, int] = (9, 0), **options: Any) -> None:
    with simulated(2, cc) as target:
        got = getattr(mla_cupy, f"indexer_{name}")(**inputs, **options)
        assert target.launched == ["mla_indexer_prepare_quantize"]
    options.pop("return_k", None)
    for x, wanted in zip(got, expected(name, inputs, **options), strict=True):
        assert_same(x, wanted)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cc", PLACES, ids=str)
@pytest.mark.parametrize("d", [32, 64, 128])
def test_queries(d: int, cc: tuple[int, int]) -> None:
    check("prepare_q", arrays("prepare_q", d, tokens=7), cc)


@pytest.mark.parametrize("scales", ["power_of_2", "plain"])
@pytest.mark.parametrize("d", [32, 64, 128])
def test_queries_for_float16(d: int, scales: str) -> None:
    """No code exceeds 128 / d, whatever the vector: zeros, infinities, and what no scale makes small enough."""
    inputs = arrays("prepare_q", d, tokens=7)
    inputs["q"][5, 0, 3], inputs["q"][5, 1, 3:5] = np.inf, (np.nan, -3e38)
    check("prepare_q", inputs, scales=scales, accumulate="float16")
    with simulated(1):
        codes, _ = mla_cupy.indexer_prepare_q(**inputs, scales=scales, accumulate="float16")
    largest = np.nan_to_num(np.abs(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64))).max(axis=-1)
    assert largest.max() == 128 / d
    assert (largest[2:5] >= 64 / d).all()


@pytest.mark.parametrize("name", ["prepare_q", "prepare_k"])
def test_one_vector_of_a_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert quantize.group_vectors(quantize.MANY_VECTORS - 1) == 1
    check(name, arrays(name, 128, tokens=19))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(map(str, flags.values())))
def test_keys(flags: dict[str, Any]) -> None:
    check("prepare_k", arrays("prepare_k", 128, tokens=9), **flags)


@pytest.mark.parametrize(("d", "pairs"), [(128, 16), (128, 64), (32, 4), (64, 24)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_widths_of_rope(d: int, pairs: int, interleaved: bool) -> None:
    check("prepare_k", arrays("prepare_k", d, pairs), interleaved=interleaved)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cc", PLACES, ids=str)
@pytest.mark.parametrize(("d", "pairs"), [(128, 0), (128, 16), (64, 0), (32, 4)])
def test_keys_with_their_norm(d: int, pairs: int, cc: tuple[int, int]) -> None:
    inputs = {**arrays("prepare_k", d, pairs, tokens=9), **norm(d)}
    for flags in ({}, {"interleaved": True, "eps": 0.5}, {"reference_rounding": False, "hadamard": False}):
        check("prepare_k", inputs, cc, **flags)


def test_the_norm_is_that_of_the_field() -> None:
    """The norm in float64, from its formula: only roundings to bfloat16 and e4m3 remain."""
    k, d = np.random.default_rng(2).standard_normal((6, 128)) * 3 + 5, 128
    inputs = {"k": k.astype(ml_dtypes.bfloat16), **norm(d)}
    tables = {"cos": np.ones((1, 32), np.float32), "sin": np.zeros((1, 32), np.float32)}
    with simulated(1):
        codes, scales = mla_cupy.indexer_prepare_k(**inputs, **tables, positions=np.zeros(6, np.int32), hadamard=False)
    x = inputs["k"].astype(np.float64)
    normal = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6)
    wanted = normal * inputs["norm_weight"].astype(np.float64) + inputs["norm_bias"].astype(np.float64)
    got = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales[:, None]
    assert np.abs(got - wanted).max() <= np.abs(wanted).max() * 2.0**-4
    assert np.sqrt(((got - wanted) ** 2).mean() / (wanted**2).mean()) < 0.04


def test_the_norm_spreads_what_is_no_number() -> None:
    inputs = {**arrays("prepare_k", 64, tokens=6), **norm(64)}
    inputs["k"][5, 40] = np.inf
    with simulated(1):
        codes, _ = mla_cupy.indexer_prepare_k(**inputs)
    assert (codes[5] == 0x7F).all()
    check("prepare_k", {**inputs, "k": inputs["k"][:5].copy(), "positions": inputs["positions"][:5].copy()})


@pytest.mark.one_in(8)
@pytest.mark.parametrize("cc", PLACES, ids=str)
@pytest.mark.parametrize(("d", "pairs"), [(128, 0), (128, 16), (64, 0), (32, 4)])
def test_queries_and_keys(d: int, pairs: int, cc: tuple[int, int]) -> None:
    inputs = both(d, pairs, tokens=7)
    check("prepare", inputs, cc, return_k=True)
    check("prepare", inputs, cc, return_k=True, accumulate="float16", interleaved=True)
    del inputs["norm_weight"], inputs["norm_bias"]
    check("prepare", inputs, cc, return_k=True, reference_rounding=False, scales="plain")


def test_queries_and_keys_at_any_address() -> None:
    inputs = both(64)
    whole = np.zeros((5, 70), inputs["k"].dtype)
    whole[..., 3:67] = inputs["k"]
    wide = np.repeat(inputs["norm_weight"], 3)
    check("prepare", {**inputs, "k": whole[..., 3:67], "norm_weight": wide[::3]}, return_k=True)


def test_a_norm_at_any_address() -> None:
    """The build for usual calls reads 16 bytes of it at once."""
    inputs = both(128, tokens=5)
    shifted = np.append(np.float32(0), inputs["norm_bias"])[1:]
    check("prepare", {**inputs, "norm_weight": np.repeat(inputs["norm_weight"], 3)[::3]}, return_k=True)
    check("prepare", {**inputs, "norm_bias": shifted}, return_k=True)


@pytest.mark.parametrize("slot_dtype", ["int32", "int64"])
@pytest.mark.parametrize("d", [64, 128])
def test_queries_and_keys_to_pages(d: int, slot_dtype: str) -> None:
    """The pages equal the append's, and the queries the separate call's; hostile slots are skipped."""
    inputs = both(d, tokens=9)
    slots = np.array([3, -1, 12, 2**31 - 1, -(2**31), 0, 11, 5, 7]).astype(slot_dtype)
    if slot_dtype == "int64":
        slots[3:5] = 2**32, -(2**63)
    wanted = expected("prepare_q", {name: inputs[name] for name in ("q", "weights", "cos", "sin", "positions")})
    pages, alone = (np.full((3, 4, d + 4), 0xA5, np.uint8) for _ in range(2))
    names = ("k", "cos", "sin", "positions", "norm_weight", "norm_bias")
    reference.indexer_cache_append(cache=alone, slots=slots, **{name: inputs[name] for name in names})
    with simulated(2) as target:
        codes, folded, *keys = mla_cupy.indexer_prepare(**inputs, cache=pages, slots=slots)
        assert target.launched == ["mla_indexer_prepare_quantize"]
        nothing = {name: inputs[name][:0] for name in ("q", "weights", "k", "positions")}
        mla_cupy.indexer_prepare(**{**inputs, **nothing}, cache=pages, slots=slots[:0])
        assert len(target.launched) == 1
    assert keys == [None, None]
    assert_same(codes, wanted[0])
    assert_same(folded, wanted[1])
    assert_same(pages, alone)


def test_no_number_stays_where_it_is() -> None:
    """Without the transform; the codes of NaN are 0x7f, and the other vectors equal the oracle's."""
    inputs = arrays("prepare_k", 64, tokens=6)
    clean = expected("prepare_k", inputs, hadamard=False)
    inputs["k"][5, 40], inputs["k"][5, 41] = np.nan, np.inf
    with simulated(1):
        codes, scales = mla_cupy.indexer_prepare_k(**inputs, hadamard=False)
    assert (codes[5, 40], codes[5, 41]) == (0x7F, 0x7E)
    assert np.isfinite(scales).all()
    assert_same(codes[:5], clean[0][:5])


def test_vectors_at_any_address() -> None:
    inputs = arrays("prepare_q", 64)
    whole = np.zeros((5, 3, 70), inputs["q"].dtype)
    whole[..., 3:67] = inputs["q"]
    check("prepare_q", {**inputs, "q": whole[..., 3:67]})


def run() -> None:
    check("prepare", both(64, 8, tokens=7), return_k=True, eps=0.01, accumulate="float16")


test_is_caught, test_as_it_is = mutant_suite(
    "indexer_prepare_quantize",
    [run],
    {},
    [Mutant("no eps", "indexer_prepare_quantize", "__fadd_rn(variance, p.norm_eps)", "variance")],
)
