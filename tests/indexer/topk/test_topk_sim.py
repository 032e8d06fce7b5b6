"""The top-k in the simulator against the oracle, index by index."""

from __future__ import annotations

from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import ShapeError
from mla_cupy.kernels.indexer.topk import TOPK
from mla_cupy.kernels.indexer.topk import select as host
from mla_cupy.kernels.indexer.topk.problem import TopkProblem
from mla_cupy.simulation import fake_gpu
from tests.indexer.topk.topk_cases import assert_selected, expected, hard_rows
from tests.support.sim_driver import simulated

Array = np.ndarray[Any, Any]
#: A block per row, or a cluster of blocks: widths that try them, and a GPU that has them.
BLOCK, CLUSTER = 1, 8
WIDTHS = {BLOCK: 1500, CLUSTER: 4100}
PLACES = {BLOCK: (8, 0), CLUSTER: (9, 0)}


def select(blocks: int, logits: Array, **options: Any) -> Any:
    takes = mock.patch.object(host, "in_clusters", return_value=blocks == CLUSTER)
    with takes, simulated(4, PLACES[blocks]) as target:
        got = mla_cupy.indexer_topk(logits, **options)
        assert target.launched == ["mla_indexer_topk_select"]
    return got


@pytest.mark.parametrize(("width", "blocks"), [(host.BLOCK_ELEMS, BLOCK), (2 * host.BLOCK_ELEMS, CLUSTER)])
def test_the_builds_are_chosen_by_width(width: int, blocks: int) -> None:
    config = TOPK.configure(TopkProblem(1, width, 2048), fake_gpu(132, PLACES[CLUSTER]))
    assert config.variant.cluster_blocks == blocks
    assert config.variant in config.kernel.defaults_on("sm_90a")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("order", "k"), [("index", 700), ("value", 333), ("index", 1)])
def test_hard_rows(order: str, k: int) -> None:
    logits = hard_rows(WIDTHS[BLOCK])
    logits = logits[2:8] if k == 1 else logits
    assert_selected(select(BLOCK, logits, k=k, order=order), expected(logits, k=k, order=order))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("at", [2, 7])
def test_hard_rows_of_a_cluster(at: int) -> None:
    logits = hard_rows(WIDTHS[CLUSTER])[at : at + 1]
    options = {"k": 900, "order": ("index", "value")[at % 2]}
    assert_selected(select(CLUSTER, logits, **options), expected(logits, **options))


def test_rows_that_do_not_fit_the_registers() -> None:
    """Read again in every pass; ties on both sides of where a new load begins."""
    width = 32768 + 1100
    logits = np.where(np.arange(width) % 9 == 0, np.float32(2), np.float32(1))[None]
    assert_selected(select(BLOCK, logits, k=5000), expected(logits, k=5000))
    logits[:, 32700:32800] = 3
    assert_selected(select(BLOCK, logits, k=70), expected(logits, k=70))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("blocks", [BLOCK, CLUSTER])
def test_ranges(blocks: int) -> None:
    """Empty, of one key, of k - 1, k and k + 1 keys, at any alignment; hostile bounds. Others are not read."""
    width, k = WIDTHS[blocks], 40
    whole = np.full((8, width + 5), np.nan, np.float32)
    logits = whole[:, 3 : 3 + width]
    ks = np.array([5, 17, 100, 99, 98, -(2**31), 1, 33], np.int32)
    ke = np.array([5, 18, 139, 139, 139, 2**31 - 1, width - 1, 3], np.int32)
    picks = range(8) if blocks == BLOCK else (6,)
    logits, ks, ke = (np.ascontiguousarray(x[list(picks)]) for x in (logits, ks, ke))
    rng = np.random.default_rng(1)
    for t, (a, b) in enumerate(zip(np.clip(ks, 0, width), np.clip(ke, 0, width), strict=True)):
        logits[t, a:b] = rng.integers(-3, 4, max(0, b - a)) if a < b else 0
    options: dict[str, Any] = {"ks": ks, "ke": ke, "k": k}
    assert_selected(select(blocks, logits, **options), expected(logits, **options))
    if blocks == BLOCK:
        assert_selected(select(blocks, logits, **options, relative=True), expected(logits, **options, relative=True))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "keep", [{"keep_first": 3}, {"keep_last": 5}, {"keep_first": 30, "keep_last": 2**31 - 1}], ids=str
)
@pytest.mark.parametrize("order", ["index", "value"])
def test_kept_keys(keep: dict[str, int], order: str) -> None:
    logits = np.random.default_rng(2).standard_normal((2, 300)).astype(np.float32)
    options: dict[str, Any] = {"ks": np.array([7, 0], np.int32), "k": 20, "order": order, **keep}
    assert_selected(select(BLOCK, logits, **options), expected(logits, **options))


def test_pages() -> None:
    """Places past the table's end or out of range are -1; the table of a sequence serves all of its rows."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((4, 300)).astype(np.float32)
    table = rng.integers(-9, 1000, (2, 2 * 9), np.int32)[:, ::2]
    table[:, 1] = 2**29  # times 24, 0 in 32 bits
    options: dict[str, Any] = {"block_table": table, "page_size": 24, "k": 60}
    got = select(BLOCK, logits, **options)
    assert_selected(got, expected(logits, **options))
    assert (got[0] == -1).any()


def test_bfloat16_and_strides() -> None:
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((3, 1000)).astype(ml_dtypes.bfloat16)[:, 1:902]
    indices, counts = np.full((3, 130), 7, np.int32)[:, :120], np.full(6, 7, np.int32)[::2]
    got = select(BLOCK, logits, k=120, indices=indices, counts=counts, return_values=False)
    wanted = expected(logits, k=120)
    assert got[0] is indices
    assert got[2] is None
    np.testing.assert_array_equal(indices, wanted[0])
    np.testing.assert_array_equal(counts, wanted[1])
    assert (indices.base[:, 120:] == 7).all()


@pytest.mark.slow
@pytest.mark.parametrize("at", range(len(hard_rows(8))))
@pytest.mark.parametrize("k", [1, 2047, 8192])
def test_hard_rows_of_long_clusters(at: int, k: int) -> None:
    logits = hard_rows(40_000)[at : at + 1]
    for order in ("index", "value"):
        assert_selected(select(CLUSTER, logits, k=k, order=order), expected(logits, k=k, order=order))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("blocks", [BLOCK, CLUSTER])
def test_an_end_for_each_sequence(blocks: int, hostile: bool) -> None:
    """Two sequences of three rows: the last one sees all, each before it one key less; hostile ends."""
    width = WIDTHS[blocks]
    logits = np.tile(np.arange(width, dtype=np.float32), (6, 1))
    ke = np.array([2**31 - 1, -(2**31)] if hostile else [width, 2], np.int32)
    got = select(blocks, logits, k=4, ke=ke)
    assert_selected(got, expected(logits, k=4, ke=ke))
    assert got[1].tolist() == [4, 4, 4, 0, *([0, 0] if hostile else [1, 2])]


def test_ends_must_divide_the_rows() -> None:
    for count in (0, 4, 7):
        with pytest.raises(ShapeError, match=r"ke.shape\[0\].*s_q=6"):
            mla_cupy.indexer_topk(np.zeros((6, 9), np.float32), 3, ke=np.zeros(count, np.int32))
