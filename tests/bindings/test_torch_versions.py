"""Every write to a tensor increments its version, by which autograd knows that what it has saved was overwritten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import arrays
from mla_cupy.ops import merge_states
from mla_cupy.simulation import simulated
from tests.bindings.cases import ONE_OF_EACH, BoundCall, decode, merge
from tests.bindings.test_torch import options, tensors
from tests.interop.test_torch import tensor
from tests.support.flat import flat, flat_plan

pytestmark = pytest.mark.usefixtures("_numpy_backend")

every_operation = pytest.mark.parametrize("call", ONE_OF_EACH, ids=lambda call: call.operation)


def writing(torch: Any, call: BoundCall) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a call that is given all its results, and the tensors that it writes to."""
    given = {name: x.clone() for name, x in tensors(torch, call).items()}
    made = zip(call.outputs, call.eager(), strict=False)
    results = {name: torch.zeros_like(tensor(torch, x)) for name, x in made if x is not None}
    changed = {name: given[name] for name in call.changed if name in given}
    return {**given, **results, **options(torch, call)}, {**results, **changed}


def versions(tensors: dict[str, Any]) -> dict[str, int]:
    return {name: x._version for name, x in tensors.items()}


@every_operation
@pytest.mark.parametrize("way", ["mla_cupy", "mla_cupy.torch", "operator"])
def test_every_function(torch: Any, of_torch: Any, call: BoundCall, way: str) -> None:
    given, written = writing(torch, call)
    operator = getattr(torch.ops.mla_cupy, call.operation + "_out" * bool(call.outputs))
    modules = {"mla_cupy": mla_cupy, "mla_cupy.torch": of_torch}
    function = flat(getattr(modules[way], call.operation)) if way in modules else operator
    others = {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and name not in written}
    before, untouched = versions(written), versions(others)
    function(**given)
    assert written
    assert all(version > before[name] for name, version in versions(written).items()), (before, versions(written))
    assert versions(others) == untouched
    with torch.inference_mode():  # such tensors have no versions
        function(**writing(torch, call)[0])


@every_operation
def test_results_of_its_own(torch: Any, of_torch: Any, call: BoundCall) -> None:
    """Results are new tensors."""
    given = {**tensors(torch, call), **options(torch, call)}
    results = flat(getattr(of_torch, call.operation))(**given)
    for x in results if isinstance(results, tuple) else (results,):
        assert x is None or x._version == 0


def test_plans(torch: Any, of_torch: Any) -> None:
    call = decode()
    sizes: dict[str, Any] = {"max_b": 3, "s_q": 2, "h_q": 4, "dtype": "bfloat16", "device": "cpu"}
    sizes |= {"max_pages": call.arrays["block_table"].shape[1], "page_size": call.arrays["kv_cache"].shape[1]}
    plan = flat_plan(of_torch.plan_decode)(**sizes)
    given, written = writing(torch, call)
    before = plan.workspace._version
    plan.update(given["seqlens"])
    assert plan.workspace._version > before
    before, results = plan.workspace._version, versions(written)
    flat(of_torch.mla_decode)(**given, plan=plan)
    assert all(version > results[name] for name, version in versions(written).items())
    torch.ops.mla_cupy.mla_decode_planned_out(plan.workspace, plan.number, **given)
    assert plan.workspace._version > before


def test_autograd_refuses_what_was_overwritten(torch: Any, of_torch: Any) -> None:
    """Also a part of it, and what the operation itself has saved."""
    given, _ = writing(torch, merge())
    saved = torch.ones(2, *given["out"].shape)
    x = torch.ones_like(saved).requires_grad_()
    product = (x * saved).sum()
    of_torch.merge_states(**{**given, "out": saved[1]})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_calls_that_skip_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes through a library that the kernel writes to are counted, from the first call of a kind on."""
    outs, lses = (merge().arrays[name] for name in ("outs", "lses"))
    out, lse = merge_states(outs, lses)
    monkeypatch.setenv("MLA_CUPY_BACKEND", "cuda")
    seen: list[Any] = []
    with simulated():
        monkeypatch.setattr(type(arrays.NUMPY), "count_writes", staticmethod(seen.append), raising=False)
        for _ in range(3):
            merge_states(outs, lses, out=out, lse=lse)
        assert [[id(x) for x in each] for each in seen] == [[id(out), id(lse)]] * 3
        seen.clear()
        merge_states(outs, lses, lse=lse)
        merge_states(outs, lses)
        assert [[id(x) for x in each] for each in seen] == [[id(lse)]]
        memory = np.zeros(1024, np.uint8)
        memory = memory[-memory.ctypes.data % 256 :][:512]
        merge_states(outs, lses, out=out, lse=lse, workspace=memory)
        assert [id(x) for x in seen[-1]] == [id(out), id(lse), id(memory)]


@pytest.mark.gpu
@every_operation
def test_on_a_gpu(torch_gpu: Any, of_torch: Any, call: BoundCall) -> None:
    """The first call of a kind, and those that skip the checks."""
    torch = torch_gpu
    given, written = writing(torch, call)
    given = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    written = {name: given[name] for name in written}
    for module in (mla_cupy, of_torch, of_torch):
        before = versions(written)
        flat(getattr(module, call.operation))(**given)
        assert all(version > before[name] for name, version in versions(written).items())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.inference_mode():
        flat(getattr(of_torch, call.operation))(**given)
    graph.replay()
    torch.cuda.synchronize()
