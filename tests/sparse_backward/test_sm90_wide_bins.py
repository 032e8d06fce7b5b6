"""Deterministic sums of dkv that do not fit the L2, on Hopper: 64 dims of a row go to one bin."""

from __future__ import annotations

import numpy as np
import pytest

import mla_cupy
from mla_cupy.kernels.exact_sums.launches import NUM_BINS
from mla_cupy.kernels.sparse_backward import SPARSE_BACKWARD
from tests.support import mutants
from tests.support.flat import flat
from tests.support.gradients import check_gradients, problem_of
from tests.support.sim_driver import fake_gpu, simulated
from tests.support.sparse_cases import Array, SparseCase, SparseInputs, make

SOURCE = "sparse_backward/sm90.cu"
LEVEL_BITS = 4
DIMS = 64
#: Rows are selected up to three times.
CASE = SparseCase(s_q=2, s_kv=60, h_q=40, topk=33, invalid=0.0)

MUTANTS = [
    mutants.Mutant("bins of half of the dims", SOURCE, "i = 2 * r; i < 32; i += 4", "i = 2 * r; i < 16; i += 4"),
    mutants.Mutant("keys have each other's bins", SOURCE, "index(odd ? other : mine)", "index(odd ? mine : other)"),
    mutants.Mutant("all keys have one bin", SOURCE, "bins.get(r, i);", "bins.get(0, 0);"),
    mutants.Mutant("all keys have one quantum", SOURCE, "extractors.get(r, i) <<", "extractors.get(0, 0) <<"),
]


def run(inputs: SparseInputs, mode: tuple[str, int]) -> tuple[list[Array], Array, float]:
    """The results, the sums, (bins, rows, 576), and the bound of the bins."""
    problem = problem_of(inputs.case, deterministic=True, aligned_out=True)
    space = SPARSE_BACKWARD.workspace(SPARSE_BACKWARD.configure(problem, fake_gpu(2), "sparse_backward_sm90"))
    workspace = np.full(space.nbytes, 0xFF, np.uint8)

    def part(name: str, elements: int) -> Array:
        return workspace[space.offsets[name] :][: 4 * elements].view(np.float32)

    with simulated(2, (9, 0), *mode, l2_bytes=1 << 10):
        got = flat(mla_cupy.sparse_mla_backward)(
            *inputs.backward_arguments,
            **inputs.backward_options,
            kernel="sparse_backward_sm90",
            deterministic=True,
            workspace=workspace,
        )
    rows = inputs.case.s_kv
    sums = part("sums", NUM_BINS * rows * 576).reshape(NUM_BINS, rows, 576)
    return list(got), sums.copy(), float(part("extractors", rows + 1)[rows])


@mutants.as_verdict
def verdict(mode: tuple[str, int] = ("early", 0)) -> None:
    """What a run shows; empty if nothing."""
    inputs = make(CASE)
    got, sums, bound = run(inputs, mode)
    check_gradients(got, inputs, deterministic=True)
    again, _, _ = run(inputs, ("random", 3))
    assert all(x is None or x.tobytes() == y.tobytes() for x, y in zip(got, again, strict=True))
    selected = np.bincount(np.concatenate(inputs.rows), minlength=CASE.s_kv)
    once = np.abs(sums[:, selected == 1]).reshape(NUM_BINS, -1, DIMS).max(axis=-1)
    assert once.any(axis=0).all()
    assert ((once > 0).sum(axis=0) == 1).all(), "64 dims of a row are in one bin"
    found, largest = once.argmax(axis=0), once.max(axis=0)
    room = bound / 2.0 ** (LEVEL_BITS * found)
    assert (largest <= room).all(), "the bin has room for them"
    assert ((largest > room / 2.0**LEVEL_BITS) | (found == NUM_BINS - 1)).all(), "no finer one has"
    assert len(set(found)) > 1
    # A row that one query selects twice has sums of even multiples.
    few, many = (min(_quantum(row) for row in sums[3, selected == n] if np.count_nonzero(row) > 300) for n in (1, 3))
    assert many == 2 * few, "room for the numbers of each row"


def _quantum(numbers: Array) -> float:
    """The largest power of two that divides all of them."""
    exponent = 0
    while (numbers.astype(np.float64) / 2.0**exponent % 1).any():
        exponent -= 1
    return 2.0**exponent


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_is_caught(mutant: mutants.Mutant, plant: mutants.Plant) -> None:
    plant(mutant)
    assert verdict(), f"nothing shows that {mutant.name}"


def test_as_it_is() -> None:
    assert verdict(("late", 0)) == ""
