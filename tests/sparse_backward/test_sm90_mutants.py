"""Bugs planted in the Hopper kernel of the sparse backward: each must show, the kernel as it is must not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import mla_cupy
from tests.support import mutants
from tests.support.gradients import check_gradients
from tests.support.sim_driver import simulated
from tests.support.sparse_cases import SparseCase, make

KERNEL = "sparse_backward_sm90"
SOURCE = "sparse_backward/sm90.cu"


def with_heads(h_q: int) -> SparseCase:
    return SparseCase(s_q=2, s_kv=60, h_q=h_q, topk=20, invalid=0.0)


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """So many heads show it."""

    h_q: int = 16


MUTANTS = [
    Mutant("half of the few heads", SOURCE, "run_reduce_role<kMaxHeads / kMmaK>", "run_reduce_role<1>", 17),
    Mutant(
        "half of the heads", SOURCE, "run_reduce_role<kMaxHeads / kMmaK>", "run_reduce_role<kMaxHeads / 2 / kMmaK>", 33
    ),
    Mutant("few heads are all heads", SOURCE, "p.h_q <= kMmaK)", "p.h_q <= 3 * kMmaK)", 33),
]


@mutants.as_verdict
def verdict(h_q: int, deterministic: bool = False) -> None:
    """What a run shows; empty if nothing."""
    inputs = make(with_heads(h_q))
    with simulated(2, (9, 0)):
        got = mla_cupy.sparse_mla_backward(
            *inputs.backward_arguments, **inputs.options, kernel=KERNEL, deterministic=deterministic
        )
    check_gradients(got, inputs, deterministic=deterministic)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_is_caught(mutant: Mutant, plant: mutants.Plant) -> None:
    plant(mutant)
    assert verdict(mutant.h_q), f"nothing shows that {mutant.name}"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("h_q", [16, 17, 32, 33])
def test_as_it_is(h_q: int, deterministic: bool) -> None:
    """On both sides of where another build begins, or fewer products."""
    assert verdict(h_q, deterministic) == ""
