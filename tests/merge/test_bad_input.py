"""Every mistake in a call of `merge_states`: argument, got and expected, before anything has happened."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, MlaError, ShapeError
from tests.support.mistakes import Bad, Call, option, raises, swap
from tests.support.recorder import Recorder

BF16 = np.dtype(ml_dtypes.bfloat16)


def good_call() -> Call:
    """Three states."""
    rng = np.random.default_rng(0)
    return {
        "outs": rng.standard_normal((3, 2, 3, 4, 64), np.float32).astype(BF16),
        "lses": rng.standard_normal((3, 2, 4, 3), np.float32),
        "out": np.full((2, 3, 4, 64), 7, BF16),
        "lse": np.full((2, 4, 3), 7, np.float32),
    }


MERGE = [
    Bad("outs 4-D", swap("outs", lambda x: x[0]), ShapeError, ("outs.shape", "(2, 3, 4, 64)", "(n, b, s_q, h_q, d)")),
    Bad(
        "lses of another layout",
        swap("lses", lambda x: x.transpose(0, 1, 3, 2)),
        ShapeError,
        ("lses.shape[2]", "3", "h_q=4, as in outs"),
    ),
    Bad("out shape", swap("out", lambda x: x[:1]), ShapeError, ("out.shape", "(1, 3, 4, 64)", "(2, 3, 4, 64)")),
    Bad("lse shape", swap("lse", lambda x: x[:, :3]), ShapeError, ("lse.shape", "(2, 3, 3)", "(2, 4, 3)")),
    Bad("out_dtype", option("out_dtype", "float32"), DTypeError, ("out.dtype", "bfloat16", "float32")),
    Bad(
        "out_dtype fp16",
        lambda c: (c.update(out_dtype="float16"), c.pop("out")),
        DTypeError,
        ("out_dtype", "float16", "bfloat16"),
    ),
    Bad(
        "out_dtype fp64",
        lambda c: (c.update(out_dtype="float64"), c.pop("out")),
        DTypeError,
        ("out_dtype", "float64", "float32"),
    ),
    Bad("lse_base", option("lse_base", "10"), ArgumentError, ("lse_base", "'10'", '"e" or "2"')),
    Bad("empty_lse", option("empty_lse", "x"), MlaError, ("empty_lse", "'x'", "number")),
]


@pytest.mark.parametrize("bad", MERGE, ids=lambda bad: bad.id.replace(" ", "_"))
def test_refuses(bad: Bad, place: str) -> None:
    raises(bad, mla_cupy.merge_states, good_call(), place)


def test_the_call_that_the_mistakes_are_made_in_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    out, lse = mla_cupy.merge_states(**good_call())
    assert (out.astype(np.float32) != 7).all()
    assert (lse != 7).all()


def test_the_same_call_is_launched_when_good(recorder: Recorder) -> None:
    mla_cupy.merge_states(**good_call())
    assert recorder.entries == ["merge_states"]
