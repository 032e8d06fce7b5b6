"""The bindings with nonsense in their arguments: errors of the package, or what the plain functions answer."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy.compat import flash_mla
from tests.bindings.cases import ONE_OF_EACH, BoundCall, as_tuple
from tests.interop.test_torch import array, tensor
from tests.support.calls import assert_same
from tests.support.flat import flat
from tests.support.mistakes import Call
from tests.support.misuse import Refused, attempt, misused, nonsense, numbers

pytestmark = pytest.mark.usefixtures("_numpy_backend")


def spoil(rng: np.random.Generator, given: Call, arrays: Any, options: Any, way: Callable[[Any], Any]) -> Call:
    """Up to two arguments are replaced."""
    for _ in range(rng.choice([0, 1, 1, 1, 2])):
        what = rng.random()
        name = str(rng.choice(arrays))
        if what < 0.5 and given.get(name) is not None:
            given[name] = way(given[name])
        elif what < 0.75 or not options:
            given[name] = nonsense(rng)
        else:
            given[str(rng.choice(options))] = nonsense(rng)
    return given


# ---- PyTorch ----------------------------------------------------------------------------------------------------


def ways_of(torch: Any) -> tuple[Callable[[Any], Any], ...]:
    """Wrong values that PyTorch's users may pass instead of a tensor."""

    class Subclass(torch.Tensor):  # type: ignore[misc, name-defined]
        pass

    return (
        lambda x: x.to("meta"),
        lambda x: x.to_sparse(),
        lambda x: torch._neg_view(x),
        lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
        lambda x: x.to(torch.complex64).conj(),
        lambda x: x.as_subclass(Subclass),
        lambda x: torch.nn.Parameter(x),
        lambda x: x.requires_grad_(),
        lambda x: x.transpose(0, -1),
        lambda x: x.flip(0),
        lambda x: x[:0],
        lambda x: x[..., :0],
        lambda x: x[None],
        lambda x: x[0],
        lambda x: x.reshape(-1),
        lambda x: x.reshape(-1)[0],
        lambda x: x[:1].expand(x.shape),
        lambda x: torch.as_strided(x, x.shape, (0,) * x.dim()),
        lambda x: x.double(),
        lambda x: x.long(),
        lambda x: x.bool(),
        lambda x: x.half(),
        lambda x: torch.cat([x, x]),
        lambda x: torch.cat([x, x], -1),
        lambda x: x.float().numpy(),
        lambda x: x.tolist(),
        lambda x: x.long() * 2**33 + 1,
        lambda x: torch.empty(x.shape, dtype=torch.float8_e8m0fnu),
        lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
        torch._subclasses.fake_tensor.FakeTensorMode().from_tensor,
    )


def spoiled_tensor(torch: Any, rng: np.random.Generator, x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return nonsense(rng)
    ways = ways_of(torch)
    while True:
        with contextlib.suppress(RuntimeError, IndexError, TypeError, NotImplementedError, AssertionError):
            return ways[rng.integers(len(ways))](x)


def is_plain(torch: Any, x: Any) -> bool:
    """True if NumPy supports the value: the answers are then compared."""
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.device.type != "cpu":
        return False
    return not (x.is_nested or x._is_zerotensor() or is_shape(torch, x))


def is_shape(torch: Any, x: Any) -> bool:
    """True for a tensor without values."""
    fake = torch._subclasses.fake_tensor.FakeTensor
    return isinstance(x, fake) or (isinstance(x, torch.Tensor) and x.device.type == "meta")


def values(torch: Any, x: Any) -> Any:
    """A copy for NumPy."""
    return array(torch, x.detach().resolve_conj().resolve_neg()).copy()


@pytest.mark.parametrize("count", numbers(25, 300))
@pytest.mark.parametrize("call", ONE_OF_EACH, ids=lambda call: call.operation)
def test_torch(torch: Any, of_torch: Any, call: BoundCall, count: int) -> None:
    function = flat(getattr(of_torch, call.operation))
    plain = flat(getattr(mla_cupy, call.operation))
    taken = [*inspect.signature(plain).parameters, *inspect.signature(function).parameters]
    options = [x for x in inspect.signature(plain).parameters if x not in (*call.record.names, "check", "stream")]
    options = [x for x in options if x not in ("plan", "workspace", "independent")]
    accepted = 0
    for seed in range(count):
        rng = np.random.default_rng([seed, 19])
        given: Call = {name: tensor(torch, x) for name, x in call.arrays.items()}
        given = spoil(rng, {**given, **call.options}, list(given), options, lambda x: spoiled_tensor(torch, rng, x))  # noqa: B023
        before = {name: values(torch, x) if is_plain(torch, x) else x for name, x in given.items()}
        mode = torch.device("cpu") if rng.random() < 0.3 else contextlib.nullcontext()

        def run(given: Call = given, mode: Any = mode) -> Any:
            with mode:
                return as_tuple(function(**given))

        about = f"{call.operation}, seed {seed}"
        results = attempt(run, taken, (), about)
        unchanged = {name: x for name, x in given.items() if is_plain(torch, x)}
        if isinstance(results, Refused):
            assert all(values(torch, x).tobytes() == before[name].tobytes() for name, x in unchanged.items()), about
            continue
        accepted += 1
        assert_answers(torch, call, given, before, results, about)
    assert 0 < accepted < count


def assert_answers(torch: Any, call: BoundCall, given: Call, before: Call, results: Any, about: str) -> None:
    """Answers equal the plain function's for NumPy's arrays, which it accepts, too."""
    plain = {name: str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else x for name, x in before.items()}
    if any(is_shape(torch, x) for x in plain.values()):
        assert all(x is None or is_shape(torch, x) for x in results), about  # an operator tells shapes
        return
    assert not any(isinstance(x, torch.Tensor) for x in plain.values()), f"{about}: {plain}"
    wanted = as_tuple(flat(getattr(mla_cupy, call.operation))(**plain))
    assert len(results) == len(wanted), about
    for got, expected in zip(results, wanted, strict=True):
        if expected is None:
            assert got is None or got.numel() == 0
        else:
            assert_same(array(torch, got), expected)
    for name in set(call.changed) & set(plain):
        assert_same(array(torch, given[name]), plain[name])


# ---- Other libraries' names, with tensors -------------------------------------------------------------------------


def compat_calls(torch: Any) -> dict[str, tuple[Any, Call]]:
    """Functions under the names of other libraries, and good calls of them."""
    modules = {name: importlib.import_module(f"mla_cupy.compat.{name}") for name in ("megatron", "xtuner", "cudnn_dsa")}
    q, kv, out = torch.ones(3, 4, 576).bfloat16(), torch.ones(20, 1, 576).bfloat16(), torch.ones(3, 4, 512).bfloat16()
    lse, indices = torch.ones(3, 4), torch.arange(18, dtype=torch.int32).view(3, 1, 6)
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    keys, heads = torch.ones(3, 4, 192).half(), torch.ones(3, 4, 128).half()
    megatron = {"query": q[:, None], "key": kv[:, None], "topk_indices": indices.transpose(0, 1), "softmax_scale": 0.1}
    xtuner = {"q": q, "kv": kv, "indices": indices, "scaling": 0.1, "value_dim": 512}
    cudnn = {"q": q, "kv": kv[:, 0], "out": out, "dout": out, "lse": lse, "attn_sink": None, "topk_idxs": indices[:, 0]}
    varlen = {"q": keys, "k": keys, "v": heads, "cu_seqlens_qo": starts, "cu_seqlens_kv": starts}
    return {
        "megatron": (
            modules["megatron"].run_fused_absorbed_sparse_attention,
            {**megatron, "v_channels": 512, "topk_length": torch.full((1, 3), 6)},
        ),
        "xtuner": (modules["xtuner"].sparse_mla, xtuner),
        "cudnn": (modules["cudnn_dsa"].sparse_attention_backward_wrapper, {**cudnn, "softmax_scale": 0.1}),
        "varlen": (flash_mla.flash_attn_varlen_func, {**varlen, "max_seqlen_qo": 2, "max_seqlen_kv": 2}),
    }


@pytest.mark.parametrize("count", numbers(60, 1000))
@pytest.mark.parametrize("name", ["megatron", "xtuner", "cudnn", "varlen"])
def test_compat(torch: Any, name: str, count: int) -> None:
    accepted = 0
    for seed in range(count):
        rng = np.random.default_rng([seed, 22])
        function, given = compat_calls(torch)[name]
        tensors = [key for key, x in given.items() if isinstance(x, torch.Tensor)]
        options = [key for key in inspect.signature(function).parameters if key not in (*tensors, "max_seqlen_qo")]
        given = spoil(rng, given, tensors, options, lambda x: spoiled_tensor(torch, rng, x))  # noqa: B023
        result = attempt(lambda: function(**given), given, (), f"{name}, seed {seed}")  # noqa: B023
        accepted += not isinstance(result, Refused)
    assert 0 < accepted < count


# ---- JAX --------------------------------------------------------------------------------------------------------


def spoiled_array(jnp: Any, rng: np.random.Generator, x: Any) -> Any:
    """Wrong values that JAX's users may pass instead of an array."""
    if not hasattr(x, "dtype"):
        return nonsense(rng)
    ways: tuple[Callable[[Any], Any], ...] = (
        lambda x: x.T,
        lambda x: x[:0],
        lambda x: x[..., :0],
        lambda x: x[None],
        lambda x: x[0],
        lambda x: x.reshape(-1),
        lambda x: x.reshape(-1)[0],
        lambda x: x.astype(rng.choice(["float32", "float16", "int32", "uint8", "bool", "complex64"])),
        lambda x: jnp.concatenate([x, x]),
        lambda x: jnp.concatenate([x, x], -1),
        lambda x: np.asarray(x),
        lambda x: np.asarray(x).tolist(),
        lambda x: np.ma.masked_array(np.asarray(x)),
        lambda x: np.asarray(x).astype(object),
        lambda x: np.asarray(x).byteswap().view(x.dtype.newbyteorder()),
        lambda x: np.asarray(x).astype("float64"),
        lambda x: np.asarray(x)[..., ::-1],
    )
    while True:
        with contextlib.suppress(IndexError, ValueError, TypeError), np.errstate(all="ignore"):
            return ways[rng.integers(len(ways))](x)


@pytest.mark.parametrize("count", numbers(8, 60))
@pytest.mark.parametrize("call", ONE_OF_EACH, ids=lambda call: call.operation)
def test_jax(jax: Any, of_jax: Any, call: BoundCall, count: int) -> None:
    function, plain = flat(getattr(of_jax, call.operation)), flat(getattr(mla_cupy, call.operation))
    taken = [*inspect.signature(plain).parameters, *inspect.signature(function).parameters]
    there = {name: x for name, x in call.arrays.items() if x.dtype != np.int64}  # which JAX does not have
    options = [x for x in inspect.signature(plain).parameters if x not in call.record.names]
    options = [x for x in options if x not in ("check", "stream", "plan", "workspace", "independent")]
    for seed in range(count):
        rng = np.random.default_rng([seed, 20])
        given: Call = {name: jax.numpy.asarray(x) for name, x in there.items()}
        given = spoil(rng, {**given, **call.options}, list(given), options, lambda x: spoiled_array(jax.numpy, rng, x))  # noqa: B023
        before = {name: np.array(x) if isinstance(x, (jax.Array, np.ndarray)) else x for name, x in given.items()}
        about = f"{call.operation}, seed {seed}"
        results = attempt(lambda: as_tuple(function(**given)), taken, given.values(), about)  # noqa: B023
        if isinstance(results, Refused):
            continue
        wanted = as_tuple(plain(**before))
        for got, expected in zip(results, (*wanted, *(before.get(name) for name in call.changed)), strict=True):
            assert (got is None) == (expected is None)
            assert got is None or np.array_equal(_bits(np.asarray(got)), _bits(expected)), about


def _bits(x: Any) -> Any:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


# ---- FlashMLA's interface ---------------------------------------------------------------------------------------


def dense_call() -> Call:
    rng = np.random.default_rng(0)
    return {
        "q": rng.standard_normal((2, 2, 4, 576)).astype(ml_dtypes.bfloat16),
        "k_cache": rng.standard_normal((4, 16, 1, 576)).astype(ml_dtypes.bfloat16),
        "block_table": np.array([[2, 0], [1, 3]], np.int32),
        "cache_seqlens": np.array([20, 5], np.int32),
        "head_dim_v": 512,
    }


def selecting_call() -> Call:
    call = {**dense_call(), "block_table": None, "cache_seqlens": None}
    return {**call, "indices": np.random.default_rng(1).integers(-1, 64, (2, 2, 6)).astype(np.int32)}


def record_call() -> Call:
    call = {**selecting_call(), "is_fp8_kvcache": True}
    return {**call, "k_cache": np.random.default_rng(2).integers(0, 60, (4, 16, 1, 656), np.uint8)}


def flat_call() -> Call:
    rng = np.random.default_rng(3)
    q, kv = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((3, 4, 576), (20, 1, 576)))
    return {"q": q, "kv": kv, "indices": rng.integers(-1, 20, (3, 1, 6)).astype(np.int32), "sm_scale": 0.05}


def clean(call: Call) -> Call:
    """Arrays with memory of their own."""
    return {name: np.array(x, order="C") if type(x) is np.ndarray and x.ndim else x for name, x in call.items()}


@pytest.mark.parametrize("count", numbers(60, 1000))
@pytest.mark.parametrize("good", [dense_call, selecting_call, record_call, flat_call], ids=lambda good: good.__name__)
def test_flash_mla(good: Callable[[], Call], count: int) -> None:
    """Schedules serve several calls; the reference uses clean arrays and a separate schedule."""
    sparse = good is flat_call
    function: Any = flash_mla.flash_mla_sparse_fwd if sparse else flash_mla.flash_mla_with_kvcache
    taken = list(inspect.signature(function).parameters)
    schedule = flash_mla.FlashMLASchedMeta()
    accepted = 0
    for seed in range(count):
        rng = np.random.default_rng([seed, 21])
        made = good()
        options = [name for name in taken if not isinstance(made.get(name), np.ndarray)]
        call = misused(rng, made, [], [], options)
        if rng.random() < 0.2:
            schedule = flash_mla.FlashMLASchedMeta()
        if not sparse:
            call.setdefault("tile_scheduler_metadata", schedule)
        results = attempt(lambda: function(**call), taken, call.values(), f"{good.__name__}, seed {seed}")  # noqa: B023
        if rng.random() < 0.1 and not sparse:
            lengths = nonsense(rng)
            attempt(lambda: schedule.update(lengths), ("seqlens", "cache_seqlens", "tile_scheduler_metadata"))  # noqa: B023
        if isinstance(results, Refused):
            continue
        accepted += 1
        wanted = function(
            **{**clean(call), **({} if sparse else {"tile_scheduler_metadata": flash_mla.FlashMLASchedMeta()})}
        )
        for got, expected in zip(results, wanted, strict=True):
            assert np.array_equal(_bits(got), _bits(expected)), f"{good.__name__}, seed {seed}"
    assert 0 < accepted < count
