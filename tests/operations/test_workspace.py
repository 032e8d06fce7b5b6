"""The caller's memory: with outputs and a workspace given, a call allocates nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DeviceError, ShapeError
from mla_cupy.ops.operation import Operation
from tests.support.flat import mla_decode, plan_decode
from tests.support.operations import at, each, function_of, good_call, output_names
from tests.support.recorder import Elsewhere, Recorder
from tests.support.sim_driver import simulated
from tests.support.workspace import aligned_bytes

operations = pytest.mark.parametrize("operation", each(), ids=lambda operation: operation.name)


def needed(operation: Operation, call: dict[str, Any]) -> int:
    return mla_cupy.workspace_bytes(function_of(operation), **call)


@operations
def test_workspace_bytes_asks_for_nothing(operation: Operation, recorder: Recorder) -> None:
    call = good_call(operation)
    inputs = {name: x for name, x in call.items() if name not in output_names(operation)}
    nbytes = needed(operation, call)
    assert needed(operation, inputs) == nbytes
    assert (recorder.launches, recorder.allocations, recorder.memsets) == ([], [], [])
    for name in output_names(operation):
        assert (call[name].astype(np.float32) == 7).all()
    function_of(operation)(**call)
    assert recorder.allocations == ([(nbytes,)] if nbytes else [])  # what a call takes if none is given
    assert needed(operation, call) == nbytes  # the same after a call that could be repeated


@operations
def test_nothing_is_allocated(operation: Operation, recorder: Recorder) -> None:
    """Neither the first call nor repeated ones allocate; every part of the workspace lies in it."""
    call = good_call(operation)
    nbytes = needed(operation, call)
    memory = aligned_bytes(nbytes)
    for _ in range(3):
        recorder.launches.clear()
        results = function_of(operation)(**call, workspace=memory)
        assert recorder.launches
        assert recorder.allocations == []
        assert all(result is call[name] for name, result in zip(output_names(operation), results, strict=True))
    arrays = [(x.ctypes.data, x.ctypes.data + x.nbytes) for x in (*call.values(), memory)]
    for launch in recorder.launches:
        assert all(any(begin <= a < end for begin, end in arrays) for a in launch.addresses.values())
    for ptr, _, size, _ in recorder.memsets:
        assert memory.ctypes.data <= ptr <= ptr + size <= memory.ctypes.data + nbytes


@operations
def test_another_workspace_is_used(operation: Operation, recorder: Recorder) -> None:
    """A repeated call takes the memory that it is given."""
    call = good_call(operation)
    nbytes = needed(operation, call)
    if nbytes == 0:
        pytest.skip("needs none")
    found = []
    for memory in (first := aligned_bytes(nbytes), aligned_bytes(nbytes), aligned_bytes(nbytes), first):
        recorder.launches.clear()
        function_of(operation)(**call, workspace=memory)
        addresses = recorder.launches[0].addresses
        within = [name for name, address in addresses.items() if 0 <= address - memory.ctypes.data < nbytes]
        found.append(within)
        assert within
    assert all(names == found[0] for names in found)


@operations
def test_a_workspace_that_does_not_fit(operation: Operation, recorder: Recorder) -> None:
    call = good_call(operation)
    nbytes = needed(operation, call)
    function_of(operation)(**call)
    function_of(operation)(**call, workspace=aligned_bytes(nbytes + 256))
    recorder.launches.clear()
    recorder.allocations.clear()
    bad: list[tuple[Any, type[Exception], str]] = [
        (aligned_bytes(nbytes + 512, shift=128), ShapeError, "multiple of 256"),
        (aligned_bytes(nbytes + 512, shift=16), ShapeError, "multiple of 256"),
        (aligned_bytes(nbytes + 512).view(np.int8), ShapeError, "contiguous vector of uint8"),
        (aligned_bytes(nbytes + 512).view(np.float32), ShapeError, "contiguous vector of uint8"),
        (aligned_bytes(2 * nbytes + 512)[::2], ShapeError, "contiguous vector of uint8"),
        (aligned_bytes(nbytes + 512)[::-1], ShapeError, "contiguous vector of uint8"),
        (aligned_bytes(2 * nbytes + 512).reshape(2, -1), ShapeError, "contiguous vector of uint8"),
        (aligned_bytes(nbytes + 512).view(Elsewhere), DeviceError, "device"),
        ([0] * 8, mla_cupy.DTypeError, "a list"),
        (nbytes, mla_cupy.DTypeError, "an int"),
    ]
    if nbytes:
        bad += [
            (aligned_bytes(nbytes - 1), ShapeError, f"at least {nbytes}"),
            (aligned_bytes(0), ShapeError, "at least"),
        ]
    frozen = aligned_bytes(nbytes + 512)
    frozen.flags.writeable = False
    bad.append((frozen, ArgumentError, "read-only"))
    for memory, error, word in bad:
        with pytest.raises(error, match="workspace") as caught:
            function_of(operation)(**call, workspace=memory)
        assert word in str(caught.value)
    assert (recorder.launches, recorder.allocations) == ([], [])


@operations
def test_a_workspace_that_overlaps(operation: Operation, recorder: Recorder) -> None:
    """Inputs as well: the call writes to its workspace."""
    for name in good_call(operation):
        call = good_call(operation)
        nbytes = needed(operation, call)
        if nbytes == 0:
            pytest.skip("needs none")
        function_of(operation)(**call, workspace=aligned_bytes(nbytes))  # a good call of the same shapes
        recorder.launches.clear()
        memory = aligned_bytes(nbytes + call[name].nbytes)
        for begin in (0, (nbytes - 1) // 16 * 16):
            call[name] = at(good_call(operation)[name], memory, begin)
            with pytest.raises(ShapeError, match=f"workspace: got memory that overlaps {name}"):
                function_of(operation)(**call, workspace=memory[:nbytes])
        assert recorder.launches == []


def test_not_with_a_plan(recorder: Recorder) -> None:
    operation = next(operation for operation in each() if operation.name == "mla_decode")
    call = good_call(operation)
    sizes = {"max_b": 2, "s_q": 3, "h_q": 4, "max_pages": 4, "page_size": 16}
    plan = plan_decode(**sizes, dtype="bfloat16", tree_mask=True, attn_sink=True, d_head=128)
    plan.update(call["seqlens"])
    mla_decode(**call, plan=plan)
    recorder.launches.clear()
    with pytest.raises(ArgumentError, match="workspace: got an array, with a plan"):
        mla_decode(**call, plan=plan, workspace=aligned_bytes(1 << 20))
    assert recorder.launches == []


@operations
def test_the_host_needs_none_and_takes_any(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    """So what allocates one for a GPU runs on the CPU, too; what is no workspace is refused there as well."""
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    call = good_call(operation)
    assert needed(operation, call) == 0
    function_of(operation)(**call, workspace=np.empty(0, np.uint8))
    with pytest.raises(ShapeError, match="workspace: got float32"):
        function_of(operation)(**call, workspace=np.empty(8, np.float32))


@pytest.mark.one_in(4)
@operations
def test_what_the_workspace_holds_does_not_matter(operation: Operation) -> None:
    """And nothing is written beside it: in the simulator, which also sees reads of what nobody wrote."""
    found = []
    for fill in (0xFF, 0x3C):
        call = good_call(operation)
        with simulated(2):
            nbytes = needed(operation, call)
            whole = aligned_bytes(nbytes + 512, fill=fill)
            function_of(operation)(**call, workspace=whole[256 : 256 + nbytes])
        assert (whole[:256] == fill).all()
        assert (whole[256 + nbytes :] == fill).all()
        found.append([call[name].tobytes() for name in output_names(operation)])
    if operation.name != "sparse_mla_backward":  # its sums have no fixed order
        assert found[0] == found[1]
    assert all(len(x) > 0 for x in found[0])
