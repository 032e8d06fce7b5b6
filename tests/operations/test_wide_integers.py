"""Indices and lengths of 64 bits: of the host converted, on a device read where they are, as their lower halves."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError
from mla_cupy.ops import schema
from mla_cupy.ops.operation import Operation
from mla_cupy.simulation import simulated
from tests.operations.test_repeated_calls import Counted
from tests.support.calls import assert_same
from tests.support.flat import mla_decode, plan_decode
from tests.support.operations import each, function_of, good_call, inputs_of, output_names
from tests.support.recorder import Launched, Recorder

Array = np.ndarray[Any, Any]
BEYOND = 2**32 + 1


def narrow_names(operation: Operation) -> list[str]:
    """The inputs that kernels read as 32-bit integers."""
    return [x.name for x in inputs_of(operation) if "int32" in x.dtypes and "int64" not in x.dtypes]


OPERATIONS = [operation for operation in each() if narrow_names(operation)]
operations = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)


def widened(operation: Operation, call: dict[str, Any]) -> dict[str, Any]:
    return {**call, **{name: call[name].astype(np.int64) for name in narrow_names(operation)}}


def low_halves(operation: Operation, call: dict[str, Any]) -> dict[str, Any]:
    """The call with 32-bit arrays in the same memory."""
    return {**call, **{name: call[name].view(np.int32)[..., ::2] for name in narrow_names(operation)}}


@operations
def test_numpy_backend(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    call, other = good_call(operation), good_call(operation)
    for got, wanted in zip(
        function_of(operation)(**widened(operation, call)), function_of(operation)(**other), strict=True
    ):
        assert_same(got, wanted)
    for name in narrow_names(operation):
        call = widened(operation, good_call(operation))
        call[name].flat[-1] = BEYOND
        path = re.escape(operation.paths.get(name, name))
        with pytest.raises(ArgumentError, match=rf"^{path}\[.*\]: got {BEYOND}, expected an integer of 32 bits"):
            function_of(operation)(**call)
        assert all((call[output] == 7).all() for output in output_names(operation))


def said(launch: Launched, arrays: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments of a launch, except the addresses of its own memory."""
    known = {x.__array_interface__["data"][0] for x in arrays.values()}
    names = launch.params.dtype.names
    return (
        launch.entry,
        launch.grid,
        *(
            launch.params[name].tolist()
            for name in names
            if launch.params.dtype[name] != np.uint64 or int(launch.params[name]) in known
        ),
    )


@operations
def test_devices_read_the_lower_halves(
    operation: Operation, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launch is told what it is told for a 32-bit view of the same memory; a repeated call is one."""
    call, function = widened(operation, good_call(operation)), function_of(operation)
    function(**low_halves(operation, call))
    wanted = [said(launch, call) for launch in recorder.launches]
    counted = Counted(operation, monkeypatch)
    for _ in range(3):
        recorder.launches.clear()
        function(**call)
        assert [said(launch, call) for launch in recorder.launches] == wanted
    assert counted.times == (1, 1, 1)


def decode_inputs() -> list[Array]:
    rng = np.random.default_rng(0)
    q, cache = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((2, 1, 4, 576), (6, 16, 576)))
    return [q, cache, np.array([[3, 1], [5, 0]]), np.array([20, 7])]


@pytest.mark.parametrize("planned", [False, True])
def test_simulated(planned: bool) -> None:
    """Values that are read on a device, as they are when the work runs; the range is a matter of `checking`."""
    q, cache, table, seqlens = decode_inputs()
    assert table.dtype == seqlens.dtype == np.int64
    wanted = mla_cupy.reference.mla_decode(q, cache, table.astype(np.int32), seqlens.astype(np.int32))
    sizes = {"max_b": 2, "s_q": 1, "h_q": 4, "max_pages": 2, "page_size": 16, "dtype": "bfloat16"}
    with simulated():
        plan = plan_decode(**sizes, device=0) if planned else None
        for _ in range(2):
            if plan is not None:
                plan.update(seqlens)
            out, lse = mla_decode(q, cache, table, seqlens, plan=plan, check=True)
            np.testing.assert_allclose(out.astype(np.float64), wanted[0], atol=0.02)
            np.testing.assert_allclose(lse, wanted[1], atol=1e-3)
        out[...] = 7
        for name, at in (("block_table", (1, 0)), ("seqlens", 1)):
            arrays = {"block_table": table.copy(), "seqlens": seqlens.copy()}
            arrays[name][at] += 2**32
            with pytest.raises(
                ArgumentError, match=rf"^{name}\[1.*\]: got {arrays[name][at]}, expected an integer of 3"
            ):
                mla_decode(q, cache, **arrays, plan=plan, out=out, check=True)
        assert (out == 7).all()


def test_plans_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    q, cache, table, seqlens = decode_inputs()
    plan = mla_cupy.plan_decode(max_b=2, s_q=1, h_q=4, max_pages=2, page_size=16, dtype="bfloat16")
    plan.update(seqlens)
    got = mla_decode(q, cache, table, seqlens, plan=plan)
    assert_same(got[0], mla_decode(q, cache, table.astype(np.int32), seqlens.astype(np.int32))[0])
    with pytest.raises(ArgumentError, match=rf"^seqlens\[0\]: got {BEYOND}, expected an integer of 32 bits"):
        plan.update(np.array([BEYOND, 1]))
    with pytest.raises(DTypeError, match=r"^seqlens.dtype: got int16, expected int32 or int64"):
        plan.update(np.array([1, 1], np.int16))


def test_lower_halves() -> None:
    """Lower halves of arrays with any strides."""
    x = np.arange(24).reshape(4, 6)[::-2, 1::3]
    view = schema.low_words(mla_cupy.arrays.NUMPY.view(x))
    assert (view.dtype, view.shape, view.strides) == ("int32", (2, 2), (-24, 6))
