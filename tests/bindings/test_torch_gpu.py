"""`mla_cupy.torch` on the GPU: right, under compilation, in CUDA graphs, and as quick as the public calls."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mla_cupy
from tests.bindings.cases import BoundCall, as_tuple, every_call, sparse_inputs
from tests.bindings.test_torch import options
from tests.bindings.test_torch_compile import plan_for, repeated
from tests.interop.test_torch import array, tensor
from tests.support import cases
from tests.support.calls import assert_same
from tests.support.flat import flat
from tests.support.gpu import microseconds_of
from tests.support.tolerance import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # PyTorch's own, where it compiles
]

CASE = cases.DecodeCase(b=4, s_q=2, h_q=32, seqlens="ragged-700", strides="dense")
NAMES = ("q", "kv_cache", "block_table", "seqlens")


def on_gpu(torch: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor(torch, x, "cuda") for name, x in arrays.items()}


def decode_on_gpu(torch: Any, case: cases.DecodeCase = CASE) -> tuple[cases.DecodeInputs, dict[str, Any]]:
    inputs = cases.make(case)
    return inputs, on_gpu(torch, dict(zip(NAMES, inputs.arguments, strict=True)))


def check_decode(torch: Any, results: Any, inputs: cases.DecodeInputs) -> None:
    check([array(torch, x) for x in results], inputs.exact, inputs.rounded, inputs.case.dtype)


@every_call
def test_operators(torch_gpu: Any, of_torch: Any, call: BoundCall) -> None:
    """The bits equal the public call's, for dkv only if deterministic."""
    chosen = options(torch_gpu, call)

    def run(function: Any) -> tuple[Any, ...]:
        """Results, then changed arguments."""
        given = on_gpu(torch_gpu, call.arrays)
        return (*as_tuple(function(**given, **chosen)), *(given.get(name) for name in call.changed))

    wanted = run(flat(getattr(mla_cupy, call.operation)))
    for function in (flat(getattr(of_torch, call.operation)), getattr(torch_gpu.ops.mla_cupy, call.operation)):
        for name, x, expected in zip((*call.outputs, *call.changed), run(function), wanted, strict=True):
            if expected is None:
                assert x is None or x.numel() == 0
            elif name == "dkv" and not call.options.get("deterministic"):
                scale = float(expected.abs().max())
                assert float((x.double() - expected.double()).abs().max()) <= 0.01 * scale
            else:
                assert_same(array(torch_gpu, x), array(torch_gpu, expected))


def test_the_workspace_is_pytorch_s(torch_gpu: Any, of_torch: Any) -> None:
    """The operators use the memory that they are given, also where PyTorch has moved it."""
    inputs, given = decode_on_gpu(torch_gpu)
    plan = plan_for(of_torch, given)
    assert plan.workspace.is_cuda
    assert plan.workspace.numel() == plan.plan.workspace_bytes
    assert plan.workspace.data_ptr() == plan.plan.address
    moved = torch_gpu.zeros_like(plan.workspace)
    plan.workspace.fill_(0xFF)
    torch_gpu.ops.mla_cupy.decode_plan_update(moved, given["seqlens"], plan.number)
    results = torch_gpu.ops.mla_cupy.mla_decode_planned(moved, plan.number, **given, scale=576**-0.5)
    check_decode(torch_gpu, results, inputs)
    assert (plan.workspace == 0xFF).all()


@pytest.mark.parametrize("write", [False, True], ids=["returned", "given"])
def test_decode_loop_in_a_graph(torch_gpu: Any, of_torch: Any, write: bool) -> None:
    torch = torch_gpu
    inputs, given = decode_on_gpu(torch)
    plan = plan_for(of_torch, given)
    targets = {"out": torch.empty((4, 2, 32, 512), dtype=torch.bfloat16, device="cuda")}
    targets["lse"] = torch.empty((4, 32, 2), device="cuda")

    def step() -> Any:
        plan.update(given["seqlens"])
        return flat(of_torch.mla_decode)(**given, plan=plan, **(targets if write else {}))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    graph.replay()
    check_decode(torch, results, inputs)
    shorter = np.minimum(inputs.seqlens, 64)
    given["seqlens"].copy_(torch.from_numpy(shorter))
    graph.replay()
    exact = mla_cupy.reference.mla_decode(*inputs.arguments[:3], shorter)
    rounded = mla_cupy.reference.mla_decode(*inputs.arguments[:3], shorter, rounding="bfloat16")
    check([array(torch, x) for x in results], exact, rounded, "bfloat16")


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # of a part without kernels, to be left out by PyTorch
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_by_inductor(torch_gpu: Any, of_torch: Any, mode: str) -> None:
    """Compiled code includes the plan's update; "reduce-overhead" replays CUDA graphs."""
    torch = torch_gpu
    pytest.importorskip("triton")
    torch._dynamo.reset()
    _, given = decode_on_gpu(torch)
    largest = repeated(torch, given, 16)
    plan = plan_for(of_torch, largest)

    def step(q: Any, kv_cache: Any, block_table: Any, seqlens: Any) -> Any:
        plan.update(seqlens)
        out, lse = flat(of_torch.mla_decode)(q * 1, kv_cache, block_table, seqlens, plan=plan)
        return out * 2, lse

    compiled = torch.compile(step, fullgraph=True, dynamic=mode == "default", mode=None if mode == "default" else mode)
    for b in (7, 3, 11, 16) if mode == "default" else (16,) * 5:
        case = repeated(torch, given, b)
        out, lse = (x.clone() for x in compiled(**case))
        plan.update(case["seqlens"])  # without a plan a smaller batch may get another kernel
        wanted = flat(of_torch.mla_decode)(**case, plan=plan)
        assert torch.equal(lse, wanted[1])
        assert torch.equal(out, wanted[0] * 2)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients(torch_gpu: Any, of_torch: Any, compiled: bool) -> None:
    """Gradients equal the public calls', bit by bit, where PyTorch requests determinism."""
    torch, inputs = torch_gpu, sparse_inputs(s_q=30, s_kv=300, h_q=64, topk=64, sink=True)
    given = on_gpu(torch, {"q": inputs.q, "kv": inputs.kv, "indices": inputs.indices, **inputs.optional})
    dout = tensor(torch, inputs.dout, "cuda")
    out, lse, _ = mla_cupy.sparse_mla_forward(**given, scale=inputs.scale)
    options = {"scale": inputs.scale, "deterministic": True}
    dq, dkv, d_sink = mla_cupy.sparse_mla_backward(**given, out=out, lse=lse, dout=dout, **options)
    leaves = {name: given[name].requires_grad_() for name in ("q", "kv", "attn_sink")}

    def run(given: dict[str, Any]) -> Any:
        return of_torch.sparse_mla_forward(**given, scale=inputs.scale)[0]

    torch._dynamo.reset()
    torch.use_deterministic_algorithms(True)
    try:
        (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(given).backward(dout)
    finally:
        torch.use_deterministic_algorithms(False)
    for leaf, wanted in zip(leaves.values(), (dq, dkv, d_sink), strict=True):
        assert torch.equal(leaf.grad, wanted)


CALLS, MAX_OVERHEAD, SCALE = 1000, 3.0, 576**-0.5


def median_microseconds(call: Callable[[], object]) -> float:
    """Median time on the host, without the first half of the calls."""
    return statistics.median(microseconds_of(call, 2 * CALLS)[CALLS:])


@pytest.mark.perf
@pytest.mark.parametrize("with_plan", [False, True], ids=["plain", "planned"])
def test_overhead_over_the_public_call(
    torch_gpu: Any, of_torch: Any, with_plan: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decode without gradients: at most 3 us more than the public call."""
    _, given = decode_on_gpu(torch_gpu, cases.DecodeCase(b=2, h_q=16, seqlens=64, strides="dense"))
    plan = plan_for(of_torch, given) if with_plan else None
    if plan is not None:
        plan.update(given["seqlens"])
    given["scale"] = SCALE
    out, lse = of_torch.mla_decode(**given)
    held = None if plan is None else plan.plan
    gc.disable()
    try:
        public = median_microseconds(lambda: mla_cupy.mla_decode(**given, plan=held, out=out, lse=lse))
        ours = median_microseconds(lambda: of_torch.mla_decode(**given, plan=plan, out=out, lse=lse))
    finally:
        gc.enable()
    with capsys.disabled():
        print(f"\nmedian us of the host: public call {public:.1f}, mla_cupy.torch {ours:.1f}")
    assert ours - public <= MAX_OVERHEAD
