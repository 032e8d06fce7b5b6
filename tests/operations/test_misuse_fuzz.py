"""Thousands of calls with nonsense in one argument or two: documented errors, or right results.

Seeds are fixed. The ordinary run makes some hundred calls; `-m slow` makes 5,000 and more.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from mla_cupy import dtypes
from mla_cupy.ops.backend import oracle
from mla_cupy.ops.operation import Operation
from tests.support.mistakes import Call
from tests.support.misuse import Refused, attempt, misused, numbers
from tests.support.operations import CHOSEN, each, function_of, good_call, output_names
from tests.support.recorder import Recorder
from tests.support.workspace import aligned_bytes

QUICK, SLOW = 100, 1000
"""Calls of each operation in each place."""
OPTIONS = (
    *("d_v", "scale", "causal", "lse_base", "empty_lse", "out_dtype", "dkv_dtype", "deterministic", "kernel"),
    *("check", "clean", "stream", "workspace", "plan", "target", "target_scale", "gradients"),
    *("groups", "topk", "slots", "order", "relative", "keep_first", "keep_last", "buffer_bytes", "accumulate"),
)


def spoiled(rng: np.random.Generator, operation: Operation) -> Call:
    """A call with mistakes in it."""
    optional = [array.name for array in operation.inputs if array.optional]
    call = misused(
        rng, good_call(operation, int(rng.integers(5))), output_names(operation), optional, options_of(operation)
    )
    if rng.random() < 0.1:
        call["workspace"] = aligned_bytes(int(rng.choice([0, 8, 1 << 20])), shift=int(rng.choice([0, 8, 128])))
    return call


@functools.cache
def options_of(operation: Operation) -> list[str]:
    return [name for name in operation.parameters if name in OPTIONS]


def run(operation: Operation, seed: int) -> tuple[Call, Any]:
    """The call, and its results; None after a documented error."""
    rng = np.random.default_rng([seed, 11])
    call = spoiled(rng, operation)
    function = function_of(operation)
    results = attempt(lambda: function(**call), names_of(operation), call.values(), f"seed {seed}")
    return call, None if isinstance(results, Refused) else results


@functools.cache
def names_of(operation: Operation) -> frozenset[str]:
    return frozenset(operation.parameters)


operations = pytest.mark.parametrize("operation", each(), ids=lambda operation: operation.name)
counts = pytest.mark.parametrize("count", numbers(QUICK, SLOW))


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
        if result.dtype == np.uint8 and wanted.dtype == np.uint8:
            np.testing.assert_array_equal(result, wanted, f"{name}, seed {seed}")
            continue
        if result.dtype == np.uint8:  # bytes are e4m3 codes
            result = result.view(dtypes.numpy_dtype("float8_e4m3fn"))
        rounded = dtypes.round_to(np.asarray(wanted, np.float64), dtypes.dtype_name(result.dtype))
        np.testing.assert_array_equal(result.astype(np.float64), rounded.reshape(result.shape), f"{name}, seed {seed}")
