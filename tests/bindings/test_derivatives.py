"""Derivatives that do not exist raise, of every operation by every argument; those that exist are right everywhere."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import DTypeError
from mla_cupy.ops import OPERATIONS, POOL_OPERATIONS
from tests.bindings.cases import CALLS, CALLS_OF_JAX, SCALE, BoundCall, as_tuple, decode, forward, merge
from tests.bindings.test_torch import options, tensors
from tests.support.flat import flat, mla_decode

pytestmark = [
    pytest.mark.usefixtures("_numpy_backend"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),  # from PyTorch's own forward mode
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]

FLOATS = ("bfloat16", "float16", "float32")
DIFFERENTIABLE = ("mla_prefill", "sparse_mla_forward")
CONSTANTS = ("indexer_warmup_loss", "indexer_sparse_loss", "indexer_head_sums")
"""They detach what they get: autograd takes their results for constants. Transforms would make zeros of that."""


def differentiable(call: BoundCall) -> bool:
    """True if a call has a gradient: e4m3 codes have none."""
    return call.operation in DIFFERENTIABLE and call.arrays["q"].dtype.name in FLOATS


def one_call_each(calls: list[BoundCall]) -> Iterator[Any]:
    """One call per operation and differentiable array, with the array's name."""
    seen = set()
    for call in calls:
        for name, x in call.arrays.items():
            if x.dtype.name in FLOATS and (call.operation, name) not in seen:
                seen.add((call.operation, name))
                yield pytest.param(call, name, id=f"{call.operation}-{name}")


every_argument = pytest.mark.parametrize(("call", "name"), [*one_call_each(CALLS)])
every_argument_of_jax = pytest.mark.parametrize(("call", "name"), [*one_call_each(CALLS_OF_JAX)])


def of_one(torch: Any, of: Any, call: BoundCall, name: str) -> tuple[Callable[[Any], Any], Any]:
    """A scalar function of one tensor, and the tensor."""
    given = {**tensors(torch, call), **options(torch, call)}

    def value(x: Any) -> Any:
        results = as_tuple(flat(getattr(of, call.operation))(**{**given, name: x}))
        changed = [given[key] for key in call.changed if key in given]
        floats = (y for y in (*results, *changed) if y is not None and y.is_floating_point())
        return sum((y.float().sum() for y in floats), x.float().sum())

    return value, given[name]


def named(call: BoundCall, name: str) -> str:
    """An argument as messages name it: alone, or as the member of its group."""
    operation = {**OPERATIONS, **POOL_OPERATIONS}.get(call.operation)
    path = operation.paths.get(name, name) if operation else name
    return f"({name}|{re.escape(path)})"


def said(call: BoundCall, name: str) -> str:
    operation = f"{call.operation}( of e4m3 codes)?"
    got = f"^{named(call, name)}: got a derivative, expected a constant"
    return f"{got}: {operation} has no such gradient; .*sparse_mla_forward"


@every_argument
def test_torch(torch: Any, of_torch: Any, call: BoundCall, name: str) -> None:
    """Refusals in reverse mode by autograd and by torch.func, and in forward mode by both."""
    value, x = of_one(torch, of_torch, call, name)
    has_gradient = differentiable(call)
    if not has_gradient:
        with pytest.raises(DTypeError, match=said(call, name)):
            torch.func.grad(value)(x)
    if not has_gradient and call.operation not in CONSTANTS:
        with pytest.raises(DTypeError, match=f"^{named(call, name)}: got a (derivative|tensor that requires grad)"):
            value(x.clone().requires_grad_())
    with pytest.raises(DTypeError, match=said(call, name)):
        torch.func.jvp(value, (x,), (x,))
    from torch.autograd import forward_ad

    with (
        forward_ad.dual_level(),
        pytest.raises(DTypeError, match=f"^{named(call, name)}: got a (derivative|tensor that has a tangent)"),
    ):
        value(forward_ad.make_dual(x, x))


@every_argument
def test_plain_functions(torch: Any, call: BoundCall, name: str) -> None:
    """Under torch.func they work on nothing at all."""
    value, x = of_one(torch, mla_cupy, call, name)
    for transformed in (lambda: torch.func.grad(value)(x), lambda: torch.func.jvp(value, (x,), (x,))):
        with pytest.raises(
            DTypeError, match=r"^\w+: got a tensor (under a transform|that requires|that has a).* mla_cupy\.t"
        ):
            transformed()
    with pytest.raises(DTypeError, match=f"^{named(call, name)}: got a tensor that requires grad, .* have gradients$"):
        value(x.clone().requires_grad_())


@every_argument_of_jax
def test_jax(jax: Any, of_jax: Any, call: BoundCall, name: str) -> None:
    given = {key: jax.numpy.asarray(x) for key, x in call.arrays.items()}

    def value(x: Any) -> Any:
        results = as_tuple(flat(getattr(of_jax, call.operation))(**{**given, name: x}, **call.options))
        floats = (y for y in results if y is not None and jax.numpy.issubdtype(y.dtype, jax.numpy.floating))
        return sum((y.astype(np.float32).sum() for y in floats), x.astype(np.float32).sum())

    x = given[name]
    if differentiable(call):
        if call.operation == "sparse_mla_forward":
            with pytest.raises(DTypeError, match=r"^(lse|max_logits): got a derivative, .*: sparse_mla_forward has no"):
                jax.grad(value)(x)
        with pytest.raises(TypeError, match="custom_vjp"):
            jax.jvp(value, (x,), (x,))
    else:
        with pytest.raises(DTypeError, match=said(call, name)):
            jax.grad(value)(x)
        with pytest.raises(DTypeError, match=said(call, name)):
            jax.jvp(value, (x,), (x,))


# ---- What is no derivative of the operation passes ---------------------------------------------------------------


def test_torch_constants(torch: Any, of_torch: Any) -> None:
    """A function that is differentiated may call operations on what it is not differentiated by."""
    given = tensors(torch, decode())
    factor, out = torch.tensor(3.0), flat(of_torch.mla_decode)(**given)[0].float().sum()
    for through in (torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones(()),))[1]):
        assert torch.equal(through(lambda x: x * flat(of_torch.mla_decode)(**given)[0].float().sum())(factor), out)
        with pytest.raises(DTypeError, match=r"^q: got a tensor under a transform, .* of mla_cupy\.torch$"):
            through(lambda x: x * mla_decode(**given)[0].float().sum())(factor)
    detached = torch.func.grad(
        lambda q: (q.float() * 0 + flat(of_torch.mla_decode)(**{**given, "q": q.detach()})[0].float().mean()).mean()
    )
    assert not detached(given["q"]).any()
    with torch.no_grad():
        flat(of_torch.mla_decode)(**{**given, "q": given["q"].clone().requires_grad_()})


def test_jax_constants(jax: Any, of_jax: Any) -> None:
    given = {key: jax.numpy.asarray(x) for key, x in decode().arrays.items()}
    stop = jax.lax.stop_gradient
    out = flat(of_jax.mla_decode)(**given)[1].sum()
    assert jax.grad(lambda x: x * flat(of_jax.mla_decode)(**given)[1].sum())(3.0) == out
    gradient = jax.jit(jax.grad(lambda q: flat(of_jax.mla_decode)(**{**given, "q": stop(q)})[1].sum() + q.sum()))(
        given["q"]
    )
    assert (gradient == 1).all()


# ---- torch.func of functions with a gradient ---------------------------------------------------------------------


def attention(torch: Any, of_torch: Any, **changes: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A loss of out and lse by the differentiable arrays of a sparse forward, and the arrays."""
    call = forward(changes)
    given = tensors(torch, call)
    names = [name for name in ("q", "kv", "attn_sink") if name in given]
    weights = torch.linspace(-1, 1, 512)

    def loss(*leaves: Any) -> Any:
        out, lse, _ = flat(of_torch.sparse_mla_forward)(
            **{**given, **dict(zip(names, leaves, strict=True))}, **call.options
        )
        return (out.float() * weights).sum() + torch.where(lse.isfinite(), lse, 0).square().sum()

    return loss, tuple(given[name] for name in names)


def by_autograd(torch: Any, loss: Callable[..., Any], leaves: tuple[Any, ...]) -> tuple[Any, ...]:
    leaves = tuple(x.clone().requires_grad_() for x in leaves)
    return tuple(torch.autograd.grad(loss(*leaves), leaves))


@pytest.mark.parametrize("changes", [{}, {"sink": True, "lengths": True, "causal": True}], ids=str)
def test_transforms_of_the_sparse_forward(torch: Any, of_torch: Any, changes: dict[str, Any]) -> None:
    loss, leaves = attention(torch, of_torch, **changes)
    wanted = by_autograd(torch, loss, leaves)
    every = tuple(range(len(leaves)))

    def same(got: Any) -> bool:
        return all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))

    assert same(torch.func.grad(loss, every)(*leaves))
    assert same(torch.func.jacrev(loss, every)(*leaves))
    assert same(torch.func.vjp(loss, *leaves)[1](torch.ones(())))
    twice = [torch.stack([x, x]) for x in leaves]
    assert same(x[1] for x in torch.func.vmap(torch.func.grad(loss, every))(*twice))
    assert same(x[1] for x in torch.func.grad(lambda *x: torch.func.vmap(loss)(*x).sum(), every)(*twice))


@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_through_lse(torch: Any, of_torch: Any, lse_base: str, compiled: bool) -> None:
    """The gradient of a loss of lse alone matches PyTorch's; rows without a key have none."""
    call = forward({"sink": True, "lengths": True})
    call.arrays["attn_sink"][:] = 0.5, -np.inf, 3, 9
    given = {name: x.double() if x.dtype == torch.bfloat16 else x for name, x in tensors(torch, call).items()}
    indices, kv = given["indices"], given["kv"].requires_grad_()
    q = given["q"].requires_grad_()
    counts = torch.arange(indices.shape[1]) < given["topk_length"][:, None]
    valid = counts & (indices >= 0) & (indices < len(kv))
    scores = torch.einsum("shd,std->sht", q, kv[indices.clamp(0, len(kv) - 1).long()].nan_to_num(0)) * 576**-0.5
    own = scores.masked_fill(~valid[:, None], -torch.inf).logsumexp(-1)
    own[valid.any(-1)].square().sum().backward()

    def loss(q: Any, kv: Any) -> Any:
        _, lse, _ = of_torch.sparse_mla_forward(
            **{**rounded, "q": q, "kv": kv}, lse_base=lse_base, empty_lse=0.0, scale=SCALE
        )
        return (lse * (1 if lse_base == "e" else np.log(2))).square().sum()

    torch._dynamo.reset()
    rounded = tensors(torch, call)
    leaves = [rounded[name].requires_grad_() for name in ("q", "kv")]
    (torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss)(*leaves).backward()
    for leaf, wanted in zip(leaves, (q.grad, kv.grad), strict=True):
        gap = (leaf.grad.double() - wanted).abs().max()
        assert gap < 0.02 * wanted.abs().max()
        assert wanted.abs().max() > 0.1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("wanted", [True, False])
def test_who_does_not_use_lse_pays_nothing(
    torch: Any, of_torch: Any, compiled: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward is then called as if there were no such gradient."""
    library = importlib.import_module("mla_cupy.torch.library")
    seen, original = [], library.run_call

    def run_call(call: Any) -> Any:
        seen.append(call)
        return original(call)

    monkeypatch.setattr(library, "run_call", run_call)
    given = tensors(torch, forward())
    given["q"].requires_grad_()

    def loss(given: dict[str, Any]) -> Any:
        out, lse, _ = of_torch.sparse_mla_forward(**given, scale=SCALE)
        return out.float().sum() + (lse.nan_to_num(neginf=0).sum() if wanted else 0)

    torch._dynamo.reset()
    (torch.compile(loss, backend="aot_eager") if compiled else loss)(given).backward()
    assert [call.operation.name for call in seen] == ["sparse_mla_forward", "sparse_mla_backward"]
    assert (seen[1].named["dlse"] is not None) == wanted


def test_second_derivatives(torch: Any, of_torch: Any) -> None:
    """The first pass of a double backward is right; the second raises."""
    loss, leaves = attention(torch, of_torch)
    q = leaves[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(q, leaves[1]), q, create_graph=True)
    assert torch.equal(gradient, by_autograd(torch, loss, leaves)[0])
    text = "sparse_mla_backward has no such gradient"
    with pytest.raises(DTypeError, match=text):
        gradient.float().sum().backward()
    with pytest.raises(DTypeError, match=text):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, leaves[1]).float().sum())(leaves[0])
    with pytest.raises(DTypeError, match="sparse_mla_forward has no such gradient"):
        torch.func.hessian(lambda q: loss(q, leaves[1]))(leaves[0])


def test_second_derivatives_in_jax(jax: Any, of_jax: Any) -> None:
    given = {key: jax.numpy.asarray(x) for key, x in forward().arrays.items()}

    def first(q: Any) -> Any:
        return jax.grad(
            lambda q: of_jax.sparse_mla_forward(**{**given, "q": q}, scale=SCALE)[0].astype(np.float32).sum()
        )(q)

    with pytest.raises(DTypeError, match=r"^q: got a derivative, .*sparse_mla_backward has no such gradient"):
        jax.grad(lambda q: first(q).astype(np.float32).sum())(given["q"])


def test_the_largest_logits_are_constants(torch: Any, of_torch: Any) -> None:
    """Autograd knows it beforehand; torch.func asks for a gradient, and gets an error."""
    given = tensors(torch, forward())

    def largest(q: Any) -> Any:
        return of_torch.sparse_mla_forward(**{**given, "q": q}, scale=SCALE)[2].nan_to_num(neginf=0).sum()

    assert not largest(given["q"].clone().requires_grad_()).requires_grad
    with pytest.raises(DTypeError, match=r"^max_logits: got a derivative"):
        torch.func.grad(largest)(given["q"])


# ---- Inside of torch.compile -------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_compiled_transforms_raise(torch: Any, of_torch: Any, transform: str) -> None:
    value, q = of_one(torch, of_torch, decode(), "q")
    functions = {"grad": torch.func.grad(value), "jvp": lambda q: torch.func.jvp(value, (q,), (q,))}
    torch._dynamo.reset()
    with pytest.raises(DTypeError, match=r"^q: got a derivative, .*mla_decode has no such gradient"):
        torch.compile(functions[transform], backend="eager")(q)


def test_a_compiled_vmap_stays_one_graph(torch: Any, of_torch: Any) -> None:
    outs, lses = (torch.stack([x, x * 2]) for x in tensors(torch, merge()).values())
    torch._dynamo.reset()
    out, _ = torch.compile(torch.func.vmap(of_torch.merge_states), backend="eager", fullgraph=True)(outs, lses)
    assert torch.equal(out[1], of_torch.merge_states(outs[1], lses[1])[0])
