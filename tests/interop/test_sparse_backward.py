"""The sparse backward with arrays of PyTorch and JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import DTypeError
from tests.interop.test_jax import put
from tests.interop.test_torch import array, tensor
from tests.support.calls import assert_same
from tests.support.flat import flat
from tests.support.gradients import backward, check_gradients
from tests.support.sparse_cases import SparseCase, SparseInputs, make

SMALL = SparseCase(h_q=4, topk=40, lengths=True, sink=True)
DENSE = SparseCase(s_q=30, h_q=64, topk=100, lengths=True, sink=True, strides="dense")


@pytest.fixture
def _numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


def tensors(torch: Any, inputs: SparseInputs, device: Any = "cpu") -> tuple[list[Any], dict[str, Any]]:
    named = {name: tensor(torch, x, device) for name, x in inputs.optional.items()} | {"scale": inputs.scale}
    return [tensor(torch, x, device) for x in inputs.backward_arguments], named


@pytest.mark.usefixtures("_numpy_backend")
def test_torch_on_the_cpu(torch: Any) -> None:
    inputs = make(SMALL)
    arguments, named = tensors(torch, inputs)
    got = flat(mla_cupy.sparse_mla_backward)(*arguments, **named)
    expected = flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.options)
    for x, wanted in zip(got, expected, strict=True):
        assert isinstance(x, torch.Tensor)
        assert_same(array(torch, x), wanted)
    without = mla_cupy.sparse_mla_backward(*arguments, scale=576**-0.5)
    assert without[2] is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", [DENSE, SparseCase(s_q=30, h_q=16, sink=True, strides="odd")], ids=["dense", "odd"])
def test_torch_on_the_gpu(torch_gpu: Any, case: SparseCase) -> None:
    inputs = make(case)
    arguments, named = tensors(torch_gpu, inputs, "cuda")
    got = flat(mla_cupy.sparse_mla_backward)(*arguments, **named, deterministic=True)
    assert all(isinstance(x, torch_gpu.Tensor) and x.is_cuda for x in got)
    host = [array(torch_gpu, x) for x in got]
    check_gradients(host, inputs, deterministic=True)
    for x, of_cupy in zip(host, backward(inputs, deterministic=True), strict=True):
        assert_same(x, of_cupy)
    dq, dkv = torch_gpu.empty_like(got[0]), torch_gpu.empty(inputs.kv.shape, device="cuda")
    again = flat(mla_cupy.sparse_mla_backward)(*arguments, **named, dq=dq, dkv=dkv)
    assert again[0] is dq
    assert again[1] is dkv
    check_gradients([array(torch_gpu, x) for x in again], inputs, "float32")


@pytest.mark.gpu
def test_torch_on_its_own_stream(torch_gpu: Any) -> None:
    """The inputs are still being computed when the call is made, the results when they are used."""
    inputs = make(DENSE)
    arguments, named = tensors(torch_gpu, inputs, "cuda")
    expected = [
        array(torch_gpu, x) for x in flat(mla_cupy.sparse_mla_backward)(*arguments, **named, deterministic=True)
    ]
    work = torch_gpu.ones((4096, 4096), device="cuda")
    torch_gpu.cuda.synchronize()
    with torch_gpu.cuda.stream(torch_gpu.cuda.Stream()):
        late = torch_gpu.zeros_like(arguments[3])
        for _ in range(5):
            work = work @ work * 1e-4
        late.copy_(arguments[3])
        arguments[3] = late
        got = [2 * x for x in flat(mla_cupy.sparse_mla_backward)(*arguments, **named, deterministic=True)]
        torch_gpu.cuda.current_stream().synchronize()
    for x, wanted in zip(got, expected, strict=True):
        np.testing.assert_array_equal(array(torch_gpu, x).astype(np.float32), 2 * wanted.astype(np.float32))


@pytest.mark.usefixtures("_numpy_backend")
def test_jax_on_the_cpu(jax: Any) -> None:
    inputs = make(SparseCase(h_q=4, topk=40, sink=True, strides="dense"))
    arguments = put(jax, inputs.backward_arguments, "cpu")
    (sink,) = put(jax, (inputs.attn_sink,), "cpu")
    got = mla_cupy.sparse_mla_backward(*arguments, attn_sink=sink, scale=576**-0.5)
    expected = mla_cupy.sparse_mla_backward(*inputs.backward_arguments, attn_sink=inputs.attn_sink, scale=inputs.scale)
    for x, wanted in zip(got, expected, strict=True):
        assert isinstance(x, jax.Array)
        assert_same(np.asarray(x), wanted)
    for name, given in (("dq", got[0]), ("dkv", got[1])):
        with pytest.raises(DTypeError, match=rf"{name}: got an array of jax, expected None; .* are immutable"):
            flat(mla_cupy.sparse_mla_backward)(*arguments, scale=inputs.scale, **{name: given})


@pytest.mark.gpu
def test_jax_on_the_gpu(jax_gpu: Any) -> None:
    inputs = make(DENSE)
    arguments = put(jax_gpu, inputs.backward_arguments, "gpu")
    named = dict(zip(inputs.optional, put(jax_gpu, tuple(inputs.optional.values()), "gpu"), strict=True))
    got = flat(mla_cupy.sparse_mla_backward)(*arguments, **named, scale=inputs.scale, deterministic=True)
    assert all(isinstance(x, jax_gpu.Array) for x in got)
    host = [np.asarray(x) for x in got]
    check_gradients(host, inputs, deterministic=True)
    for x, of_cupy in zip(host, backward(inputs, deterministic=True), strict=True):
        assert_same(x, of_cupy)
