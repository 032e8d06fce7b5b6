"""Preparation before decode with W_UK in the simulator, and bugs planted in its kernel."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from tests.cache.absorbed_runs import CASES, K3, AbsorbedCase, check_absorbed, make
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated

MODES = (("late", 0), ("early", 0), ("random", 1))


def same(x: np.ndarray) -> np.ndarray:
    return x


def check(case: AbsorbedCase, mode: tuple[str, int] = ("early", 0), sm_count: int = 2) -> None:
    with simulated(sm_count, mode=mode[0], seed=mode[1]) as target:
        check_absorbed(case, same, np.asarray)
        assert target.launched == ["mla_cache_absorb"]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_oracle(case: AbsorbedCase) -> None:
    check(case, MODES[case.n % 3], sm_count=1 + case.n % 2)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        AbsorbedCase(n=3, h=1, d_nope=64, record="v32", interleaved=False),
        replace(K3, n=3, h=1, d_nope=64),
        replace(K3, n=9, h=1, d_nope=64, dtype="float16", record="v32-nope"),
    ],
    ids=str,
)
def test_in_every_order(case: AbsorbedCase, mode: tuple[str, int]) -> None:
    check(case, mode)


@pytest.mark.parametrize("case", [AbsorbedCase(), replace(K3, record="fp16-nope")], ids=str)
def test_on_older_gpus(case: AbsorbedCase) -> None:
    with simulated(2, (7, 5)):
        check_absorbed(replace(case, n=3, h=1, d_nope=64, dtype="float16"), same, np.asarray)


def test_bits_are_those_of_two_calls() -> None:
    """Bits equal `absorb`'s, and `mla_prepare`'s for the RoPE part and the tokens."""
    arrays, options = make(AbsorbedCase(n=9, h=1, d_nope=64))
    apart = {name: x.copy() if name == "cache" else x for name, x in arrays.items() if name != "w_uk"}
    with simulated(2):
        out, _, _ = mla_cupy.mla_prepare(**arrays, **options)
        turned, _, _ = mla_cupy.mla_prepare(**{**apart, "q": arrays["q"][..., 64:]}, **options)
        absorbed = mla_cupy.absorb(arrays["q"][..., :64], arrays["w_uk"])
    assert out.tobytes() == np.concatenate([absorbed, turned], axis=2).tobytes()
    assert (arrays["cache"].view(np.uint16) == apart["cache"].view(np.uint16)).all()


def test_bits_without_rope_are_those_of_two_calls() -> None:
    """Bits equal `absorb`'s and `cache_append`'s."""
    arrays, options = make(replace(K3, n=9))
    cache = arrays["cache"].copy()
    with simulated(2):
        out, _, _ = mla_cupy.mla_prepare(**arrays, **options)
        mla_cupy.cache_append(arrays["latent"], None, cache, arrays["slots"])
        absorbed = mla_cupy.absorb(arrays["q"], arrays["w_uk"])
    assert out.tobytes() == absorbed.tobytes()
    assert (arrays["cache"].view(np.uint16) == cache.view(np.uint16)).all()


@pytest.mark.parametrize("case", [AbsorbedCase(), K3], ids=str)
def test_nothing_to_do_is_no_launch(case: AbsorbedCase) -> None:
    arrays, options = make(case)
    given = {name: x if name in ("cache", "cos", "sin", "w_uk") else x[:0] for name, x in arrays.items()}
    with simulated(1) as target:
        out, _, _ = mla_cupy.mla_prepare(**given, **options)
        assert (out.shape, target.launched) == ((0, 2, case.d_qk), [])


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"q": (5, 2, 160)}, "q.shape[-1]: got 160, expected 192, or 128 without RoPE, with w_uk.shape[1]=128"),
        (
            {"q": (5, 2, 192), "q_rope": (5, 2, 64)},
            "q.shape[-1]: got 192, expected 128 with q_rope, with w_uk.shape[1]=128",
        ),
        ({"w_uk": (2, 64, 512)}, "q.shape[-1]: got 192, expected 128, or 64 without RoPE, with w_uk.shape[1]=64"),
        ({"w_uk": (2, 96, 512)}, "w_uk.shape[1]: got 96, expected 128 or 64 or 192 or 256"),
        ({"w_uk": (3, 128, 512)}, "w_uk.shape"),
        ({"w_uk": (2, 128, 448)}, "w_uk.shape"),
        ({"quantise": True}, "quantise: got True, expected False with w_uk"),
        ({"odd": "q"}, "q.strides"),
        ({"odd": "out"}, "out.strides"),
        ({"out": (5, 2, 192)}, "out.shape"),
    ],
    ids=str,
)
def test_bad_input(changed: dict[str, Any], expected: str) -> None:
    arrays, options = make(AbsorbedCase(record=""))
    for name, x in changed.items():
        if name == "quantise":
            options[name] = x
        elif name == "odd":
            wide = np.zeros((5, 2, 577 if x == "out" else 193), ml_dtypes.bfloat16)
            arrays[x] = wide[..., 1:]
        else:
            arrays[name] = np.zeros(x, ml_dtypes.bfloat16)
    with simulated(1) as target, pytest.raises(mla_cupy.MlaError, match=re.escape(expected)):
        mla_cupy.mla_prepare(**arrays, **options)
    assert target.launched == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"rope": (5, 64)}, "rope: got an array, expected None: q has no RoPE part"),
        ({"positions": (5,), "theta": 1e4}, "positions: got an array, expected None: q has no RoPE part"),
        ({"cos": (9, 32), "sin": (9, 32)}, "cos: got an array, expected None: q has no RoPE part"),
        ({"theta": 1e4}, "theta: got 10000.0, expected None: q has no RoPE part"),
        ({"return_rope": True}, "rope: got None"),
        ({"cache": (6, 4, 576)}, "rope: got None, expected an array of width 64 for bf16"),
        ({"out": (5, 2, 576)}, "out.shape"),
        ({"quantise": True}, "quantise: got True, expected False with w_uk"),
    ],
    ids=str,
)
def test_bad_input_without_rope(changed: dict[str, Any], expected: str) -> None:
    arrays, options = make(K3)
    kinds: dict[str, Any] = {"positions": np.int64, "cos": np.float32, "sin": np.float32}
    for name, x in changed.items():
        options[name] = np.zeros(x, kinds.get(name, ml_dtypes.bfloat16)) if isinstance(x, tuple) else x
    with simulated(1) as target, pytest.raises(mla_cupy.MlaError, match=re.escape(expected)):
        mla_cupy.mla_prepare(**arrays | options)
    assert target.launched == []


FEW = AbsorbedCase(n=11, h=2, d_nope=64, return_rope=True)
MANY = AbsorbedCase(n=134, h=1, d_nope=64, record="")  # more than a share's blocks turn at once

test_is_caught, test_as_it_is = mutant_suite(
    "cache_absorb",
    [
        partial(check, FEW, ("late", 0)),
        partial(check, MANY, ("late", 0), 1),
        partial(check, FEW, ("early", 0)),
        partial(check, FEW, ("random", 1)),
    ],
    {
        "bar.sync": (3, [0, 1]),
        "cp.async.wait_group": (2, [0, 1]),
        "cp.async.commit_group": (3, [0, 1]),
    },
    [Mutant("RoPE of the first head", "cache_absorb", ": first, block.head,", ": first, 0,")],
)
