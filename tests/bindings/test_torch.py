"""`mla_cupy.torch` on the CPU: operators, fakes, autograd, compilation."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, ShapeError
from tests.bindings.cases import (
    CALLS,
    SCALE,
    Array,
    BoundCall,
    append,
    as_tuple,
    backward,
    decode,
    every_call,
    forward,
    merge,
    mla_prepare,
    sparse_loss,
    warmup_loss,
)
from tests.interop.test_torch import array, tensor
from tests.support.calls import assert_same
from tests.support.flat import flat, flat_plan, mla_decode, plan_decode
from tests.support.loss_cases import LossCase
from tests.support.sparse_loss_cases import SparseLossCase

pytestmark = pytest.mark.usefixtures("_numpy_backend")


RETURNING = [call for call in CALLS if call.outputs]


def tensors(torch: Any, call: BoundCall) -> dict[str, Any]:
    return {name: tensor(torch, x) for name, x in call.arrays.items()}


def options(torch: Any, call: BoundCall) -> dict[str, Any]:
    """Dtypes as PyTorch's."""
    return {name: getattr(torch, x) if name.endswith("dtype") else x for name, x in call.options.items()}


def operator(torch: Any, call: BoundCall, suffix: str = "") -> Any:
    return getattr(torch.ops.mla_cupy, call.operation + suffix).default


def check(torch: Any, got: Any, wanted: tuple[Array | None, ...]) -> None:
    got = as_tuple(got)
    assert len(got) == len(wanted)
    for x, expected in zip(got, wanted, strict=True):
        if expected is None:
            assert x is None or x.numel() == 0
        else:
            assert_same(array(torch, x), expected)


def run(torch: Any, function: Any, call: BoundCall) -> tuple[Any, ...]:
    """Results, then changed arguments."""
    given = tensors(torch, call)
    return (*as_tuple(function(**given, **options(torch, call))), *(given.get(name) for name in call.changed))


@every_call
def test_functions(torch: Any, of_torch: Any, call: BoundCall) -> None:
    check(torch, run(torch, flat(getattr(of_torch, call.operation)), call), call.eager())


@every_call
def test_operators(torch: Any, of_torch: Any, call: BoundCall) -> None:
    check(torch, run(torch, operator(torch, call), call), call.of_operator())


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32")], ids=["name", "type", "dtype"])
def test_dtypes_of_any_form(torch: Any, of_torch: Any, dtype: Any) -> None:
    """Dtypes in every form of the public functions, for every operator."""
    call, steps = forward(), decode()
    given, inputs = tensors(torch, call), tensors(torch, steps)
    wanted = BoundCall("", call.operation, call.arrays, {**call.options, "out_dtype": "float32"}).eager()
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            check(torch, of_torch.sparse_mla_forward(**given, out_dtype=dtype, scale=SCALE), wanted)
    transformed = torch.func.vjp(
        lambda q: of_torch.sparse_mla_forward(**{**given, "q": q}, out_dtype=dtype, scale=SCALE), given["q"]
    )
    check(torch, transformed[0], wanted)
    b, s_q, h_q, _ = inputs["q"].shape
    (_, max_pages), page_size = inputs["block_table"].shape, inputs["kv_cache"].shape[1]
    sizes = {"max_b": b, "s_q": s_q, "h_q": h_q, "max_pages": max_pages, "page_size": page_size}
    plan = flat_plan(of_torch.plan_decode)(**sizes, dtype="bfloat16", device="cpu")
    plan.update(inputs["seqlens"])
    with torch.device("cpu"):  # a mode, which has to see operators
        out, _ = flat(of_torch.mla_decode)(**inputs, plan=plan, out_dtype=dtype)
    assert out.dtype == torch.float32
    with pytest.raises(DTypeError, match=r"^out_dtype: got 'int77', expected None, or a dtype"):
        of_torch.sparse_mla_forward(**given, out_dtype="int77", scale=SCALE)


def test_rows_without_rope(torch: Any, of_torch: Any) -> None:
    latent, slots = torch.ones(2, 512).bfloat16(), torch.tensor([3, -1])
    for write in (of_torch.cache_append, torch.ops.mla_cupy.cache_append):
        cache = torch.zeros(2, 4, 512).bfloat16()
        write(latent, None, cache, slots)
        assert (cache.view(8, 512).sum(1) == torch.tensor([0, 0, 0, 512, 0, 0, 0, 0])).all()


@pytest.mark.parametrize("call", RETURNING, ids=[call.id for call in RETURNING])
def test_operators_that_write(torch: Any, of_torch: Any, call: BoundCall) -> None:
    names = call.outputs
    wanted = call.eager()[: len(names)]
    targets = {
        name: torch.full_like(tensor(torch, x), 7) for name, x in zip(names, wanted, strict=True) if x is not None
    }
    given = {**tensors(torch, call), **options(torch, call)}
    assert operator(torch, call, "_out")(**given, **targets) is None
    check(torch, [targets.get(name) for name in names], wanted)


def test_functions_that_write(torch: Any, of_torch: Any) -> None:
    call = backward({"sink": True})
    given, wanted = tensors(torch, call), call.eager()
    dq, dkv, d_sink = (torch.full_like(tensor(torch, x), 7) for x in wanted if x is not None)
    got = of_torch.sparse_mla_backward(**given, dq=dq, dkv=dkv, d_sink=d_sink, scale=SCALE)
    assert [x is y for x, y in zip(got, (dq, dkv, d_sink), strict=True)] == [True] * 3
    check(torch, got, wanted)
    with pytest.raises(ArgumentError, match="dkv: got None, expected a tensor, like dq; pass all results or none"):
        of_torch.sparse_mla_backward(**given, dq=dq, scale=SCALE)
    for name, results in (("merge_states", ("out", "lse")), ("mla_decode", ("out", "lse"))):
        call = merge() if name == "merge_states" else decode()
        targets = dict(zip(results, (torch.full_like(tensor(torch, x), 7) for x in call.eager()), strict=True))
        got = flat(getattr(of_torch, name))(**tensors(torch, call), **targets)
        assert [x is y for x, y in zip(got, targets.values(), strict=True)] == [True] * 2
        check(torch, got, call.eager())


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"scale": -1.0}, ArgumentError, "scale: got -1.0"),
        ({"kernel": "no_such_kernel"}, ArgumentError, "kernel: got 'no_such_kernel'"),
        ({"seqlens": np.zeros(3, np.int16)}, DTypeError, "seqlens.dtype: got int16, expected int32 or int64"),
        ({"seqlens": np.zeros(4, np.int32)}, ShapeError, r"seqlens.shape\[0\]: got 4, expected b=3"),
    ],
    ids=["scale", "kernel", "dtype", "shape"],
)
def test_errors_come_through(
    torch: Any, of_torch: Any, change: dict[str, Any], kind: type[Exception], text: str
) -> None:
    """Errors come from the operator and from its fake."""
    given = {**tensors(torch, decode()), "scale": SCALE, **change}
    given = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    with pytest.raises(kind, match=text):
        torch.ops.mla_cupy.mla_decode(**given)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        with pytest.raises(kind, match=text):
            torch.ops.mla_cupy.mla_decode(**fakes)


def test_wide_integers(torch: Any, of_torch: Any) -> None:
    """PyTorch's default is 64 bits: by function, by operator, and of a shape alone."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = decode()
    given = {name: x.long() if x.dtype == torch.int32 else x for name, x in tensors(torch, call).items()}
    for function in (mla_cupy.mla_decode, of_torch.mla_decode):
        check(torch, function(**given, **call.options), call.eager())
    check(torch, torch.ops.mla_cupy.mla_decode(**given, **call.options), call.of_operator())
    with FakeTensorMode() as mode:
        out, _ = of_torch.mla_decode(**{name: mode.from_tensor(x) for name, x in given.items()}, scale=SCALE)
    assert out.shape == (*given["q"].shape[:-1], 512)


# ---- What PyTorch itself says ------------------------------------------------------------------------------------


CHECKED = [
    decode(),
    forward({"sink": True}),
    backward({"sink": True}),
    merge(),
    append("v32"),
    append("v4", rotated=True),
]


# PyTorch 2.14 hides this warning by a filter of its own, which does not help where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("call", CHECKED, ids=[call.id for call in CHECKED])
def test_opcheck(torch: Any, of_torch: Any, call: BoundCall) -> None:
    """Schema, fake, autograd and tracing with symbolic sizes."""
    given = tensors(torch, call)
    if call.operation == "sparse_mla_forward":
        for name in ("q", "kv", "attn_sink"):
            given[name].requires_grad_()
    torch.library.opcheck(operator(torch, call), (), {**given, **options(torch, call)})


@pytest.mark.parametrize("call", [decode(), backward()], ids=["decode", "backward"])
def test_opcheck_of_what_writes(torch: Any, of_torch: Any, call: BoundCall) -> None:
    names = call.outputs
    targets = {
        name: torch.zeros_like(tensor(torch, x)) for name, x in zip(names, call.eager(), strict=True) if x is not None
    }
    given = {**tensors(torch, call), **options(torch, call), **targets}
    torch.library.opcheck(operator(torch, call, "_out"), (), given)


# ---- Gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"sink": True, "lengths": True, "causal": True}, {"head_axis": True}], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients(torch: Any, of_torch: Any, changes: dict[str, Any], compiled: bool) -> None:
    """They are the public backward's; max_logits has none."""
    call, whole = forward(changes), backward(changes)
    given = tensors(torch, call)
    leaves = {name: given[name].requires_grad_() for name in ("q", "kv", "attn_sink") if name in given}

    def run(given: dict[str, Any]) -> Any:
        return flat(of_torch.sparse_mla_forward)(**given, **call.options)

    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    out, lse, max_logits = run(given)
    assert (out.requires_grad, lse.requires_grad, max_logits.requires_grad) == (True, True, False)
    out.backward(tensor(torch, whole.arrays["dout"]))
    eager_out, eager_lse, _ = call.eager()
    arrays = {**call.arrays, "out": eager_out, "lse": eager_lse, "dout": whole.arrays["dout"]}
    dq, dkv, d_sink = flat(mla_cupy.sparse_mla_backward)(**arrays, **call.options)
    wanted = {"q": dq, "kv": dkv, "attn_sink": d_sink}
    for name, leaf in leaves.items():
        assert_same(array(torch, leaf.grad), wanted[name])


def test_an_expanded_gradient(torch: Any, of_torch: Any) -> None:
    call = forward()
    given = tensors(torch, call)
    given["q"].requires_grad_()
    of_torch.sparse_mla_forward(**given, scale=SCALE)[0].sum().backward()
    out, lse, _ = call.eager()
    dq, _, _ = mla_cupy.sparse_mla_backward(**call.arrays, out=out, lse=lse, dout=np.ones_like(out), scale=SCALE)
    assert_same(array(torch, given["q"].grad), dq)


def test_gradients_are_deterministic_where_pytorch_is(
    torch: Any, of_torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = importlib.import_module("mla_cupy.torch.library")
    seen: list[bool] = []
    original = library.run_call

    def run_call(call: Any) -> Any:
        if call.operation.name == "sparse_mla_backward":
            seen.append(call.operation.options(*call.options).deterministic)
        return original(call)

    monkeypatch.setattr(library, "run_call", run_call)
    for wanted in (False, True):
        given = tensors(torch, forward())
        given["kv"].requires_grad_()
        torch.use_deterministic_algorithms(wanted)
        try:
            of_torch.sparse_mla_forward(**given, scale=SCALE)[0].sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, True]


def test_the_public_call_points_to_the_binding(torch: Any) -> None:
    given = tensors(torch, forward())
    given["q"].requires_grad_()
    with pytest.raises(DTypeError, match=r"^q: got a tensor that requires grad.*of mla_cupy\.torch have gradients"):
        mla_cupy.sparse_mla_forward(**given, scale=SCALE)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"q": None}, "q: got None, expected a tensor"),
        ({"q": np.zeros(3)}, "q: got a ndarray, expected a tensor"),
        ({"indices": (1,)}, "indices: got a tuple, expected a tensor"),
        ({"topk_length": "x"}, "topk_length: got a str, expected a tensor"),
        ({"scale": "x"}, "scale: got 'x', expected a number"),
        ({"scale": 10**400}, "scale: got 1000.* expected a number"),
        ({"scale": None}, "scale: got None, expected a number"),
        ({"causal": [True]}, r"causal: got \[True\], expected True or False"),
        ({"kernel": 3}, "kernel: got 3, expected a name"),
    ],
)
@pytest.mark.parametrize("recorded", [True, False])
def test_arguments_of_other_kinds(
    torch: Any, of_torch: Any, changes: dict[str, Any], match: str, recorded: bool
) -> None:
    """PyTorch's own errors, for what its schemas do not take, are none of the package's."""
    given = {**tensors(torch, forward()), "scale": SCALE, **changes}
    with (
        torch.set_grad_enabled(recorded),
        pytest.raises((ArgumentError, DTypeError), match=match if recorded else None),
    ):
        of_torch.sparse_mla_forward(**given)
    if recorded and "q" not in changes:
        with pytest.raises((ArgumentError, DTypeError), match=match):
            torch.func.vjp(lambda q: of_torch.sparse_mla_forward(**{**given, "q": q}), given["q"])


def test_numbers_of_numpy_as_options(torch: Any, of_torch: Any) -> None:
    call = forward()
    given = tensors(torch, call)
    chosen = {"scale": np.float32(0.5), "causal": np.bool_(True)}
    wanted = BoundCall("", call.operation, call.arrays, {"scale": 0.5, "causal": True}).eager()
    check(torch, flat(of_torch.sparse_mla_forward)(**given, **chosen), wanted)


def test_tensors_that_are_not_dense(torch: Any, of_torch: Any) -> None:
    given = tensors(torch, forward())
    with pytest.raises(DTypeError, match=r"q: got a tensor of layout torch\.sparse_coo"):
        of_torch.sparse_mla_forward(**{**given, "q": given["q"].to_sparse()}, scale=SCALE)
    nested = torch.nested.nested_tensor([given["q"]], layout=torch.jagged)
    for context in (torch.no_grad, torch.enable_grad):
        with context(), pytest.raises(DTypeError, match="q: got a nested tensor"):
            of_torch.sparse_mla_forward(**{**given, "q": nested}, scale=SCALE)


def fakes_of(torch: Any) -> dict[str, Any]:
    """Ways to make a tensor that has no memory, or none that says what it is."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Wrapper(torch.Tensor):  # type: ignore[misc, name-defined]
        @staticmethod
        def __new__(cls, x: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

        @classmethod
        def __torch_dispatch__(cls, *given: Any) -> Any:
            raise AssertionError("nothing may be asked of it")

    mode = FakeTensorMode()
    return {
        "FakeTensor": mode.from_tensor,
        "Wrapper": Wrapper,
        "functional": torch._to_functional_tensor,
        "zeros": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
        "negative": torch._neg_view,
        "meta": lambda x: x.to("meta"),
        "scales": lambda x: torch.empty(x.shape, dtype=torch.float8_e8m0fnu),
        "quantised": lambda x: torch.quantize_per_tensor(x.float(), 1.0, 0, torch.quint8),
    }


FAKES = ["FakeTensor", "Wrapper", "functional", "zeros", "negative", "meta", "scales", "quantised"]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", FAKES)
@pytest.mark.parametrize("name", ["q", "kv_cache", "seqlens"])
def test_tensors_without_values(torch: Any, of_torch: Any, kind: str, name: str) -> None:
    """The plain functions refuse them, wherever they stand."""
    call = decode()
    given = tensors(torch, call)
    if name == "seqlens" and kind in ("negative", "quantised"):
        given[name] = given[name].float()
    given[name] = fakes_of(torch)[kind](given[name])
    with pytest.raises(DTypeError, match=rf"^{name}(\.dtype)?: got "):
        mla_decode(**given)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in FAKES if kind not in ("Wrapper", "functional")])
@pytest.mark.parametrize("name", ["q", "kv"])
def test_operators_refuse_mixtures(torch: Any, of_torch: Any, kind: str, name: str, recorded: bool) -> None:
    given = tensors(torch, forward())
    given[name] = fakes_of(torch)[kind](given[name])
    with torch.set_grad_enabled(recorded), pytest.raises((DTypeError, mla_cupy.DeviceError)):
        of_torch.sparse_mla_forward(**given, scale=SCALE)


@every_call
def test_shapes_alone(torch: Any, of_torch: Any, call: BoundCall) -> None:
    """Shapes alone for tensors on "meta", and for fake ones without their mode."""
    wanted = call.eager()[: len(call.outputs)]
    for kind in ("meta", "FakeTensor"):
        make = fakes_of(torch)[kind]
        given = {name: make(x) for name, x in tensors(torch, call).items()}
        with torch.no_grad():
            results = as_tuple(flat(getattr(of_torch, call.operation))(**given, **options(torch, call)))
        for x, expected in zip(results, wanted, strict=True):
            assert (x is None) == (expected is None)
            assert x is None or x.shape == expected.shape


def test_vmap_over_what_writes(torch: Any, of_torch: Any) -> None:
    call, appended = merge(), append("v32")
    given = {name: torch.stack([x, x]) for name, x in tensors(torch, call).items()}
    out, lse = (torch.stack([tensor(torch, x)] * 2) for x in call.eager())
    with pytest.raises(DTypeError, match=r"^outs: got a tensor under vmap, .*: merge_states writes to its arguments"):
        torch.vmap(lambda outs, lses, out, lse: of_torch.merge_states(outs, lses, out=out, lse=lse))(
            *given.values(), out, lse
        )
    others = tensors(torch, appended)
    latent = torch.stack([others.pop("latent")] * 2)
    with pytest.raises(DTypeError, match=r"^latent: got a tensor under vmap, .*: cache_append writes to its arguments"):
        torch.vmap(lambda x: of_torch.cache_append(x, **others, **options(torch, appended)))(latent)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    ("call", "name", "text"),
    [
        (warmup_loss(LossCase()), "out", "there is no v"),
        (warmup_loss(LossCase(), gradients=False), "d_weights", "gradients is not set"),
        (sparse_loss(SparseLossCase(), gradients=False), "d_index_q", "gradients is not set"),
        (mla_prepare(theta=1e4), "rope_out", "return_rope is not set"),
    ],
    ids=["out", "d_weights", "d_index_q", "rope_out"],
)
def test_results_that_there_are_not(
    torch: Any, of_torch: Any, call: BoundCall, name: str, text: str, recorded: bool
) -> None:
    assert name in call.outputs
    given = {**tensors(torch, call), **options(torch, call), name: torch.zeros(3)}
    for module in (mla_cupy, of_torch):
        with (
            torch.set_grad_enabled(recorded),
            pytest.raises(ArgumentError, match=rf"^(results\.)?{name}: got .*None: {text}"),
        ):
            flat(getattr(module, call.operation))(**given)


@pytest.mark.parametrize("name", ["kv", "indices"])
def test_tensors_of_which_one_has_no_memory(torch: Any, of_torch: Any, name: str) -> None:
    """Tensors all on "meta" give shapes; a mixture is refused, since its result would never be written."""
    given = tensors(torch, forward())
    on_meta = {key: x.to("meta") for key, x in given.items()}
    assert of_torch.sparse_mla_forward(**on_meta, scale=SCALE)[0].device.type == "meta"
    with pytest.raises(mla_cupy.DeviceError, match=f"{name}: got a tensor on meta, expected one on cpu, like q"):
        of_torch.sparse_mla_forward(**{**given, name: on_meta[name]}, scale=SCALE)


def test_plans_that_are_not_pytorchs(torch: Any, of_torch: Any) -> None:
    call = decode()
    sizes: dict[str, Any] = {"max_b": 3, "s_q": 2, "h_q": 4, "max_pages": 2, "page_size": 64, "dtype": "bfloat16"}
    plan = plan_decode(**sizes)
    for given in (plan, "x"):
        with pytest.raises(mla_cupy.PlanError, match=r"plan: got .*, expected a TorchDecodePlan, or None"):
            flat(of_torch.mla_decode)(**tensors(torch, call), plan=given)
    with pytest.raises(
        mla_cupy.PlanError, match=r"plan: got TorchDecodePlan\(max_b=3.*, expected a plan of mla_decode"
    ):
        mla_decode(**tensors(torch, call), plan=flat_plan(of_torch.plan_decode)(**sizes, device="cpu"))


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        (("x",), DTypeError, "seqlens: got a str, expected a tensor"),
        ((None,), DTypeError, "seqlens: got None"),
        (("lengths", "x"), DTypeError, "cu_seqlens_q: got a str"),
        (("lengths", None, 1.5), ArgumentError, "total_q: got 1.5"),
        (("lengths", None, 3), mla_cupy.PlanError, "total_q: got one"),
    ],
)
def test_updates_of_wrong_kinds(torch: Any, of_torch: Any, changes: Any, kind: Any, text: str) -> None:
    plan = of_torch.plan_decode(max_b=3, s_q=2, h_q=4, max_pages=2, page_size=64, dtype="bfloat16", device="cpu")
    given = [torch.zeros(3, dtype=torch.int32) if x == "lengths" else x for x in changes]
    with pytest.raises(kind, match=f"^{text}"):
        plan.update(*given)


@pytest.mark.parametrize("device", ["nope", "meta", "xla", (), 1.5, True, "cuda:-1"], ids=str)
def test_plans_of_no_place(of_torch: Any, device: Any) -> None:
    sizes: dict[str, Any] = {"max_b": 3, "s_q": 2, "h_q": 4, "max_pages": 2, "page_size": 64, "dtype": "bfloat16"}
    with pytest.raises(mla_cupy.DeviceError, match=r"^device: got .*, expected 'cpu'"):
        flat_plan(of_torch.plan_decode)(**sizes, device=device)


def test_unknown_options(torch: Any, of_torch: Any) -> None:
    with pytest.raises(TypeError, match=r"sparse_mla_forward\(\) got an unexpected keyword argument 'scales'"):
        of_torch.sparse_mla_forward(**tensors(torch, forward()), scales=1.0, scale=SCALE)
