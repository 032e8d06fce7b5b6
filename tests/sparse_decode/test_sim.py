"""`sparse_mla_decode` in the simulator, with planted bugs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest

import mla_cupy
from mla_cupy.kernels.sparse_decode.problem import SparseDecodeProblem
from mla_cupy.kernels.sparse_decode.schedule import Cuts, even_cuts
from tests.sparse_decode.runs import (
    CASES,
    MORE_CASES,
    NOPE_CASES,
    ON_HOPPER,
    V41_CASES,
    V41_WIDE,
    SparseDecodeCase,
    check,
    check_call,
    fitting,
    make,
)
from tests.support.flat import flat
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated


@pytest.mark.one_in(12)
@pytest.mark.parametrize("case", [*CASES, *NOPE_CASES, *V41_CASES], ids=str)
def test_equals_the_oracle(case: SparseDecodeCase) -> None:
    with simulated(case.sm_count):
        check(case, lambda x: x, np.asarray)


MODES = ("early", "late", "random")
#: Each case in one mode; the kernel for many heads, which takes longer, in the main ones.
RUNS = [(kernel, case) for kernel in ON_HOPPER for case in CASES[: 4 if kernel == "sparse_decode_sm90" else None]]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("kernel", "case"), RUNS)
def test_tensor_cores_are_as_exact_as_their_formats(case: SparseDecodeCase, kernel: str) -> None:
    """Results in float32, and some in the dtype of the queries."""
    turn = CASES.index(case)
    case, mode = fitting(case, kernel), MODES[(turn + turn // 3) % len(MODES)]
    with simulated(case.sm_count, mode=mode, seed=7):
        check(case, lambda x: x, np.asarray, kernel, case.dtype if case.s_q > 1 else "float32")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", ON_HOPPER)
@pytest.mark.parametrize("case", NOPE_CASES, ids=str)
def test_tokens_without_rope_on_tensor_cores(case: SparseDecodeCase, kernel: str) -> None:
    case, mode = fitting(case, kernel), MODES[NOPE_CASES.index(case)]
    with simulated(case.sm_count, mode=mode, seed=3):
        check(case, lambda x: x, np.asarray, kernel, case.dtype if case.s_q > 1 else "float32")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kernel", [*ON_HOPPER, "sparse_decode_mma", "sparse_decode_generic"])
def test_shorter_tokens_without_rope(kernel: str) -> None:
    """Tokens of 528 bytes in both caches, the second one copied, give the bits of those of 656."""
    case = fitting(replace(NOPE_CASES[1], s_q=1), kernel)
    call = {**make(case), "kernel": kernel}
    short = {"kv_cache": call["kv_cache"][..., :528], "extra_kv_cache": call["extra_kv_cache"][..., :528].copy()}
    with simulated(1):
        whole = flat(mla_cupy.sparse_mla_decode)(**call)
        got = flat(mla_cupy.sparse_mla_decode)(**{**call, **short}, kv_format="v32-nope")
    for mine, expected in zip(got, whole, strict=True):
        np.testing.assert_array_equal(mine, expected)


#: V4.1 runs, each in one mode. Further runs of the seesaw take longer and are marked slow.
V41_RUNS = [
    (kernel, case)
    for kernel in ON_HOPPER
    for case in (*V41_CASES, V41_WIDE)
    if not (kernel == "sparse_decode_sm90" and case.extra_record) or case is V41_CASES[2]
]
V41_OF_THE_SEESAW = [("sparse_decode_sm90", case) for case in (*V41_CASES[3:], V41_WIDE)]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("kernel", "case"), V41_RUNS)
def test_v41_on_tensor_cores(case: SparseDecodeCase, kernel: str) -> None:
    mode = MODES[(V41_RUNS.index((kernel, case)) + 2) % len(MODES)]
    case = fitting(case, kernel)
    with simulated(case.sm_count, mode=mode, seed=5):
        check(case, lambda x: x, np.asarray, kernel)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "case"), [*V41_RUNS, *V41_OF_THE_SEESAW])
@pytest.mark.parametrize("mode", MODES)
def test_v41_in_all_modes(case: SparseDecodeCase, kernel: str, mode: str) -> None:
    case = fitting(case, kernel)
    for out_dtype in ("float32", case.dtype):
        with simulated(case.sm_count, mode=mode, seed=13):
            check(case, lambda x: x, np.asarray, kernel, out_dtype)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ON_HOPPER)
@pytest.mark.parametrize("case", [*CASES, *NOPE_CASES, *MORE_CASES], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_all_cases_on_tensor_cores(case: SparseDecodeCase, mode: str, kernel: str) -> None:
    case = fitting(case, kernel)
    for out_dtype in ("float32", case.dtype):
        with simulated(case.sm_count, mode=mode, seed=11):
            check(case, lambda x: x, np.asarray, kernel, out_dtype)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", ON_HOPPER)
def test_rows_of_any_size_keep_to_themselves(kernel: str) -> None:
    """Queries in bfloat16 reach far beyond float16, in which the keys are; Inf and NaN concern their own rows only."""
    case = fitting(SparseDecodeCase(b=1, h_q=5, topk=70, sm_count=1), kernel)
    call = make(case)
    factors = np.ones((1, 1, case.h_q, 1))
    factors[0, 0, 1:3, 0] = 1e5, 1e-30
    call["q"] = (call["q"].astype(np.float32) * factors).astype(call["q"].dtype)
    wild = {**call, "q": call["q"].copy()}
    wild["q"][0, 0, 3, 7], wild["q"][0, 0, 4, 570] = np.nan, np.inf
    with simulated(1):
        check_call(case, call, lambda x: x, np.asarray, kernel)
        out, lse = flat(mla_cupy.sparse_mla_decode)(**wild, kernel=kernel)
        tame, _ = flat(mla_cupy.sparse_mla_decode)(**call, kernel=kernel)
    np.testing.assert_array_equal(np.delete(out, (3, 4), axis=2), np.delete(tame, (3, 4), axis=2))
    assert np.isnan(out[0, 0, 3]).all()
    assert np.isnan(lse[0, 0, 3])
    assert not np.isfinite(out[0, 0, 4]).all()


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kernel", [*ON_HOPPER, "sparse_decode_generic"])
@pytest.mark.parametrize("held", [0, 100])
def test_pieces_may_have_no_token(kernel: str, held: int) -> None:
    """The schedule cuts a list of six tiles into three pieces; of its entries the last ones, or all, are no tokens."""
    case = fitting(SparseDecodeCase(record="v4", b=1, h_q=2, topk=640, sink=True, sm_count=5), kernel)
    call = make(case)
    call["indices"][..., held:] = -1
    with simulated(case.sm_count) as driver:
        check_call(case, call, lambda x: x, np.asarray, kernel)
    assert "mla_attention_combine" in driver.launched


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", ON_HOPPER)
def test_cuts_may_be_anywhere(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three splits of four queries of two tiles each: the first ends within a query, and so does the second."""
    case = fitting(SparseDecodeCase(b=4, h_q=2, topk=70, sm_count=3), kernel)
    monkeypatch.setattr("mla_cupy.kernels.sparse_decode.schedule.even_cuts", lambda *sizes: Cuts(3, 2, 1))
    with simulated(case.sm_count) as driver:
        check_call(case, make(case), lambda x: x, np.asarray, kernel)
    assert driver.launched[-1] == "mla_attention_combine"


def merge_equal_pieces(pieces: int) -> None:
    """Two queries with equally many tiles, each in a separate piece; the last tiles of the second hold no token."""
    case = SparseDecodeCase(b=2, h_q=3, topk=64 * pieces, sink=True, sm_count=2 * pieces)
    call = make(case)
    call["indices"][1, :, 70:] = -1
    with simulated(case.sm_count) as driver:
        check_call(case, call, lambda x: x, np.asarray, "sparse_decode_generic")
    assert driver.launched[-1] == "mla_attention_combine"


@pytest.mark.parametrize("pieces", [pytest.param(n, marks=[pytest.mark.slow] if n != 5 else []) for n in (2, 5, 8, 9)])
def test_equal_pieces(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to eight of each query are merged without a list."""
    monkeypatch.setattr("mla_cupy.kernels.sparse_decode.schedule.even_cuts", lambda *_: Cuts(2 * pieces, pieces, 1))
    merge_equal_pieces(pieces)


def test_even_cuts() -> None:
    """Whole queries, equal pieces of a query, and cuts anywhere where too many blocks would wait."""
    problem = SparseDecodeProblem(128, 16, 2048, "bfloat16", "v32")
    assert even_cuts(problem, 16, 132) == Cuts(128, 1, 32)
    assert even_cuts(replace(problem, queries=1), 16, 132) == Cuts(32, 32, 1)
    assert even_cuts(replace(problem, queries=1, h_q=32), 16, 66) == Cuts(32, 32, 1)
    assert even_cuts(replace(problem, queries=1, h_q=64), 16, 33) == Cuts(16, 32, 1)
    assert even_cuts(replace(problem, queries=16), 16, 132) == Cuts(128, 32, 1)
    assert even_cuts(replace(problem, queries=150), 16, 132) == Cuts(132, 32, 1)
    assert even_cuts(replace(problem, topk=0), 16, 132) == Cuts(128, 1, 1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("h_q", [2, 33])
def test_queries_may_start_anywhere(h_q: int) -> None:
    """One kernel needs them at multiples of 16 bytes; the other takes any number of heads."""
    case = SparseDecodeCase(b=1, h_q=h_q, topk=3)
    call = make(case)
    shifted = np.zeros((1, 1, h_q, 580), call["q"].dtype)[..., 3:579]
    shifted[...] = call["q"]
    with simulated(1) as driver:
        check_call(case, {**call, "q": shifted}, lambda x: x, np.asarray, None)
    assert "mla_sparse_decode_sm90_small" in driver.launched


def test_heads_and_tiles_decide() -> None:
    """Blocks of 64 heads are for more than 32 of them, and for splits of many tiles."""
    small, large = "mla_sparse_decode_sm90_small", "mla_sparse_decode_sm90"
    for h_q, topk, entry in ((32, 5, small), (33, 5, small), (33, 257, large)):
        case = SparseDecodeCase(b=1, h_q=h_q, topk=topk, sm_count=1)
        with simulated(1) as driver:
            check_call(case, make(case), lambda x: x, np.asarray, None)
        assert entry in driver.launched


# ---- Planted bugs ----------------------------------------------------------------------------------------------

#: Two lists, of several warps' entries and of two tiles, lengths and a sink.
SEEN_BY = SparseDecodeCase(record="v4", topk=170, extra=33, lengths=True, sink=True, h_q=3)
TEXTS = [
    Mutant("both lanes count", "attention/generic_records.cuh", "counts && half == 0", "counts"),
    Mutant(
        "extra entries follow all of the first",
        "attention/record_tokens.cuh",
        "token < item.tokens_in_first",
        "token < p.max_pages",
    ),
]
TEXTS_OF_SCHEDULE = [Mutant("a query is not scheduled", "sparse_decode_schedule", "b(p.queries)", "b(p.queries - 1)")]
TEXTS_OF_MERGE = [
    Mutant("no sink", "attention_combine", "final_factor(p, head, max.low, sum.low)", "1.f / sum.low"),
]


def run(mode: str, kernel: str = "sparse_decode_generic", cc: tuple[int, int] = (9, 0)) -> None:
    with simulated(2, cc, mode):
        check(SEEN_BY, lambda x: x, np.asarray, kernel)


def merge() -> None:
    with mock.patch("mla_cupy.kernels.sparse_decode.schedule.even_cuts", return_value=Cuts(10, 5, 1)):
        merge_equal_pieces(5)


def merge_many() -> None:
    """Pieces of one query, by blocks."""
    with simulated(12, (8, 9), "late") as target:
        check(SparseDecodeCase(b=1, h_q=2, topk=760, sink=True), lambda x: x, np.asarray, "sparse_decode_mma")
    assert target.launched[-1] == "mla_attention_combine"


test_is_caught, test_as_it_is = mutant_suite(
    "sparse_decode_generic",
    [partial(run, "late"), partial(run, "early")],
    {"bar.sync": (5, [0, 2])},
    TEXTS,
)
test_is_caught_of_mma, test_as_it_is_of_mma = mutant_suite(
    "sparse_decode_mma",
    [partial(run, mode, "sparse_decode_mma", (8, 9)) for mode in ("late", "early")],
    {
        "bar.sync": (8, [4, 7]),
        "cp.async.wait_group": (2, [0]),
    },
)
test_is_caught_of_schedule, test_as_it_is_of_schedule = mutant_suite(
    "sparse_decode_schedule",
    [partial(run, "late", "sparse_decode_mma", (8, 9))],
    {"bar.sync": (14, [3, 13])},
    TEXTS_OF_SCHEDULE,
)
test_is_caught_of_merge, test_as_it_is_of_merge = mutant_suite(
    "attention_combine",
    [merge_many, merge],
    {"bar.sync": (7, [6])},
    TEXTS_OF_MERGE,
)
