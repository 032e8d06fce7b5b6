"""Deterministic sums of dkv that do not fit the L2, on Hopper: 64 dims of a row go to one bin."""

from __future__ import annotations

import numpy as np

import mla_cupy
from mla_cupy.kernels.exact_sums.launches import NUM_BINS
from mla_cupy.kernels.sparse_backward import SPARSE_BACKWARD
from tests.support.flat import flat
from tests.support.gradients import check_gradients, problem_of
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import fake_gpu, simulated
from tests.support.sparse_cases import Array, SparseCase, SparseInputs, make

LEVEL_BITS = 4
DIMS = 64
#: Rows are selected up to three times.
CASE = SparseCase(s_q=2, s_kv=60, h_q=40, topk=33, invalid=0.0)


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


def run_and_check() -> None:
    inputs = make(CASE)
    got, sums, bound = run(inputs, ("late", 0))
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


TEXTS = [
    Mutant("all have one quantum", "sparse_backward_sm90", "extractors.get(r, i) <<", "extractors.get(0, 0) <<"),
]
test_is_caught, test_as_it_is = mutant_suite("sparse_backward_sm90", [run_and_check], {}, TEXTS)
