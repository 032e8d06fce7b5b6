"""Blackwell's kernel for sparse decode in the simulator, against the oracle, and with planted bugs.

No GPU has run it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import mla_cupy
from mla_cupy.kernels.sparse_decode import SPARSE_DECODE
from mla_cupy.kernels.sparse_decode.problem import SparseDecodeProblem
from tests.sparse_decode.runs import CASES, MORE_CASES, NOPE_CASES, SparseDecodeCase, check, check_call, make
from tests.support.flat import flat
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import fake_gpu, simulated
from tests.support.sim_modes import MODES

KERNEL = "sparse_decode_sm100"
RANDOM_CASES, SLOW_CASES = 10, 200


def random_case(seed: int) -> SparseDecodeCase:
    """Sizes that the tests of all kernels do not name, too."""
    rng = np.random.default_rng([seed, 200])
    extra = int(rng.choice([0, 0, 1, 30, 100]))
    return SparseDecodeCase(
        record=str(rng.choice(["v32", "v4"])),
        dtype=str(rng.choice(["bfloat16", "float16"])),
        b=int(rng.integers(1, 4)),
        s_q=int(rng.integers(1, 3)),
        h_q=int(rng.choice([1, 8, 16, 17, 32, 33, 64, 65])),
        topk=int(rng.integers(0, 200)),
        extra=extra,
        lengths=bool(rng.random() < 0.4),
        sink=bool(rng.random() < 0.4),
        empty=bool(extra and rng.random() < 0.2),
        page_size=int(rng.choice([1, 5, 64])),
        sm_count=int(rng.choice([1, 2, 5])),
    )


def run(case: SparseDecodeCase, mode: tuple[str, int], resident: int = 1, out_dtype: str = "float32") -> None:
    with simulated(case.sm_count, (10, 0), *mode) as driver:
        driver.resident = resident
        check(case, lambda x: x, np.asarray, KERNEL, out_dtype)
    assert "mla_sparse_decode_sm100" in driver.launched


@pytest.mark.one_in(16)
@pytest.mark.parametrize(
    "seed",
    [pytest.param(i, marks=[] if i < RANDOM_CASES else [pytest.mark.slow]) for i in range(SLOW_CASES)],
)
def test_random_cases(seed: int) -> None:
    mode = (("early", 0), ("late", 0), ("random", seed))[seed % 3]
    run(random_case(seed), mode)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *MORE_CASES], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_all_cases(case: SparseDecodeCase, mode: tuple[str, int]) -> None:
    for out_dtype in ("float32", case.dtype):
        run(case, mode, out_dtype=out_dtype)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", NOPE_CASES, ids=str)
def test_tokens_without_rope(case: SparseDecodeCase) -> None:
    run(case, MODES[NOPE_CASES.index(case)])


def test_blocks_side_by_side() -> None:
    """Two blocks of heads for each of two queries."""
    run(SparseDecodeCase(h_q=66, topk=70, sm_count=4), ("random", 7), resident=4, out_dtype="bfloat16")


def test_rows_of_any_size_keep_to_themselves() -> None:
    """Queries in bfloat16 reach far beyond float16, in which the keys are; Inf and NaN concern their own rows only."""
    case = SparseDecodeCase(b=1, h_q=5, topk=70, sm_count=1)
    call = make(case)
    factors = np.ones((1, 1, case.h_q, 1))
    factors[0, 0, 1:3, 0] = 1e5, 1e-30
    call["q"] = (call["q"].astype(np.float32) * factors).astype(call["q"].dtype)
    wild = {**call, "q": call["q"].copy()}
    wild["q"][0, 0, 3, 7], wild["q"][0, 0, 4, 570] = np.nan, np.inf
    with simulated(1, (10, 0)):
        check_call(case, call, lambda x: x, np.asarray, KERNEL)
        out, lse = flat(mla_cupy.sparse_mla_decode)(**wild, kernel=KERNEL)
        tame, _ = flat(mla_cupy.sparse_mla_decode)(**call, kernel=KERNEL)
    np.testing.assert_array_equal(np.delete(out, (3, 4), axis=2), np.delete(tame, (3, 4), axis=2))
    assert np.isnan(out[0, 0, 3]).all()
    assert np.isnan(lse[0, 0, 3])
    assert not np.isfinite(out[0, 0, 4]).all()


@pytest.mark.parametrize(("h_q", "rows"), [(1, 16), (16, 16), (17, 32), (33, 64), (128, 64)])
def test_default_where_the_self_test_has_admitted_it(h_q: int, rows: int) -> None:
    """A call gets the build for its heads, and Hopper refuses it by name."""
    problem = SparseDecodeProblem(4, h_q, 2048, "bfloat16", "v32")
    gpu = fake_gpu(148, (10, 0))
    assert SPARSE_DECODE.configure(problem, gpu).kernel.name == KERNEL
    assert SPARSE_DECODE.configure(problem, replace(gpu, admitted=frozenset())).kernel.name != KERNEL
    config = SPARSE_DECODE.configure(problem, gpu, KERNEL)
    assert config.variant.block_rows == rows
    assert config.row_blocks == -(-h_q // 64)
    with pytest.raises(mla_cupy.errors.UnsupportedDeviceError, match=r"compute capability 10\.0 or 10\.3"):
        SPARSE_DECODE.configure(problem, fake_gpu(132, (9, 0)), KERNEL)


# ---- Planted bugs

#: One block works on three requests, of one to three tiles.
CASE = SparseDecodeCase(scales="plain", b=3, topk=150, extra=20, lengths=True, h_q=7, sink=True, sm_count=1)
TEXTS = [
    Mutant("absent tokens count", "sparse_decode_sm100", "mask_absent(scores, s.present[stage], thread);", ""),
]


def run_rising() -> None:
    """Maxima rise from tile to tile."""
    call = make(CASE)
    call["q"] *= np.asarray(2000, call["q"].dtype)
    with simulated(1, (10, 0), "late"):
        check_call(CASE, call, lambda x: x, np.asarray, KERNEL)


test_is_caught, test_as_it_is = mutant_suite(
    KERNEL,
    [*(partial(run, CASE, mode) for mode in (("late", 0), ("early", 0), ("random", 1))), run_rising],
    {
        "bar.sync": (7, [0, 6]),
        "mbarrier.try_wait": (12, [0, 6]),
        "mbarrier.arrive": (5, [0]),
        "fence.proxy": (4, [0]),
        "fence.mbarrier_init": (1, [0]),
        "tcgen05.commit": (6, [0]),
        "tcgen05.wait::st": (1, [0]),
        "tcgen05.wait::ld": (3, [0]),
        "tcgen05.fence::before_thread_sync": (3, [1]),
        "tcgen05.fence::after_thread_sync": (7, [3]),
    },
    TEXTS,
)
