"""The selection in one launch on a GPU: index by index what the two kernels' calls select."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from tests.indexer.select.select_cases import KERNEL, LOGITS, SelectCase, check
from tests.support.gpu import upload
from tests.support.indexer_cases import PagedCase

pytestmark = pytest.mark.gpu
REPLAYS = 10_000

CASES = (
    SelectCase(PagedCase(b=1, h=64, seqlens=(16384,)), topk=2048),
    SelectCase(PagedCase(b=4, h=64, seqlens=(5000, 2048, 2049, 30_000)), topk=2048),
    SelectCase(PagedCase(b=2, s_q=2, h=32, seqlens=(9000, 100), per_token=True, missing_page=True), topk=512),
    SelectCase(PagedCase(b=3, s_q=8, h=7, seqlens=(3000, 70, 4097)), topk=1000, keep_first=4, keep_last=64),
    SelectCase(PagedCase(b=1, h=64, seqlens=(130_000,)), topk=8192, slots=False),
    SelectCase(PagedCase(b=9, h=64, seqlens=(4096,) * 9), topk=2048, levels=5),
    SelectCase(PagedCase(b=1, h=64, seqlens=(20_000,)), topk=2048, levels=1),
)


def select(there: dict[str, Any], case: SelectCase, **options: Any) -> tuple[Any, Any]:
    found: tuple[Any, Any] = mla_cupy.indexer_select_paged(**there, **case.options, **options)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_selects_as_two_launches_do(hopper: object, case: SelectCase) -> None:
    import cupy

    inputs = case.inputs()
    there = {name: upload(x) for name, x in inputs.items()}
    logits = cupy.asnumpy(mla_cupy.indexer_logits_paged(**there, kernel=LOGITS))
    one = tuple(cupy.asnumpy(x) for x in select(there, case, kernel=KERNEL))
    two = tuple(cupy.asnumpy(x) for x in select(there, case, kernel={"logits": LOGITS}))
    check(case, inputs, one, logits)
    for x, y in zip(one, two, strict=True):
        np.testing.assert_array_equal(x, y)


def test_replays_agree_and_follow_lengths(hopper: object) -> None:
    import cupy

    case = CASES[1]
    there = {name: upload(x) for name, x in case.inputs().items()}
    results = {"indices": cupy.empty((4, 1, 2048), np.int32), "counts": cupy.empty((4, 1), np.int32)}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        select(there, case, kernel=KERNEL, **results)
        stream.begin_capture()
        select(there, case, kernel=KERNEL, **results)
        graph = stream.end_capture()
        for longer in (0, 1, -2500):
            there["seqlens"] += longer
            wanted = [x.copy() for x in select(there, case, kernel={"logits": LOGITS})]
            differ = cupy.zeros((), np.int64)
            for _ in range(REPLAYS // 3):
                graph.launch(stream)
                differ += (results["indices"] != wanted[0]).sum() + (results["counts"] != wanted[1]).sum()
            assert int(differ) == 0
