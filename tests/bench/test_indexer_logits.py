"""The benchmark of the indexer's logits on the NumPy device, and DeepGEMM's adapter with a stand-in for it."""

from __future__ import annotations

import sys
import types
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from bench.core.errors import BenchError
from bench.core.implementation import Choices
from bench.operations import INDEXER_LOGITS
from mla_cupy import reference
from tests.bench import fake_torch


@pytest.fixture
def run(rows_of):
    return partial(rows_of, INDEXER_LOGITS)


def test_a_logit_that_should_be_hidden_is_found(device):
    case = INDEXER_LOGITS.parse("sq3-skv20-h2-d32")
    inputs = INDEXER_LOGITS.inputs(case, "bfloat16", 0, device)
    samples = INDEXER_LOGITS.expect(case, "bfloat16", inputs, device)
    logits = reference.indexer_logits(**inputs.host)
    assert np.isinf(logits[0, 19])
    logits[0, 19] = 0
    assert not INDEXER_LOGITS.judge(samples, SimpleNamespace(logits=logits), "bfloat16", device).ok


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
    torch = fake_torch.install(monkeypatch, deep_gemm=package)
    torch.arange = lambda n, device, dtype: np.arange(n, dtype=dtype)
    monkeypatch.setattr("bench.peers.deep_gemm.recorder_for", lambda torch, device: device.recorder())
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", list(sys.path))
    return package


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
