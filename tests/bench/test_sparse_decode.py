"""The benchmark of sparse decode on the NumPy device, and FlashMLA's adapter with a PyTorch made of NumPy."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from bench.core.implementation import Choices, make
from bench.operations import SPARSE_DECODE
from bench.ops.sparse_decode import host_cache, host_pages
from mla_cupy import reference
from tests.bench import fake_torch


@pytest.fixture
def run(rows_of):
    return partial(rows_of, SPARSE_DECODE)


def test_sets_share_the_pool_and_differ_in_all_else(device):
    case = SPARSE_DECODE.parse("b1-sq1-hq2-topk4-extra3-v4-pool128")
    one, other = (SPARSE_DECODE.inputs(case, "bfloat16", seed, device) for seed in (0, 1))
    for number, (a, b) in enumerate(zip(one.sources, other.sources, strict=True)):
        assert a.cache is b.cache
        assert not np.array_equal(a.indices, b.indices)
        np.testing.assert_array_equal(a.cache, host_cache("v4", host_pages("v4", 128, number)))
        assert a.cache.strides[0] % 576 == 0, "the stride of pages that FlashMLA wants"
    assert not np.array_equal(one.sources[0].cache, one.sources[1].cache)
    assert not np.array_equal(one.q, other.q)
    assert one.sink is None


def test_mixed_cases_have_two_records_and_a_sink(device):
    case = SPARSE_DECODE.parse("b1-sq1-hq2-topk4-extra3-v41-fp4-pool64")
    inputs = SPARSE_DECODE.inputs(case, "bfloat16", 0, device)
    assert [source.cache.shape[2] for source in inputs.sources] == [528, 288]
    assert inputs.sink.shape == (2,)
    assert case.shape()["extra_record"] == "v41-fp4"


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """FlashMLA by the oracle: the order of arguments and results, and lse's axes, are its own."""
    seen = []

    def decode(
        q, cache, indices, lengths, sink, metadata, splits, extra, extra_indices, extra_lengths, d_v, scale, out
    ):
        assert lengths is sink is extra_lengths is out is None
        assert (cache.ndim, cache.shape[2], cache.dtype, d_v) == (4, 1, ml_dtypes.float8_e4m3fn, 512)
        seen.append((q.shape, metadata, splits))
        more = {}
        if extra is not None:
            more = {"extra_kv_cache": np.asarray(extra)[:, :, 0].view(np.uint8), "extra_indices": extra_indices}
        pages = np.asarray(cache)[:, :, 0].view(np.uint8)
        result, lse = reference.sparse_mla_decode(np.asarray(q), pages, indices, scale=scale, **more)
        return result.astype(q.dtype), lse.transpose(0, 2, 1).astype("f4"), "metadata", "splits"

    fake_torch.install(monkeypatch).ops._flashmla_C = SimpleNamespace(sparse_decode_fwd=decode)
    (tmp_path / "_flashmla_C.abi3.so").touch()
    return seen


@pytest.mark.parametrize(
    ("name", "heads", "said"),
    [
        ("b1-sq2-hq3-topk2-pool64", 64, "padded from 3 to 64 heads before"),
        ("b1-sq1-hq64-topk2-extra4-v4-pool64", 64, "its metadata is made before"),
        ("b1-sq1-hq65-topk2-pool64", 128, "padded from 65 to 128 heads before"),
    ],
)
def test_flashmla(run, calls, tmp_path, monkeypatch, name, heads, said):
    monkeypatch.setattr("bench.peers.flashmla_sparse_decode.TOPK_MULTIPLE", 2)  # so that the oracle is quick
    rows = run(name, ["flashmla"], Choices(tmp_path))
    assert {row["status"] for row in rows.values()} == {"ok"}, [row["reason"] for row in rows.values()]
    row = rows["flashmla"]
    assert {shape[2] for shape, *_ in calls} == {heads}
    assert calls[0][1:] == (None, None)
    assert {call[1:] for call in calls[1:]} == {("metadata", "splits")}
    assert said in row["includes"]
    assert row["flops"] == SPARSE_DECODE.parse(name).cost.flops, "padding is no work done"


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("b1-sq1-hq16-topk64", "float16", "bfloat16"),
        ("b1-sq1-hq129-topk64", "bfloat16", "128 heads"),
        ("b1-sq1-hq64-topk65", "bfloat16", "multiple of 64"),
        ("b1-sq1-hq64-topk64-extra1-v4", "bfloat16", "multiple of 64"),
        ("b1-sq1-hq64-topk64-v41", "bfloat16", "v32 and v4"),
        ("b1-sq1-hq64-topk64-v32-nope", "bfloat16", "v32 and v4"),
        ("b1-sq1-hq64-topk64", "bfloat16", None),
    ],
)
def test_what_flashmla_cannot_do(calls, tmp_path, name, dtype, reason):
    (_, peer) = make(["flashmla"], SPARSE_DECODE.implementations(Choices(tmp_path)))
    said = peer.unsupported(SPARSE_DECODE.parse(name), dtype)
    assert said is None if reason is None else reason in said
