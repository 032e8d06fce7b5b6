"""PyTorch tensors and JAX arrays in the sparse forward: results are of the same library, on its stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import DeviceError, DTypeError, dtypes
from tests.interop.test_jax import put
from tests.interop.test_torch import array, tensor
from tests.support.calls import assert_same
from tests.support.flat import flat
from tests.support.sparse_cases import SparseCase, SparseInputs, make
from tests.support.sparse_gpu import Forward, check_forward, forward

CASE = SparseCase(s_q=50, s_kv=900, h_q=32, topk=200, lengths=True, sink=True)
RAGGED = SparseCase(
    s_q=9, s_kv=300, h_q=16, topk=70, sequences=((3, 90), (0, 5), (2, 3), (1, 150)), causal=True, sink=True
)
SMALL = SparseCase(h_q=4, topk=40, lengths=True, sink=True)


def tensors(torch: Any, inputs: SparseInputs, device: str = "cpu") -> tuple[list[Any], dict[str, Any]]:
    named = {name: tensor(torch, x, device) for name, x in inputs.optional.items()} | {"scale": inputs.scale}
    return [tensor(torch, x, device) for x in inputs.arguments], {**named, "causal": inputs.case.causal}


def of_torch(torch: Any, results: tuple[Any, ...]) -> Forward:
    out, lse, max_logits = (array(torch, x) for x in results)
    return out, lse, max_logits


def jax_arrays(jax: Any, inputs: SparseInputs, platform: str) -> tuple[list[Any], dict[str, Any]]:
    named = dict(zip(inputs.optional, put(jax, tuple(inputs.optional.values()), platform), strict=True))
    return put(jax, inputs.arguments, platform), {**named, "scale": inputs.scale, "causal": inputs.case.causal}


def stored(inputs: SparseInputs) -> Forward:
    """The oracle's answer in the dtypes of the public call."""
    out, lse, max_logits = inputs.exact
    name = inputs.case.dtype
    return (
        dtypes.round_to(out, name).astype(dtypes.numpy_dtype(name)),
        lse.astype(np.float32),
        max_logits.astype(np.float32),
    )


# ---- On the CPU ------------------------------------------------------------------------------------------------


@pytest.fixture
def _numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


@pytest.mark.usefixtures("_numpy_backend")
def test_torch_cpu_tensors(torch: Any) -> None:
    inputs = make(SMALL)
    arguments, named = tensors(torch, inputs)
    results = flat(mla_cupy.sparse_mla_forward)(*arguments, **named)
    assert all(isinstance(x, torch.Tensor) for x in results)
    assert [x.dtype for x in results] == [torch.bfloat16, torch.float32, torch.float32]
    for got, wanted in zip(of_torch(torch, results), stored(inputs), strict=True):
        assert_same(got, wanted)
    targets = [torch.full_like(x, 7.0) for x in results]
    names = dict(zip(("out", "lse", "max_logits"), targets, strict=True))
    again = flat(mla_cupy.sparse_mla_forward)(*arguments, **named, **names)
    assert all(one is other for one, other in zip(again, targets, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(targets, results, strict=True))


@pytest.mark.usefixtures("_numpy_backend")
def test_jax_cpu_arrays(jax: Any) -> None:
    inputs = make(SMALL)
    arguments, named = jax_arrays(jax, inputs, "cpu")
    results = flat(mla_cupy.sparse_mla_forward)(*arguments, **named)
    assert all(isinstance(x, jax.Array) for x in results)
    for got, wanted in zip(map(np.asarray, results), stored(inputs), strict=True):
        assert_same(got, wanted)
    for name, x in zip(("out", "lse", "max_logits"), results, strict=True):
        with pytest.raises(DTypeError, match=f"{name}: got an array of jax, expected None"):
            flat(mla_cupy.sparse_mla_forward)(*arguments, **named, **{name: x})


# ---- On the GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASE, RAGGED], ids=["flat", "ragged"])
def test_torch_gpu_tensors(torch_gpu: Any, case: SparseCase) -> None:
    inputs = make(case)
    arguments, named = tensors(torch_gpu, inputs, "cuda")
    results = flat(mla_cupy.sparse_mla_forward)(*arguments, **named)
    assert all(isinstance(x, torch_gpu.Tensor) and x.is_cuda for x in results)
    got = of_torch(torch_gpu, results)
    check_forward(got, inputs.exact, inputs.rounded, case.dtype)
    for one, other in zip(got, forward(inputs), strict=True):
        assert_same(one, other)


@pytest.mark.gpu
def test_torch_s_current_stream_is_honoured(torch_gpu: Any) -> None:
    """Inputs that are written late on the current stream are seen, and the host does not wait for them."""
    torch, inputs = torch_gpu, make(CASE)
    arguments, named = tensors(torch, inputs, "cuda")
    flat(mla_cupy.sparse_mla_forward)(*arguments, **named)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(x) for x in arguments]
        torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
        for target, source in zip(late, arguments, strict=True):
            target.copy_(source)
        results = flat(mla_cupy.sparse_mla_forward)(*late, **named)
        assert not stream.query(), "the call waited, or did not run on the current stream"
    stream.synchronize()
    check_forward(of_torch(torch, results), inputs.exact, inputs.rounded, CASE.dtype)


@pytest.mark.gpu
def test_memory_comes_from_torch(torch_gpu: Any) -> None:
    import cupy

    torch, inputs = torch_gpu, make(CASE)
    arguments, named = tensors(torch, inputs, "cuda")

    def refuse(nbytes: int) -> Any:
        raise AssertionError(f"{nbytes} bytes were asked of CuPy")

    flat(mla_cupy.sparse_mla_forward)(*arguments, **named)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with cupy.cuda.using_allocator(refuse):
        flat(mla_cupy.sparse_mla_forward)(*arguments, **named)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 4  # the results, and the workspace


@pytest.mark.gpu
def test_torch_and_cupy_do_not_mix(torch_gpu: Any) -> None:
    import cupy

    inputs = make(CASE)
    arguments, named = tensors(torch_gpu, inputs, "cuda")
    named["attn_sink"] = cupy.asarray(inputs.attn_sink)
    with pytest.raises(DeviceError, match="attn_sink: got an array of cupy on the GPU, expected an array of torch"):
        flat(mla_cupy.sparse_mla_forward)(*arguments, **named)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASE, RAGGED], ids=["flat", "ragged"])
def test_jax_gpu_arrays(jax_gpu: Any, case: SparseCase) -> None:
    inputs = make(case)
    arguments, named = jax_arrays(jax_gpu, inputs, "gpu")
    results = flat(mla_cupy.sparse_mla_forward)(*arguments, **named)
    assert all(isinstance(x, jax_gpu.Array) for x in results)
    assert {device.platform for x in results for device in x.devices()} == {"gpu"}
    out, lse, max_logits = map(np.asarray, results)
    check_forward((out, lse, max_logits), inputs.exact, inputs.rounded, case.dtype)
