"""Thousands of calls with nonsense in one argument or two: documented errors, or right results.

Seeds are fixed. The ordinary run makes some hundred calls; `-m slow` makes 5,000 and more.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import MlaError, dtypes
from mla_cupy.ops.backend import oracle
from mla_cupy.ops.operation import Operation
from tests.support.mistakes import Call, Foreign, HostForeign
from tests.support.operations import CHOSEN, each, function_of, good_call, off_by_a_byte, output_names, stepped_by_bytes
from tests.support.recorder import Elsewhere, Recorder
from tests.support.workspace import aligned_bytes

QUICK, SLOW = 100, 1000
"""Calls of each operation in each place."""
OPTIONS = (
    *("d_v", "scale", "causal", "lse_base", "empty_lse", "out_dtype", "dkv_dtype", "deterministic", "kernel"),
    *("check", "clean", "stream", "workspace", "plan", "target", "target_scale", "gradients"),
    *("groups", "topk", "slots", "order", "relative", "keep_first", "keep_last", "buffer_bytes", "accumulate"),
)


class Unequal:
    """Cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("not comparable")

    __hash__ = None  # type: ignore[assignment]


class Lazy:
    """Has every attribute, as a mock has."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


NONSENSE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 3, 512, 2**31, 2**63, 2**70, -(2**70), 0.5, -0.5, 1e300, 1e-300, float("nan")),
    *(float("inf"), -float("inf"), 1j, "", "e", "2", "10", "float32", "bfloat16", "float16", "True", b"e", "q"),
    *([], [1], {}, (), set(), (1, 2), [[1.0]], range(3), slice(None), len, object(), object, type, Ellipsis),
    *(np.float32(0.5), np.float64(2), np.int32(1), np.int64(512), np.bool_(True), np.str_("e"), np.dtype("float32")),
    *(np.float32, np.float16, np.dtype("float64"), np.void, np.zeros(3), np.zeros(()), np.ones(1), np.zeros((2, 2))),
    *(np.zeros(0, np.uint8), np.zeros(3, object), np.zeros(3, "U3"), np.zeros(3, "M8[s]"), np.zeros(2, complex)),
    *(np.zeros(2, [("a", "i4")]), np.ma.zeros(3), np.array("e"), np.array([True]), np.zeros(3, "V0")),
    *(Foreign(), HostForeign(), Foreign, Unequal(), Lazy()),
    *({"topk": 3}, {"logits": None, "merge": "merge_states"}, {3: "q"}, (("topk", []),), ((),), {"prefix": []}),
    *([(0, 2, 1)], [[0, 1, 1]], ((0, 2, 2**63),), ((0, True, 1),), ([0, 2, 1],), np.array([[0, 2, 1]]), [(0, 2)]),
)


def spoil_array(rng: np.random.Generator, x: Any) -> Any:
    """Another array in its place, which may or may not do."""
    ways: tuple[Callable[[Any], Any], ...] = (
        lambda x: x[..., ::-1],
        lambda x: x[::-1],
        lambda x: x[::2],
        lambda x: x[..., ::2],
        lambda x: x.T,
        lambda x: x[None],
        lambda x: x[0],
        lambda x: x[:0],
        lambda x: x[..., :0],
        lambda x: x.reshape(-1),
        lambda x: x.reshape(-1)[0],
        lambda x: x.astype(rng.choice(["float64", "float32", "float16", "int64", "int32", "int8", "complex64"])),
        lambda x: x.astype(object),
        lambda x: x.astype(dtypes.numpy_dtype("float8_e4m3fn")),
        lambda x: x.view(np.uint8),
        lambda x: x.view([("a", x.dtype)]),
        lambda x: x.byteswap().view(x.dtype.newbyteorder()) if x.dtype.kind in "if" else x.view("V2"),
        lambda x: x.view(Elsewhere),
        lambda x: np.ma.masked_array(x),
        lambda x: np.broadcast_to(x[:1], x.shape),
        lambda x: np.lib.stride_tricks.as_strided(x, x.shape, (0,) * x.ndim),
        lambda x: np.lib.stride_tricks.as_strided(x, x.shape, tuple(max(1, s // 2) for s in x.strides)),
        off_by_a_byte,
        stepped_by_bytes,
        lambda x: np.resize(x, (*x.shape[:-1], x.shape[-1] + 1)),
        lambda x: np.resize(x, (x.shape[0] + 1, *x.shape[1:])),
        lambda x: np.asfortranarray(x),
        lambda x: x.tolist(),
        lambda x: memoryview(x.tobytes()),
        frozen,
        hostile,
    )
    while True:
        # Not everything can be done to every array.
        with contextlib.suppress(IndexError, ValueError, TypeError, StopIteration), np.errstate(all="ignore"):
            return ways[rng.integers(len(ways))](x)


def frozen(x: Any) -> Any:
    x = x.copy()
    x.flags.writeable = False
    return x


def hostile(x: Any) -> Any:
    """Values that nothing may trust."""
    wild = [-(2**31), 2**31 - 1, -1, 1 << 30] if x.dtype.kind == "i" else [np.nan, np.inf, -np.inf, 0.0]
    x = x.copy()
    places = x.reshape(-1)[:: max(1, x.size // 4)]
    places[...] = np.resize(wild, len(places))
    return x


def misused(rng: np.random.Generator, operation: Operation, options: list[str]) -> Call:
    """A good call with one to three things changed."""
    call = good_call(operation, int(rng.integers(5)))
    for name in output_names(operation):
        if rng.random() < 0.5:
            del call[name]
    absent = 0.3 * rng.integers(2)  # in every other call none: some arrays are good only with another
    for array in operation.inputs:
        if array.optional and rng.random() < absent:
            del call[array.name]
    for _ in range(rng.integers(1, 4)):
        what = rng.random()
        arrays = [name for name, x in call.items() if type(x) is np.ndarray and name not in options]
        if what < 0.4 and arrays:
            name = str(rng.choice(arrays))
            call[name] = spoil_array(rng, call[name])
        elif what < 0.6 and arrays:
            call[str(rng.choice(arrays))] = NONSENSE[rng.integers(len(NONSENSE))]
        elif what < 0.7 and len(arrays) > 1:
            one, other = rng.choice(arrays, 2, replace=False)
            call[str(one)] = call[str(other)]
        elif what < 0.75:
            call["workspace"] = aligned_bytes(int(rng.choice([0, 8, 1 << 20])), shift=int(rng.choice([0, 8, 128])))
        else:
            call[str(rng.choice(options))] = NONSENSE[rng.integers(len(NONSENSE))]
    return call


def options_of(operation: Operation) -> list[str]:
    return [name for name in inspect.signature(function_of(operation)).parameters if name in OPTIONS]


def run(operation: Operation, seed: int) -> tuple[Call, Any]:
    """The call, and its results; None after a documented error."""
    rng = np.random.default_rng([seed, 11])
    call = misused(rng, operation, options_of(operation))
    try:
        return call, function_of(operation)(**call)
    except MlaError as error:
        if "got" not in str(error) and "no kernel fits" not in str(error):
            raise AssertionError(f"seed {seed}: {error}") from error
        return call, None
    except Exception as error:
        shown = {n: (x.dtype, x.shape, x.strides) if isinstance(x, np.ndarray) else x for n, x in call.items()}
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}: {shown}") from error


def numbers(count: int) -> list[Any]:
    return [QUICK, pytest.param(count, marks=pytest.mark.slow)]


operations = pytest.mark.parametrize("operation", each(), ids=lambda operation: operation.name)
counts = pytest.mark.parametrize("count", numbers(SLOW))


@operations
@counts
def test_on_the_way_to_a_gpu(operation: Operation, count: int, recorder: Recorder) -> None:
    """An error comes before anything is launched or allocated; what is launched has the arrays that were given."""
    accepted = 0
    for seed in range(count):
        recorder.launches.clear()
        recorder.memsets.clear()
        recorder.allocations.clear()
        call, results = run(operation, seed)
        if results is None:
            assert (recorder.launches, recorder.memsets, recorder.allocations) == ([], [], []), f"seed {seed}"
            continue
        accepted += 1
        for name, result in zip(output_names(operation), results, strict=True):
            assert call.get(name) is None or result is call[name]
    assert 0 < accepted < count


@operations
@counts
def test_on_the_host(operation: Operation, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    accepted = 0
    for seed in range(count):
        call, results = run(operation, seed)
        if results is not None:
            accepted += 1
            assert_right(operation, call, results, seed)
    assert 0 < accepted < count


def assert_right(operation: Operation, call: Call, results: tuple[Any, ...], seed: int) -> None:
    """The oracle's answer on clean copies of the arrays, rounded once."""
    given = {array.name: call.get(array.name) for array in operation.inputs if not array.scratch}
    inputs = {name: None if x is None else np.ascontiguousarray(x) for name, x in given.items()}
    options = {**CHOSEN.get(operation.name, {}), **call}
    numbers = {name: options[name] for name in operation.options._fields if options.get(name) is not None}
    with np.errstate(all="ignore"):
        exact = oracle(operation.name, numbers)(**inputs)
    for name, result, wanted in zip(output_names(operation), results, exact, strict=True):
        if wanted is None:
            assert result is None
            continue
        if result.dtype == np.uint8:  # bytes are e4m3 codes
            result = result.view(dtypes.numpy_dtype("float8_e4m3fn"))
        rounded = dtypes.round_to(np.asarray(wanted, np.float64), dtypes.dtype_name(result.dtype))
        np.testing.assert_array_equal(result.astype(np.float64), rounded.reshape(result.shape), f"{name}, seed {seed}")


PLAN: Call = {"max_b": 2, "s_q": 3, "h_q": 4, "h_kv": 2, "max_pages": 4, "page_size": 16, "dtype": "bfloat16"}


@pytest.mark.parametrize("on_gpu", [True, False])
@counts
def test_plans(count: int, on_gpu: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_gpu:
        request.getfixturevalue("recorder")
    else:
        monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    made = updated = 0
    nonsense = [x for x in NONSENSE if type(x) is not Foreign]  # for which CuPy would look for a GPU
    for seed in range(count):
        rng = np.random.default_rng([seed, 12])
        changed = {str(rng.choice([*PLAN, "workspace", "kernel"])): nonsense[rng.integers(len(nonsense))]}
        if rng.random() < 0.5 or callable(changed.get("workspace")):  # an allocator of the caller's: its own errors
            changed = {}
        try:
            plan = mla_cupy.plan_decode(**{**PLAN, **changed})
            made += 1
            seqlens = np.array([20, 33], np.int32)
            given = spoil_array(rng, seqlens) if rng.random() < 0.5 else nonsense[rng.integers(len(nonsense))]
            stream = nonsense[rng.integers(len(nonsense))] if rng.random() < 0.2 else None
            plan.update(given, stream=stream)
            updated += 1
        except MlaError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}: {changed}") from error
    assert 0 < updated < made < count
