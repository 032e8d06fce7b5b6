"""The selection in chunks is the top-k of the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, ShapeError
from tests.support.indexer_cases import LogitsCase, logits_inputs
from tests.support.recorder import Recorder
from tests.support.sim_driver import simulated
from tests.support.workspace import aligned_bytes

INPUTS = logits_inputs(LogitsCase(s_q=5, s_kv=60, h=3, d=32, dtype="uint8"))


@pytest.mark.parametrize("rows", [1, 2, 5, 100])
def test_chunks_do_not_matter(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    indices, counts = mla_cupy.indexer_select(**INPUTS, topk=9, buffer_bytes=rows * 4 * 60, keep_last=2)
    logits = mla_cupy.indexer_logits(**INPUTS)
    bounds = {name: INPUTS.get(name) for name in ("ks", "ke")}
    wanted = mla_cupy.indexer_topk(logits, 9, **bounds, relative=True, keep_last=2)
    np.testing.assert_array_equal(indices, wanted[0])
    np.testing.assert_array_equal(counts, wanted[1])


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("cc", "accumulate"), [((8, 0), "float32"), ((9, 0), "float16")])
def test_simulated(cc: tuple[int, int], accumulate: str) -> None:
    bounds = {name: INPUTS.get(name) for name in ("ks", "ke")}
    chosen: dict[str, Any] = {"accumulate": accumulate}
    with simulated(2, cc) as target:
        logits = mla_cupy.indexer_logits(**INPUTS, **chosen)
        wanted = mla_cupy.indexer_topk(logits, 9, **bounds, relative=True)
        indices, counts = mla_cupy.indexer_select(**INPUTS, **chosen, topk=9, buffer_bytes=3 * 4 * 60)
    assert any("sm90" in name for name in target.launched) == (accumulate == "float16")
    np.testing.assert_array_equal(indices, wanted[0])
    np.testing.assert_array_equal(counts, wanted[1])


def test_memory_of_long_keys(recorder: Recorder) -> None:
    """131,072 keys: 256 MB of logits, whatever the number of queries; nothing is allocated if all is given."""
    s_q, s_kv = 1200, 131_072
    q, k = np.zeros((s_q, 1, 32), np.uint8), np.zeros((s_kv, 32), np.uint8)
    weights = np.zeros((s_q, 1), np.float32)
    indices, counts = mla_cupy.indexer_select(q, k, weights)
    nbytes = mla_cupy.workspace_bytes(mla_cupy.indexer_select, q, k, weights)
    assert recorder.allocations == [(s_q, 2048), (s_q,), (nbytes,)]
    assert 0 <= nbytes - (256 << 20) < 10_000  # the schedule
    assert 4 * 512 * s_kv == 256 << 20
    assert sum("topk" in entry for entry in recorder.entries) == 3
    recorder.allocations.clear()
    buffer = np.zeros((150, s_kv), np.float32)
    given = {"logits": buffer, "indices": indices, "counts": counts, "workspace": aligned_bytes(10_000)}
    mla_cupy.indexer_select(q, k, weights, **given)
    assert recorder.allocations == []


def test_mistakes_are_found_before_a_launch(recorder: Recorder) -> None:
    mistakes: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"topk": 0}, ArgumentError),
        ({"order": "size"}, ArgumentError),
        ({"accumulate": "fp16"}, ArgumentError),
        ({"buffer_bytes": 0}, ArgumentError),
        ({"indices": np.zeros((5, 8), np.int32)}, ShapeError),
        ({"counts": np.zeros(6, np.int32)}, ShapeError),
        ({"logits": np.zeros((0, 60), np.float32)}, ShapeError),
        ({"logits": np.zeros((2, 61), np.float32)}, ShapeError),
    ]
    for changed, error in mistakes:
        with pytest.raises(error):
            mla_cupy.indexer_select(**INPUTS, **{"topk": 9, **changed})
    assert recorder.launches == []


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.uint64])
def test_numbers_of_numpy(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy integers of 8 bits cannot be subtracted from a length."""
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs = logits_inputs(LogitsCase(s_q=2, s_kv=300, h=3, d=32, dtype="uint8"))
    wanted = mla_cupy.indexer_select(**inputs, topk=9, keep_first=2, keep_last=3)
    chosen = mla_cupy.indexer_select(**inputs, topk=kind(9), keep_first=kind(2), keep_last=kind(3))
    for got, expected in zip(chosen, wanted, strict=True):
        np.testing.assert_array_equal(got, expected)
