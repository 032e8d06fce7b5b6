"""Results of sparse decode that are turned back by the queries' RoPE, in the simulator, with planted bugs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from mla_cupy.errors import ArgumentError, ShapeError
from tests.sparse_decode.runs import GENERIC, SparseDecodeCase, check, check_call, make
from tests.support.flat import flat
from tests.support.gpu import upload
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated

TURN = "mla_sparse_decode_turn_results"
SMALL, SEESAW, AMPERE = "sparse_decode_sm90_small", "sparse_decode_sm90", "sparse_decode_mma"
CASES = (
    (SparseDecodeCase(record="v4", s_q=2, h_q=9, sink=True, turned=True), GENERIC, "float32"),
    (SparseDecodeCase(record="v41", topk=19, extra=40, extra_record="v41-fp4", turned=True), SMALL, "bfloat16"),
    (SparseDecodeCase(record="v41", dtype="float16", b=1, h_q=35, turned=True, empty=True), SEESAW, "float16"),
    (SparseDecodeCase(record="v4", b=1, h_q=6, topk=640, sm_count=5, turned=True), SMALL, "float32"),  # split, merged
)


#: The seesaw takes longer than all others, and the launch after it is the same.
IN_THE_SIMULATOR = [pytest.param(*one, marks=pytest.mark.slow if one[1] == SEESAW else ()) for one in CASES]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("case", "kernel", "out_dtype"), IN_THE_SIMULATOR, ids=str)
def test_equals_the_oracle(case: SparseDecodeCase, kernel: str, out_dtype: str) -> None:
    with simulated(case.sm_count, mode="random", seed=2) as target:
        check(case, lambda x: x, np.asarray, kernel, out_dtype)
        assert target.launched[-1] == TURN


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "kernel", "out_dtype"), CASES, ids=str)
def test_on_a_gpu(case: SparseDecodeCase, kernel: str, out_dtype: str, hopper: object) -> None:
    import cupy

    check(case, upload, cupy.asnumpy, kernel, out_dtype)


def test_before_hopper() -> None:
    case = SparseDecodeCase(record="v4", b=1, h_q=2, topk=9, turned=True)
    with simulated(1, (8, 0)) as target:
        check(case, lambda x: x, np.asarray, AMPERE, "bfloat16")
        assert target.launched[-1] == TURN


def test_the_oracle_turns_by_the_inverse() -> None:
    """Turned forth again, results equal a call's without turning."""
    call = make(SparseDecodeCase(record="v4", s_q=2, turned=True))
    angles = np.random.default_rng(1).uniform(-3, 3, (7, 32))
    call["out_cos"], call["out_sin"] = np.cos(angles), np.sin(angles)
    turned, lse = reference.sparse_mla_decode(**call)
    plain, same = reference.sparse_mla_decode(**{**call, "out_cos": None, "out_sin": None, "out_positions": None})
    rows = np.clip(call["out_positions"], 0, 6)
    factors = np.exp(1j * angles[rows])[:, :, None]
    pairs = (turned[..., 448::2] + 1j * turned[..., 449::2]) * factors
    np.testing.assert_allclose(pairs, plain[..., 448::2] + 1j * plain[..., 449::2], atol=1e-12)
    np.testing.assert_array_equal(turned[..., :448], plain[..., :448])
    np.testing.assert_array_equal(lse, same)


def test_without_turning_nothing_is_launched() -> None:
    case = SparseDecodeCase(record="v4", b=1)
    with simulated(1) as target:
        check_call(case, make(case), lambda x: x, np.asarray, GENERIC)
        assert TURN not in target.launched


def _call(**changes: Any) -> dict[str, Any]:
    return {**make(SparseDecodeCase(record="v4", b=1, topk=2, turned=True)), **changes}


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (_call(out_positions=None), ArgumentError, "out_positions"),
        (
            _call(out_sin=np.ones((7, 16), np.float32)),
            ShapeError,
            r"out_rope.sin.shape\[-1\]: got 16, expected p",
        ),
        (_call(out_positions=np.ones((2, 1), np.int32)), ShapeError, r"out_rope.positions.shape\[0\]: got 2"),
        (
            _call(w_uv=np.ones((3, 128, 512), _call()["q"].dtype)),
            ArgumentError,
            "project: got an array, expected None with out_rope",
        ),
        (
            {
                **make(SparseDecodeCase(b=1, topk=2)),
                **{name: _call()[name] for name in ("out_cos", "out_sin", "out_positions")},
            },
            ShapeError,
            r"q.shape\[-1\]: got 576, expected 512 with out_rope",
        ),
    ],
    ids=["one left out", "width", "sequences", "W_UV", "other values"],
)
def test_bad_input(call: dict[str, Any], error: type[Exception], said: str) -> None:
    with simulated(1) as target, pytest.raises(error, match=said):
        flat(mla_cupy.sparse_mla_decode)(**call)
    assert target.launched == []


SOURCE = "sparse_decode_turn_results"
TEXTS = [
    Mutant("heads that are not there", SOURCE, "if (first + i < p.h_q) store_pair", "store_pair"),
]


def run() -> None:
    with simulated(2):
        check(SparseDecodeCase(record="v4", s_q=2, h_q=9, topk=5, turned=True), lambda x: x, np.asarray)


test_is_caught, test_as_it_is = mutant_suite("sparse_decode_turn_results", [run], {}, TEXTS)
