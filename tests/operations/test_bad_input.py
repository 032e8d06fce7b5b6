"""The mistakes that follow from the operations' records, for every operation; what says more stands with its family."""

from __future__ import annotations

import functools
import inspect
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DeviceError, MlaError, ShapeError
from mla_cupy.ops.operation import Operation
from tests.support.calls import no_launch
from tests.support.gpu import upload
from tests.support.mistakes import Bad, Call, raises, refuses_what_it_cannot_write, swap
from tests.support.operations import CHOSEN, at, each, function_of, good_call, mistakes, output_names, outputs_of
from tests.support.recorder import Elsewhere, Recorder
from tests.support.workspace import aligned_bytes

MISTAKES = [
    pytest.param(operation, bad, id=f"{operation.name}-{bad.id.replace(' ', '_')}")
    for operation in each()
    for bad in mistakes(operation)
]
#: Uploading would undo them.
OF_THE_HOST = ("between_items", "odd_strides", "repeated", "scalar", "masked", "endless", "reversed", "backwards")
operations = pytest.mark.parametrize("operation", each(), ids=lambda operation: operation.name)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("operation", "bad"), MISTAKES)
def test_refuses(operation: Operation, bad: Bad, place: str) -> None:
    if place == "cupy" and bad.id.replace(" ", "_").endswith(OF_THE_HOST):
        pytest.skip("uploading undoes it")
    raises(bad, function_of(operation), good_call(operation), place)


@operations
def test_the_call_is_good(operation: Operation, recorder: Recorder) -> None:
    results = function_of(operation)(**good_call(operation))
    assert len(results) == len(output_names(operation))
    assert recorder.launches


@operations
def test_the_call_is_good_for_the_numpy_backend(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    call = good_call(operation)
    results = function_of(operation)(**call)
    for name, result in zip(output_names(operation), results, strict=True):
        assert result is call[name]
        assert (result.astype(np.float32) != 7).any()


@operations
def test_outputs_that_overlap_another_array(operation: Operation, place: str) -> None:
    """All pairs of an output and another array, from one address on or in their last 16 bytes; both are named.

    Pairs where one may overwrite the other overlap in part.
    """
    if place == "cupy":
        pytest.skip("uploading would separate them")
    written = output_names(operation)
    for first, second in combinations(good_call(operation), 2):
        if first not in written and second not in written:
            continue
        for shift in (0, -16):
            if shift == 0 and operation.in_place.get(second) == first:
                continue
            call = good_call(operation)
            one, other = call[first], call[second]
            begin = 0 if shift == 0 else -(-one.nbytes // 16) * 16 - 16
            memory = aligned_bytes(begin + one.nbytes + other.nbytes)
            call[first], call[second] = at(one, memory, 0), at(other, memory, begin)
            with pytest.raises(ShapeError, match="memory that overlaps") as caught:
                function_of(operation)(**call)
            paths = {operation.paths.get(name, name) for name in (first, second)} | {first, second}
            assert len(paths & set(str(caught.value).replace(":", " ").replace(",", " ").split())) == 2


@operations
def test_outputs_between_the_rows_of_another_array_are_fine(operation: Operation, recorder: Recorder) -> None:
    """Interleaved, without a common byte: the check is exact where the intervals alone would say no."""
    call = good_call(operation)
    name = next((output.name for output in outputs_of(operation) if call[output.name].ndim > 1 and not output.even), "")
    if not name:
        pytest.skip("has no rows that may lie apart")
    x = call[name]
    both = np.full((x.shape[0], 2, *x.shape[1:]), 7, x.dtype)
    call[name] = both[:, 0]
    same = [other for other in call if other != name and call[other].shape == x.shape and call[other].dtype == x.dtype]
    if same:
        both[:, 1] = call[same[0]]
        call[same[0]] = both[:, 1]
    function_of(operation)(**call)
    function_of(operation)(**call)
    assert recorder.launches


@operations
def test_arrays_on_another_device(operation: Operation, recorder: Recorder) -> None:
    for name in list(good_call(operation))[1:]:
        call = good_call(operation)
        call[name] = call[name].view(Elsewhere)
        with pytest.raises(DeviceError, match=rf"{name}'s device: got 1, expected 0, like {operation.inputs[0].name}"):
            function_of(operation)(**call)
    assert recorder.launches == []


@operations
def test_read_only_results_are_refused(operation: Operation, place: str) -> None:
    if place == "cupy":
        pytest.skip("CuPy's arrays can all be written")
    for name in output_names(operation):
        call = good_call(operation)
        call[name].flags.writeable = False
        with pytest.raises(ArgumentError, match=rf"{name}: got a read-only array, expected a writable one"):
            function_of(operation)(**call)


@operations
def test_results_that_cannot_be_written_are_refused(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses_what_it_cannot_write(function_of(operation), good_call(operation), output_names(operation), monkeypatch)


@operations
@pytest.mark.parametrize("stream", ["mine", 1.5, True, object()], ids=lambda x: type(x).__name__)
def test_stream_of_an_unknown_kind(operation: Operation, stream: Any, recorder: Recorder) -> None:
    """Also after a good call, which a repeated one need not check again."""
    call = good_call(operation)
    for launches in (0, 1):
        recorder.launches.clear()
        if launches:
            function_of(operation)(**call)
            recorder.launches.clear()
        with pytest.raises(ArgumentError, match=r"stream: got .*, expected a raw handle"):
            function_of(operation)(**call, stream=stream)
        assert recorder.launches == []


@operations
def test_an_output_without_its_input(operation: Operation, place: str) -> None:
    if place == "cupy":
        pytest.skip("has no more to say")
    wanting = [output for output in operation.outputs if output.needs]
    for output in wanting:
        call = good_call(operation)
        for name in {*(other.needs for other in wanting), *(other.name for other in wanting if other is not output)}:
            del call[name]
        if operation.name == "merge_project":
            call["outs"] = call["outs"][:1]  # several would need their log-sum-exps
        with pytest.raises(ArgumentError, match=f"{output.name}: got an array, expected None: there is no"):
            function_of(operation)(**call)


@operations
def test_mistakes_after_a_good_call_are_found(operation: Operation, recorder: Recorder) -> None:
    """A call that looks like an earlier one is not checked again: every other one is."""
    for bad in mistakes(operation):
        good = good_call(operation)
        function_of(operation)(**good)
        recorder.launches.clear()
        call: Call = dict(good)
        bad.change(call)
        with pytest.raises(bad.error) as caught:
            function_of(operation)(**call)
        assert isinstance(caught.value, MlaError)
        assert recorder.launches == [], bad.id


@pytest.mark.gpu
@operations
def test_numpy_and_cupy_do_not_mix(operation: Operation, gpu: object) -> None:
    for name in good_call(operation):
        call = good_call(operation)
        call[name] = upload(call[name])
        with no_launch(), pytest.raises(DeviceError, match=r"got an array of (cupy on the GPU|numpy on the CPU)"):
            function_of(operation)(**call)


def test_workspace_bytes_of_what_is_no_operation() -> None:
    for function in (len, 3, None, "mla_decode", mla_cupy.plan_decode, lambda x: x):
        with pytest.raises(ArgumentError, match="operation: got"):
            mla_cupy.workspace_bytes(function, [1])  # type: ignore[arg-type]


def requires_scale(operation: Operation) -> bool:
    scale = inspect.signature(getattr(mla_cupy, operation.name)).parameters.get("scale")
    return scale is not None and scale.default is scale.empty


@pytest.mark.parametrize("operation", [*filter(requires_scale, each())], ids=lambda operation: operation.name)
def test_a_missing_scale(operation: Operation) -> None:
    """Python's own error would not say which value a model needs."""
    function, call = getattr(mla_cupy, operation.name), {**CHOSEN.get(operation.name, {}), **good_call(operation)}
    call.pop("scale", None)
    for run in (function, functools.partial(mla_cupy.workspace_bytes, function)):
        with pytest.raises(ArgumentError, match=r"192\*\*-0.5 for DeepSeek-V2"):
            run(**operation.grouped(call))


@pytest.mark.parametrize("name", ["mla_decode", "sparse_mla_forward", "sparse_mla_backward"])
def test_queries_that_are_not_absorbed(name: str, place: str) -> None:
    """The commonest mistake with MLA; the width of the heads is what the scale belongs to."""
    operation = next(one for one in each() if one.name == name)
    narrow = swap("q", lambda q: q[..., :192].copy())
    words = ("q.shape[-1]", "192", "576", "absorb W_UK", "512 wide", "192**-0.5")
    raises(Bad("", narrow, ShapeError, words), function_of(operation), good_call(operation), place)
