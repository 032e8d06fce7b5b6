"""The benchmarks of the indexer's top-k and preparation on the NumPy device, and torch.topk by a stand-in."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest

from bench.core.errors import BenchError
from bench.core.implementation import Choices, make
from bench.operations import INDEXER_PREPARE, INDEXER_TOPK
from bench.ops.indexer_topk.inputs import DIGIT_SHIFT, DIGIT_STEP, HOT_DIGITS, Selection
from mla_cupy import reference

SMALL = {
    INDEXER_TOPK: ("sq5-skv40-k7", "sq300-skv90-k90-hot", "sq1-skv33-k1"),
    INDEXER_PREPARE: ("sq5-h3-d32", "sq2-h1-d64", "sq1-h2", "sq5-h3-d32-keys"),
}
NAMES = [(operation, name) for operation, names in SMALL.items() for name in names]


@pytest.mark.parametrize("operation", SMALL, ids=lambda operation: operation.name)
def test_names_round_trip(operation):
    cases = operation.select([], "targets")
    assert cases[0].name in ("sq4096-skv32768-k2048", "sq4096-h64")
    for case in cases:
        assert operation.parse(case.name) is case
    for name in SMALL[operation]:
        assert operation.parse(name).name == name


@pytest.mark.parametrize(
    ("operation", "name"),
    [(INDEXER_TOPK, name) for name in ("", "sq1-skv9", "sq0-skv9-k1", "sq1-skv9-k10", "sq1-skv9000-k8193")]
    + [(INDEXER_PREPARE, name) for name in ("", "sq1", "sq0-h1", "sq1-h1-d48")],
)
def test_a_bad_name_is_refused(operation, name):
    with pytest.raises(BenchError, match="case"):
        operation.parse(name)


def test_costs():
    """One read of the logits; of the preparation, what it reads and writes, counted from the arrays."""
    assert INDEXER_TOPK.parse("sq3-skv50-k2").cost.nbytes == 3 * 50 * 4
    case = INDEXER_PREPARE.parse("sq5-h3-d32")
    tables = 2 * 5 * 8 * 4  # the rows of cos and sin that five positions take
    assert case.cost.nbytes == 5 * 3 * (32 * 2 + 32 + 4 + 4) + tables + 5 * 4


def test_hot_logits_have_few_digits(device):
    inputs = INDEXER_TOPK.inputs(INDEXER_TOPK.parse("sq4-skv3000-k5-hot"), "bfloat16", 0, device)
    digits = np.unique(inputs.host.view(np.uint32) >> DIGIT_SHIFT)
    assert len(digits) == HOT_DIGITS
    assert (digits % DIGIT_STEP == 0).all()
    assert np.isfinite(inputs.host).all()
    assert len(np.unique(inputs.host[0])) > 2900, "lower bits decide"


@pytest.mark.parametrize(("operation", "name"), NAMES, ids=lambda x: getattr(x, "name", x))
def test_our_own(rows_of, operation, name):
    row = rows_of(operation, name)["mla_cupy"]
    assert (row["status"], row["reason"]) == ("ok", "")
    figure = "by_value" if operation is INDEXER_TOPK else "copy"
    assert row["figures_us"][figure] > 0
    assert row["share_copy"] == pytest.approx(row["bytes"] / row["timing"]["us_median"] / 1e6 / 4.0)


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


@pytest.mark.parametrize("name", ["codes", "folded"])
def test_a_wrong_byte_is_found(device, numpy_backend, name):
    import mla_cupy

    case = INDEXER_PREPARE.parse("sq5-h3-d32")
    inputs = INDEXER_PREPARE.inputs(case, "bfloat16", 0, device)
    samples = INDEXER_PREPARE.expect(case, "bfloat16", inputs, device)
    codes, folded = mla_cupy.indexer_prepare_q(inputs.q, **inputs.arguments)
    outputs = SimpleNamespace(codes=codes, folded=folded)
    assert INDEXER_PREPARE.judge(samples, outputs, "bfloat16", device).ok
    array = getattr(outputs, name)
    array[4, 1] = np.nextafter(array[4, 1], np.float32(9)) if name == "folded" else array[4, 1] ^ 1
    verdict = INDEXER_PREPARE.judge(samples, outputs, "bfloat16", device)
    assert not verdict.ok
    assert name in verdict.reason


@pytest.fixture
def torch_topk(monkeypatch):
    """torch.topk by a partition, in no order."""

    def topk(logits, k, dim, sorted):
        assert (dim, sorted) == (1, False)
        indices = np.argpartition(-np.asarray(logits), k - 1, axis=1)[:, :k][:, ::-1].astype(np.int64)
        return SimpleNamespace(values=np.take_along_axis(np.asarray(logits), indices, axis=1), indices=indices)

    torch, cupy = types.ModuleType("torch"), types.ModuleType("cupy")
    torch.topk, torch.from_dlpack, cupy.from_dlpack = topk, np.asarray, np.asarray
    for name, module in (("torch", torch), ("cupy", cupy)):
        monkeypatch.setitem(sys.modules, name, module)
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
