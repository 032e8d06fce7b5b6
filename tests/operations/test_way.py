"""Number of files of the package that a repeated call runs, from the public function to the driver.

The recorder stands in for the driver, which is a file of the package itself on a GPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mla_cupy
from mla_cupy.ops import OPERATIONS
from mla_cupy.ops.operation import Operation
from tests.support.operations import CHOSEN, each, function_of, good_call
from tests.support.recorder import Recorder
from tests.support.workspace import aligned_bytes

PACKAGE = Path(mla_cupy.__file__).parent
LAST = "kernels/pipeline.py"
#: Part of the recorder here: what a driver without means of its own is made of.
STAND_IN = PACKAGE / "runtime" / "launching.py"
MAX_FILES = 6
MAX_CHANGES = {"planned": 5, "plain": 25}


def call_of(operation: Operation, call: dict[str, Any]) -> Callable[[], object]:
    """A call whose arguments are in groups already."""
    return functools.partial(operation.function, **operation.grouped({**CHOSEN.get(operation.name, {}), **call}))


def way_of(call: Callable[[], object]) -> list[str]:
    """The file of each function that is called, in order, where it is another one than that before."""
    found: list[str] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(PACKAGE) or path == STAND_IN:
            return
        name = path.relative_to(PACKAGE).as_posix()
        if not found or found[-1] != name:
            found.append(name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def test_a_plain_call(recorder: Recorder) -> None:
    for operation in each():
        call = good_call(operation)
        nbytes = mla_cupy.workspace_bytes(function_of(operation), **call)
        for given in (call, {**call, "workspace": aligned_bytes(nbytes)}, inputs_of(operation, call)):
            repeated = call_of(operation, given)
            repeated()
            way = way_of(repeated)
            assert way[-1] == LAST
            assert len(set(way)) <= MAX_FILES, way
            assert len(way) - 1 <= MAX_CHANGES["plain"], way


def inputs_of(operation: Operation, call: dict[str, Any]) -> dict[str, Any]:
    names = [array.name for array in operation.inputs]
    return {name: call[name] for name in names if name in call}


def test_a_planned_call(recorder: Recorder) -> None:
    operation = OPERATIONS["mla_decode"]
    call = good_call(operation)
    sizes = {"max_b": 2, "s_q": 3, "h_q": 4, "max_pages": 4, "page_size": 16}
    plan = mla_cupy.plan_decode(**sizes, dtype="bfloat16", tree_mask=True, attn_sink=True, d_head=128)
    plan.update(call["seqlens"])
    repeated = call_of(operation, {**call, "plan": plan})
    repeated()
    way = way_of(repeated)
    assert way[-1] == LAST
    assert len(set(way)) <= MAX_FILES, way
    assert len(way) - 1 <= MAX_CHANGES["planned"], way


def test_the_first_call_is_longer(recorder: Recorder) -> None:
    """The measure can fail."""
    call = good_call(next(iter(each())))
    way = way_of(call_of(next(iter(each())), call))
    assert len(set(way)) > MAX_FILES
    assert len(way) - 1 > MAX_CHANGES["plain"]


@pytest.mark.gpu
def test_calls_on_a_gpu(gpu: object) -> None:
    """Calls with CuPy's arrays, down to the driver's own file."""
    from tests.support.gpu import upload

    for operation in each():
        call = {name: upload(x) for name, x in good_call(operation).items()}
        repeated = call_of(operation, call)
        repeated()
        way = way_of(repeated)
        assert way[-1] == "runtime/cuda_driver.py"
        assert len(set(way)) <= MAX_FILES, way
        assert len(way) - 1 <= MAX_CHANGES["plain"], way
