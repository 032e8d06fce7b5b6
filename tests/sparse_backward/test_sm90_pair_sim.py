"""The sparse backward by pairs of blocks in the simulator, through the public call, against the oracle.

What all main kernels must do, test_sparse_backward_sim.py has.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from tests.support.flat import flat
from tests.support.gradients import check_gradients
from tests.support.mutant_suite import mutant_suite
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES
from tests.support.sparse_cases import SparseCase, SparseInputs, make

PAIR = "sparse_backward_sm90_pair"

CASES = [
    SparseCase(s_q=1, s_kv=60, h_q=65, topk=1, invalid=0.0),
    SparseCase(s_q=2, s_kv=200, h_q=128, topk=63, invalid=0.0, sink=True),
    SparseCase(s_q=2, s_kv=200, h_q=100, topk=65, d_qk=512, dtype="float16"),
    SparseCase(s_q=4, s_kv=300, h_q=128, topk=140, lengths=True, sink=True),  # a query that has no row
    SparseCase(s_q=3, s_kv=40, h_q=96, topk=130, causal=True, invalid=0.0),  # more slots than rows: duplicates
    SparseCase(s_q=6, s_kv=90, h_q=66, topk=40, sequences=((2, 30), (0, 5), (3, 40)), causal=True, dtype="float16"),
    SparseCase(s_q=2, s_kv=300, h_q=128, topk=256, invalid=0.0, d_qk=512),
    SparseCase(s_q=3, s_kv=50, h_q=70, topk=9, invalid=1.0, sink=True),  # nothing to attend to
    SparseCase(s_q=2, s_kv=70, h_q=128, topk=30, head_axis=True),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_matches_oracle:
        chosen = [(case, MODES[i % len(MODES)], i % 3 == 1) for i, case in enumerate(CASES)]
        ids = [
            f"{case.id}-{mode}{seed}{'-deterministic' if deterministic else ''}"
            for case, (mode, seed), deterministic in chosen
        ]
        metafunc.parametrize(("case", "mode", "deterministic"), chosen, ids=ids)


def run(inputs: SparseInputs, mode: tuple[str, int] = ("early", 0), sm_count: int = 2, **options: Any) -> Any:
    with simulated(sm_count, (9, 0), *mode) as target:
        got = flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.options, **options)
    assert f"mla_{PAIR}" in target.launched
    return got


@pytest.mark.one_in(16)
def test_matches_oracle(case: SparseCase, mode: tuple[str, int], deterministic: bool) -> None:
    inputs = make(case)
    check_gradients(run(inputs, mode, deterministic=deterministic), inputs, deterministic=deterministic)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("mode", MODES)
def test_several_pairs_with_several_queries(mode: tuple[str, int]) -> None:
    """Five SMs: two pairs."""
    inputs = make(SparseCase(s_q=5, s_kv=200, h_q=80, topk=70, lengths=True))
    check_gradients(run(inputs, mode, sm_count=5), inputs)


def test_heads_without_a_gradient() -> None:
    """An infinite lse means that there is none, whatever out and dout contain."""
    inputs = make(SparseCase(s_q=3, s_kv=90, h_q=72, topk=12, invalid=0.0))
    inputs.lse[0, [1, 66]], inputs.lse[2] = np.inf, -np.inf
    inputs.dout[0, [1, 66]], inputs.out[0, [1, 66]] = np.nan, np.inf
    inputs.dout[2], inputs.out[2] = np.nan, np.nan
    got = run(inputs)
    for x in (inputs.dout, inputs.out):
        x[~np.isfinite(inputs.lse)] = 0
    expected = reference.sparse_mla_backward(*inputs.backward_arguments)
    assert (got[0][0, [1, 66]] == 0).all()
    assert (got[0][2] == 0).all()
    for x, y in zip(got[:2], expected[:2], strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y, rtol=0, atol=2e-2 * np.abs(y).max())


def run_and_check(mode: tuple[str, int]) -> None:
    check_gradients(run(SEEN_BY, mode, kernel=PAIR), SEEN_BY)


SEEN_BY = make(SparseCase(s_q=2, s_kv=200, h_q=66, topk=70, invalid=0.0))
test_is_caught, test_as_it_is = mutant_suite(
    PAIR,
    [partial(run_and_check, mode) for mode in (("late", 0), ("early", 0))],
    {
        "barrier.cluster.arrive": (2, [0]),
        "barrier.cluster.wait": (2, [0]),
        "mbarrier.try_wait": (20, [10, 19]),
        "mbarrier.arrive": (18, [0]),
        "fence.proxy": (6, [0]),
        "cp.async.wait_all": (3, [0]),
        "wgmma.fence": (11, [0]),
        "wgmma.wait_group": (11, [0]),
    },
)
