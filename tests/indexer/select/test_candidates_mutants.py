"""Bugs planted in the selection through lists of candidates."""

from __future__ import annotations

from functools import partial

from tests.indexer.select.candidate_cases import CandidateCase
from tests.indexer.select.test_candidates_sim import run
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant

TOPK = "indexer_topk_select"
LEVELS = CandidateCase("levels", s_q=9)
FAILING = tuple(CandidateCase(kind, s_q=9, s_kv=3000) for kind in ("sample-above", "sample-below"))

test_is_caught, test_as_it_is = mutant_suite(
    TOPK,
    [partial(run, case, ("late", 0)) for case in (LEVELS, *FAILING)],
    {},
    [
        Mutant("short lists are taken", TOPK, "again = threshold.lowest <= kNanKey", "again = false"),
        Mutant("full lists are taken", TOPK, "found < p.k || found > p.capacity", "found < p.k"),
        Mutant("rows without keys are written", TOPK, "row.p.skips_empty && row.length() == 0", "false"),
    ],
)
