"""The mma.sync kernel of the sparse backward in the simulator, from the PTX of the GPUs that it is for."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from mla_cupy.kernels.sparse_backward import mma
from tests.sparse_backward.test_sim import run
from tests.support.gradients import check_gradients
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sparse_cases import SparseCase, make

MMA = mma.KERNEL.name


@pytest.mark.one_in(4)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("cc", [(12, 0), (9, 0)], ids=str)
def test_on_newer_gpus(cc: tuple[int, int], deterministic: bool) -> None:
    """Four numbers are added at once, in another order; the kernel's other tests run on older ones."""
    inputs = make(SparseCase(s_q=2, s_kv=90, h_q=35, topk=40, lengths=True))
    got = run(inputs, MMA, ("random", 2), cc, deterministic=deterministic)
    check_gradients(got, inputs, deterministic=deterministic)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cc", [(8, 0), (8, 6)], ids=str)
def test_what_counts_for_nothing_may_be_anything(cc: tuple[int, int]) -> None:
    """Heads without a gradient, and rows that nobody selects."""
    case = SparseCase(s_q=2, s_kv=60, h_q=35, topk=20, invalid=0.0)
    inputs = make(case)
    heads = [0, 34]
    inputs.lse[:, heads] = -np.inf
    inputs.q[:, heads] = np.nan
    inputs.dout[:, 34] = np.inf
    unselected = np.setdiff1d(np.arange(case.s_kv), inputs.indices)
    inputs.kv[unselected] = np.nan
    dq, dkv, _ = (x if x is None else x.astype(np.float32) for x in run(inputs, MMA, ("random", 4), cc))
    assert unselected.size > 0
    assert not dq[:, heads].any()
    assert not dkv[unselected].any()
    assert np.isfinite(dq).all()
    assert np.isfinite(dkv).all()
    assert dq[:, 1:34].any(axis=-1).all()


#: Several steps, the last one not whole; a part of the heads.
HARD = make(SparseCase(s_q=2, s_kv=90, h_q=20, topk=75, invalid=0.0))
TEXTS = [
    Mutant("half of the columns", MMA, "low[r].x + high[r].x", "low[r].x"),
]


def run_and_check(mode: tuple[str, int]) -> None:
    check_gradients(run(HARD, MMA, mode, (8, 6)), HARD)


test_is_caught, test_as_it_is = mutant_suite(
    MMA,
    [partial(run_and_check, mode) for mode in (("late", 0), ("early", 0))],
    {"bar.sync": (6, [0, 3]), "cp.async.wait_all": (2, [0])},
    TEXTS,
)
