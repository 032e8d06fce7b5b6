"""The benchmark of the indexer's logits on the NumPy device, and DeepGEMM's adapter with a stand-in for it."""

from __future__ import annotations

import sys
import types
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from bench.core.errors import BenchError
from bench.core.implementation import Choices
from bench.operations import INDEXER_LOGITS
from bench.ops.indexer_logits.cases import CASES, LogitsCase
from mla_cupy import reference

SMALL = (
    "sq3-skv20-h2-d32",
    "sq5-skv9-h3-full",
    "sq4-skv10-h2-bf16",
    "sq3-skv20-h2-float16",
    "b2-sq2-skv70-h2",
    "b2-sq2-skv70-h2-e2m1",
)


def test_names_round_trip():
    assert INDEXER_LOGITS.select([], "targets") == CASES
    for case in CASES:
        assert INDEXER_LOGITS.parse(case.name) is case
    for name in SMALL:
        assert INDEXER_LOGITS.parse(name).name == name


@pytest.mark.parametrize(
    "name",
    ["", "sq1-skv1", "sq0-skv1-h1", "sq1-skv1-h1-d48", "b0-sq1-skv1-h1", "b1-sq1-skv1-h1-full", "sq1-skv1-h1-e2m1"],
)
def test_a_bad_name_is_refused(name):
    with pytest.raises(BenchError, match="case"):
        INDEXER_LOGITS.parse(name)


def test_rates_agree_with_the_peer_s_own_count():
    """TFLOP/s that another program printed for these times."""
    assert [case.cost.tflops(case.peer_us) for case in CASES[:2]] == pytest.approx([824, 1112], rel=0.005)
    assert LogitsCase(2, 3, 5, 32).cost.flops == 2 * 5 * 32 * (2 + 3)
    assert LogitsCase(1, 10, b=2).cost.nbytes == 2 * 10 * 132 + 2 * 64 * 132 + 4 * 2 * 64


@pytest.fixture
def run(rows_of):
    return partial(rows_of, INDEXER_LOGITS)


@pytest.mark.parametrize("name", SMALL)
def test_our_own(run, name):
    row = run(name)["mla_cupy"]
    assert (row["status"], row["reason"]) == ("ok", "")
    assert row["check"]["samples"]["logits"] >= 3
    assert row["figures_us"]["not_clean"] > 0


@pytest.mark.parametrize(("place", "value"), [((2, 5), 0.5), ((0, 19), 0.0), ((1, 3), np.nan)])
def test_a_wrong_logit_is_found(device, numpy_backend, place, value):
    case = INDEXER_LOGITS.parse(SMALL[0])
    inputs = INDEXER_LOGITS.inputs(case, "bfloat16", 0, device)
    samples = INDEXER_LOGITS.expect(case, "bfloat16", inputs, device)
    logits = reference.indexer_logits(**inputs.host)
    assert INDEXER_LOGITS.judge(samples, SimpleNamespace(logits=logits), "bfloat16", device).ok
    logits[place] = value if np.isinf(logits[place]) or np.isnan(value) else logits[place] + value
    assert not INDEXER_LOGITS.judge(samples, SimpleNamespace(logits=logits), "bfloat16", device).ok


class Tensor(np.ndarray):
    """What the adapter asks of a tensor."""

    device = "cpu"

    def view(self, kind=None, *more):
        return super().view(ml_dtypes.float8_e4m3fn if kind == "float8" else kind or Tensor, *more)

    def contiguous(self):
        return self


@pytest.fixture
def deep_gemm(monkeypatch, tmp_path):
    """DeepGEMM by the oracle: the order of arguments is its own, and paged calls take one length per token."""

    def prefill(q, keys, weights, ks, ke, clean_logits):
        assert clean_logits
        k, scale = (np.asarray(x) for x in keys)
        found = reference.indexer_logits(np.asarray(q), k, np.asarray(weights), ks, ke, k_scale=scale)
        return found.astype(np.float32)

    def metadata(lengths, page_size, sms):
        assert lengths.ndim == 2
        return page_size, sms

    def paged(q, cache, weights, lengths, table, meta, max_len, clean_logits):
        assert meta == (64, 132)
        b, s_q, h, _ = q.shape
        arrays = np.asarray(q), np.asarray(cache), np.asarray(weights).reshape(b, s_q, h)
        assert (np.diff(lengths) == 1).all()
        found = reference.indexer_logits_paged(*arrays, np.asarray(lengths[:, -1]), np.asarray(table))
        assert found.shape[2] == max_len
        return found.reshape(b * s_q, max_len).astype(np.float32)

    package = types.ModuleType("deep_gemm")
    package.fp8_mqa_logits, package.fp8_paged_mqa_logits = prefill, paged
    package.get_paged_mqa_logits_metadata, package.get_num_sms = metadata, lambda: 132
    torch = types.ModuleType("torch")
    torch.float8_e4m3fn, torch.from_dlpack = "float8", lambda x: np.asarray(x).view(Tensor)
    torch.arange = lambda n, device, dtype: np.arange(n, dtype=dtype)
    torch.cuda = SimpleNamespace(ExternalStream=lambda ptr: ptr, stream=lambda stream: types_null())
    cupy = types.ModuleType("cupy")
    cupy.from_dlpack = np.asarray
    for name, module in (("deep_gemm", package), ("torch", torch), ("cupy", cupy)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("bench.peers.deep_gemm.recorder_for", lambda torch, device: device.recorder())
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", list(sys.path))
    return package


def types_null():
    return SimpleNamespace(__enter__=lambda: None, __exit__=lambda *_: None)


@pytest.mark.parametrize("name", ["sq3-skv20-h32", "b1-sq1-skv9-h32", "b1-sq2-skv9-h32"])
def test_deep_gemm(run, deep_gemm, tmp_path, name):
    rows = run(name, ["deep_gemm"], Choices(tmp_path))
    assert {row["status"] for row in rows.values()} == {"ok"}, [row["reason"] for row in rows.values()]
    assert rows["mla_cupy"]["speed_vs_best_peer"] is not None


def test_an_assertion_of_deep_gemm_is_a_reason_and_no_error(run, deep_gemm, tmp_path, monkeypatch):
    """A version that takes one or two tokens per sequence asserts that a schedule has a share for each SM."""

    def paged(q, cache, weights, lengths, table, meta, max_len, clean_logits):
        raise RuntimeError("Assertion error (attention.hpp:346): _schedule_meta_size == num_sms + 1\nframe #0: ...")

    monkeypatch.setattr(deep_gemm, "fp8_paged_mqa_logits", paged)
    rows = run("b1-sq4-skv9-h64", ["deep_gemm"], Choices(tmp_path))
    assert rows["mla_cupy"]["status"] == "ok"
    row = rows["deep_gemm"]
    assert row["status"] == "unsupported"
    assert row["reason"] == (
        "this version does not take 4 tokens per sequence: "
        "Assertion error (attention.hpp:346): _schedule_meta_size == num_sms + 1"
    )


def test_what_deep_gemm_does_not_take(run, deep_gemm, tmp_path):
    for name, reason in (("sq3-skv20-h2", "32 or 64"), ("sq3-skv20-h64-bf16", "e4m3 only")):
        row = run(name, ["deep_gemm"], Choices(tmp_path))["deep_gemm"]
        assert row["status"] == "unsupported"
        assert reason in row["reason"]
    with pytest.raises(BenchError, match="deep_gemm is not there"):
        run("sq3-skv20-h32", ["deep_gemm"], Choices(tmp_path / "deep_gemm"))
