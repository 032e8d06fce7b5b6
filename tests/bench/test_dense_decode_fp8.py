"""The benchmark of dense decode from FP8 records, on the NumPy device."""

from __future__ import annotations

import io
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from bench.core.implementation import Choices, make
from bench.core.table import show
from bench.operations import DENSE_DECODE_FP8
from bench.ops.dense_decode_fp8 import Fp8DecodeCase
from mla_cupy import reference
from mla_cupy.reference.fp8_queries import dequantised
from tests.bench import fake_torch
from tests.bench.small import DECODE as SMALL


def test_names_say_the_record():
    assert DENSE_DECODE_FP8.parse(SMALL) == Fp8DecodeCase(2, 2, 3, 20, page_size=16)
    assert DENSE_DECODE_FP8.parse(SMALL + "-fp8") == Fp8DecodeCase(2, 2, 3, 20, page_size=16, one_scale=True)
    both = Fp8DecodeCase(2, 2, 3, 20, page_size=16, one_scale=True, fp8_math=True)
    assert DENSE_DECODE_FP8.parse(SMALL + "-fp8-math") == both


def test_products_in_fp8_beside_conversion(rows_of, device, numpy_backend):
    """Queries are numbers of e4m3, which rounding leaves as they are: all compute the same."""
    name = "b1-sq1-hq2-skv9-page16-fp8-math"
    rows = rows_of(DENSE_DECODE_FP8, name, ["exact", "rows", "e4m3_queries"])
    assert [(row["status"], row["reason"]) for row in rows.values()] == [("ok", "")] * 4
    assert rows["e4m3_queries"]["check"]["out_max"] == rows["mla_cupy"]["check"]["out_max"]
    assert {row["shape"]["math"] for row in rows.values()} == {"fp8"}
    q = DENSE_DECODE_FP8.inputs(DENSE_DECODE_FP8.parse(name), "bfloat16", 1, device).q
    np.testing.assert_array_equal(dequantised(q), q.astype(np.float64))
    assert len(np.unique(q.astype(np.float32))) > 50


def test_latents_of_mean_1(device, numpy_backend):
    case = DENSE_DECODE_FP8.parse(SMALL + "-fp8-mean1")
    assert case == Fp8DecodeCase(2, 2, 3, 20, page_size=16, one_scale=True, mean1=True)
    assert (case.name, case.shape()["mean"]) == (SMALL + "-fp8-mean1", 1)
    latents = DENSE_DECODE_FP8.inputs(case, "bfloat16", 1, device).kv_cache[..., :512].astype(np.float64)
    assert latents.mean() == pytest.approx(1, abs=0.02)
    assert latents.std() == pytest.approx(0.5, abs=0.02)


# ---- FlashMLA in FP8 -------------------------------------------------------------------------------------------


@pytest.fixture
def flashmla(monkeypatch, tmp_path):
    """A fake of PyTorch whose operator is the oracle, its result times `calls.factor`."""
    calls = SimpleNamespace(factor=1.0, metadata=[], decodes=[])

    def metadata(seqlens, rows, heads_kv):
        calls.metadata.append((seqlens.tolist(), rows, heads_kv))
        return "metadata", "splits"

    def decode(q, cache, d_v, seqlens, table, scale, causal, metadata, splits, descale_q, descale_k):
        assert (q.dtype, cache.dtype, cache.shape[2:]) == (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fn, (1, 576))
        assert (d_v, causal, metadata, splits) == (512, True, "metadata", "splits")
        assert (descale_q.tolist(), descale_k.tolist()) == ([1.0], [1.0])
        calls.decodes.append(q.shape)
        pages = np.asarray(cache)[:, :, 0].view(np.uint8)
        out, lse = reference.mla_decode(np.asarray(q).astype(np.float64), pages, table, seqlens, scale=scale)
        return (calls.factor * out).astype(ml_dtypes.bfloat16), lse.astype(np.float32)

    torch = fake_torch.install(monkeypatch)
    torch.float8_e4m3fn = ml_dtypes.float8_e4m3fn
    torch.ops._flashmla_extension_C = SimpleNamespace(
        get_mla_decoding_metadata_dense_fp8=metadata, fwd_kvcache_mla_fp8=decode
    )
    (tmp_path / "_flashmla_extension_C.abi3.so").touch()
    return calls


@pytest.mark.parametrize("kind", ["-fp8", "-fp8-math"])
def test_flashmla_in_fp8(rows_of, flashmla, tmp_path, kind):
    """It gets queries and records in e4m3, of the numbers that the others have."""
    row = rows_of(DENSE_DECODE_FP8, "b2-sq2-hq2-skv70" + kind, ["flashmla_fp8"], Choices(tmp_path))["flashmla_fp8"]
    assert (row["status"], row["reason"]) == ("ok", "")
    assert flashmla.metadata == [([70, 70], 4, 1)]
    assert set(flashmla.decodes) == {(2, 2, 2, 576)}
    assert row["check"]["out_rms"] < 0.01
    assert abs(row["check"]["out_bias"]) < 0.01


@pytest.mark.parametrize(("factor", "status"), [(0.851, "inexact"), (0.5, "wrong"), (np.nan, "wrong")])
def test_sums_that_lose_bits_are_timed_and_said(rows_of, flashmla, tmp_path, factor, status):
    flashmla.factor = factor
    rows = rows_of(DENSE_DECODE_FP8, "b1-sq1-hq2-skv9-fp8-mean1", ["flashmla_fp8"], Choices(tmp_path))
    row = rows["flashmla_fp8"]
    assert row["status"] == status
    assert "out differs by" in row["reason"]
    assert not row["check"]["ok"]
    assert (row["timing"] is None) == (status == "wrong")
    assert ("flashmla_fp8" in rows["mla_cupy"]["speed_vs"]) == (status == "inexact")
    if status == "inexact":
        assert "timed all the same: its sums" in row["reason"]
        assert row["check"]["out_bias"] == pytest.approx(factor - 1, abs=0.01)
        text = io.StringIO()
        show(Console(file=text, width=300), list(rows.values()))
        assert "rms error" in text.getvalue()
        assert f"{row['check']['out_bias']:+.2e}" in text.getvalue()


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("b1-sq1-hq2-skv9", "bfloat16", "cases -fp8"),
        ("b1-sq1-hq2-skv9-fp8", "float16", "bfloat16 only"),
        ("b1-sq1-hq2-skv9-page16-fp8", "bfloat16", "64 tokens"),
        ("b1-sq1-hq2-skv9-fp8-math", "bfloat16", None),
    ],
)
def test_what_flashmla_in_fp8_cannot_do(flashmla, tmp_path, name, dtype, reason):
    (_, peer) = make(["flashmla_fp8"], DENSE_DECODE_FP8.implementations(Choices(tmp_path)))
    said = peer.unsupported(DENSE_DECODE_FP8.parse(name), dtype)
    assert said is None if reason is None else reason in said


def test_default_peers(tmp_path):
    assert DENSE_DECODE_FP8.peers_of(Choices()) == ["rows"]
    assert DENSE_DECODE_FP8.peers_of(Choices(tmp_path)) == ["rows", "flashmla", "flashmla_fp8", "fa3"]
