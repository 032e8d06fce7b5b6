"""Calls without memory: what they return, how they travel, and that what they launch is what the public call does."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedDeviceError, ops
from mla_cupy.arrays import HOST
from mla_cupy.ops.bind import Launcher, Signature, options_of, parameters
from mla_cupy.ops.call import examine
from mla_cupy.ops.schema import contiguous_view
from mla_cupy.runtime import driver, launching
from mla_cupy.simulation import simulated
from tests.bindings.cases import BoundCall, backward, decode, every_call, forward, merge
from tests.bindings.cases import test_every_operation_has_a_call as test_every_operation_has_a_call
from tests.support.calls import assert_same
from tests.support.flat import flat
from tests.support.recorder import B200, Recorder, address

Array = np.ndarray[Any, Any]


def signature(call: BoundCall, **given: Array) -> Signature:
    operation = call.record
    arrays = {**call.arrays, **given}
    present = {name: (x.shape, x.dtype.name) for name, x in arrays.items()}
    return Signature(call.operation, tuple(map(present.get, operation.names)), options_of(operation, call.options))


def empty(call: Signature) -> list[Array]:
    """Memory for the results, aligned as a GPU's is."""
    return [aligned(shaped[0], mla_cupy.dtypes.numpy_dtype(shaped[1])) for shaped in call.results if shaped is not None]


def aligned(shape: tuple[int, ...], dtype: Any) -> Array:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + 256, np.uint8)
    begin = -address(memory) % 256
    return memory[begin : begin + nbytes].view(dtype).reshape(shape)


def in_place(call: BoundCall) -> list[Array]:
    """The given arrays in the order of the record, aligned."""
    names = [array.name for array in call.record.inputs if array.name in call.arrays]
    copies = []
    for name in names:
        copy = aligned(call.arrays[name].shape, call.arrays[name].dtype)
        copy[...] = call.arrays[name]
        copies.append(copy)
    return copies


class Symbol(int):
    """A size as compilers have it, who do not know it yet."""

    __hash__ = None  # type: ignore[assignment]


@every_call
def test_checks_look_no_size_up(call: BoundCall) -> None:
    """PyTorch checks calls whose sizes are symbols, which are no keys of tables or sets."""
    of_call = signature(call)
    views = [
        None if array is None else contiguous_view(tuple(map(Symbol, array[0])), array[1], HOST)
        for array in of_call.arrays
    ]
    given = dict(zip(call.record.names, views, strict=True))
    assert examine(call.record, given, of_call.options).missing == of_call.request.missing


@every_call
def test_results_are_those_of_the_public_call(call: BoundCall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    wanted = call.of_operator()
    found = signature(call).results
    assert found == tuple(None if x is None else (x.shape, x.dtype.name) for x in wanted)


@every_call
def test_a_signature_travels_as_text(call: BoundCall) -> None:
    original = signature(call)
    copy = Signature.from_text(original.to_text())
    assert copy == original
    assert hash(copy) == hash(original)
    assert copy.results == original.results


def test_numbers_of_numpy_travel_too() -> None:
    original = signature(decode(scale=np.float32(0.5), causal=np.bool_(False)))
    assert Signature.from_text(original.to_text()) == original


@every_call
def test_on_the_host(call: BoundCall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    bound = signature(call)
    results = empty(bound)
    bound.on_host(in_place(call), results)
    for got, wanted in zip(results, [x for x in call.eager() if x is not None], strict=True):
        assert_same(got, wanted)


def test_given_results_are_targets() -> None:
    call = backward({"sink": True})
    dkv, d_sink = np.zeros(call.arrays["kv"].shape, np.float32), np.zeros(4, np.float32)
    bound = signature(call, dkv=dkv, d_sink=d_sink)
    assert bound.results[1] == (dkv.shape, "float32")
    assert bound.targets == ((7, 1), (8, 2))  # after 7 inputs, attn_sink included
    assert signature(backward(), dkv=dkv).targets == ((6, 1),)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"options": {"scale": -1.0}}, ArgumentError),
        ({"options": {"kernel": "no_such_kernel"}}, ArgumentError),
        ({"options": {"out_dtype": "int32"}}, DTypeError),
        ({"arrays": {"block_table": np.zeros((2, 4), np.int32)}}, ShapeError),
        ({"arrays": {"seqlens": np.zeros(3, np.int16)}}, DTypeError),
    ],
)
def test_errors_are_those_of_the_public_call(
    change: dict[str, Any], kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    good = decode()
    arrays, options = {**good.arrays, **change.get("arrays", {})}, {**good.options, **change.get("options", {})}
    bad = BoundCall("bad", "mla_decode", arrays, options)
    with pytest.raises(kind) as of_public:
        bad.eager()
    with pytest.raises(kind) as of_signature:
        signature(bad).request  # noqa: B018
    assert str(of_signature.value) == str(of_public.value)


def test_options_have_the_public_names_and_defaults() -> None:
    assert list(parameters("merge_states")) == ["outs", "lses", "lse_base", "empty_lse", "out_dtype"]
    assert options_of(ops.OPERATIONS["merge_states"], {})._asdict() == {
        "lse_base": "e",
        "empty_lse": -np.inf,
        "out_dtype": None,
    }
    with pytest.raises(TypeError, match="no_such_option"):
        options_of(ops.OPERATIONS["merge_states"], {"no_such_option": 1})


# ---- Launches ----------------------------------------------------------------------------------------------------


@every_call
def test_it_launches_what_the_public_call_launches(call: BoundCall, recorder: Recorder) -> None:
    """Equal kernels, grids and parameters, addresses included; only none of them is a programmatic dependent."""
    bound = signature(call)
    launcher = Launcher(bound, [HOST])
    inputs, results = in_place(call), empty(bound)
    workspace = aligned((launcher.nbytes,), np.uint8)
    names = [array.name for array in call.record.inputs if array.name in call.arrays]
    outputs = [name for name, x in zip(bound.result_names, bound.results, strict=True) if x is not None]
    for name in set(call.changed) & set(names):  # lies in the result's memory
        inputs[names.index(name)] = results[outputs.index(name)]
    flat(getattr(mla_cupy, call.operation))(
        **{**dict(zip(names, inputs, strict=True)), **dict(zip(outputs, results, strict=True))},
        **call.options,
        **({"workspace": workspace} if launcher.nbytes else {}),
        stream=5,
    )
    wanted, filled = list(recorder.launches), list(recorder.memsets)
    recorder.launches.clear()
    recorder.memsets.clear()
    recorder.allocations.clear()
    places = [address(x) for x in (*inputs, *results, *([workspace] if launcher.nbytes else []))]
    launcher.enqueue(HOST, places, 5)
    assert recorder.allocations == []
    assert recorder.memsets == filled
    assert [(x.entry, x.grid, x.stream) for x in recorder.launches] == [(x.entry, x.grid, x.stream) for x in wanted]
    for got, expected in zip(recorder.launches, wanted, strict=True):
        assert got.params.tobytes() == expected.params.tobytes()
        assert len(got.more) == len(expected.more)
    assert wanted


def test_kernels_are_loaded_when_it_is_made(recorder: Recorder) -> None:
    call = forward()
    launcher = Launcher(signature(call), [HOST])
    places = [address(x) for x in (*in_place(call), *empty(signature(call)), aligned((launcher.nbytes,), np.uint8))]
    recorder.capturing = True
    launcher.enqueue(HOST, places, 3)
    assert recorder.launches


class Dependents:
    """A driver that notes which launches may start before their predecessor has ended."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.pdl: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)

    def prepare(self, *arguments: Any) -> launching.PreparedLaunch:
        self.pdl.append(arguments[-1])
        return self._recorder.prepare(*arguments)


def test_no_launch_is_a_programmatic_dependent(recorder: Recorder) -> None:
    noting = Dependents(recorder)
    with driver.use(noting):  # type: ignore[arg-type]
        Launcher(signature(decode()), [HOST])
    assert noting.pdl
    assert not any(noting.pdl)


def test_threads_do_not_disturb_each_other(recorder: Recorder) -> None:
    """Every launch has the addresses of its own call."""
    call = merge()
    launcher = Launcher(signature(call), [HOST])
    barrier = threading.Barrier(8)

    def enqueue(thread: int) -> None:
        barrier.wait(timeout=60)
        for i in range(200):
            first = 4096 * (1000 * thread + i + 1)
            launcher.enqueue(HOST, [first, first + 16, first + 32, first + 48], thread)

    threads = [threading.Thread(target=enqueue, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(recorder.launches) == 8 * 200
    for launch in recorder.launches:
        first = int(launch.params["outs"])
        assert first // 4096 // 1000 == launch.stream
        assert [int(launch.params[name]) - first for name in ("lses", "out", "lse")] == [16, 32, 48]
    assert len(launcher._idle[HOST]) <= 8


def test_what_does_not_fit_is_said(recorder: Recorder) -> None:
    launcher = Launcher(signature(merge()), [HOST])
    with pytest.raises(DeviceError, match=r"device: got 3, expected one of \[-1\]"):
        launcher.enqueue(3, [16, 32, 48, 64], 0)
    with pytest.raises(ShapeError, match=r"addresses: got arrays at .*0x31.*expected multiples of 16"):
        launcher.enqueue(HOST, [16, 32, 49, 64], 0)
    scratch = Launcher(signature(decode()), [HOST])
    assert scratch.nbytes > 0
    with pytest.raises(ShapeError, match="a workspace at 0x110, expected multiples of 16, and of 256"):
        scratch.enqueue(HOST, [16, 32, 48, 64, 80, 96, 0x110], 0)
    recorder.gpu = B200
    with pytest.raises(UnsupportedDeviceError, match="no kernel fits"):
        Launcher(signature(decode(kernel="decode_sm90_seesaw")), [HOST])
    assert recorder.launches == []


def test_in_the_simulator() -> None:
    """The numbers are right when the kernels run."""
    call = merge(lse_base="2")
    wanted = mla_cupy.reference.merge_states(**call.arrays, lse_base="2")
    with simulated() as gpu:
        bound = signature(call)
        launcher = Launcher(bound, [0])
        inputs, results = in_place(call), empty(bound)
        launcher.enqueue(0, [gpu.memory.map(x) for x in (*inputs, *results)], 0)
    np.testing.assert_allclose(results[0], wanted[0], rtol=0, atol=4e-6)
    np.testing.assert_allclose(results[1], wanted[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("operation", ops.BOUND_OPERATIONS.values(), ids=lambda operation: operation.name)
def test_options_have_the_order_of_the_public_function(operation: Any) -> None:
    """The operators of PyTorch pass them by position."""
    inputs = [array.name for array in operation.inputs]
    assert [name for name in parameters(operation.name) if name not in inputs] == list(operation.bound_options)
