"""The selection from given logits, by one block per row and by a cluster, and together with the logits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

import mla_cupy
from tests.indexer.topk import test_select_paged
from tests.indexer.topk.topk_cases import assert_selected, expected, hard_rows
from tests.stress.sanitized import Call
from tests.support.gpu import fetch, upload
from tests.support.indexer_cases import LogitsCase, logits_inputs

#: Widths that are one block's, a cluster's where rows are few, and a cluster's.
WIDTHS = (1500, 4100, 34_000)


def calls() -> Iterator[Call]:
    """Ties, hot digits and what is no number; hostile ranges; a few rows of logits at a time."""
    for width in WIDTHS:
        for k, order in ((1, "index"), (333, "value"), (2048, "index")):
            yield Call(f"{k} of {width} by {order}", partial(hard, width, k, order))
        yield Call(f"ranges of {width}", partial(ranges, width))
    yield Call("select", select)
    for slots in (False, True):
        yield Call(f"select from pages, slots={slots}", partial(select_paged, slots))


def hard(width: int, k: int, order: str) -> None:
    """Rows that are hard to select from."""
    logits = hard_rows(width)
    assert_selected(_selected(logits, k=k, order=order), expected(logits, k=k, order=order))


def ranges(width: int) -> None:
    """Empty, of one key, of k - 1, k and k + 1 keys; hostile bounds. Others are NaN, and rows lie apart."""
    whole = np.full((8, width + 5), np.nan, np.float32)
    logits = whole[:, 3 : 3 + width]
    ks = np.array([5, 17, 100, 99, 98, -(2**31), 1, 33], np.int32)
    ke = np.array([5, 18, 139, 139, 139, 2**31 - 1, width - 1, 3], np.int32)
    for row, a, b in zip(logits, np.clip(ks, 0, width), np.clip(ke, 0, width), strict=True):
        row[a:b] = np.random.default_rng(int(b)).integers(-3, 4, max(0, b - a))
    options: dict[str, Any] = {"k": 40, "keep_first": 2, "keep_last": 3}
    assert_selected(_selected(logits, ks=ks, ke=ke, **options), expected(logits, ks=ks, ke=ke, **options))


def select() -> None:
    """Select in chunks: the top-k of the logits, which are compared with the oracle elsewhere."""
    inputs = {name: upload(x) for name, x in logits_inputs(LogitsCase(s_q=19, s_kv=390, h=12, dtype="uint8")).items()}
    bounds = {name: inputs[name] for name in ("ks", "ke")}
    got = mla_cupy.indexer_select(**inputs, topk=70, buffer_bytes=8 * 4 * 390)
    logits = fetch(mla_cupy.indexer_logits(**inputs))
    wanted = expected(logits, k=70, relative=True, **{name: fetch(x) for name, x in bounds.items()})
    for x, y in zip(got, wanted[:2], strict=True):
        np.testing.assert_array_equal(fetch(x), y)


def select_paged(slots: bool) -> None:
    """Select in chunks of two sequences."""
    given = test_select_paged.inputs()
    there = {name: upload(x) for name, x in given.items()}
    got = mla_cupy.indexer_select_paged(**there, topk=5, slots=slots, buffer_bytes=2 * 2 * 4 * 16)
    for x, wanted in zip(got, test_select_paged.expected(given, 5, slots), strict=True):
        np.testing.assert_array_equal(fetch(x), wanted)


def _selected(logits: Any, **options: Any) -> Any:
    given = {name: upload(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    return tuple(fetch(x) for x in mla_cupy.indexer_topk(upload(logits), **given))
