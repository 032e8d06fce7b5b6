"""CUDA graphs of the sparse calls: captured once with a workspace, replayed with other contents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.runtime.device import DeviceInfo
from tests.support.calls import assert_same
from tests.support.gpu import upload
from tests.support.sparse_cases import SparseCase, SparseInputs, make

pytestmark = pytest.mark.gpu

CASE = SparseCase(s_q=9, s_kv=400, h_q=64, topk=150, sink=True, strides="dense")


def workspace(operation: Any, *arguments: Any, **options: Any) -> Any:
    """Memory for a call, filled with NaN."""
    import cupy

    return cupy.full(mla_cupy.workspace_bytes(operation, *arguments, **options), 0xFF, cupy.uint8)


def captured(call: Any) -> tuple[Any, Any]:
    """A stream and the graph of one call, which has been made once before: kernels are loaded then."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        call()
        stream.begin_capture()
        call()
        graph = stream.end_capture()
    stream.synchronize()
    return stream, graph


def refill(arrays: list[Any], inputs: SparseInputs, values: tuple[Any, ...]) -> None:
    for target, source in zip(arrays, values, strict=True):
        target[...] = upload(source)


@pytest.mark.parametrize("h_q", [16, 64, 128])
def test_forward_replays_with_other_contents(gpu: DeviceInfo, h_q: int) -> None:
    import cupy

    first, second = (make(replace(CASE, h_q=h_q, seed=seed)) for seed in (0, 1))
    arrays = [cupy.asarray(np.ascontiguousarray(x)) for x in first.arguments]
    results = [cupy.empty((9, h_q, 512), arrays[0].dtype), *(cupy.empty((9, h_q), cupy.float32) for _ in range(2))]
    named = {"scale": first.scale, **dict(zip(("out", "lse", "max_logits"), results, strict=True))}
    memory = workspace(mla_cupy.sparse_mla_forward, *arrays, **named)
    pool = cupy.get_default_memory_pool()
    stream, graph = captured(lambda: mla_cupy.sparse_mla_forward(*arrays, **named, workspace=memory))
    for inputs in (second, first):
        refill(arrays, inputs, inputs.arguments)
        wanted = [cupy.asnumpy(x) for x in mla_cupy.sparse_mla_forward(*arrays, scale=first.scale)]
        for result in results:
            result.fill(7)
        cupy.cuda.Device().synchronize()
        used = pool.used_bytes()
        graph.launch(stream)
        stream.synchronize()
        assert pool.used_bytes() == used
        for result, expected in zip(results, wanted, strict=True):
            assert_same(cupy.asnumpy(result), expected)


@pytest.mark.parametrize("h_q", [64, 128])
def test_backward_replays_with_other_contents(gpu: DeviceInfo, h_q: int) -> None:
    import cupy

    first, second = (make(replace(CASE, h_q=h_q, seed=seed)) for seed in (0, 1))
    arrays = [cupy.asarray(np.ascontiguousarray(x)) for x in first.backward_arguments]
    sink = cupy.asarray(first.attn_sink)
    results = {
        "dq": cupy.empty_like(arrays[0]),
        "dkv": cupy.empty(arrays[1].shape, cupy.float32),
        "d_sink": cupy.empty(h_q, cupy.float32),
    }
    options = {"scale": first.scale, "attn_sink": sink, "deterministic": True}
    memory = workspace(mla_cupy.sparse_mla_backward, *arrays, **options, **results)
    stream, graph = captured(lambda: mla_cupy.sparse_mla_backward(*arrays, **options, **results, workspace=memory))
    for inputs in (second, first):
        refill(arrays, inputs, inputs.backward_arguments)
        sink[...] = cupy.asarray(inputs.attn_sink)
        wanted = mla_cupy.sparse_mla_backward(*arrays, **options, dkv_dtype="float32")
        expected = [cupy.asnumpy(x) for x in wanted]
        for result in results.values():
            result.fill(7)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        for result, exact in zip(results.values(), expected, strict=True):
            assert_same(cupy.asnumpy(result), exact)
