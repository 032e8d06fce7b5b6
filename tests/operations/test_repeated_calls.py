"""A call like an earlier one re-uses its checks, configuration, kernels and parameters; what differs is seen."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import PlanError, ShapeError
from mla_cupy.ops import call as calling
from mla_cupy.ops.operation import Operation
from mla_cupy.runtime import driver
from tests.support.flat import mla_decode, plan_decode
from tests.support.operations import each, function_of, good_call, output_names
from tests.support.recorder import B200, H200, Recorder
from tests.support.workspace import aligned_bytes

operations = pytest.mark.parametrize("operation", each(), ids=lambda operation: operation.name)


class Counted:
    """Counters of calls of an operation's own checks and its pipeline."""

    def __init__(self, operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
        self.configured = self.prepared = self.examined = 0
        pipeline = operation.pipeline
        configure, prepare, examine = pipeline.configure, pipeline.prepare, calling._examine

        def configured(*arguments: Any) -> Any:
            self.configured += 1
            return configure(*arguments)

        def prepared(*arguments: Any) -> Any:
            self.prepared += 1
            return prepare(*arguments)

        def examined(*arguments: Any) -> Any:
            self.examined += 1
            return examine(*arguments)

        monkeypatch.setattr(pipeline, "configure", configured, raising=False)
        monkeypatch.setattr(pipeline, "prepare", prepared, raising=False)
        monkeypatch.setattr(calling, "_examine", examined)

    @property
    def times(self) -> tuple[int, int, int]:
        return self.examined, self.configured, self.prepared


def inputs_of(operation: Operation, call: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in call.items() if name not in output_names(operation)}


def moved(x: Any) -> Any:
    """An equal array elsewhere, at an address of the same alignment."""
    memory = aligned_bytes(x.nbytes, shift=x.ctypes.data % 256)
    made = memory.view(x.dtype).reshape(x.shape)
    made[...] = x
    return made


@operations
@pytest.mark.parametrize("given", [True, False], ids=["outputs given", "outputs allocated"])
def test_everything_is_used_again(
    operation: Operation, given: bool, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(operation, monkeypatch)
    call = good_call(operation) if given else inputs_of(operation, good_call(operation))
    function_of(operation)(**call)
    first, maps = recorder.entries, len(recorder.maps)
    assert counted.times == (1, 1, 1)
    for _ in range(5):
        recorder.launches.clear()
        function_of(operation)(**call)
        assert recorder.entries == first
    assert counted.times == (1, 1, 1)
    assert len(recorder.maps) == maps or not given  # the addresses are the same, so the maps are


@operations
def test_other_addresses_are_seen(operation: Operation, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(operation, monkeypatch)
    call = {name: moved(x) for name, x in good_call(operation).items()}
    function_of(operation)(**call)
    for name in call:
        other = {**call, name: moved(call[name])}
        recorder.launches.clear()
        function_of(operation)(**other)
        used = {address for launch in recorder.launches for address in launch.addresses.values()}
        bases = {spec.base for spec in recorder.maps}
        assert other[name].ctypes.data in used | bases, name
        assert call[name].ctypes.data not in used, name
    assert counted.times == (1, 1, 1)


def changes(operation: Operation) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    """Good calls that differ from the good call in one thing."""

    def strides(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def change(call: dict[str, Any]) -> dict[str, Any]:
            x = call[name]
            whole = np.zeros((2 * x.shape[0], *x.shape[1:]), x.dtype)
            whole[::2] = x
            return {**call, name: whole[::2]}

        return change

    even = [array.name for array in (*operation.inputs, *operation.outputs) if array.even]
    free = [name for name, x in good_call(operation).items() if x.ndim > 1 and name not in even]
    found = {f"strides of {name}": strides(name) for name in free}
    if "lse_base" in getattr(operation.options, "_fields", ()):
        found["lse_base"] = lambda call: {**call, "lse_base": "2"}
    if "scale" in getattr(operation.options, "_fields", ()):
        found["scale"] = lambda call: {**call, "scale": 0.25}
    if "cp_world" in getattr(operation.options, "_fields", ()):
        found["cp_world"] = lambda call: {**call, "cp_world": 2}
        found["cp_rank"] = lambda call: {**call, "cp_world": 2, "cp_rank": 1}
    return found


@operations
def test_whatever_else_changes_is_seen(
    operation: Operation, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the changed calls launches what it launches when it is the first of its kind; in any order."""
    call = good_call(operation)
    todo = {"the call itself": lambda call: call, **changes(operation)}
    prepared = {name: change(dict(call)) for name, change in todo.items()}
    memory = aligned_bytes(max(mla_cupy.workspace_bytes(function_of(operation), **kind) for kind in prepared.values()))

    def launched(name: str) -> list[tuple[Any, ...]]:
        recorder.launches.clear()
        function_of(operation)(**prepared[name], workspace=memory)
        return [(launch.entry, launch.grid, launch.params.tobytes()) for launch in recorder.launches]

    alone = {}
    for name in todo:
        calling.forget()
        alone[name] = launched(name)
    assert len({tuple(launches) for launches in alone.values()}) == len(alone)
    calling.forget()
    counted = Counted(operation, monkeypatch)
    for order in (list(todo), list(reversed(todo)), list(todo)):
        for name in order:
            assert launched(name) == alone[name], name
    assert counted.times == (len(todo), len(todo), len(todo))


@operations
def test_the_alignment_of_the_first_input_is_seen(operation: Operation, recorder: Recorder) -> None:
    """It decides whether TMA, or loads of 16 bytes, can fetch the array: the kernel changes, or nothing does."""
    call = inputs_of(operation, good_call(operation))
    name = operation.inputs[0].name
    x = call[name]
    odd = np.zeros(x.size + 16, x.dtype)[1 : 1 + x.size].reshape(x.shape)
    assert odd.ctypes.data % 16 != 0
    if operation.inputs[0].wide:  # there is no kernel for such an array
        with pytest.raises(ShapeError, match=f"{name}.strides: "):
            function_of(operation)(**{**call, name: odd})
        return
    found = []
    for first in (x, odd, x, odd):
        recorder.launches.clear()
        function_of(operation)(**{**call, name: first})
        found.append(recorder.entries)
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert (found[0] != found[1]) == any("sm90" in entry or "mma" in entry for entry in found[0])


@operations
def test_another_driver_is_seen(operation: Operation, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    call = good_call(operation)
    function_of(operation)(**call)
    counted = Counted(operation, monkeypatch)
    other = Recorder()
    before = len(recorder.launches)
    with driver.use(other):  # type: ignore[arg-type]
        function_of(operation)(**call)
        assert len(other.launches) == before
    assert len(recorder.launches) == before
    assert counted.times == (1, 1, 1)
    function_of(operation)(**call)
    assert len(recorder.launches) == 2 * before


@operations
def test_the_memory_of_calls_is_bounded(
    operation: Operation, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "MAX_ENTRIES", 4)
    call = good_call(operation)
    if "empty_lse" in operation.options._fields:
        kinds: list[dict[str, Any]] = [{"empty_lse": float(i)} for i in range(10)]
    elif "clean" in operation.options._fields:
        names = (None, "float32", np.float32)
        kinds = [{"clean": clean, "out_dtype": name} for clean in (True, False) for name in names]
    elif "hadamard" in operation.options._fields:
        kinds = [
            {"hadamard": bool(i % 2), "interleaved": bool(i // 2 % 2), "scales": name}
            for i in range(4)
            for name in ("plain", "power_of_2")
        ]
    elif "max_keys" in operation.options._fields:
        kinds = [{"max_keys": 20 - i} for i in range(10)]  # the mask is no narrower
    elif "keep_first" in operation.options._fields:
        kinds = [{"keep_first": i} for i in range(10)]
    elif "scale" in operation.options._fields:
        kinds = [{"scale": 0.25 + i} for i in range(10)]
    else:  # no options: with memory for the results, and without
        kinds = [{}, *({name: None} for name in output_names(operation))]
    for options in kinds * 2:
        recorder.launches.clear()
        function_of(operation)(**{**call, **options})
        assert recorder.launches
        assert len(calling._thread.recent.entries) <= 4


def test_places_that_were_apart_are_not_compared_again(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers take turns, each with memory of its own. Other places are compared whenever they come."""
    operation = next(operation for operation in each() if operation.name == "mla_decode")
    monkeypatch.setattr(calling, "MAX_PLACES", 3)
    compared: list[list[int]] = []
    apart = calling.overlap.clearly_apart
    monkeypatch.setattr(calling.overlap, "clearly_apart", lambda *args: compared.append(args[0]) or apart(*args))
    layers = [{name: moved(x) for name, x in good_call(operation).items()} for _ in range(4)]
    mla_decode(**layers[0])  # the first of its kind
    compared.clear()
    for turn in range(3):
        for call in layers[1:3]:
            recorder.launches.clear()
            mla_decode(**call)
            used = {address for launch in recorder.launches for address in launch.addresses.values()}
            assert call["out"].ctypes.data in used
        assert len(compared) == 2, turn
    call = layers[2]
    over = call["w_uv"].reshape(-1).view(call["out"].dtype)[: call["out"].size].reshape(call["out"].shape)
    recorder.launches.clear()
    for _ in range(2):
        with pytest.raises(ShapeError, match="out: got memory that overlaps w_uv"):
            mla_decode(**{**call, "out": over})
        assert not recorder.launches
    for call in layers * 2:
        mla_decode(**call)
        assert all(len(entry.known) <= 3 for entry in calling._thread.recent.entries.values())


@operations
def test_equal_options_of_another_type_are_checked(operation: Operation, recorder: Recorder) -> None:
    """True == 1 == 1.0, but a scale of True is refused, and so is a count of 1.0, whatever earlier calls were given."""
    twins = {
        "scale": (1, True),
        "causal": (True, 1.0),
        "d_v": (512, 512.0),
        "k": (2048, 2048.0),
        "keep_first": (1, True),
    }
    tried = 0
    for name in sorted(twins.keys() & set(operation.options._fields)):
        call, (good, bad) = good_call(operation), twins[name]
        for _ in range(2):
            function_of(operation)(**{**call, name: good})
        launched = len(recorder.launches)
        for _ in range(2):
            with pytest.raises(mla_cupy.ArgumentError, match=name):
                function_of(operation)(**{**call, name: bad})
        assert len(recorder.launches) == launched
        function_of(operation)(**{**call, name: good})
        assert len(recorder.launches) > launched
        tried += 1
    if not tried:
        pytest.skip("has no such option")


@operations
def test_checked_calls_are_checked_every_time(operation: Operation, recorder: Recorder) -> None:
    """`checking` looks at values, which no earlier call has seen."""
    names = {"mla_decode": "seqlens", "sparse_mla_forward": "topk_length", "sparse_mla_backward": "topk_length"}
    if operation.name not in names:
        pytest.skip("has no values to check")
    call = good_call(operation)
    call.update({name: np.full_like(x, -1) for name, x in call.items() if name == "indices"})
    function_of(operation)(**call)
    function_of(operation)(**call, check=True)
    call[names[operation.name]][0] = -5
    function_of(operation)(**call)
    with pytest.raises(mla_cupy.ArgumentError, match="got -5"):
        function_of(operation)(**call, check=True)
    function_of(operation)(**call)


@operations
def test_each_thread_has_its_own(operation: Operation, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameter blocks are written before each launch: two threads must not share them."""
    counted = Counted(operation, monkeypatch)
    calls = [good_call(operation, seed) for seed in range(4)]
    failures: list[BaseException] = []
    blocks: list[list[Any]] = [[] for _ in calls]
    prepare = recorder.prepare

    def watched(kernel: Any, grid: Any, block: Any, cluster: Any, smem: int, args: Any, pdl: bool) -> Any:
        blocks[index.number].append(args)
        return prepare(kernel, grid, block, cluster, smem, args, pdl)

    monkeypatch.setattr(recorder, "prepare", watched)
    index = threading.local()

    def work(number: int) -> None:
        index.number = number
        try:
            for _ in range(20):
                function_of(operation)(**calls[number])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert counted.times == (4, 4, 4)
    assert all(blocks)
    of_threads = [{args.pointers for args in held} for held in blocks]
    assert sum(map(len, of_threads)) == len(set().union(*of_threads))
    written = {address for launch in recorder.launches for address in launch.addresses.values()}
    name = output_names(operation)[0]
    assert {call[name].ctypes.data for call in calls} <= written | {spec.base for spec in recorder.maps}


def test_another_gpu_is_another_configuration(recorder: Recorder) -> None:
    """Devices are part of what is compared: here the same ordinal becomes another GPU, as after `forget`."""
    operation = next(operation for operation in each() if operation.name == "sparse_mla_backward")
    call = good_call(operation)
    for gpu, word in ((H200, "sm90"), (B200, "sm100"), (H200, "sm90")):
        recorder.gpu = gpu
        calling.forget()
        recorder.launches.clear()
        function_of(operation)(**call)
        assert any(word in entry for entry in recorder.entries)


# ---- Plans ------------------------------------------------------------------------------------------------------

PLAN = {"max_b": 2, "s_q": 3, "h_q": 4, "max_pages": 4, "page_size": 16, "dtype": "bfloat16"}
PLAN |= {"tree_mask": True, "attn_sink": True, "d_head": 128}  # as `good_call` has them


def test_a_plan_is_used_again(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = next(operation for operation in each() if operation.name == "mla_decode")
    call = good_call(operation)
    plan = plan_decode(**PLAN)
    plan.update(call["seqlens"])
    counted = Counted(operation, monkeypatch)
    recorder.allocations.clear()
    for _ in range(5):
        mla_decode(**call, plan=plan)
        plan.update(call["seqlens"])
    assert counted.times == (1, 0, 1)
    assert recorder.allocations == []


def test_another_plan_of_the_same_shape_has_its_own_memory(recorder: Recorder) -> None:
    call = good_call(next(operation for operation in each() if operation.name == "mla_decode"))
    plans = [plan_decode(**PLAN) for _ in range(3)]
    for plan in plans:
        plan.update(call["seqlens"])
    for plan in (*plans, *reversed(plans)):
        recorder.launches.clear()
        mla_decode(**call, plan=plan)
        launch = recorder.launches[0]
        assert plan.address <= int(launch.params["partial_out"]) < plan.address + plan.workspace_bytes
    assert len({plan.address for plan in plans}) == 3


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda function: function.__name__)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_plans_are_neither_copied_nor_pickled(
    make: Callable[[Any], Any], on_gpu: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_gpu:
        request.getfixturevalue("recorder")
    else:
        monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    plan = plan_decode(**PLAN)
    with pytest.raises(PlanError, match=r"plan: got a copy or a pickle of it, .*plan_decode"):
        make(plan)
    with pytest.raises(PlanError, match="plan_decode"):
        make({"plan": plan}) if make is not copy.copy else make(plan)


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"max_b": 2**200}, mla_cupy.ArgumentError, "max_b"),
        ({"max_b": True}, mla_cupy.ArgumentError, "max_b"),
        ({"h_q": np.array([4])}, mla_cupy.ArgumentError, "h_q"),
        ({"s_q": "3"}, mla_cupy.ArgumentError, "s_q"),
        ({"kernel": []}, mla_cupy.ArgumentError, "kernel"),
        ({"kernel": np.zeros(3)}, mla_cupy.ArgumentError, "kernel"),
        ({"tree_mask": 3}, mla_cupy.ArgumentError, "tree_mask"),
        ({"d_qk": np.array([1, 2])}, mla_cupy.ArgumentError, "d_qk"),
        ({"d_qk": 576.0}, mla_cupy.ArgumentError, "d_qk"),
        ({"kv_format": np.array([1, 2])}, mla_cupy.ArgumentError, "kv_format"),
        ({"dtype": 3}, mla_cupy.DTypeError, "dtype"),
        ({"dtype": []}, mla_cupy.DTypeError, "dtype"),
        ({"dtype": np.zeros(3)}, mla_cupy.DTypeError, "dtype"),
        ({"device": "cuda"}, mla_cupy.ArgumentError, "device"),
        ({"device": -1}, mla_cupy.ArgumentError, "device"),
        ({"device": 1.0}, mla_cupy.ArgumentError, "device"),
        ({"workspace": np.zeros(8, np.float32)}, PlanError, "workspace"),
    ],
    ids=str,
)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_plans_of_nonsense(
    changes: dict[str, Any],
    error: type[Exception],
    word: str,
    on_gpu: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if on_gpu:
        request.getfixturevalue("recorder")
    else:
        monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    with pytest.raises(error, match=word):
        plan_decode(**{**PLAN, **changes})


def test_a_plan_for_a_device_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the missing package, without a traceback of an import."""
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(mla_cupy.MlaError):
        plan_decode(**PLAN, device=0)


def test_a_plan_of_numpy_s_numbers(recorder: Recorder) -> None:
    """Addresses and sizes are computed from them, which 32 bits would not hold."""
    small = {name: np.int32(value) for name, value in PLAN.items() if type(value) is int}
    plan = plan_decode(**{**PLAN, **small})
    assert plan.workspace_bytes == plan_decode(**PLAN).workspace_bytes
    assert plan.splits is not None
    plan.update(np.array([20, 33], np.int32))
