"""The plugin of vLLM against a stand-in of its interface; vLLM itself has not run it."""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy.integrations import vllm as plugin
from tests.bindings import stand_in_vllm
from tests.interop.test_torch import array, tensor
from tests.support import cases
from tests.support.tolerance import check

pytestmark = pytest.mark.usefixtures("_numpy_backend")

IMPL = {
    "num_heads": 4,
    "head_size": 576,
    "scale": 576**-0.5,
    "num_kv_heads": 1,
    "alibi_slopes": None,
    "sliding_window": None,
    "kv_cache_dtype": "auto",
    "logits_soft_cap": None,
    "attn_type": "decoder",
    "kv_sharing_target_layer_name": None,
}


@pytest.fixture
def backend(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in_vllm.install(monkeypatch)
    return importlib.import_module("mla_cupy.integrations.vllm_backend")


def builder_of(
    backend: Any,
    torch: Any,
    heads: int = 4,
    max_num_seqs: int = 8,
    dcp: int = 1,
    device: str = "cpu",
    cache_dtype: str = "bfloat16",
    head_size: int = 576,
) -> Any:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=dcp),
        model_config=SimpleNamespace(get_num_attention_heads=lambda parallel: heads, dtype=torch.bfloat16),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
    )
    spec = SimpleNamespace(block_size=64, head_size=head_size, dtype=getattr(torch, cache_dtype))
    return backend.MlaCupyBackend.get_builder_cls()(spec, ["layer"], config, torch.device(device))


def build(builder: Any, torch: Any, table: Any, seqlens: Any, s_q: int) -> Any:
    b = len(seqlens)
    starts = torch.arange(0, (b + 1) * s_q, s_q, dtype=torch.int32)
    decode = builder._build_decode(table, seqlens, int(seqlens.max()), starts, starts, b * s_q, None)
    return SimpleNamespace(decode=decode, num_decodes=b)


@pytest.mark.parametrize("s_q", [1, 2])
@pytest.mark.parametrize("split_query", [False, True])
def test_a_step(torch: Any, backend: Any, s_q: int, split_query: bool) -> None:
    """Two layers of one step, and an empty sequence among the others."""
    inputs = cases.make(cases.DecodeCase(b=3, s_q=s_q, h_q=4, seqlens="ragged-200", strides="dense", head_axis=False))
    q, cache, table, seqlens = (tensor(torch, x) for x in inputs.arguments)
    builder = builder_of(backend, torch)
    metadata = build(builder, torch, table, seqlens, s_q)
    query: Any = q.flatten(0, 1)
    if split_query:
        query = (query[..., :512], query[..., 512:])
    for _ in range(2):
        layer = backend.MlaCupyBackend.get_impl_cls()(**IMPL)
        out, lse = layer.forward_mqa(query, cache, metadata, None)
        assert (tuple(out.shape), tuple(lse.shape)) == ((3 * s_q, 4, 512), (3 * s_q, 4))
        got = array(torch, out.view(3, s_q, 4, 512)), array(torch, lse.view(3, s_q, 4).transpose(1, 2))
        check(got, inputs.exact, inputs.rounded, "bfloat16")
    assert len(builder._plans) == 1
    again = build(builder, torch, table[:2], seqlens[:2], s_q)
    assert again.decode.plan is metadata.decode.plan


def test_the_base_that_vllm_merges_with(torch: Any, backend: Any) -> None:
    inputs = cases.make(cases.DecodeCase(b=2, h_q=4, seqlens=70, strides="dense", head_axis=False))
    q, cache, table, seqlens = (tensor(torch, x) for x in inputs.arguments)
    layer = backend.MlaCupyImpl(**IMPL)
    found = []
    for flashinfer in (False, True):
        layer._use_fi_prefill = flashinfer
        metadata = build(builder_of(backend, torch), torch, table, seqlens, 1)
        found.append(layer._forward_decode(q.flatten(0, 1), cache, metadata, None)[1])
    assert torch.allclose(found[1], found[0] * np.log2(np.e), rtol=1e-5)


def test_gathered_heads(torch: Any, backend: Any) -> None:
    """Under decode context parallelism there are more query heads than the layer has; without a plan for them, too."""
    inputs = cases.make(cases.DecodeCase(b=2, h_q=8, seqlens="ragged-90", strides="dense", head_axis=False))
    q, cache, table, seqlens = (tensor(torch, x) for x in inputs.arguments)
    for dcp, heads in ((2, 4), (1, 4)):
        builder = builder_of(backend, torch, heads=heads, dcp=dcp)
        metadata = build(builder, torch, table, seqlens, 1)
        assert metadata.decode.plan_heads == heads * dcp
        out, _ = backend.MlaCupyImpl(**IMPL).forward_mqa(q.flatten(0, 1), cache, metadata, None)
        wanted = mla_cupy.mla_decode(q, cache, table, seqlens)[0]
        assert torch.equal(out, wanted.flatten(0, 1))


FP8 = cases.DecodeCase(b=3, h_q=4, seqlens="ragged-200", strides="dense", head_axis=False, record="fp8", kv_scale=0.03)


@pytest.mark.parametrize("s_q", [1, 2])
def test_an_fp8_cache(torch: Any, backend: Any, s_q: int) -> None:
    """16-bit queries, a cache whose bytes vLLM shows as e4m3, and a scale of each layer."""
    inputs = cases.make(replace(FP8, s_q=s_q))
    q, cache, table, seqlens = (tensor(torch, x) for x in inputs.arguments)
    builder = builder_of(backend, torch, cache_dtype="uint8")
    metadata = build(builder, torch, table, seqlens, s_q)
    layer = backend.MlaCupyImpl(**{**IMPL, "kv_cache_dtype": "fp8"})
    assert layer.supports_quant_query_input is False
    for scale in (FP8.kv_scale, 2 * FP8.kv_scale):
        scales = SimpleNamespace(_k_scale_float=scale)
        out, lse = layer.forward_mqa(q.flatten(0, 1), cache.view(torch.float8_e4m3fn), metadata, scales)
        exact, rounded = (
            mla_cupy.reference.mla_decode(*inputs.arguments, kv_scale=scale, rounding=rounding)
            for rounding in (None, "bfloat16")
        )
        got = array(torch, out.view(3, s_q, 4, 512)), array(torch, lse.view(3, s_q, 4).transpose(1, 2))
        check(got, exact, rounded, "bfloat16")
    assert len(builder._plans) == 1


def test_fp8_caches_that_it_declines(torch: Any, backend: Any) -> None:
    supported = backend.MlaCupyBackend.supported_kv_cache_dtypes
    assert {"fp8", "fp8_e4m3"} <= set(supported)
    for other in ("fp8_e5m2", "fp8_ds_mla"):
        assert other not in supported
        with pytest.raises(NotImplementedError, match=f"not {other}"):
            backend.MlaCupyImpl(**{**IMPL, "kv_cache_dtype": other})
    with pytest.raises(NotImplementedError, match="FP8 rows of 576 elements, not 512"):
        builder_of(backend, torch, cache_dtype="uint8", head_size=512)


def test_batch_invariance(torch: Any, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's switch says; only with the heads that the plans are for."""
    inputs = cases.make(cases.DecodeCase(b=2, h_q=8, seqlens=70, strides="dense", head_axis=False))
    q, cache, table, seqlens = (tensor(torch, x) for x in inputs.arguments)
    assert backend.MlaCupyBackend.supports_batch_invariance()
    for wanted in (False, True):
        monkeypatch.setattr(backend.envs, "VLLM_BATCH_INVARIANT", wanted)
        assert builder_of(backend, torch)._plans.sizes["batch_invariant"] is wanted
    metadata = build(builder_of(backend, torch, heads=4), torch, table, seqlens, 1)
    with pytest.raises(NotImplementedError, match="batch-invariant with 4 heads, not 8"):
        backend.MlaCupyImpl(**IMPL).forward_mqa(q.flatten(0, 1), cache, metadata, None)
    metadata = build(builder_of(backend, torch, heads=8), torch, table, seqlens, 1)
    out, _ = backend.MlaCupyImpl(**IMPL).forward_mqa(q.flatten(0, 1), cache, metadata, None)
    assert torch.equal(out, mla_cupy.mla_decode(q, cache, table, seqlens)[0].flatten(0, 1))
    monkeypatch.delattr(backend.envs, "VLLM_BATCH_INVARIANT")
    assert not backend.MlaCupyBackend.supports_batch_invariance()


def test_what_it_cannot_do(torch: Any, backend: Any) -> None:
    with pytest.raises(NotImplementedError, match="without sliding_window"):
        backend.MlaCupyImpl(**{**IMPL, "sliding_window": 128})
    kinds = backend.MlaCupyBackend
    assert kinds.get_name() == "CUSTOM"
    assert [kinds.supports_compute_capability(SimpleNamespace(major=x)) for x in (8, 9, 10)] == [False, True, False]


@pytest.fixture
def sparse_backend(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in_vllm.install(monkeypatch)
    return importlib.import_module("mla_cupy.integrations.vllm_sparse_backend")


@pytest.mark.parametrize("split_query", [False, True])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_sparse_attention(torch: Any, sparse_backend: Any, split_query: bool, with_lengths: bool) -> None:
    """Two requests whose pages are mixed, padded heads that hold NaN, and a token without rows."""
    tokens, heads, topk, pages, size = 5, 4, 7, 6, 64
    rng = np.random.default_rng(8)
    q = rng.standard_normal((tokens, heads, 576)).astype(ml_dtypes.bfloat16)
    cache = rng.standard_normal((pages, size, 576)).astype(ml_dtypes.bfloat16)
    table = np.array([[4, 1, 3], [0, 5, 2]], np.int32)
    requests = np.array([0, 0, 1, 1, 1])
    chosen = rng.integers(0, 3 * size, (tokens, topk)).astype(np.int32)
    chosen[:, -2] = -1
    chosen[3] = -1
    lengths = np.array([topk, 3, 0, topk, 1], np.int32) if with_lengths else None
    metadata = SimpleNamespace(
        block_table=torch.from_numpy(table),
        req_id_per_token=torch.from_numpy(requests),
        block_size=size,
        topk_length=None if lengths is None else torch.from_numpy(lengths),
    )
    layer = sparse_backend.MlaCupySparseBackend.get_impl_cls()(heads, 0.07, torch.from_numpy(chosen))
    query = tensor(torch, q)
    out, lse = layer.forward_mqa(
        (query[..., :512], query[..., 512:]) if split_query else query, tensor(torch, cache), metadata, None
    )
    rows = table[requests[:, None], chosen // size] * size + chosen % size
    rows[chosen < 0] = -1
    arguments = (q, cache.reshape(-1, 576), rows)
    exact, rounded = (
        mla_cupy.reference.sparse_mla_forward(*arguments, scale=0.07, topk_length=lengths, rounding=rounding)
        for rounding in (None, "bfloat16")
    )
    check((array(torch, out), array(torch, lse)), exact[:2], rounded[:2], "bfloat16")
    assert np.isneginf(exact[1]).any()


def fp8_selection(heads: int = 4) -> tuple[Any, ...]:
    """Queries, a cache of records, and the tokens that each query selects; one query has none."""
    rng = np.random.default_rng(9)
    tokens, topk, pages, size = 5, 7, 6, 64
    q = rng.standard_normal((tokens, heads, 576)).astype(ml_dtypes.bfloat16)
    cache = np.zeros((pages, size, 656), np.uint8)
    latent, rope = (rng.standard_normal((pages * size, width)).astype(ml_dtypes.bfloat16) for width in (512, 64))
    mla_cupy.reference.cache_append(latent, rope, cache, np.arange(pages * size))
    chosen = rng.integers(0, 3 * size, (tokens, topk)).astype(np.int32)
    chosen[:, -2] = -1
    chosen[3] = -1
    return q, cache, chosen


@pytest.mark.parametrize("split_query", [False, True])
def test_sparse_attention_from_an_fp8_cache(torch: Any, sparse_backend: Any, split_query: bool) -> None:
    """Heads are not padded; a query without tokens counts for nothing where ranks are merged."""
    q, cache, chosen = fp8_selection()
    table = np.array([[4, 1, 3]], np.int32)
    metadata = SimpleNamespace(
        block_table=torch.from_numpy(table), req_id_per_token=torch.zeros(5, dtype=torch.int64), block_size=64
    )
    layer = sparse_backend.MlaCupySparseImpl(4, 0.07, torch.from_numpy(chosen), "fp8_ds_mla")
    query = tensor(torch, q)
    given = (query[..., :512], query[..., 512:]) if split_query else query
    out, lse = layer.forward_mqa(given, torch.from_numpy(cache), metadata, None)
    assert (tuple(out.shape), tuple(lse.shape)) == ((5, 4, 512), (5, 4))
    slots = np.where(chosen < 0, -1, table[0][chosen // 64] * 64 + chosen % 64)
    exact, rounded = (
        mla_cupy.reference.sparse_mla_decode(q[None], cache, slots[None], scale=0.07, rounding=rounding)
        for rounding in (None, "float16")
    )
    check((array(torch, out)[None], array(torch, lse)[None]), exact, rounded, "bfloat16")
    assert (lse[3] == -torch.inf).all()
    assert not out[3].any()


def test_what_the_sparse_backend_takes(sparse_backend: Any) -> None:
    kinds = sparse_backend.MlaCupySparseBackend
    assert kinds.get_name() == "CUSTOM"
    assert kinds.supported_kv_cache_dtypes == ["auto", "bfloat16", "fp8_ds_mla"]
    assert [kinds.supports_compute_capability(SimpleNamespace(major=x)) for x in (9, 10, 12)] == [True, False, False]
    assert kinds.get_supported_kernel_block_sizes() == [64]


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_registration(torch: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    registered = stand_in_vllm.install(monkeypatch)
    monkeypatch.setenv("MLA_CUPY_VLLM", kind)
    with caplog.at_level(logging.WARNING, "mla_cupy"):
        plugin.register()
    assert registered == {"CUSTOM": plugin.BACKENDS[kind]}
    assert caplog.records == []
    module, _, name = plugin.BACKENDS[kind].rpartition(".")
    assert getattr(importlib.import_module(module), name).get_name() == "CUSTOM"


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("what", ["parameters", "method", "absent"])
def test_another_interface_is_declined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str, kind: str
) -> None:
    """With one line in the log, and nothing registered."""
    registered = stand_in_vllm.install(monkeypatch)
    monkeypatch.setenv("MLA_CUPY_VLLM", kind)
    impl = {"dense": stand_in_vllm.MLACommonImpl, "sparse": stand_in_vllm.FlashMLASparseImpl}[kind]
    if what == "parameters":
        monkeypatch.setattr(impl, "forward_mqa", lambda self, q, cache: None)
    elif what == "method":
        monkeypatch.delattr(impl, "forward_mqa")
    else:
        monkeypatch.setitem(sys.modules, {"dense": plugin._LAYER, "sparse": plugin._SPARSE}[kind], None)
    with caplog.at_level(logging.WARNING, "mla_cupy"):
        plugin.register()
    assert registered == {}
    (record,) = caplog.records
    assert "mla_cupy is no attention backend for this vLLM" in record.getMessage()
