"""Lists cut into pieces where the last round of queries would leave most SMs without work, on Hopper."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

import mla_cupy
from mla_cupy.kernels.sparse_backward import SPARSE_BACKWARD, heuristics, sm90
from mla_cupy.kernels.sparse_backward.pieces import Pieces
from mla_cupy.kernels.sparse_backward.problem import SparseBackwardProblem
from tests.support.flat import flat
from tests.support.gradients import check_gradients
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.recorder import H200, Recorder
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES
from tests.support.sparse_cases import SparseCase, make
from tests.support.workspace import assert_laid_out

KERNEL = "sparse_backward_sm90"
SOURCE = "sparse_backward_sm90"
SUM_SOURCE = "sparse_backward_dq_pieces"

ALL_CUT = SparseCase(s_q=1, s_kv=200, h_q=4, topk=130, invalid=0.0)
#: Two queries as they are, one in two pieces of two tiles; delta comes before, since there are sinks.
LAST_CUT = SparseCase(s_q=3, s_kv=200, h_q=20, topk=200, lengths=True, sink=True)
#: Lists of all lengths; a third to two thirds of the pieces have no key.
SHORT = SparseCase(s_q=2, s_kv=150, h_q=3, topk=190, causal=True, invalid=0.6, dtype="float16")


def problem(s_q: int, topk: int = 2048, h_q: int = 64, d_qk: int = 576, **more: Any) -> SparseBackwardProblem:
    return SparseBackwardProblem(s_q, 8192, h_q, topk, d_qk, "bfloat16", **more)


def pieces_of(asked: SparseBackwardProblem) -> Pieces | None:
    return SPARSE_BACKWARD.configure(asked, H200).pieces


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Cases of a few tiles are cut, too."""
    if "measured" not in request.fixturenames:
        monkeypatch.setattr(heuristics, "MIN_SAVED_TILES", 1)


@pytest.fixture
def measured() -> None:
    """Cut as users' calls are."""


def run(case: SparseCase, sm_count: int = 2, mode: tuple[str, int] = ("early", 0)) -> None:
    inputs = make(case)
    with simulated(sm_count, (9, 0), *mode) as target:
        target.race_global = True
        got = flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.backward_options, kernel=KERNEL)
    assert "mla_sparse_backward_dq_pieces" in target.launched
    check_gradients(got, inputs)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("case", "sm_count", "mode"),
    [pytest.param(ALL_CUT, 2, MODES[1], marks=pytest.mark.slow), (LAST_CUT, 2, MODES[2]), (SHORT, 6, MODES[3])],
    ids=lambda x: x.id if isinstance(x, SparseCase) else str(x),
)
def test_results(case: SparseCase, sm_count: int, mode: tuple[str, int]) -> None:
    run(case, sm_count, mode)


def test_the_last_round_is_cut(measured: None) -> None:
    """4,096 queries are 31 rounds of 132 and four: each of these in 32 tiles."""
    cut = pieces_of(problem(4096))
    assert cut is not None
    assert (cut.first_query, cut.queries, cut.pieces, cut.piece_keys) == (4092, 4, 32, 64)
    assert cut.build in sm90.KERNEL.variants
    assert SPARSE_BACKWARD.configure(problem(4096), H200).grid == (132, 1, 1)


@pytest.mark.parametrize("s_q", [1, 2, 5, 40, 66, 133, 170, 300])
def test_pieces_cover_the_lists_and_have_an_sm_each(s_q: int) -> None:
    for topk in (65, 500, 2048, 2100):
        cut = pieces_of(problem(s_q, topk))
        if cut is None:
            assert topk < 2 * 64 * (s_q % 132)
            continue
        assert cut.first_query % 132 == 0
        assert cut.first_query + cut.queries == s_q
        assert cut.items <= 132
        assert (cut.pieces - 1) * cut.piece_keys < topk <= cut.pieces * cut.piece_keys
        assert cut.piece_keys % 64 == 0


@pytest.mark.parametrize(
    "asked",
    [
        problem(132 * 7),
        problem(1024, 512),  # 100 of 132 in the last round
        problem(4096, 64 * 4),  # so few tiles that starting pieces costs more
        problem(4096, h_q=65),
        problem(4096, d_qk=512),
        problem(4096, deterministic=True),
        problem(0),
        problem(5, 0),
    ],
    ids=str,
)
def test_what_is_not_cut(asked: SparseBackwardProblem, measured: None) -> None:
    assert pieces_of(asked) is None


def test_workspace() -> None:
    """A part of dq for each piece, and delta where the main kernel makes it."""
    for aligned_out in (False, True):
        config = SPARSE_BACKWARD.configure(problem(5, 130, 3, aligned_out=aligned_out), H200)
        assert config.pieces is not None
        assert config.pieces.items == 15
        per_head, parts = 4 * 5 * 3, 4 * 15 * 3
        needs = {"rows": 4 * 5 * 192, "counts": 4 * 5, "lse2": per_head, "delta": per_head}
        needs |= dict.fromkeys(("delta_bounds", "sink_sums", "norms", "extractors"), 0)
        needs |= {"dq_pieces": parts * 576, "delta_pieces": parts if aligned_out else 0}
        needs |= {"selected": 0, "largest": 0, "progress": 8, "sums": 4 * 8192 * 576}
        assert_laid_out(SPARSE_BACKWARD.workspace(config), needs)


@pytest.mark.parametrize("s_q", [5, 134])
@pytest.mark.parametrize("sink", [False, True])
def test_launches(recorder: Recorder, s_q: int, sink: bool) -> None:
    """The whole queries first, if there are any; then pieces, whose delta nobody else writes; then their sums."""
    inputs = make(SparseCase(s_q=s_q, h_q=2, topk=130, sink=sink))
    dq, *_ = flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.backward_options)
    before = ["attention_row_lists", *["sparse_backward_delta"] * sink]
    main = ["sparse_backward_sm90"] * (1 + (s_q > 132))
    after = ["sparse_backward_dq_pieces", "sparse_backward_dkv", *["sparse_backward_sink"] * sink]
    assert recorder.entries == [*before, *main, *after]
    *whole, of_pieces = [launch for launch in recorder.launches if launch.entry == "mla_sparse_backward_sm90"]
    (sums,) = [launch for launch in recorder.launches if launch.entry == "mla_sparse_backward_dq_pieces"]
    tail = s_q % 132
    record = of_pieces.params
    assert of_pieces.grid == (3 * tail, 1, 1)
    assert (record["s_q"], record["first_query"], record["pieces"], record["piece_keys"]) == (s_q, s_q - tail, 3, 64)
    for launch in whole:
        assert (launch.grid, launch.params["s_q"]) == ((132, 1, 1), s_q - tail)
        assert (launch.params["delta"] == record["delta"]) == sink
    assert sums.grid == (2 * tail, 1, 1)
    assert sums.params["dq_pieces"] == record["dq"]
    for name in ("first_query", "pieces", "piece_keys", "counts"):
        assert sums.params[name] == record[name]
    assert sums.params["dq"] == dq.ctypes.data


TEXTS = [
    Mutant("the last part is left out", SUM_SOURCE, "ceil_div(p.counts[query], p.piece_keys)", "p.pieces - 1"),
]


def run_cut() -> None:
    """Small pieces, whatever the fixtures."""
    with mock.patch.object(heuristics, "MIN_SAVED_TILES", 1):
        run(ALL_CUT)


test_is_caught, test_as_it_is = mutant_suite("sparse_backward_dq_pieces", [run_cut], {}, TEXTS)
