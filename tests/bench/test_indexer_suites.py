"""The benchmark of the indexer's top-k on the NumPy device, and torch.topk by a stand-in."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from bench.core.errors import BenchError
from bench.core.implementation import Choices, make
from bench.operations import INDEXER_TOPK
from bench.ops.indexer_topk import DIGIT_SHIFT, DIGIT_STEP, HOT_DIGITS, Selection
from mla_cupy import reference
from tests.bench import fake_torch


def test_hot_logits_have_few_digits(device):
    inputs = INDEXER_TOPK.inputs(INDEXER_TOPK.parse("sq4-skv3000-k5-hot"), "bfloat16", 0, device)
    digits = np.unique(inputs.host.view(np.uint32) >> DIGIT_SHIFT)
    assert len(digits) == HOT_DIGITS
    assert (digits % DIGIT_STEP == 0).all()
    assert np.isfinite(inputs.host).all()
    assert len(np.unique(inputs.host[0])) > 2900, "lower bits decide"


@pytest.mark.parametrize("spoil", ["another", "twice", "outside", "not written"])
@pytest.mark.parametrize("lowest_ties", [False, True])
def test_a_wrong_selection_is_found(device, spoil, lowest_ties):
    case = INDEXER_TOPK.parse("sq3-skv40-k7")
    inputs = INDEXER_TOPK.inputs(case, "bfloat16", 0, device)
    samples = INDEXER_TOPK.expect(case, "bfloat16", inputs, device)
    right = reference.indexer_topk(inputs.host, k=7)[0].astype(np.int32)

    def verdict(indices):
        return INDEXER_TOPK.judge(samples, Selection(indices, lowest_ties), "bfloat16", device)

    assert verdict(right).ok
    assert verdict(right[:, ::-1]).ok != lowest_ties, "peers may return any order"
    wrong = right.copy()
    other = np.setdiff1d(np.arange(40), right[2])[0]
    wrong[2, 3] = {"another": other, "twice": right[2, 4], "outside": 40, "not written": -1}[spoil]
    assert not verdict(wrong).ok


def test_equal_logits_may_be_any_of_a_peer_s(device):
    case = INDEXER_TOPK.parse("sq1-skv6-k2")
    inputs = SimpleNamespace(host=np.ones((1, 6), np.float32))
    samples = INDEXER_TOPK.expect(case, "bfloat16", inputs, device)
    for lowest_ties in (False, True):
        found = INDEXER_TOPK.judge(samples, Selection(np.array([[3, 5]]), lowest_ties), "bfloat16", device)
        assert found.ok != lowest_ties


@pytest.fixture
def torch_topk(monkeypatch):
    """torch.topk by a partition, in no order."""

    def topk(logits, k, dim, sorted):
        assert (dim, sorted) == (1, False)
        indices = np.argpartition(-np.asarray(logits), k - 1, axis=1)[:, :k][:, ::-1].astype(np.int64)
        return SimpleNamespace(values=np.take_along_axis(np.asarray(logits), indices, axis=1), indices=indices)

    fake_torch.install(monkeypatch).topk = topk
    monkeypatch.setattr("bench.peers.torch_topk.recorder_for", lambda torch, device: device.recorder())
    monkeypatch.setattr("bench.peers.torch_topk.peak_bytes", lambda torch, call, results: 77)


def test_torch(rows_of, torch_topk):
    rows = rows_of(INDEXER_TOPK, "sq5-skv40-k7", ["torch"])
    assert {row["status"] for row in rows.values()} == {"ok"}, [row["reason"] for row in rows.values()]
    assert rows["torch"]["workspace_bytes"] == 77
    assert rows["mla_cupy"]["speed_vs_best_peer"] is not None


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BenchError, match="needs PyTorch"):
        make(["torch"], INDEXER_TOPK.implementations(Choices()))
