"""Shared by the tests of Blackwell's dense decode from records and in FP8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.cases import DecodeCase, DecodeInputs
from tests.support.flat import mla_decode
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES

BLACKWELL = (10, 0)
QUICK_SEEDS, ALL_SEEDS = 2, 200
SEEDS = pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=() if i < QUICK_SEEDS else pytest.mark.slow) for i in range(ALL_SEEDS)]
)


def run(
    kernel: str, inputs: DecodeInputs, sm_count: int = 1, mode: tuple[str, int] = ("early", 0), **options: Any
) -> Any:
    """The public call of a kernel in the simulator."""
    with simulated(sm_count, BLACKWELL, *mode) as target:
        got = mla_decode(*inputs.arguments, **inputs.case.options, kernel=kernel, **options)
    assert f"mla_{kernel}" in target.launched
    return got


def in_turns(cases: Sequence[DecodeCase]) -> Any:
    """Each case with a number of multiprocessors and a mode, which take turns."""
    turns = [(case, (1, 3)[i % 2], MODES[i % len(MODES)]) for i, case in enumerate(cases)]
    return pytest.mark.parametrize(("case", "sm_count", "mode"), turns, ids=[case.id for case in cases])


def in_all_modes(cases: Sequence[DecodeCase]) -> Callable[[Any], Any]:
    """Each case in each mode with each number of multiprocessors."""

    def decorate(test: Any) -> Any:
        for names, values, ids in (
            ("case", cases, lambda case: case.id),
            ("mode", MODES, str),
            ("sm_count", [1, 3, 5], str),
        ):
            test = pytest.mark.parametrize(names, values, ids=ids)(test)
        return pytest.mark.slow(test)

    return decorate


def turn_of(seed: int) -> tuple[int, tuple[str, int]]:
    """The number of multiprocessors and the mode of a random case."""
    return 1 + seed % 6, ("random", seed) if seed % 3 else (("early", "late")[seed // 3 % 2], 0)


def random_sizes(seed: int, salt: int, longest: int) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A chooser, and what all random cases have: sizes that the tests of all kernels do not name, too."""
    rng = np.random.default_rng([seed, salt])

    def one_of(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    h_q = one_of(1, 3, 8, 16, 21, 32, 33, 64, 65)
    shard = int(rng.integers(3)) if rng.random() < 0.2 else None
    lengths = tuple(int(n) for n in rng.integers(0, rng.choice([5, 70, longest]), int(rng.integers(1, 4))))
    sizes = {"b": len(lengths), "seqlens": lengths, "h_q": h_q, "seed": seed}
    return one_of, sizes | {"cp_world": 1 if shard is None else 3, "cp_rank": shard or 0}
