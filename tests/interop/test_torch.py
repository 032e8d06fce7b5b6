"""PyTorch tensors: results are tensors, on PyTorch's current stream, out of PyTorch's memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import DeviceError, DTypeError
from mla_cupy.arrays.torch import TorchFamily
from tests.support.calls import Array, assert_same, oracle, plan_of
from tests.support.cases import DecodeCase, DecodeInputs, make
from tests.support.flat import flat, mla_decode
from tests.support.gpu import uploaded
from tests.support.tolerance import check

CASE = DecodeCase(b=4, s_q=2, h_q=32, seqlens="ragged-700")


#: Dtypes that NumPy does not have, and the integers of their size.
UNKNOWN = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e8m0fnu": "uint8"}


def tensor(torch: Any, x: Array, device: Any = "cpu") -> Any:
    """A tensor with the same strides; the gaps are not initialised."""
    host = np.ascontiguousarray(x)
    if host.dtype.name in UNKNOWN:
        flat = torch.from_numpy(host.view(UNKNOWN[host.dtype.name])).view(getattr(torch, host.dtype.name))
    else:
        flat = torch.from_numpy(host)
    strides = tuple(stride // x.itemsize for stride in x.strides)
    return torch.empty_strided(x.shape, strides, dtype=flat.dtype, device=device).copy_(flat)


def array(torch: Any, x: Any) -> Array:
    """Back to NumPy."""
    x = x.detach().cpu()
    name = str(x.dtype).removeprefix("torch.")
    if name in UNKNOWN:
        return np.asarray(x.contiguous().view(getattr(torch, UNKNOWN[name])).numpy().view(getattr(ml_dtypes, name)))
    return np.asarray(x.numpy())


def tensors(torch: Any, inputs: DecodeInputs, device: Any = "cpu") -> list[Any]:
    return [tensor(torch, x, device) for x in inputs.arguments]


# ---- On the CPU ------------------------------------------------------------------------------------------------


@pytest.fixture
def _numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


@pytest.mark.usefixtures("_numpy_backend")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_cpu_tensors(torch: Any, dtype: str, out_dtype: str | None) -> None:
    inputs = make(DecodeCase(h_q=4, seqlens=70, dtype=dtype))
    out, lse = mla_decode(*tensors(torch, inputs), out_dtype=out_dtype)
    assert isinstance(out, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    assert (out.device.type, out.dtype) == ("cpu", getattr(torch, out_dtype or dtype))
    expected = oracle(inputs, out_dtype)
    assert_same(array(torch, out), expected[0])
    assert_same(array(torch, lse), expected[1])


@pytest.mark.usefixtures("_numpy_backend")
def test_cpu_tensors_are_written_in_place(torch: Any) -> None:
    inputs = make(DecodeCase(h_q=4, seqlens=70))
    out = torch.full((3, 1, 4, 520), 7.0, dtype=torch.bfloat16)[..., :512]
    lse = torch.full((3, 4, 1), 7.0)
    results = mla_decode(*tensors(torch, inputs), out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse
    expected = oracle(inputs)
    assert_same(array(torch, out), expected[0])
    assert_same(array(torch, lse), expected[1])


@pytest.mark.usefixtures("_numpy_backend")
def test_cpu_tensors_that_require_grad_are_refused(torch: Any) -> None:
    q, *others = tensors(torch, make(DecodeCase(h_q=4, seqlens=70)))
    q.requires_grad_()
    with pytest.raises(DTypeError, match=r"^q: got a tensor that requires grad.*torch\.no_grad\(\)"):
        mla_decode(q, *others)
    with torch.no_grad():
        mla_decode(q, *others)
    mla_decode(q.detach(), *others)


@pytest.mark.usefixtures("_numpy_backend")
def test_cpu_merge(torch: Any) -> None:
    outs, lses = torch.ones((2, 1, 1, 2, 8), dtype=torch.bfloat16), torch.zeros((2, 1, 2, 1))
    outs[1] = 3
    out, lse = mla_cupy.merge_states(outs, lses, lse_base="2")
    assert out.dtype == torch.bfloat16
    assert (out == 2).all()
    assert (lse == 1).all()


def test_tensors_are_matched_as_their_signatures_say(torch: Any) -> None:
    family = TorchFamily()  # looks at tensors on the CPU as at those on a GPU
    match = family.matcher(few := [torch.zeros(4, 6), torch.zeros(3, dtype=torch.int32), None])
    if match is None:
        pytest.skip("this version of PyTorch has no TensorGuards; tensors are compared one by one in Python")
    signed = family.signature(few)
    assert signed is not None
    assert match(few) == signed[0]
    first, second, _ = others = [torch.ones(4, 6), torch.ones(3, dtype=torch.int32), None]
    assert match(others) == family.signature(others)[0]  # type: ignore[index]
    for changed in (
        [first.reshape(6, 4), second, None],
        [torch.zeros(6, 4).t(), second, None],
        [first.double(), second, None],
        [torch.zeros(25)[1:].reshape(4, 6), second, None],
        [torch.zeros(4, 6, requires_grad=True), second, None],
        [torch.nn.Parameter(first, requires_grad=False), second, None],
        [first.numpy(), second, None],
        [first, None, None],
        [first, None, second],
        [first, second, second.clone()],
    ):
        assert match(changed) is None


def test_addresses_of_matched_tensors_are_the_callers_to_change(torch: Any) -> None:
    family = TorchFamily()
    first, other, last = (torch.zeros(4) for _ in range(3))
    match = family.matcher([first, None, last])
    if match is None:
        pytest.skip("this version of PyTorch has no TensorGuards")
    for arrays in ([first, None, last], [first, None, last], [other, None, last], [first, None, last]):
        expected = [0, arrays[0].data_ptr(), 0, last.data_ptr()]
        found = match(arrays)
        assert found == expected
        found.pop()  # as a call does with the address of its workspace
    assert match([first, None, torch.zeros(5)[1:]]) is None


def test_tensors_without_a_matcher(torch: Any) -> None:
    family = TorchFamily()
    misaligned = torch.zeros(5)[1:]
    assert family.matcher([torch.zeros(4), misaligned]) is None
    assert family.matcher([torch.zeros(4, requires_grad=True), torch.zeros(4)]) is None
    assert family.matcher([torch.zeros(4), None]) is None
    family._guards = None
    assert family.matcher([torch.zeros(4), torch.zeros(4)]) is None


@pytest.mark.gpu
def test_cpu_tensors_use_the_gpu_where_there_is_one(torch: Any, gpu: object) -> None:
    inputs = make(CASE)
    out, lse = mla_decode(*tensors(torch, inputs))
    assert out.device.type == lse.device.type == "cpu"
    check((array(torch, out), array(torch, lse)), inputs.exact, inputs.rounded, CASE.dtype)


# ---- On the GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("strides", ["padded", "odd", "dense"])
def test_gpu_tensors(torch_gpu: Any, dtype: str, strides: Any) -> None:
    inputs = make(DecodeCase(b=4, s_q=2, h_q=32, seqlens="ragged-700", dtype=dtype, strides=strides))
    out, lse = mla_decode(*tensors(torch_gpu, inputs, "cuda"))
    assert isinstance(out, torch_gpu.Tensor)
    assert isinstance(lse, torch_gpu.Tensor)
    assert out.is_cuda
    assert (out.dtype, lse.dtype) == (getattr(torch_gpu, dtype), torch_gpu.float32)
    assert not out.requires_grad
    got = array(torch_gpu, out), array(torch_gpu, lse)
    check(got, inputs.exact, inputs.rounded, dtype)
    of_cupy = mla_decode(*uploaded(inputs))
    assert_same(got[0], of_cupy[0].get())
    assert_same(got[1], of_cupy[1].get())


@pytest.mark.gpu
def test_gpu_tensors_are_written_in_place(torch_gpu: Any) -> None:
    torch, inputs = torch_gpu, make(CASE)
    whole = torch.full((4, 2, 32, 520), 7.0, dtype=torch.float32, device="cuda")
    out, lse = whole[..., :512], torch.full((4, 2, 32), 7.0, device="cuda").transpose(1, 2)
    results = mla_decode(*tensors(torch, inputs, "cuda"), out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse
    check((array(torch, out), array(torch, lse)), inputs.exact, inputs.rounded, CASE.dtype)
    assert (whole[..., 512:] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("with_plan", [False, True])
def test_current_stream_is_honoured(torch_gpu: Any, with_plan: bool) -> None:
    """Inputs that are written late on the current stream are seen, and the host does not wait for them."""
    torch, inputs = torch_gpu, make(CASE)
    ready = tensors(torch, inputs, "cuda")
    plan = plan_of(inputs) if with_plan else None
    mla_decode(*ready)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(x) for x in ready]
        torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
        for target, source in zip(late, ready, strict=True):
            target.copy_(source)
        if plan:
            plan.update(late[3])
        out, lse = mla_decode(*late, plan=plan)
        assert not stream.query(), "the call waited, or did not run on the current stream"
    stream.synchronize()
    check((array(torch, out), array(torch, lse)), inputs.exact, inputs.rounded, CASE.dtype)


@pytest.mark.gpu
def test_stream_argument(torch_gpu: Any) -> None:
    torch, inputs = torch_gpu, make(CASE)
    arguments = tensors(torch, inputs, "cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for given in (stream, stream.cuda_stream):
        out, lse = mla_decode(*arguments, stream=given)
        stream.synchronize()
        check((array(torch, out), array(torch, lse)), inputs.exact, inputs.rounded, CASE.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("handle", ["current", 0, 1, 2, "side"])
def test_checks_and_copies_wait_for_the_stream(torch_gpu: Any, handle: int | str) -> None:
    """`check=True` and `contiguous` read what a busy stream has not written yet, whichever handle names the stream."""
    torch, cuda = torch_gpu, torch_gpu.cuda
    stream = cuda.Stream() if handle == "side" else cuda.ExternalStream(2) if handle == 2 else cuda.default_stream()
    given = None if handle == "current" else stream.cuda_stream if handle == "side" else handle
    valid = torch.ones(300, dtype=torch.int32, device="cuda")
    bad = torch.arange(300, dtype=torch.int32, device="cuda") % 2 + 1
    mla_cupy.prefill_segments(valid, 2)  # compiled before the stream is busy
    cuda.synchronize()
    with cuda.stream(stream):
        ids, wide = bad.clone(), torch.zeros(300, 2, dtype=torch.int32, device="cuda")
        cuda._sleep(200_000_000)  # cycles: about a tenth of a second
        ids.copy_(valid)
        wide[:, 0] = valid
        flat(mla_cupy.prefill_segments)(ids, 2, check=True, stream=given)
        copy = TorchFamily().contiguous(wide[:, 0], stream.cuda_stream)
        assert copy.tolist() == valid.tolist()
        cuda._sleep(200_000_000)
        ids.copy_(bad)
        with pytest.raises(mla_cupy.ArgumentError, match="segment_ids_q"):
            flat(mla_cupy.prefill_segments)(ids, 2, check=True, stream=given)


@pytest.mark.gpu
def test_memory_comes_from_torch(torch_gpu: Any) -> None:
    import cupy

    torch, inputs = torch_gpu, make(CASE)
    arguments = tensors(torch, inputs, "cuda")

    def refuse(nbytes: int) -> Any:
        raise AssertionError(f"{nbytes} bytes were asked of CuPy")

    mla_decode(*arguments)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with cupy.cuda.using_allocator(refuse):
        mla_decode(*arguments)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 3  # out, lse, workspace


@pytest.mark.gpu
def test_gpu_tensors_that_require_grad_are_refused(torch_gpu: Any) -> None:
    torch, inputs = torch_gpu, make(CASE)
    q, *others = tensors(torch, inputs, "cuda")
    plan = plan_of(inputs)
    plan.update(others[2])
    mla_decode(q, *others, plan=plan)
    q = torch.nn.Parameter(q)
    for options in ({}, {"plan": plan}):
        with pytest.raises(DTypeError, match=r"requires grad.*torch\.no_grad\(\)"):
            mla_decode(q, *others, **options)
        with torch.no_grad():
            out, lse = mla_decode(q, *others, **options)
        check((array(torch, out), array(torch, lse)), inputs.exact, inputs.rounded, CASE.dtype)
        mla_decode(q.detach(), *others, **options)
    q = q.detach().requires_grad_()
    with pytest.raises(DTypeError, match="requires grad"):
        mla_decode(q, *others, plan=plan)


@pytest.mark.gpu
def test_places_do_not_mix(torch_gpu: Any) -> None:
    q, kv_cache, table, seqlens = tensors(torch_gpu, make(CASE), "cuda")
    with pytest.raises(
        DeviceError, match="seqlens: got an array of torch on the CPU, expected an array of torch on the GPU"
    ):
        mla_decode(q, kv_cache, table, seqlens.cpu())
    import cupy

    with pytest.raises(DeviceError, match="seqlens: got an array of cupy on the GPU, expected an array of torch"):
        mla_decode(q, kv_cache, table, cupy.asarray(seqlens.cpu().numpy()))


@pytest.mark.gpu
def test_plan_in_a_torch_graph(torch_gpu: Any) -> None:
    torch, inputs = torch_gpu, make(CASE)
    arguments = tensors(torch, inputs, "cuda")
    q, kv_cache, table, seqlens = arguments
    nbytes = plan_of(inputs).workspace_bytes
    workspace = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")  # PyTorch aligns to 512 bytes
    plan = plan_of(inputs, workspace=workspace)
    out = torch.empty((4, 2, 32, 512), dtype=torch.bfloat16, device="cuda")
    lse = torch.empty((4, 32, 2), device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        plan.update(seqlens)
        mla_decode(q, kv_cache, table, seqlens, plan=plan, out=out, lse=lse)
        doubled = out.float() * 2  # PyTorch's own work in the same graph
    graph.replay()
    check((array(torch, out), array(torch, lse)), inputs.exact, inputs.rounded, CASE.dtype)
    shorter = np.minimum(inputs.seqlens, 64)
    seqlens.copy_(torch.from_numpy(shorter))
    graph.replay()
    exact = mla_cupy.reference.mla_decode(*inputs.arguments[:3], shorter)
    rounded = mla_cupy.reference.mla_decode(*inputs.arguments[:3], shorter, rounding=CASE.dtype)
    check((array(torch, out), array(torch, lse)), exact, rounded, CASE.dtype)
    assert torch.equal(doubled, out.float() * 2)


@pytest.mark.gpu
def test_gpu_merge(torch_gpu: Any) -> None:
    torch = torch_gpu
    generator = torch.Generator("cuda").manual_seed(0)
    outs = torch.randn((3, 2, 1, 4, 64), device="cuda", generator=generator)
    lses = torch.randn((3, 2, 4, 1), device="cuda", generator=generator)
    out, lse = mla_cupy.merge_states(outs, lses, out_dtype="bfloat16")
    assert (out.dtype, out.device) == (torch.bfloat16, outs.device)
    assert torch.allclose(lse, torch.logsumexp(lses, 0), atol=1e-5)
    weights = torch.softmax(lses, 0).swapaxes(-1, -2)[..., None]
    assert torch.allclose(out.float(), (weights * outs).sum(0), atol=0.02)
