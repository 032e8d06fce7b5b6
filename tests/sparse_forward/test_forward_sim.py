"""The kernels of the sparse forward in the simulator, through the public call, against the oracle.

Rows of kv that no query selects are NaN, lists end anywhere in a tile, and some are empty. An ordinary run takes a
pairwise choice of cases and modes; `--sim=full` takes them all.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

import mla_cupy
from tests.support.flat import flat
from tests.support.kernels import FORWARD_KERNELS, on_hopper
from tests.support.mutant_suite import Run, mutant_suite
from tests.support.sim_driver import fake_gpu, simulated
from tests.support.sim_modes import parametrize_pairs
from tests.support.sparse_cases import SparseCase, SparseInputs, make
from tests.support.sparse_gpu import problem_of
from tests.support.tolerance import check, check_lse

GENERIC = "attention_generic"
HOPPER = on_hopper(FORWARD_KERNELS)

# The sinks leave so little of some heads that float16 would lose it, and with it the measure of the error: they are for
# bfloat16.
CASES = [
    SparseCase(s_q=2, h_q=64, topk=64, invalid=0.0),  # one whole tile
    SparseCase(s_q=2, h_q=1, topk=1, invalid=0.0),
    SparseCase(s_q=3, h_q=16, topk=63, invalid=0.0, d_qk=512, sink=True),
    SparseCase(s_q=2, h_q=8, topk=65, invalid=0.0, dtype="float16"),  # two tiles, the last one with a single row
    SparseCase(s_q=5, h_q=32, topk=200, lengths=True, sink=True),  # empty lists and whole ones
    SparseCase(s_q=2, h_q=100, topk=200, d_qk=512, dtype="float16"),  # two blocks of heads, the last one not full
    SparseCase(s_q=1, h_q=128, topk=300, sink=True),
    SparseCase(s_q=2, s_kv=40, h_q=20, topk=130, causal=True, dtype="float16"),  # more slots than rows: duplicates
    SparseCase(s_q=6, h_q=5, topk=70, sequences=((2, 90), (0, 5), (3, 80)), causal=True, head_axis=True),
    SparseCase(s_q=3, h_q=64, topk=40, invalid=1.0, sink=True),  # nothing to attend to
    SparseCase(s_q=1, h_q=40, topk=400, sink=True),  # split
    SparseCase(s_q=2, h_q=16, topk=300, d_qk=512, sink=True),  # split, and tiles of both parities
]


def _fits(case: SparseCase, kernel: str) -> bool:
    return not FORWARD_KERNELS[kernel].unsupported(problem_of(case), fake_gpu(1))


PAIRS = [(case, kernel) for case, kernel in itertools.product(CASES, HOPPER) if _fits(case, kernel)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_hopper_kernels:
        parametrize_pairs(metafunc, PAIRS)


def run(
    inputs: SparseInputs,
    kernel: str,
    sm_count: int = 1,
    mode: tuple[str, int] = ("early", 0),
    cc: tuple[int, int] = (9, 0),
    **options: Any,
) -> tuple[tuple[Any, Any, Any], list[str]]:
    """The public call, checked against the oracle: its results, and the entries that it launched."""
    with simulated(sm_count, cc, *mode) as target:
        got = flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **inputs.options, kernel=kernel, **options)
    assert f"mla_{kernel}" in target.launched
    check(got[:2], inputs.exact[:2], inputs.rounded[:2], inputs.case.dtype)
    check_lse(got[2], inputs.exact[2], inputs.rounded[2])
    return got, target.launched


@pytest.mark.one_in(12)
def test_hopper_kernels(case: SparseCase, kernel: str, mode: tuple[str, int], sm_count: int) -> None:
    run(make(case), kernel, sm_count, mode)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("case", "cc", "sm_count"),
    [
        (SparseCase(s_q=3, s_kv=60, h_q=3, topk=40, lengths=True, sink=True, strides="odd"), (7, 5), 1),
        (SparseCase(s_q=1, s_kv=200, h_q=9, topk=150, d_qk=512, sink=True), (9, 0), 2),  # split
    ],
    ids=["odd", "split"],
)
def test_generic_kernel(case: SparseCase, cc: tuple[int, int], sm_count: int) -> None:
    run(make(case), GENERIC, sm_count, ("random", 3), cc)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", HOPPER)
def test_results_in_float32(kernel: str) -> None:
    """They are not rounded to 16 bits on the way."""
    inputs = make(SparseCase(s_q=2, h_q=19, topk=90, sink=True))
    (out, _, _), _ = run(inputs, kernel, out_dtype="float32")
    assert out.dtype == np.float32
    assert (out != out.astype(inputs.q.dtype).astype(np.float32)).mean() > 0.5


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", HOPPER)
def test_many_pieces_are_merged(kernel: str) -> None:
    """Blocks merge many pieces, warps merge few."""
    inputs = make(SparseCase(s_q=1, h_q=9, topk=760, s_kv=900, invalid=0.0, sink=True))
    assert "mla_attention_combine" in run(inputs, kernel, sm_count=12)[1]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("sm_count", [1, 3])
def test_what_one_query_selects_stays_with_it(kernel: str, sm_count: int) -> None:
    """NaN in the values, infinity in the RoPE columns; `max_logits` tells of NaN too."""
    inputs = make(SparseCase(s_q=4, s_kv=900, h_q=3, topk=150, invalid=0.0))
    rows = inputs.rows
    inputs.kv[np.setdiff1d(rows[2], np.concatenate(rows[:2] + rows[3:]))[0], 5] = np.nan
    inputs.kv[np.setdiff1d(rows[3], np.concatenate(rows[:3]))[0], 570] = np.inf
    (out, _, max_logits), _ = run(inputs, kernel, sm_count, ("random", 5))
    assert np.isfinite(out[:2].astype(np.float32)).all()
    assert np.isnan(max_logits[2]).all()


def runs(kernel: str, h_q: int) -> list[Run]:
    """One block has two queries of four tiles."""
    inputs = make(SparseCase(s_q=2, h_q=h_q, topk=197, invalid=0.0))
    return [partial(run, inputs, kernel, 1, mode) for mode in (("late", 0), ("early", 0), ("random", 1))]


test_is_caught, test_as_it_is = mutant_suite(
    "sparse_forward_sm90",
    runs("sparse_forward_sm90", 40),
    {
        "bar.sync": (6, [0, 3]),
        "bar.arrive": (3, [0]),
        "mbarrier.try_wait": (11, [0, 5]),
        "mbarrier.arrive": (12, [0]),
        "fence.proxy": (8, [7]),
        "cp.async.mbarrier": (3, [0]),
        "wgmma.fence": (9, [0]),
        "wgmma.wait_group": (7, [0]),
    },
)
test_is_caught_of_few_heads, test_as_it_is_of_few_heads = mutant_suite(
    "sparse_forward_sm90_small",
    runs("sparse_forward_sm90_small", 5),
    {
        "bar.sync": (11, [0, 5]),
        "bar.arrive": (2, [0]),
        "mbarrier.try_wait": (7, [0, 3]),
        "mbarrier.arrive": (7, [0]),
        "fence.proxy": (4, [0]),
        "cp.async.mbarrier": (3, [0]),
        "wgmma.fence": (4, [0]),
        "wgmma.wait_group": (4, [0]),
    },
)
