"""The bindings against NumPy's answers and float64 autograd: random values, layouts, ways to call, and gradients.

Mistakes in arguments are in `test_misuse_fuzz.py`. Together an ordinary run makes about 3,000 calls, `-m slow` 30,000.
Seeds are fixed: every run makes the same calls.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import MlaError
from tests.bindings import draws
from tests.bindings.cases import CALLS, CALLS_OF_JAX, ONE_OF_EACH, Array, BoundCall, as_tuple
from tests.bindings.draws import PROBLEMS, Problem
from tests.interop.test_torch import UNKNOWN, array, tensor
from tests.operations.test_layout_fuzz import LaidOut
from tests.support.flat import flat
from tests.support.misuse import numbers

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
]
on_cpu = pytest.mark.usefixtures("_numpy_backend")
GPU_ERROR = 0.05
"""Relative to the largest result: of products of 8 and 16 bits."""
every_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
every_problem = pytest.mark.parametrize("draw", PROBLEMS, ids=lambda draw: draw.__name__)


# ---- The judge ----------------------------------------------------------------------------------------------------


def answer(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Result of a call, or its error."""
    try:
        with np.errstate(all="ignore"):
            return as_tuple(function(**given))
    except MlaError as error:
        return error


def judge(got: Any, wanted: Any, about: str, error: float = 0.0) -> None:
    """Both refuse by the same kind of error, or the results are equal, or near relative to the largest."""
    if isinstance(wanted, MlaError) or isinstance(got, MlaError):
        assert type(got) is type(wanted), f"{about}: {got!r} in place of {wanted!r}"
        return
    for x, expected in zip(got, wanted, strict=True):
        if expected is None:
            assert x is None or x.size == 0, about
            continue
        assert (x.dtype, x.shape) == (expected.dtype, expected.shape), about
        if about.startswith("gather_keys") and x.dtype == np.uint8:  # e4m3 codes: -0 is 0
            x, expected = (np.where(codes == 0x80, np.uint8(0), codes) for codes in (x, expected))
        x, expected = _numbers(x), _numbers(expected)
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(x[~finite], expected[~finite], about)
        unit = np.abs(expected[finite]).max(initial=0)
        np.testing.assert_allclose(x[finite], expected[finite], rtol=0, atol=error * unit, err_msg=about)


def _numbers(x: Any) -> Array:
    """Numbers in float64; XLA's CPU threads flush subnormals, so they count as zeros."""
    wide = np.asarray(x).astype(np.float64) if x.dtype.kind != "i" else np.asarray(x)
    return np.where(np.abs(wide) < 2.0**-126, 0, wide) if x.dtype.kind != "i" else wide


# ---- Values -------------------------------------------------------------------------------------------------------


def in_place(torch: Any, one: LaidOut, device: str) -> Any:
    """A tensor over the same memory, or over a copy of it on a GPU."""
    kind, view = one.view.dtype.name, one.view
    memory = one.memory.reshape(-1)
    flat = torch.from_numpy(memory.view(UNKNOWN[kind]) if kind in UNKNOWN else memory).to(device)
    strides = [stride // view.itemsize for stride in view.strides]
    return flat.as_strided(view.shape, strides, one.offset if view.size else 0).view(getattr(torch, kind))


def in_torch(torch: Any, of_torch: Any, call: BoundCall, rng: np.random.Generator, device: str) -> Any:
    """A way to call an operation."""
    function, operator = flat(getattr(of_torch, call.operation)), getattr(torch.ops.mla_cupy, call.operation)
    plain = flat(getattr(mla_cupy, call.operation))
    contexts = (torch.no_grad, torch.enable_grad, torch.inference_mode)

    def by_operator(**given: Any) -> Any:
        return tuple(as_tuple(operator(**given))[: len(call.outputs)])  # without scales that there are not

    ways = [*((function, context) for context in contexts), (by_operator, torch.no_grad), (plain, torch.no_grad)]
    chosen, context = ways[rng.integers(len(ways))]

    def run(**given: Any) -> Any:
        with context():
            return chosen(**given)

    return run, chosen is by_operator


@pytest.mark.one_in(2)
@on_cpu
@pytest.mark.parametrize("count", numbers(20, 300))
@every_call
def test_torch(torch: Any, of_torch: Any, call: BoundCall, count: int) -> None:
    for seed in range(count):
        compare_in_torch(torch, of_torch, call, seed, "cpu")


@on_cpu  # as NumPy's arrays are
@pytest.mark.gpu
@pytest.mark.parametrize("count", numbers(4, 60))
@every_call
def test_torch_on_a_gpu(torch_gpu: Any, of_torch: Any, call: BoundCall, count: int) -> None:
    for seed in range(count):
        compare_in_torch(torch_gpu, of_torch, call, seed, "cuda")


@on_cpu
@pytest.mark.gpu
@pytest.mark.parametrize("call", ONE_OF_EACH, ids=lambda call: call.operation)
def test_torch_by_inductor(torch_gpu: Any, of_torch: Any, call: BoundCall) -> None:
    torch = torch_gpu
    torch._dynamo.reset()
    given = {name: tensor(torch, x, "cuda") for name, x in call.arrays.items()}
    options = {name: getattr(torch, x) if name.endswith("dtype") else x for name, x in call.options.items()}
    compiled = torch.compile(flat(getattr(of_torch, call.operation)), dynamic=False)
    with torch.no_grad():
        made = as_tuple(compiled(**given, **options))
    got = [*made, *(given.get(name) for name in call.changed)]
    judge([None if x is None else array(torch, x) for x in got], call.eager(), call.id, GPU_ERROR)


def compare_in_torch(torch: Any, of_torch: Any, call: BoundCall, seed: int, device: str) -> None:
    """One call, of arrays in odd layouts, half of them with results in such; nothing beside an array is written."""
    rng, about = np.random.default_rng([seed, 51]), f"{call.id}, seed {seed}"
    inputs, outputs = ({x.name: x for x in side} for side in (call.record.inputs, call.record.outputs))
    arrays = draws.values(rng, call) if device == "cpu" else {name: x.copy() for name, x in call.arrays.items()}
    expected = {name: x.copy() for name, x in arrays.items()}
    wanted = answer(flat(getattr(mla_cupy, call.operation)), {**expected, **call.options})
    laid = {name: draws.layout(rng, x, inputs[name]) for name, x in arrays.items()}
    run, by_operator = in_torch(torch, of_torch, call, rng, device)
    given: dict[str, Any] = {name: in_place(torch, x, device) for name, x in laid.items()}
    results: dict[str, LaidOut] = {}
    if rng.random() < 0.5 and not by_operator and not isinstance(wanted, MlaError):
        made = ((name, x) for name, x in zip(call.outputs, wanted, strict=False) if x is not None)
        results = {name: draws.layout(rng, np.zeros_like(x), outputs[name]) for name, x in made}
        given |= {name: in_place(torch, x, device) for name, x in results.items()}
    options = {name: getattr(torch, x) if name.endswith("dtype") else x for name, x in call.options.items()}
    got = answer(run, {**given, **options})
    if isinstance(got, MlaError):  # NumPy's arrays are refused, too, perhaps for the layout
        views = {name: x.view for name, x in laid.items()}
        judge(got, answer(flat(getattr(mla_cupy, call.operation)), {**views, **call.options}), about)
        return
    error = 0.0 if device == "cpu" else GPU_ERROR
    judge([None if x is None else array(torch, x) for x in got], wanted, about, error)
    changed = [name for name in call.changed if name in given]
    judge([array(torch, given[name]) for name in changed], [expected[name] for name in changed], about, error)
    for one in (*(laid.values()), *results.values()) if device == "cpu" else ():
        if one.view.flags.writeable:
            one.assert_nothing_beside()


@pytest.mark.one_in(2)
@on_cpu
@pytest.mark.parametrize("count", numbers(3, 40))
@pytest.mark.parametrize("call", CALLS_OF_JAX, ids=lambda call: call.id)
def test_jax(jax: Any, of_jax: Any, call: BoundCall, count: int) -> None:
    """Eagerly, as NumPy's arrays in odd layouts, and exportable; under jit a call of each operation."""
    function, inputs = flat(getattr(of_jax, call.operation)), {x.name: x for x in call.record.inputs}
    for seed in range(count):
        rng, about = np.random.default_rng([seed, 52]), f"{call.id}, seed {seed}"
        arrays = draws.values(rng, call)
        expected = {name: x.copy() for name, x in arrays.items()}
        wanted = answer(flat(getattr(mla_cupy, call.operation)), {**expected, **call.options})
        odd = rng.random() < 0.5
        given = {
            name: draws.layout(rng, x, inputs[name]).view
            if odd
            else jax.numpy.asarray(x.astype(np.int32) if x.dtype == np.int64 else x)
            for name, x in arrays.items()
        }
        got = answer(function, {**given, **call.options, "exportable": bool(rng.random() < 0.3)})
        if not isinstance(wanted, MlaError):
            wanted = (*wanted, *(expected.get(name) for name in call.changed))
        judge(got, wanted, about)


@pytest.mark.one_in(4)
@on_cpu
@pytest.mark.parametrize("call", ONE_OF_EACH, ids=lambda call: call.operation)
def test_jax_under_transforms(jax: Any, of_jax: Any, call: BoundCall) -> None:
    """jit, and vmap over two calls with different values."""
    rng, function = np.random.default_rng(53), flat(getattr(of_jax, call.operation))
    given = {name: x.astype(np.int32) if x.dtype == np.int64 else x for name, x in call.arrays.items()}
    other = {**given, **{name: x for name, x in draws.values(rng, call).items() if x.shape == given[name].shape}}
    other = {name: x.astype(given[name].dtype) for name, x in other.items()}
    both = {name: np.stack([x, other[name]]) for name, x in given.items()}
    got = as_tuple(jax.jit(jax.vmap(lambda x: as_tuple(function(**x, **call.options))))(both))
    for at, arrays in enumerate((given, other)):
        expected = {name: x.copy() for name, x in arrays.items()}
        wanted = answer(flat(getattr(mla_cupy, call.operation)), {**expected, **call.options})
        wanted = (*wanted, *(expected.get(name) for name in call.changed))
        judge([None if x is None else x[at] for x in got], wanted, call.id)


# ---- Gradients ----------------------------------------------------------------------------------------------------


def assert_near(problem: Problem, name: str, got: Array, wanted: Array, about: str) -> None:
    """Within what 16 bits for P, dS and the results leave."""
    x, expected = got.astype(np.float64), np.asarray(wanted, np.float64)
    assert x.shape == expected.shape, about
    gap, norm = np.linalg.norm(x - expected), np.linalg.norm(expected)
    floor = problem.unit * sum(np.linalg.norm(y) for y in problem.cotangents)
    assert gap <= 0.02 * norm + 0.05 * floor, f"{about}, {name}: {gap} of {norm}"


def in_float64(problem: Problem) -> dict[str, Array]:
    return {name: problem.arrays[name].astype(np.float64) for name in problem.leaves}


def torch_loss(torch: Any, problem: Problem, results: Any, wide: bool) -> Any:
    """The scalar for the compared gradients: unused results have no part in it."""
    parts = []
    for x, weights in zip(results, problem.cotangents, strict=False):
        if weights.any():
            c = torch.from_numpy(np.asarray(weights, np.float64)).to(x.device)
            parts.append((torch.where(c != 0, x if wide else x.float(), 0) * (c if wide else c.float())).sum())
    return sum(parts) if parts else None


def compare_torch_gradients(
    torch: Any, of_torch: Any, draw: Any, seed: int, device: str, compiled: bool = False
) -> None:
    rng = np.random.default_rng([seed, 54])
    problem, about = draw(rng), f"{draw.__name__}, seed {seed}"
    wide = {name: torch.from_numpy(x).requires_grad_() for name, x in in_float64(problem).items()}
    exact = torch_loss(torch, problem, problem.textbook(torch, torch.from_numpy, wide), wide=True)
    if exact is None:
        return
    wanted = torch.autograd.grad(exact, list(wide.values()), allow_unused=True, materialize_grads=True)
    given = {name: tensor(torch, x, device) for name, x in problem.arrays.items()}
    names = [name for name in problem.leaves if rng.random() < 0.8] or [problem.leaves[0]]

    def value(*leaves: Any) -> Any:
        call = {**given, **dict(zip(names, leaves, strict=True)), **problem.options}
        return torch_loss(torch, problem, flat(getattr(of_torch, problem.function))(**call), wide=False)

    leaves = [tensor(torch, given_x, device) for given_x in (problem.arrays[name] for name in names)]
    run = torch.compile(value, dynamic=False) if compiled else value
    if rng.random() < 0.3 and not compiled:
        got = torch.func.grad(value, tuple(range(len(leaves))))(*leaves)
    else:
        leaves = [x.requires_grad_() for x in leaves]
        got = torch.autograd.grad(run(*leaves), leaves, allow_unused=True, materialize_grads=True)
    for name, x in zip(names, got, strict=True):
        at = problem.leaves.index(name)
        assert_near(problem, name, array(torch, x), wanted[at].numpy(), about)


@on_cpu
@pytest.mark.parametrize("count", numbers(60, 600))
@every_problem
def test_torch_gradients(torch: Any, of_torch: Any, draw: Any, count: int) -> None:
    for seed in range(count):
        compare_torch_gradients(torch, of_torch, draw, seed, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("count", numbers(15, 300))
@every_problem
def test_torch_gradients_on_a_gpu(torch_gpu: Any, of_torch: Any, draw: Any, count: int) -> None:
    for seed in range(count):
        compare_torch_gradients(torch_gpu, of_torch, draw, seed, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("count", numbers(2, 10))
@every_problem
def test_torch_gradients_by_inductor(torch_gpu: Any, of_torch: Any, draw: Any, count: int) -> None:
    for seed in range(count):
        torch_gpu._dynamo.reset()
        compare_torch_gradients(torch_gpu, of_torch, draw, seed, "cuda", compiled=True)


@pytest.mark.one_in(4)
@on_cpu
@pytest.mark.parametrize("count", numbers(6, 150))
@every_problem
def test_jax_gradients(jax: Any, of_jax: Any, draw: Any, count: int) -> None:
    for seed in range(count):
        rng = np.random.default_rng([seed, 55])
        problem, about = draw(rng), f"{draw.__name__}, seed {seed}"
        if not any(weights.any() for weights in problem.cotangents):
            continue
        exact = float64_gradients(jax, problem)
        leaves = {name: jax.numpy.asarray(problem.arrays[name]) for name in problem.leaves}

        def value(leaves: Any, problem: Problem = problem) -> Any:
            call = {**problem.arrays, **leaves, **problem.options}
            return jax_loss(jax, problem, flat(getattr(of_jax, problem.function))(**call))

        gradient = jax.grad(value) if rng.random() < 0.2 else jax.jit(jax.grad(value))
        for name, x in gradient(leaves).items():
            assert_near(problem, name, np.asarray(x), exact[name], about)


def jax_loss(jax: Any, problem: Problem, results: Any) -> Any:
    jnp = jax.numpy
    pairs = [(x, c) for x, c in zip(results, problem.cotangents, strict=False) if c.any()]
    kind = jnp.float64 if any(x.dtype == jnp.float64 for x, _ in pairs) else jnp.float32
    return sum((jnp.where(c != 0, x.astype(kind), 0) * jnp.asarray(c, kind)).sum() for x, c in pairs)


def float64_gradients(jax: Any, problem: Problem) -> dict[str, Array]:
    holder = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
    with holder.enable_x64(True):
        leaves = {name: jax.numpy.asarray(x) for name, x in in_float64(problem).items()}
        loss = jax.grad(lambda x: jax_loss(jax, problem, problem.textbook(jax.numpy, jax.numpy.asarray, x)))
        found = jax.jit(loss)(leaves)  # a compilation, in place of one for each operation
        return {name: np.asarray(x) for name, x in found.items()}
