"""`sparse_mla_decode` in the simulator, with planted bugs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mla_cupy.errors import KernelCompileError
from tests.sparse_decode.runs import CASES, SparseDecodeCase, check
from tests.support.mutants import Mutant, planted
from tests.support.sim_driver import simulated


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_oracle(case: SparseDecodeCase) -> None:
    with simulated(case.sm_count):
        check(case, lambda x: x, np.asarray)


LISTS, GENERIC = "sparse_decode/lists.cu", "sparse_decode/generic.cu"
MUTANTS = (
    Mutant("warps at one place", LISTS, "if (other < warp) place", "if (false) place"),
    Mutant("extra pages of the first cache", LISTS, "source.cache = p.extra_cache;", ""),
    Mutant("extra page size of the first cache", LISTS, ", source.layout.page_size = p.extra_page_size", ""),
    Mutant("lengths are not clamped", LISTS, "max(0, min(lengths[at], topk))", "lengths[at]"),
    Mutant("half of the scores", GENERIC, "sum + __shfl_xor_sync(kFullWarp, sum, kTokens)", "sum"),
    Mutant("both lanes count", GENERIC, "counts && half == 0", "counts"),
    Mutant("keys are overwritten", GENERIC, "__syncthreads();  // the previous step's keys have been read", ""),
    Mutant("scales of a neighbour", GENERIC, "kGroupChunks = 4,", "kGroupChunks = 2,"),
)
#: Two lists, lengths and a sink; in one split per SM.
SEEN_BY = SparseDecodeCase(record="v4", topk=20, extra=33, lengths=True, sink=True, h_q=9)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_planted_bugs_show(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with planted(mutant, tmp_path / "sources", monkeypatch), simulated(2), pytest.raises(Exception) as caught:  # noqa: PT011
        check(SEEN_BY, lambda x: x, np.asarray)
    assert not isinstance(caught.value, KernelCompileError)
