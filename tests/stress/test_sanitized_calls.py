"""Calls that are made for compute-sanitizer, in the simulator: that they are right, and which kernels they launch."""

from __future__ import annotations

from typing import Any

import pytest

from mla_cupy.kernels.attention import combine_project
from mla_cupy.kernels.cache import table
from mla_cupy.kernels.cache.absorb import ABSORB
from mla_cupy.kernels.decode import sm90_small
from mla_cupy.kernels.indexer.prepare import quantize
from mla_cupy.kernels.projection.pipeline import STATES
from tests.stress.sanitized import ends
from tests.stress.sanitized.families import FAMILIES
from tests.support.sim_driver import simulated


def same(x: Any) -> Any:
    return x


CALLS = {call.name: call for call in ends.calls(same, same)}
USUAL = [name for name in CALLS if name.startswith(("absorb", "index", "prepare d=512"))]
LAUNCHED = {
    "prepare": table.PREPARE,
    "index": quantize.KERNEL,
    "absorb": ABSORB,
    "merge": STATES,
    "decode": combine_project.KERNEL,
    "forms": sm90_small.KERNEL,
}
"""Kernel that the calls of a kind must reach, at least."""


def run(name: str) -> set[str]:
    """Make a call; returns the entries of the kernels that it launches."""
    with simulated(2) as target:
        CALLS[name].run()
    return set(target.launched)


@pytest.mark.parametrize("name", USUAL)
def test_a_call(name: str) -> None:
    assert LAUNCHED[name.split()[0]].entry in run(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CALLS if name not in USUAL])
def test_further_calls(name: str) -> None:
    assert run(name)


@pytest.mark.slow
def test_kernels_of_the_ends_are_launched() -> None:
    for kind, kernel in LAUNCHED.items():
        name = next(name for name in CALLS if name.split()[0] == kind)
        assert kernel.entry in run(name), name


def test_the_family_is_run() -> None:
    assert "ends" in FAMILIES
