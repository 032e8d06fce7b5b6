"""Bugs planted in the kernels of the warm-up loss: each must show."""

from __future__ import annotations

from pathlib import Path

import pytest
from ptxsim.errors import SimError

import mla_cupy
from mla_cupy import reference
from tests.support.loss_cases import LossCase, check_loss, loss_inputs
from tests.support.mutants import Mutant, planted
from tests.support.sim_driver import simulated

RANGES, ROWS, KEYS = "indexer/loss_ranges.cu", "indexer/loss_rows.cu", "indexer/loss_keys_generic.cu"
SCORES, QUERIES = "indexer/loss_scores_generic.cu", "indexer/loss_queries_generic.cu"
CASE = LossCase(s_q=4, s_kv=6, h=2, lse=True, sequences=((2, 3), (2, 3)))
PER_HEAD = LossCase(s_q=2, s_kv=5, h=2, h_i=2, target="per_head", spread=20)

TARGET = "exp_from(target, norms.max_target)"

MUTANTS = [
    (Mutant("a query sees the next one's key", RANGES, "end_q - 1 - token", "end_q - 2 - token"), CASE),
    (Mutant("heads of infinite lse have a part", SCORES, "fabsf(lse) <= kMaxFloat", "lse < 1e30f"), CASE),
    (Mutant("rows have no factor", ROWS, "? 0.f : row_weight *", "? 0.f :"), CASE),
    (Mutant("the target is not normalised", ROWS, "target * inverse;", "target;"), CASE),
    (Mutant("a maximum is not taken off", ROWS, TARGET, "exp_from(target, 0.f)"), PER_HEAD),
    (Mutant("inactive heads have gradients", QUERIES, "q.dot(key) > 0.f", "true"), CASE),
    (Mutant("a chunk forgets those before it", KEYS, "if (!p.first_chunk)", "if (false)"), CASE),
    (Mutant("all heads share a row", "indexer/loss_params.cuh", "p.per_head ? head : 0", "0"), PER_HEAD),
]  # fmt: skip


def run(case: LossCase) -> None:
    inputs = loss_inputs(case)
    with simulated(1):
        got = mla_cupy.indexer_warmup_loss(**inputs, **case.options, buffer_bytes=2 * 8 * 128)
    check_loss(got, reference.indexer_warmup_loss(**inputs, **case.options))


@pytest.mark.parametrize("case", [CASE, PER_HEAD], ids=lambda case: case.id)
def test_without_a_bug(case: LossCase) -> None:
    run(case)


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=lambda x: x.id if isinstance(x, Mutant) else "")
def test_shows(mutant: Mutant, case: LossCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with planted(mutant, tmp_path / "cuda_src", monkeypatch), pytest.raises((AssertionError, SimError)):
        run(case)
