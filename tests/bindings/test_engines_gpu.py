"""The engines' backends and FlashMLA's interface on the GPU: captured once, replayed for other lengths."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy.compat.flash_mla import FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache
from mla_cupy.integrations import sglang as sglang_plugin
from tests.bindings import stand_in_sglang, stand_in_vllm, test_sglang, test_vllm, test_vllm_prefill
from tests.bindings.test_torch_gpu import NAMES, decode_on_gpu
from tests.interop.test_torch import array, tensor
from tests.support import cases
from tests.support.tolerance import check

pytestmark = pytest.mark.gpu

CASE = cases.DecodeCase(b=4, h_q=32, seqlens="ragged-700", strides="dense")
SHORTER = 64


def captured(torch: Any, run: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph of `run`, which has run before, and its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def check_lengths(torch: Any, got: Any, inputs: cases.DecodeInputs, lengths: Any) -> None:
    """Against the oracle for these lengths; an empty row's LSE may be either infinity."""
    exact, rounded = (
        mla_cupy.reference.mla_decode(*inputs.arguments[:3], lengths, rounding=rounding)
        for rounding in (None, "bfloat16")
    )
    out, lse = (array(torch, x) for x in got)
    check((out, np.where(np.isneginf(exact[1]) & np.isinf(lse), -np.inf, lse)), exact, rounded, "bfloat16")


@pytest.mark.parametrize("form", ["chunks", "lists", ""])
@pytest.mark.parametrize("kv_scale", [0.0, 0.25])
def test_prefill_in_vllm(torch_gpu: Any, monkeypatch: pytest.MonkeyPatch, form: str, kv_scale: float) -> None:
    stand_in_vllm.install(monkeypatch)
    backend = importlib.import_module("mla_cupy.integrations.vllm_backend")
    step = test_vllm_prefill.Step(torch_gpu, form, kv_scale, "cuda")
    layer = test_vllm_prefill.layer_of(backend, kv_cache_dtype="fp8" if kv_scale else "auto")
    layer.forward_mha(*step.arguments, step.output)
    assert layer.prefilled == []
    step.check(torch_gpu, with_prefixes=bool(form))


@pytest.mark.parametrize("first", ["before the capture", "in the capture"])
def test_flash_mla_in_a_graph(torch_gpu: Any, first: str) -> None:
    """The schedule is made by an eager call, or by the first captured one, in memory of the graph."""
    torch = torch_gpu
    inputs, given = decode_on_gpu(torch, CASE)
    arguments = [given[name] for name in NAMES]
    made = FlashMLASchedMeta()
    flash_mla_with_kvcache(*arguments, 512, made, causal=True)  # loads the kernels, too
    schedule = made if first == "before the capture" else FlashMLASchedMeta()

    def layers() -> Any:
        if schedule.have_initialized:
            schedule.update(given["seqlens"])
        return [flash_mla_with_kvcache(*arguments, 512, schedule, causal=True) for _ in range(2)]

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = layers()
    for lengths in (inputs.seqlens, np.minimum(inputs.seqlens, SHORTER)):
        given["seqlens"].copy_(torch.from_numpy(lengths))
        graph.replay()
        for result in results:
            check_lengths(torch, result, inputs, lengths)


def test_flash_mla_sparse(torch_gpu: Any) -> None:
    """Decode from pages and attention over rows give the same, and what the public call gives."""
    torch, rng = torch_gpu, np.random.default_rng(2)
    b, s_q, heads, pages, topk = 3, 2, 16, 9, 96
    q = rng.standard_normal((b, s_q, heads, 576)).astype(ml_dtypes.bfloat16)
    cache = rng.standard_normal((pages, 64, 1, 576)).astype(ml_dtypes.bfloat16)
    indices = rng.integers(-1, pages * 64, (b, s_q, topk)).astype(np.int32)
    q, cache, indices = (tensor(torch, x, "cuda") for x in (q, cache, indices))
    out, lse = flash_mla_with_kvcache(q, cache, None, None, 512, FlashMLASchedMeta(), indices=indices)
    rows = q.flatten(0, 1), cache.flatten(0, 1), indices.flatten(0, 1)[:, None]
    flat, _, flat_lse = flash_mla_sparse_fwd(*rows, 576**-0.5)
    wanted = mla_cupy.sparse_mla_forward(*rows, scale=576**-0.5)
    assert torch.equal(out.flatten(0, 1), flat)
    assert torch.equal(flat, wanted[0])
    assert torch.equal(lse.transpose(1, 2).flatten(0, 1), flat_lse)
    assert torch.equal(flat_lse, wanted[1])


def test_vllm_steps(torch_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured layer schedules the lengths of each replay, whether the builder has run before it or not."""
    torch = torch_gpu
    stand_in_vllm.install(monkeypatch)
    backend = importlib.import_module("mla_cupy.integrations.vllm_backend")
    inputs, given = decode_on_gpu(torch, CASE)
    builder = test_vllm.builder_of(backend, torch, heads=CASE.h_q, max_num_seqs=8, device="cuda")
    layer = backend.MlaCupyImpl(**{**test_vllm.IMPL, "num_heads": CASE.h_q})
    metadata = test_vllm.build(builder, torch, given["block_table"], given["seqlens"], 1)
    query, cache = given["q"].flatten(0, 1), given["kv_cache"].flatten(2, 3)
    graph, (out, lse) = captured(torch, lambda: layer.forward_mqa(query, cache, metadata, None))
    for lengths in (inputs.seqlens, np.minimum(inputs.seqlens, SHORTER)):
        given["seqlens"].copy_(torch.from_numpy(lengths))
        graph.replay()
        check_lengths(torch, (out[:, None], lse[:, :, None]), inputs, lengths)
        again = test_vllm.build(builder, torch, given["block_table"], given["seqlens"], 1)
        assert again.decode.plan is metadata.decode.plan


def test_vllm_steps_from_an_fp8_cache(torch_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured with a layer's scale; also in batch-invariant plans, whose bits do not depend on the neighbours."""
    torch = torch_gpu
    stand_in_vllm.install(monkeypatch)
    backend = importlib.import_module("mla_cupy.integrations.vllm_backend")
    inputs, given = decode_on_gpu(torch, replace(test_vllm.FP8, b=4, h_q=16, seqlens="ragged-700"))
    query, cache, scales = given["q"].flatten(0, 1), given["kv_cache"].view(torch.float8_e4m3fn), inputs.case.kv_scale
    layer = backend.MlaCupyImpl(**{**test_vllm.IMPL, "num_heads": 16, "kv_cache_dtype": "fp8"})
    of_layer = SimpleNamespace(_k_scale_float=scales)
    for invariant in (False, True):
        monkeypatch.setattr(backend.envs, "VLLM_BATCH_INVARIANT", invariant)
        builder = test_vllm.builder_of(backend, torch, heads=16, device="cuda", cache_dtype="uint8")
        steps = given["block_table"], given["seqlens"]
        metadata = test_vllm.build(builder, torch, *steps, 1)
        graph, (out, lse) = captured(
            torch, lambda metadata=metadata: layer.forward_mqa(query, cache, metadata, of_layer)
        )
        graph.replay()
        check((array(torch, out[:, None]), array(torch, lse[:, :, None])), inputs.exact, inputs.rounded, "bfloat16")
        if invariant:
            alone = test_vllm.build(builder, torch, *(x[1:2] for x in steps), 1)
            again, _ = layer.forward_mqa(query[1:2], cache, alone, of_layer)
            assert torch.equal(again, out[1:2])


def test_vllm_sparse_steps_from_an_fp8_cache(torch_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed graph returns the public call's result."""
    torch = torch_gpu
    stand_in_vllm.install(monkeypatch)
    backend = importlib.import_module("mla_cupy.integrations.vllm_sparse_backend")
    q, cache, slots = (tensor(torch, x, "cuda") for x in test_vllm.fp8_selection(16))
    layer = backend.MlaCupySparseImpl(16, 0.07, None, "fp8_ds_mla")
    graph, (out, lse) = captured(torch, lambda: layer._fp8_flash_mla_kernel(q[None], cache, slots[None], None))
    slots.copy_(slots.flip(0).clone())
    graph.replay()
    wanted = mla_cupy.sparse_mla_decode(q[None], cache, slots[None], scale=0.07)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1].transpose(1, 2))
    assert (lse[0, :, 1] == -torch.inf).all()


@pytest.mark.parametrize("cache", ["bfloat16", "fp8"])
@pytest.mark.parametrize("s_q", [1, 3], ids=["decode", "verify"])
def test_sglang_steps(torch_gpu: Any, monkeypatch: pytest.MonkeyPatch, s_q: int, cache: str) -> None:
    """A captured layer follows the batches that are prepared before each replay."""
    torch, mode = torch_gpu, "decode" if s_q == 1 else "verify"
    stand_in_sglang.install(monkeypatch)
    model = test_sglang.in_fp8 if cache == "fp8" else test_sglang.runner
    backend = sglang_plugin.create(model(torch, drafts=3, device="cuda"))
    backend.init_cuda_graph_state(3, 9)
    q = np.random.default_rng(6).standard_normal((3 * s_q, test_sglang.HEADS, 576)).astype(ml_dtypes.bfloat16)
    query, layer = tensor(torch, q, "cuda").flatten(1), test_sglang.layer_of()
    run = backend.forward_decode if s_q == 1 else backend.forward_extend
    first = test_sglang.batch(torch, [1, 1, 1], mode, "cuda")
    backend.init_forward_metadata_out_graph(first, in_capture=True)
    graph, out = captured(torch, lambda: run(query, None, None, layer, first))
    for lengths in ([130, 1, 0], [3, 90, 1]):
        backend.init_forward_metadata_out_graph(test_sglang.batch(torch, lengths, mode, "cuda"))
        graph.replay()
        shown = np.array(lengths, np.int32) + (0 if s_q == 1 else 3)
        exact, rounded = (test_sglang.oracle(torch, backend, q, shown, rounding) for rounding in (None, "bfloat16"))
        got = array(torch, out).reshape(3, s_q, test_sglang.HEADS, 512), exact[1]
        check(got, exact, rounded, "bfloat16")
