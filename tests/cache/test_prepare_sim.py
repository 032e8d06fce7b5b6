"""The preparation before decode in the simulator, which also reports every access outside of an array."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy.kernels.cache.prepare import frequencies
from mla_cupy.reference.fp8_queries import dequantised, quantise_queries
from tests.cache.prepare_runs import CASES, PrepareCase, check_prepare, make
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated


def same(x: np.ndarray) -> np.ndarray:
    return x


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_oracle(case: PrepareCase) -> None:
    with simulated(2) as target:
        check_prepare(case, same, np.asarray)
        assert target.launched == ["mla_cache_prepare"]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", [CASES[1], CASES[11], CASES[14]], ids=str)
def test_on_older_gpus(case: PrepareCase) -> None:
    """Without instructions for e4m3, and without the usual path of tokens."""
    with simulated(2, (8, 0)):
        check_prepare(case, same, np.asarray)


def test_nothing_to_do_is_no_launch() -> None:
    inputs = make(PrepareCase(record="v32"))
    given = {name: x if name in ("cache", "cos", "sin") else x[:0] for name, x in inputs.arrays.items()}
    with simulated(1) as target:
        out, q_scales, _ = mla_cupy.mla_prepare(**given, quantise=True)
        assert (out.shape, out.dtype, q_scales.shape, target.launched) == ((0, 3, 576), np.uint8, (0, 3), [])


def test_codes_are_those_that_decode_makes() -> None:
    """Codes of the turned 16-bit queries: `mla_decode` multiplies equal numbers either way."""
    inputs = make(PrepareCase(hostile=False))
    with simulated(2):
        turned, _, _ = mla_cupy.mla_prepare(**inputs.arrays)
        codes, q_scales, _ = mla_cupy.mla_prepare(**inputs.arrays, quantise=True)
    wanted, scales = quantise_queries(turned)
    assert (codes == wanted).all()
    assert (q_scales == scales).all()
    assert (dequantised(codes) * q_scales[..., None] == dequantised(turned)).all()


@pytest.mark.parametrize("base", [1.0, 10000.0, 8e6])
def test_angles_are_exact_whatever_the_position(base: float) -> None:
    """Pairs (1, 0) become (cos, sin): of bfloat16, hence to half a step."""
    positions = np.array([0, 1, -1, 5, 999_999, 2**31 - 1, -(2**31), 2**40 + 12345])
    q = np.tile(np.array([1, 0], ml_dtypes.bfloat16), (len(positions), 1, 32))
    with simulated(1):
        got = mla_cupy.mla_prepare(q, positions=positions, theta=base)[0].astype(np.float64).reshape(-1, 32, 2)
    turns = np.array([[(int(p) * f) % 2**64 / 2**64 for f in frequencies(base)] for p in positions])
    np.testing.assert_allclose(got[..., 0], np.cos(2 * math.pi * turns), rtol=2.0**-8, atol=2.0**-21)
    np.testing.assert_allclose(got[..., 1], np.sin(2 * math.pi * turns), rtol=2.0**-8, atol=2.0**-21)
    exact = [base ** (-i / 32) / (2 * math.pi) for i in range(32)]
    np.testing.assert_allclose(np.array(frequencies(base), np.float64) / 2.0**64, exact, rtol=1e-15, atol=2.0**-64)


def run() -> None:
    with simulated(2):
        check_prepare(CASES[0], same, np.asarray)


test_is_caught, test_as_it_is = mutant_suite(
    "cache_prepare",
    [run],
    {},
    [Mutant("the other sign of the angle", "tile/rope.cuh", "turned(x, y, cos, -sin)", "turned(x, y, cos, sin)")],
)
