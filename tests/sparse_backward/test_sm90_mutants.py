"""Bugs planted in the Hopper kernel of the sparse backward: each must show, the kernel as it is must not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import mla_cupy
from tests.support import mutants
from tests.support.flat import flat
from tests.support.gradients import check_gradients
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES
from tests.support.sparse_cases import SparseCase, make

KERNEL = "sparse_backward_sm90"
SOURCE = "sparse_backward/sm90.cu"


def with_heads(h_q: int, s_q: int = 2, topk: int = 20) -> SparseCase:
    return SparseCase(s_q=s_q, s_kv=60, h_q=h_q, topk=topk, invalid=0.0)


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """So many heads show it, so many queries and indices, and a mode of the simulator."""

    h_q: int = 16
    s_q: int = 2
    topk: int = 20
    mode: tuple[str, int] = ("early", 0)


MUTANTS = [
    Mutant("half of the few heads", SOURCE, "run_reduce_role<kMaxHeads / kMmaK>", "run_reduce_role<1>", 17),
    Mutant(
        "half of the heads", SOURCE, "run_reduce_role<kMaxHeads / kMmaK>", "run_reduce_role<kMaxHeads / 2 / kMmaK>", 33
    ),
    Mutant("few heads are all heads", SOURCE, "p.h_q <= kMmaK)", "p.h_q <= 3 * kMmaK)", 33),
    Mutant("no delta of the first item", SOURCE, "        make_first_deltas(block);\n", ""),
    Mutant("no delta ahead", SOURCE, "if (makes_delta) deltas.start(", "if (0) deltas.start(", s_q=3),
    Mutant(
        "the loads of one delta alone", SOURCE, "if (makes_delta) deltas.finish(", "if (0) deltas.finish(", 4, s_q=3
    ),
    Mutant("every fourth delta", SOURCE, "* kWarpgroupWarps + thread / kWarpThreads;", "* kWarpgroupWarps;", s_q=3),
    Mutant("one delta of several", SOURCE, "count > 1 && i < count", "count > 1 && i < 1", s_q=3),
    Mutant("deltas of the first tile only", SOURCE, "row = at.tile * share", "row = 0 * share", 40, s_q=3, topk=130),
    Mutant(
        "deltas of the first tile of a long list only",
        SOURCE,
        "row = at.tile * share",
        "row = 0 * share",
        8,
        s_q=4,
        topk=1030,
    ),
    Mutant("delta of the same item again", SOURCE, "seek(block, at.pass + 1, Nothing{}).pass", "at.pass", s_q=3),
    Mutant(
        "deltas are not waited for",
        SOURCE,
        *mutants.steps("bar.sync", 1, of=2),
    ),
    Mutant("dS of the first heads", SOURCE, "reduce.ds[step % kStepsInRegs]", "reduce.ds[0]", 33),
    Mutant("dS all from registers", SOURCE, "if (step < kStepsInRegs) {", "if (true) {", 64),
    Mutant("dS is not waited for", SOURCE, *mutants.steps("mbarrier.try_wait", 1, 3, of=31)),
    Mutant(
        "Q of the next item too early",
        SOURCE,
        *mutants.steps("mbarrier.try_wait", *range(4, 13), *range(22, 31), of=31),
        s_q=3,
    ),
    Mutant(
        "Q given back with every tile", SOURCE, "if (at.last()) release(s.q_empty", "release(s.q_empty", s_q=5, topk=70
    ),
    Mutant("copies are not waited for", SOURCE, *mutants.steps("cp.async.wait_all", 0, 1, of=2), mode=("late", 0)),
]


@mutants.as_verdict
def verdict(case: SparseCase, deterministic: bool = False, mode: tuple[str, int] = ("early", 0)) -> None:
    """What a run shows; empty if nothing."""
    inputs = make(case)
    with simulated(2, (9, 0), *mode) as target:
        target.race_global = True
        got = flat(mla_cupy.sparse_mla_backward)(
            *inputs.backward_arguments, **inputs.options, kernel=KERNEL, deterministic=deterministic
        )
    check_gradients(got, inputs, deterministic=deterministic)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_is_caught(mutant: Mutant, plant: mutants.Plant) -> None:
    plant(mutant)
    shown = verdict(with_heads(mutant.h_q, mutant.s_q, mutant.topk), mode=mutant.mode)
    assert shown, f"nothing shows that {mutant.name}"


@pytest.mark.one_in(8)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("h_q", [4, 16, 17, 32, 33, 49])
def test_as_it_is(h_q: int, deterministic: bool) -> None:
    """On both sides of where another build begins, or fewer products."""
    assert verdict(with_heads(h_q), deterministic) == ""


@pytest.mark.slow
def test_one_head_with_each_tile_of_a_long_list() -> None:
    assert verdict(with_heads(8, 4, 1030)) == ""  # not three: the last one would be cut into pieces


@pytest.mark.one_in(8)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("h_q", "s_q", "topk"), [(4, 3, 70), (16, 3, 130), (16, 5, 70), (40, 3, 130)])
def test_several_items_as_they_are(h_q: int, s_q: int, topk: int, mode: tuple[str, int]) -> None:
    assert verdict(with_heads(h_q, s_q, topk), mode=mode) == ""
