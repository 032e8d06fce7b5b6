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
from tests.support.mutants import CAUGHT, Mutant, Plant
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
    """Of the turned queries in 16 bits: `mla_decode` has the same numbers to multiply either way."""
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


PREPARE, ROWS, APPEND = "cache/prepare.cu", "cache/prepare.cuh", "cache/append.cuh"
ROPE, CODES = "tile/rope.cuh", "attention/query_codes.cuh"
IN_PLACE, QUANTISED = CASES[1], CASES[8]
TOKENS, COMPUTED = PrepareCase(d=64, h=1, record="bf16", n=11, return_rope=True), CASES[4]
PLANTED: tuple[tuple[Mutant, PrepareCase], ...] = (
    (Mutant("the other sign of the angle", ROPE, "turned(x, y, cos, -sin)", "turned(x, y, cos, sin)"), CASES[0]),
    (Mutant("the other sign of halves", ROPE, "? -sin[k] : sin[k]", "? sin[k] : -sin[k]"), IN_PLACE),
    (Mutant("the neighbour's half", ROPE, "x[k], kPieceOfOther)", "x[k], 1)"), IN_PLACE),
    (Mutant("angles of another piece", ROPE, "piece % kPieceOfOther * kChunkElems",
            "piece % 2 * kChunkElems"), IN_PLACE),
    (Mutant("an eighth is not rounded", ROPE, "(turns + kEighth) / kQuarterTurn", "turns / kQuarterTurn"), COMPUTED),
    (Mutant("cos has the sign of sin", ROPE, "(quarter + 1) / 2 % 2", "quarter / 2 % 2"), COMPUTED),
    (Mutant("computed angles of the lane", ROPE, "* 2 + k / kPairsOfPiece", "* 2"), COMPUTED),
    (Mutant("positions of 32 bits", APPEND, "return read_index(positions",
            "return (i32)read_index(positions"), CASES[0]),
    (Mutant("positions are not clamped from below", APPEND, "max(0ll, min(position", "(min(position"), CASES[0]),
    (Mutant("448 for 256", CODES, "kAbove = 0x1fffff", "kAbove = 0"), QUANTISED),
    (Mutant("zeros have no least scale", CODES, "max((i32)(largest + kAbove >> 23) - 8, kLeastQueryExponent)",
            "((i32)(largest + kAbove >> 23) - 8)"), QUANTISED),
    (Mutant("infinity is a number", CODES, "__float_as_uint(kMaxFloat) + 1",
            "__float_as_uint(kMaxFloat) + 2"), QUANTISED),
    (Mutant("the largest of a few lanes", PREPARE, "lanes < kRowLanes; lanes *= 2",
            "lanes < 4; lanes *= 2"), QUANTISED),
    (Mutant("the RoPE part has no part in the largest", PREPARE, "largest_magnitude<Element>(rope, 0)", "0"),
     PrepareCase(d=64, quantise=True, hostile=False)),
    (Mutant("scales of another head", PREPARE, "row.head * p.q_scales_stride_h_elems",
            "(row.head ^ 1) * p.q_scales_stride_h_elems"),
     QUANTISED),
    (Mutant("rows past the end", ROWS, "at < (i64)p.n * p.h", "at < (i64)p.n * p.h + 1"), CASES[0]),
    (Mutant("the last pieces are left", PREPARE, "first < moved; first += kMovedPieces",
            "first < 0; first += kMovedPieces"),
     CASES[0]),
    (Mutant("nothing moves", PREPARE, "p.out == p.q && p.q_rope == nullptr", "p.q_rope == nullptr"), CASES[0]),
    (Mutant("in place is elsewhere", PREPARE, "store_piece(to + p.pieces * kLaneStepBytes, rope)",
            "store_piece(to + moved * kLaneStepBytes, rope)"), IN_PLACE),
    (Mutant("RoPE of the first token", APPEND, "has_rope ? first + rope_token : first", "first"), TOKENS),
    (Mutant("RoPE to the other token", APPEND, "rope_token == t)", "rope_token == 1 - t)"), TOKENS),
    (Mutant("a token too many", APPEND, "rope_token < count;", "rope_token < kTokens;"), TOKENS),
    (Mutant("codes in 16 bits' place", APPEND, "reinterpret_cast<uint4*>(token.data)[lane] = make_uint4(codes[0].x",
            "reinterpret_cast<uint4*>(token.data)[lane ^ 1] = make_uint4(codes[0].x"), CASES[14]),
)  # fmt: skip
#: Every one is compiled anew: the ordinary run takes a few.
QUICK = ("the neighbour's half", "the largest of a few lanes", "RoPE to the other token")


@pytest.mark.parametrize(
    ("mutant", "case"),
    [
        pytest.param(mutant, case, id=mutant.id, marks=[] if mutant.name in QUICK else [pytest.mark.slow])
        for mutant, case in PLANTED
    ],
)
def test_mutants_are_caught(mutant: Mutant, case: PrepareCase, plant: Plant) -> None:
    plant(mutant)
    with simulated(2), pytest.raises(CAUGHT):
        check_prepare(case, same, np.asarray)
