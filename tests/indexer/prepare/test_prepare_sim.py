"""The preparation in the simulator against the oracle, byte by byte."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy.kernels.indexer.prepare import quantize
from tests.indexer.prepare.prepare_cases import Array, arrays, expected
from tests.support.calls import assert_same
from tests.support.mutants import CAUGHT, Mutant, Plant
from tests.support.sim_driver import simulated

#: (8, 0) has no instruction for e4m3.
PLACES = ((9, 0), (8, 0))
FLAGS = [
    {"interleaved": a, "hadamard": b, "reference_rounding": c, "scales": d}
    for a, b, c, d in itertools.product((False, True), (True, False), (True, False), ("power_of_2", "plain"))
]


@pytest.fixture(autouse=True)
def _groups_take_vectors_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there are many. `test_one_vector_of_a_group`, and the tests of the cache, are about few."""
    monkeypatch.setattr(quantize, "MANY_VECTORS", 1)


def check(name: str, inputs: dict[str, Array], cc: tuple[int, int] = (9, 0), **options: Any) -> None:
    with simulated(2, cc) as target:
        got = getattr(mla_cupy, f"indexer_{name}")(**inputs, **options)
        assert target.launched == ["mla_indexer_prepare_quantize"]
    for x, wanted in zip(got, expected(name, inputs, **options), strict=True):
        assert_same(x, wanted)


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


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(map(str, flags.values())))
def test_keys(flags: dict[str, Any]) -> None:
    check("prepare_k", arrays("prepare_k", 128, tokens=9), **flags)


@pytest.mark.parametrize(("d", "pairs"), [(128, 16), (128, 64), (32, 4), (64, 24)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_widths_of_rope(d: int, pairs: int, interleaved: bool) -> None:
    check("prepare_k", arrays("prepare_k", d, pairs), interleaved=interleaved)


def test_no_number_stays_where_it_is() -> None:
    """Without the transform; the codes of NaN are 0x7f, and the other vectors are those of the oracle."""
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


def check_with_and_without_transform(inputs: dict[str, Array]) -> None:
    for hadamard in (False, True):
        check("prepare_k", inputs, hadamard=hadamard)


def mutant(name: str, old: str, new: str) -> Mutant:
    return Mutant(name, "indexer/prepare/quantize.cu", old, new)


LEVELS = "for (i32 step = 1; step < kLanes; step *= 2) "
MUTANTS = [
    mutant("the other sign of RoPE", "__fmul_rn(y, -sin)", "__fmul_rn(y, sin)"),
    mutant("scale of a lane", LEVELS + "amax", "for (i32 step = 1; step < 1; step *= 2) amax"),
    mutant("exact powers of 2 are doubled", "((bits & 0x7fffff) != 0)", "1"),
    mutant("angles of the token before", "if (next.token != place.token)", "if (false)"),
    mutant("a vector twice", "next.advance(p);", "(void)0;"),
]


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=() if at == 0 else pytest.mark.slow, id=m.id) for at, m in enumerate(MUTANTS)],
)
def test_mutants_are_caught(mutant: Mutant, plant: Plant) -> None:
    inputs = arrays("prepare_k", 128, tokens=30)
    plant(mutant)
    with pytest.raises(CAUGHT):
        check_with_and_without_transform(inputs)
