"""The selection through lists of candidates on a GPU: index by index what chunks of logits select."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from tests.indexer.select.candidate_cases import CHUNKS, KERNEL, LISTS, CandidateCase, check
from tests.support.gpu import upload
from tests.support.indexer_cases import LogitsCase, logits_inputs

pytestmark = pytest.mark.gpu
REPLAYS = 200

SIZES = ({"s_q": 9, "s_kv": 20_000, "k": 2048}, {"s_q": 300, "s_kv": 9000, "k": 512})
KINDS = ("random", "equal", "levels", "nan", "mostly-nan", "infinite", "rising", "sample-above", "sample-below")
CASES = (
    *(CandidateCase(kind, **size, ranges="causal") for kind in KINDS for size in SIZES),
    *(CandidateCase(kind, **SIZES[1], ranges="packed", rows=64) for kind in KINDS),
    CandidateCase("levels", s_q=12, s_kv=140_000, k=2048, ranges="windows"),
    CandidateCase("sample-below", s_q=12, s_kv=140_000, k=2048, relative=False),
)


def select(there: dict[str, Any], case: CandidateCase, kernel: dict[str, str], **more: Any) -> tuple[Any, Any]:
    found: tuple[Any, Any] = mla_cupy.indexer_select(**there, **case.options, kernel=kernel, **more)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_selects_what_the_oracle_does(hopper: object, case: CandidateCase) -> None:
    import cupy

    inputs = case.inputs()
    there = {name: upload(x) for name, x in inputs.items()}
    logits = cupy.asnumpy(mla_cupy.indexer_logits(**there, kernel=KERNEL))
    lists = tuple(cupy.asnumpy(x) for x in select(there, case, LISTS))
    chunks = tuple(cupy.asnumpy(x) for x in select(there, case, CHUNKS))
    check(case, inputs, lists, logits)
    for x, y in zip(lists, chunks, strict=True):
        np.testing.assert_array_equal(x, y)


def test_replays_agree_and_follow_scales(hopper: object) -> None:
    """A graph over memory full of garbage; each round's rows need logits, or do not."""
    import cupy

    case = CandidateCase(s_q=1100, s_kv=20_000, k=2048, ranges="causal", heads=8)
    random = logits_inputs(LogitsCase(s_q=1100, s_kv=20_000, h=8, dtype="uint8", ranges="none"))
    there = {name: upload(x) for name, x in (case.inputs() | random).items()}
    nbytes = mla_cupy.workspace_bytes(mla_cupy.indexer_select, **there, topk=2048, kernel=LISTS)
    more = {"indices": cupy.empty((1100, 2048), np.int32), "counts": cupy.empty(1100, np.int32)}
    more["workspace"] = cupy.full(nbytes, 0x7F, np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        mla_cupy.indexer_select(**there, topk=2048, kernel=LISTS, **more)
        stream.begin_capture()
        mla_cupy.indexer_select(**there, topk=2048, kernel=LISTS, **more)
        graph = stream.end_capture()
        for factor in (1, 1e-4, 1e8):
            there["k_scale"][::64] *= factor
            wanted = [x.copy() for x in mla_cupy.indexer_select(**there, topk=2048, kernel=CHUNKS)]
            differ = cupy.zeros((), np.int64)
            for _ in range(REPLAYS // 3):
                graph.launch(stream)
                differ += (more["indices"] != wanted[0]).sum() + (more["counts"] != wanted[1]).sum()
            assert int(differ) == 0
