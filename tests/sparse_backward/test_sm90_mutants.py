"""The Hopper kernel of the sparse backward with any number of heads, and bugs planted in it."""

from __future__ import annotations

from functools import partial

import pytest

import mla_cupy
from tests.support.flat import flat
from tests.support.gradients import check_gradients
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES
from tests.support.sparse_cases import SparseCase, make

KERNEL = "sparse_backward_sm90"
SOURCE = "sparse_backward_sm90"


def with_heads(h_q: int, s_q: int = 2, topk: int = 20) -> SparseCase:
    return SparseCase(s_q=s_q, s_kv=60, h_q=h_q, topk=topk, invalid=0.0)


def run(case: SparseCase, deterministic: bool = False, mode: tuple[str, int] = ("early", 0)) -> None:
    inputs = make(case)
    with simulated(2, (9, 0), *mode) as target:
        target.race_global = True
        got = flat(mla_cupy.sparse_mla_backward)(
            *inputs.backward_arguments, **inputs.options, kernel=KERNEL, deterministic=deterministic
        )
    check_gradients(got, inputs, deterministic=deterministic)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("h_q", [4, 16, 17, 32, 33, 49])
def test_numbers_of_heads(h_q: int, deterministic: bool) -> None:
    """Numbers of heads on both sides of each switch to another build or to fewer products."""
    run(with_heads(h_q), deterministic)


@pytest.mark.slow
def test_one_head_with_each_tile_of_a_long_list() -> None:
    run(with_heads(8, 4, 1030))  # not three: the last one would be cut into pieces


@pytest.mark.one_in(12)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("h_q", "s_q", "topk"), [(4, 3, 70), (16, 3, 130), (16, 5, 70), (40, 3, 130)])
def test_several_items(h_q: int, s_q: int, topk: int, mode: tuple[str, int]) -> None:
    run(with_heads(h_q, s_q, topk), mode=mode)


TEXTS = [
    Mutant("dS of the first heads", SOURCE, "reduce.ds[step % kStepsInRegs]", "reduce.ds[0]"),
]
test_is_caught, test_as_it_is = mutant_suite(
    KERNEL,
    [partial(run, with_heads(40, 3, 70), mode=mode) for mode in (("late", 0), ("early", 0), ("random", 1))],
    {
        "bar.sync": (2, [1]),
        "mbarrier.try_wait": (31, [15, 30]),
        "mbarrier.arrive": (30, [15]),
        "fence.proxy": (4, [0]),
        "cp.async.wait_all": (2, [0]),
        "wgmma.fence": (24, [12]),
        "wgmma.wait_group": (24, [12]),
    },
    TEXTS,
)
