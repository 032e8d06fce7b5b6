"""`independent=True` in the simulator, which runs launches one after another: where the kernel waits, and results."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import mla_cupy
import ptxsim
from tests.indexer.prepare.prepare_cases import both
from tests.support.calls import Array
from tests.support.sim_driver import instead_of_waiting, simulated

MARK, TOKENS, HEADS = 7, 5, 3


def call(independent: bool, paged: bool, d: int = 128) -> dict[str, Array]:
    """One call: everything that it writes."""
    given: dict[str, Any] = dict(both(d, tokens=TOKENS, heads=HEADS))
    written = {"codes": np.full((TOKENS, HEADS, d), MARK, np.uint8), "folded": np.full((TOKENS, HEADS), MARK, "f")}
    if paged:
        given["slots"] = np.arange(TOKENS)[::-1].copy()
        written["cache"] = np.full((2, 16, d + 4), MARK, np.uint8)
    else:
        given["return_k"] = True
        written |= {"k_codes": np.full((TOKENS, d), MARK, np.uint8), "k_scale": np.full(TOKENS, MARK, "f")}
    with simulated(2):
        mla_cupy.indexer_prepare(**given, **written, independent=independent)
    return written


def same(a: dict[str, Array], b: dict[str, Array]) -> bool:
    return all(a[name].tobytes() == b[name].tobytes() for name in a)


@pytest.mark.parametrize("paged", [False, True], ids=["arrays", "pages"])
def test_the_wait_comes_first_or_last(paged: bool) -> None:
    wanted = call(False, paged)
    assert same(call(True, paged), wanted)
    assert all((x != MARK).any() for x in wanted.values())
    with instead_of_waiting("exit;"):
        untouched, made = call(False, paged), call(True, paged)
    assert all((x == MARK).all() for x in untouched.values())
    assert same(made, wanted)
    for independent in (False, True):
        with instead_of_waiting("trap;"), pytest.raises(ptxsim.SimError, match="trap"):
            call(independent, paged)


@pytest.mark.parametrize("missing", ["codes", "folded", "k_codes", "k_scale"])
def test_results_are_memory_of_the_caller(missing: str) -> None:
    """New memory may be what the previous call, which still runs, has given back."""
    given: dict[str, Any] = {**both(64, tokens=TOKENS, heads=HEADS), "return_k": True, "independent": True}
    given["codes"], given["folded"] = np.empty((TOKENS, HEADS, 64), np.uint8), np.empty((TOKENS, HEADS), np.float32)
    given["k_codes"], given["k_scale"] = np.empty((TOKENS, 64), np.uint8), np.empty(TOKENS, np.float32)
    del given[missing]
    expected = f"{missing}: got None, expected an array with independent; allocate it before the previous call"
    with simulated(1) as target, pytest.raises(mla_cupy.ArgumentError, match=re.escape(expected)):
        mla_cupy.indexer_prepare(**given)
    assert target.launched == []


def test_on_the_host() -> None:
    given: dict[str, Any] = {**both(64, tokens=TOKENS, heads=HEADS), "return_k": True}
    wanted = mla_cupy.indexer_prepare(**given)
    names = ("codes", "folded", "k_codes", "k_scale")
    memory = {name: np.empty_like(x) for name, x in zip(names, wanted, strict=True)}
    got = mla_cupy.indexer_prepare(**given, **memory, independent=True)
    for mine, x, name in zip(got, wanted, names, strict=True):
        assert mine is memory[name]
        np.testing.assert_array_equal(mine, x)
    with pytest.raises(mla_cupy.ArgumentError, match="independent: got 2, expected True or False"):
        mla_cupy.indexer_prepare(**given, **memory, independent=2)  # type: ignore[arg-type]
