"""The selection over pages is the top-k of the paged logits, and what sparse decode reads."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, ShapeError
from tests.support.recorder import Recorder
from tests.support.sim_driver import simulated
from tests.support.workspace import aligned_bytes

Array = np.ndarray[Any, Any]
PAGE_SIZE, D = 4, 32


def inputs(b: int = 3, s_q: int = 2, lengths: bool = False, seed: int = 0) -> dict[str, Array]:
    """Sequences of 13, 1 and 0 keys or so, in pages in any order; what no token sees is poison."""
    rng = np.random.default_rng(seed)
    table = rng.permutation(20)[: b * 4].reshape(b, 4).astype(np.int32)
    seqlens = np.array([13, 1, 0, 16], np.int32)[:b]
    table[:, 1:][np.arange(1, 4) * PAGE_SIZE >= seqlens[:, None]] = 2**31 - 1
    cache = np.full((20, PAGE_SIZE, D + 4), 0x7F, np.uint8)
    for n in range(b):
        places = np.arange(seqlens[n])
        slots = table[n, places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
        keys = rng.standard_normal((len(places), D)).astype(ml_dtypes.bfloat16)
        mla_cupy.reference.indexer_cache_append(keys, cache, slots)
    q = rng.integers(0x20, 0x48, (b, s_q, 3, D)).astype(np.uint8) | rng.integers(0, 2, (b, s_q, 3, D)).astype(
        np.uint8
    ) << np.uint8(7)
    weights = rng.standard_normal((b, s_q, 3)).astype(np.float32)
    given = np.maximum(seqlens[:, None] - np.arange(s_q) % 2 * 3, 0).astype(np.int32) if lengths else seqlens
    return {"q": q, "cache": cache, "weights": weights, "seqlens": given, "block_table": table}


def expected(given: dict[str, Array], topk: int, slots: bool) -> tuple[Array, Array]:
    """Through the two operations of the oracle, with an end for each token."""
    logits = mla_cupy.reference.indexer_logits_paged(**given)
    b, s_q, keys = logits.shape
    seqlens = given["seqlens"]
    ends = seqlens if seqlens.ndim == 2 else seqlens[:, None] - np.arange(s_q)[::-1]
    table = {"block_table": given["block_table"], "page_size": PAGE_SIZE} if slots else {}
    flat = logits.reshape(-1, keys).astype(np.float32)
    indices, counts, _ = mla_cupy.reference.indexer_topk(flat, ke=ends.reshape(-1), k=topk, **table)
    return indices.reshape(b, s_q, topk), counts.reshape(b, s_q)


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize(("b", "s_q", "chunk"), [(3, 2, 1), (4, 1, 3), (4, 3, 100)])
def test_equals_the_oracle(
    b: int, s_q: int, chunk: int, slots: bool, lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    given = inputs(b, s_q, lengths)
    for topk in (3, 16):
        got = mla_cupy.indexer_select_paged(**given, topk=topk, slots=slots, buffer_bytes=chunk * s_q * 4 * 16)
        for x, wanted in zip(got, expected(given, topk, slots), strict=True):
            np.testing.assert_array_equal(x, wanted)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("cc", "logits", "slots"), [((7, 5), "generic", False), ((7, 5), "generic", True), ((8, 0), "mma", True)]
)
def test_simulated(cc: tuple[int, int], logits: str, slots: bool) -> None:
    given = inputs()
    with simulated(2, cc) as target:
        got = mla_cupy.indexer_select_paged(**given, topk=5, slots=slots, buffer_bytes=2 * 2 * 4 * 16)
        assert target.launched == [f"mla_indexer_logits_{logits}", "mla_indexer_topk_select"] * 2
    for x, wanted in zip(got, expected(given, 5, slots), strict=True):
        np.testing.assert_array_equal(x, wanted)


def test_given_arrays_are_used(recorder: Recorder) -> None:
    """Nothing is allocated: the step can be captured."""
    given = inputs(b=4, s_q=2)
    logits, indices, counts = np.zeros((4, 16), np.float32), np.zeros((4, 2, 5), np.int32), np.zeros((4, 2), np.int32)
    results = {"logits": logits, "indices": indices, "counts": counts, "workspace": aligned_bytes(1 << 16)}
    mla_cupy.indexer_select_paged(**given, topk=5, **results)
    assert recorder.allocations == []
    assert sum("topk" in entry for entry in recorder.entries) == 2
    empty = {name: x[:0] if name != "cache" else x for name, x in given.items()}
    assert mla_cupy.indexer_select_paged(**empty, topk=5)[0].shape == (0, 2, 5)


def test_mistakes_are_found_before_a_launch(recorder: Recorder) -> None:
    given = inputs()
    mistakes: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"topk": 0}, ArgumentError),
        ({"slots": "yes"}, ArgumentError),
        ({"order": "size"}, ArgumentError),
        ({"buffer_bytes": 0}, ArgumentError),
        ({"indices": np.zeros((3, 2, 4), np.int32)}, ShapeError),
        ({"indices": np.zeros((3, 5, 5), np.int32)[:, :2]}, ShapeError),
        ({"counts": np.zeros((6, 4), np.int32)[::2, ::2]}, ShapeError),
        ({"logits": np.zeros((1, 16), np.float32)}, ShapeError),
        ({"logits": np.zeros((2, 15), np.float32)}, ShapeError),
        ({"seqlens": np.zeros((3, 3), np.int32)}, ShapeError),
        ({"q": given["q"][0]}, ShapeError),
    ]
    for changed, error in mistakes:
        with pytest.raises(error):
            mla_cupy.indexer_select_paged(**{**given, "topk": 5, **changed})
    assert recorder.launches == []


@pytest.mark.gpu
@pytest.mark.parametrize("s_q", [1, 2])
def test_a_captured_step_follows_lengths_and_tables(s_q: int, gpu: object) -> None:
    import cupy

    first, then = inputs(4, s_q, seed=1), inputs(4, s_q, seed=2)
    there = {name: cupy.asarray(x) for name, x in first.items()}
    results = {
        "logits": cupy.empty((4 * s_q, 16), np.float32),
        "indices": cupy.empty((4, s_q, 5), np.int32),
        "counts": cupy.empty((4, s_q), np.int32),
    }
    nbytes = mla_cupy.workspace_bytes(
        mla_cupy.indexer_logits_paged, *(there[name] for name in ("q", "cache", "weights", "seqlens", "block_table"))
    )
    results["workspace"] = cupy.empty(max(1, nbytes), np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        mla_cupy.indexer_select_paged(**there, topk=5, **results)
        stream.begin_capture()
        mla_cupy.indexer_select_paged(**there, topk=5, **results)
        graph = stream.end_capture()
    for given in (first, then):
        for name, x in given.items():
            there[name][...] = cupy.asarray(x)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        for name, wanted in zip(("indices", "counts"), expected(given, 5, True), strict=True):
            np.testing.assert_array_equal(cupy.asnumpy(results[name]), wanted)
