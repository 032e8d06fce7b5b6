"""`mla_cupy.torch` under torch.compile, and its plans."""

from __future__ import annotations

import gc
import inspect
from typing import Any

import pytest

import mla_cupy
from mla_cupy import PlanError, ops
from mla_cupy.arrays import dynamo
from mla_cupy.arrays.torch import TorchCpuFamily, TorchFamily, check_tensor
from tests.bindings.cases import CALLS, BoundCall, decode, decode_with_forms, forward, merge
from tests.bindings.test_torch import check, tensors
from tests.interop.test_torch import tensor
from tests.support.flat import flat, flat_plan

pytestmark = pytest.mark.usefixtures("_numpy_backend")


def repeated(torch: Any, given: dict[str, Any], b: int) -> dict[str, Any]:
    """The first sequence of a decode call, b times."""
    return {name: x if name == "kv_cache" else x[:1].repeat(b, *[1] * (x.dim() - 1)) for name, x in given.items()}


def test_compiled_decode_with_a_dynamic_batch(torch: Any, of_torch: Any) -> None:
    """One graph for all batch sizes, with a plan that is updated inside of it."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    call = decode()
    given = tensors(torch, call)
    b, s_q, h_q, _ = given["q"].shape
    pages, page_size = given["block_table"].shape[1], given["kv_cache"].shape[1]
    sizes = {"s_q": s_q, "h_q": h_q, "max_pages": pages, "page_size": page_size}
    plan = flat_plan(of_torch.plan_decode)(max_b=16, dtype=torch.bfloat16, device="cpu", **sizes)

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def step(q: Any, kv_cache: Any, block_table: Any, seqlens: Any) -> Any:
        plan.update(seqlens)
        out, lse = flat(of_torch.mla_decode)(q * 1, kv_cache, block_table, seqlens, plan=plan)
        return out * 2, lse

    for b in (7, 3, 11, 16):  # the first is no other size: PyTorch takes equal sizes for one
        case = repeated(torch, given, b)
        out, lse = step(**case)
        wanted = flat(of_torch.mla_decode)(**case)
        assert torch.equal(out, wanted[0] * 2)
        assert torch.equal(lse, wanted[1])
    assert counter.frame_count == 1


def test_compiled_sparse_attention_with_a_dynamic_length(torch: Any, of_torch: Any) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    given = tensors(torch, forward({"sink": True}))

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def attend(q: Any, kv: Any, indices: Any, attn_sink: Any) -> Any:
        return of_torch.sparse_mla_forward(q, kv, indices, attn_sink=attn_sink, scale=576**-0.5)[0]

    for s_q in (2, 3, 5):
        case = {**given, "q": given["q"][:s_q], "indices": given["indices"][:s_q]}
        assert torch.equal(attend(**case), of_torch.sparse_mla_forward(**case, scale=576**-0.5)[0])
    assert counter.frame_count == 1


def test_what_is_written_survives_compilation(torch: Any, of_torch: Any) -> None:
    """Nothing reads the results of the call, so that only the declared mutation keeps it."""
    torch._dynamo.reset()
    call = merge()
    given, wanted = tensors(torch, call), call.eager()
    out, lse = (torch.full_like(tensor(torch, x), 7) for x in wanted)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def write(outs: Any, lses: Any, out: Any, lse: Any) -> Any:
        of_torch.merge_states(outs, lses, out=out, lse=lse)
        return out + 1

    more = write(**given, out=out, lse=lse)
    check(torch, (out, lse), wanted)
    assert torch.equal(more, out + 1)


def test_vmap_goes_through_the_operator(torch: Any, of_torch: Any) -> None:
    given = tensors(torch, merge())
    stacked = [torch.stack([x, x * 2]) for x in given.values()]
    out, lse = torch.func.vmap(of_torch.merge_states)(*stacked)
    for i in range(2):
        wanted = of_torch.merge_states(*(x[i] for x in stacked))
        assert torch.equal(out[i], wanted[0])
        assert torch.equal(lse[i], wanted[1])


# ---- Plans -------------------------------------------------------------------------------------------------------


def plan_for(of_torch: Any, given: dict[str, Any], **options: Any) -> Any:
    """A plan that serves a decode call."""
    b, s_q, h_q, _ = given["q"].shape
    pages, page_size, dtype = given["block_table"].shape[1], given["kv_cache"].shape[1], given["q"].dtype
    return flat_plan(of_torch.plan_decode)(
        max_b=b, s_q=s_q, h_q=h_q, max_pages=pages, page_size=page_size, dtype=dtype, **options
    )


@pytest.mark.parametrize("write", [False, True], ids=["returned", "given"])
@pytest.mark.parametrize("by_operator", [False, True], ids=["function", "operator"])
def test_plans(torch: Any, of_torch: Any, write: bool, by_operator: bool) -> None:
    call = decode()
    given, wanted = tensors(torch, call), call.eager()
    plan = plan_for(of_torch, given, device="cpu")
    with pytest.raises(PlanError, match="no update yet"):
        flat(of_torch.mla_decode)(**given, plan=plan)
    plan.update(given["seqlens"])
    targets = dict(zip(("out", "lse"), (torch.zeros_like(tensor(torch, x)) for x in wanted), strict=True))
    chosen = targets if write else {}
    if by_operator:
        name = "mla_decode_planned_out" if write else "mla_decode_planned"
        held = {"workspace": plan.workspace, "plan": plan.number}
        got = getattr(torch.ops.mla_cupy, name)(**held, **given, **call.options, **chosen)
        check(torch, *((tuple(targets.values()), wanted) if write else (got, call.of_operator())))
    else:
        check(torch, flat(of_torch.mla_decode)(**given, plan=plan, **chosen), wanted)


def test_opcheck_of_plans(torch: Any, of_torch: Any) -> None:
    given = tensors(torch, decode())
    plan = plan_for(of_torch, given, device="cpu")
    plan.update(given["seqlens"])
    held = {"workspace": plan.workspace, "plan": plan.number}
    torch.library.opcheck(torch.ops.mla_cupy.decode_plan_update.default, (), {**held, "seqlens": given["seqlens"]})
    torch.library.opcheck(torch.ops.mla_cupy.mla_decode_planned.default, (), {**held, **given, "scale": 0.1})


@pytest.mark.filterwarnings("ignore:`torch.jit")  # from inductor's imports
def test_a_plan_for_lengths_that_vary(torch: Any, of_torch: Any) -> None:
    given = tensors(torch, decode_with_forms("cu_seqlens_q", "q_rope", "attn_sink"))
    plan = plan_for(of_torch, tensors(torch, decode()), device="cpu", cu_seqlens_q=True, q_rope=True, attn_sink=True)

    def step(seqlens: Any, starts: Any) -> Any:
        plan.update(seqlens, starts, 5)
        return flat(of_torch.mla_decode)(**given, plan=plan)

    got = torch.compile(step, fullgraph=True)(given["seqlens"], given["cu_seqlens_q"])
    for mine, whole in zip(got, flat(of_torch.mla_decode)(**given), strict=True):
        torch.testing.assert_close(mine, whole, rtol=0, atol=0)


def test_a_plan_must_live(torch: Any, of_torch: Any) -> None:
    given = tensors(torch, decode())
    plan = plan_for(of_torch, given, device="cpu")
    number, workspace = plan.number, plan.workspace
    del plan
    gc.collect()
    with pytest.raises(PlanError, match="keep the plan alive"):
        torch.ops.mla_cupy.mla_decode_planned(workspace, number, **given, scale=0.1)


def test_a_step_that_appends_to_its_cache(torch: Any, of_torch: Any) -> None:
    """The compiled program writes before it reads, and to the caller's cache."""
    cache, q = torch.zeros(4, 64, 656, dtype=torch.uint8), torch.ones(1, 1, 8, 576).half()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(latent: Any, rope: Any, slots: Any, indices: Any) -> Any:
        of_torch.cache_append(latent * 2, rope, cache, slots)
        out, _ = of_torch.sparse_mla_decode(q, cache, indices, scale=576**-0.5)
        rows = of_torch.cache_gather(cache, slots, out_dtype="float32")
        return out + 1, rows

    for value in (1.0, 3.0):
        latent, rope, slots = torch.full((2, 512), value).half(), torch.zeros(2, 64).half(), torch.tensor([70, 5])
        out, rows = step(latent, rope, slots, torch.tensor([[[5, -1, 70]]], dtype=torch.int32))
        assert (out == 2 * value + 1).all()
        assert (rows[:, :512] == 2 * value).all()
        assert torch.equal(of_torch.cache_gather(cache, slots, out_dtype=torch.float32), rows)


def test_mutations_are_declared(torch: Any, of_torch: Any) -> None:
    """Each operator's schema says what it writes, and nothing else."""
    for operation, (changed, outputs) in {
        call.operation: (call.changed, call.record.outputs) for call in CALLS
    }.items():
        schema = getattr(torch.ops.mla_cupy, operation).default._schema
        assert {x.name for x in schema.arguments if x.is_write} == set(changed)
        if outputs:
            written = getattr(torch.ops.mla_cupy, f"{operation}_out").default._schema
            assert {x.name for x in written.arguments if x.is_write} == {
                *(x.name for x in outputs),
                *changed,
                "workspace",
            }
    for name, wanted in (
        ("decode_plan_update", {"workspace"}),
        ("mla_decode_planned", {"workspace"}),
        ("mla_decode_planned_out", {"workspace", "out", "lse", "out_scales"}),
    ):
        schema = getattr(torch.ops.mla_cupy, name).default._schema
        assert {x.name for x in schema.arguments if x.is_write} == wanted


# ---- The functions of mla_cupy -----------------------------------------------------------------------------------


PLAIN = [call for call in CALLS if call.outputs]
PLAIN = list({call.operation: call for call in PLAIN}.values())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("call", PLAIN, ids=[call.operation for call in PLAIN])
def test_a_plain_function_breaks_the_graph(torch: Any, call: BoundCall) -> None:
    """It runs as it is, between two graphs."""
    compiled, counter = _compiled(torch, call)
    check(torch, compiled(tensors(torch, call)), call.eager()[: len(call.outputs)])
    assert (counter.frame_count, counter.op_count) == (2, 2)


def test_a_plain_function_that_is_compiled_before_pytorch_knows_of_it(torch: Any) -> None:
    """A function that was imported before PyTorch, and has not been called yet."""
    frames, call = torch._C._dynamo.eval_frame, decode()
    methods = [x for kind in (TorchFamily, TorchCpuFamily) for x in vars(kind).values() if inspect.isfunction(x)]
    for function in (ops.mla_decode, ops.call.run, ops.call._on_host, check_tensor, *methods):
        frames.reset_code(function.__code__)
        dynamo._waiting.append(function.__code__)
    compiled, counter = _compiled(torch, call)
    check(torch, compiled(tensors(torch, call)), call.eager())
    assert not dynamo._waiting
    assert counter.op_count == 2


def test_what_breaks_the_graph_says_what_does_not(torch: Any) -> None:
    given = tensors(torch, merge())
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"launches kernels itself.* mla_cupy\.torch"):
        torch.compile(lambda given: mla_cupy.merge_states(**given), fullgraph=True, backend="eager")(given)


def _compiled(torch: Any, call: BoundCall) -> tuple[Any, Any]:
    """A call with something for the compiler before and after it."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    first = next(iter(call.arrays))

    @torch.compile(backend=counter)
    def run(given: dict[str, Any]) -> Any:
        given = {**given, first: given[first].clone()}
        results = flat(getattr(mla_cupy, call.operation))(**given, **call.options)
        return (results[0].clone(), *results[1:]) if isinstance(results, tuple) else results.clone()

    return run, counter
