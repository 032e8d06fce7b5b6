"""Thousands of calls of the operations on pages with nonsense in them: documented errors, or the oracle's bytes."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from mla_cupy import ops, reference
from mla_cupy.dtypes import dtype_name
from mla_cupy.ops import POOL_OPERATIONS, backend
from tests.cache.test_bad_input import GOOD
from tests.support.mistakes import Call
from tests.support.misuse import Refused, attempt, misused, numbers
from tests.support.recorder import Recorder

QUICK, SLOW = 40, 500
"""Calls of each operation in each place."""

operations = pytest.mark.parametrize("name", GOOD)
counts = pytest.mark.parametrize("count", numbers(QUICK, SLOW))


def run(name: str, seed: int) -> tuple[Call, Call, Any]:
    """The call, clean copies of its arrays as they were before, and what it returned."""
    rng, function = np.random.default_rng([seed, 13]), getattr(ops, name)
    operation, taken = POOL_OPERATIONS[name], list(inspect.signature(function).parameters)
    results = [output.name for output in operation.outputs]
    optional = [array.name for array in operation.inputs if array.optional]
    good = GOOD[name]()
    options = [x for x in taken if x not in operation.names]
    call = misused(rng, good, [x for x in results if x in good], [x for x in optional if x in good], options)
    before = {
        n: np.array(x, order="C") if type(x) is np.ndarray and not x.dtype.hasobject else x for n, x in call.items()
    }
    return call, before, attempt(lambda: function(**call), taken, call.values(), f"{name}, seed {seed}")


@operations
@counts
def test_on_the_way_to_a_gpu(name: str, count: int, recorder: Recorder) -> None:
    accepted = 0
    for seed in range(count):
        recorder.launches.clear()
        recorder.allocations.clear()
        if isinstance(run(name, seed)[2], Refused):
            assert (recorder.launches, recorder.memsets, recorder.allocations) == ([], [], []), f"seed {seed}"
        else:
            accepted += 1
    assert 0 < accepted < count


@operations
@counts
def test_on_the_host(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    accepted = 0
    for seed in range(count):
        call, before, results = run(name, seed)
        if not isinstance(results, Refused):
            accepted += 1
            assert_right(name, call, before, results, seed)
    assert 0 < accepted < count


def assert_right(name: str, call: Call, before: Call, results: Any, seed: int) -> None:
    """Compare with the oracle on clean copies: arrays changed in place, and results."""
    operation, known = POOL_OPERATIONS[name], inspect.signature(getattr(reference, name)).parameters
    given = {x: value for x, value in before.items() if x in known and (value is not None or x in operation.names)}
    given = {x: int(value) if isinstance(value, np.integer) else value for x, value in given.items()}
    with np.errstate(all="ignore"):
        exact = getattr(reference, name)(**given)
    for array in operation.inputs:
        if array.written:
            np.testing.assert_array_equal(_bits(call[array.name]), _bits(before[array.name]), f"{name}, seed {seed}")
    if operation.outputs:
        for got, wanted in zip(_tuple(results), _tuple(exact), strict=True):
            assert (got is None) == (wanted is None), f"{name}, seed {seed}"
            if got is not None:
                (right,) = backend.rounded([np.asarray(wanted)], [dtype_name(got.dtype)])
                np.testing.assert_array_equal(got, right, f"{name}, seed {seed}")


def _bits(x: Any) -> Any:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)
