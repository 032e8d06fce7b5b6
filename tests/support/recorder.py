"""A GPU that only writes down what it is asked to launch: the public calls' path without CUDA."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from mla_cupy import arrays
from mla_cupy.dtypes import numpy_dtype
from mla_cupy.kernels import KERNELS
from mla_cupy.ops import backend
from mla_cupy.ops.call import forget
from mla_cupy.runtime import device, driver, launching, loader
from mla_cupy.runtime.build import BuildRequest
from mla_cupy.runtime.device import EVERY_KERNEL, DeviceInfo
from mla_cupy.runtime.tensormap import TensorMapSpec
from tests.support.calls import no_launch

DEVICE = 0
H200 = DeviceInfo(DEVICE, "a fake H200", (9, 0), 132, 232448, 50 << 20, 139 << 30)
B200 = DeviceInfo(DEVICE, "a fake B200", (10, 0), 148, 232448, 126 << 20, 178 << 30, EVERY_KERNEL)


class Launched(NamedTuple):
    """One launch: `params` is the record of its parameters, `more` what follows it (a tensor map)."""

    entry: str
    grid: launching.Dim3
    stream: int
    params: Any
    more: list[bytes]

    @property
    def addresses(self) -> dict[str, int]:
        """Parameters that are non-null addresses."""
        names = [name for name in self.params.dtype.names if self.params.dtype[name] == np.uint64]
        return {name: int(self.params[name]) for name in names if self.params[name]}


@cache
def dtype_of(entry: str, nbytes: int) -> np.dtype[Any]:
    """The parameter struct of a kernel as a dtype, of the variant whose struct has that size.

    Looked up once, since the path of repeated calls is measured.
    """
    layouts = (spec.layout(build) for spec in KERNELS.values() if spec.entry == entry for build in spec.variants)
    return next(layout.dtype for layout in layouts if layout.size == nbytes)


class Recorder:
    """A driver that launches nothing; memory is the host's."""

    def __init__(self) -> None:
        self.launches: list[Launched] = []
        self.maps: list[TensorMapSpec] = []
        self.allocations: list[tuple[int, ...]] = []
        self.memsets: list[tuple[int, int, int, int]] = []  # address, byte, bytes, stream
        self.capturing = False
        self.gpu = H200

    @property
    def entries(self) -> list[str]:
        return [launch.entry.removeprefix("mla_") for launch in self.launches]

    def wanted(self, request: BuildRequest) -> BuildRequest:
        return request

    def encode_tiled(self, tensor_map: TensorMapSpec) -> bytes:
        self.maps.append(tensor_map)
        return len(self.maps).to_bytes(128, "little")

    def memset(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        self.memsets.append((ptr, value, nbytes, stream))

    def prepare(
        self,
        kernel: launching.LoadedKernel,
        grid: launching.Dim3,
        block: launching.Dim3,
        cluster: launching.Dim3,
        smem: int,
        args: launching.ArgumentBlock,
        pdl: bool,
    ) -> launching.PreparedLaunch:
        def enqueue(stream: int) -> None:
            record, *more = [bytes(view) for view in args.views]
            params = np.frombuffer(record, dtype_of(kernel.entry, len(record)))[0]
            self.launches.append(Launched(kernel.entry, grid, stream, params, more))

        return enqueue

    def in_order(self, launches: Sequence[launching.PreparedLaunch]) -> launching.PreparedLaunch:
        return launching.one_by_one(launches)

    def is_capturing(self, stream: int) -> bool:
        return self.capturing

    def device_guard(self, device: int) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


def address(x: Any) -> int:
    return int(x.__array_interface__["data"][0])


def elements(x: Any, axes: int) -> list[int]:
    """The strides of its first axes, in elements."""
    return [stride // x.itemsize for stride in x.strides[:axes]]


class Elsewhere(np.ndarray):
    """An array on the second fake GPU."""


def _array_of(view: arrays.View) -> Any:
    """Array of a view."""
    dtype = numpy_dtype(view.dtype)

    class Interface:
        __array_interface__ = {  # noqa: RUF012
            "data": (view.ptr, False),
            "shape": view.shape,
            "strides": tuple(dtype.itemsize * stride for stride in view.strides),
            "typestr": dtype.str,
            "version": 3,
        }

    return np.asarray(Interface())


class _FakeCupy:
    """The parts of CuPy that plans use."""

    def current_device(self) -> int:
        return DEVICE

    def current_stream(self, device: int) -> int:
        return 0

    def own_memory(self, nbytes: int, device: int) -> Any:
        memory = np.zeros(nbytes, np.uint8)
        return SimpleNamespace(memory=memory, ptr=memory.ctypes.data)

    def assign(self, out: arrays.View, source: arrays.View, minus: int, stream: int) -> None:
        _array_of(out)[...] = _array_of(source) - minus if minus else _array_of(source)

    def write(self, address: int, data: Any, device: int) -> None:
        ctypes.memmove(address, data.ctypes.data, data.nbytes)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """NumPy arrays count as arrays on a fake GPU, an H200 at first, and launches are written down."""
    fake = Recorder()
    empty, view = arrays.NumpyFamily.empty, arrays.NumpyFamily.view

    def counted(self: arrays.NumpyFamily, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> Any:
        fake.allocations.append(shape)
        return empty(self, shape, dtype, device, stream)

    def on_device(self: arrays.NumpyFamily, x: Any, argument: str = "an array") -> arrays.View:
        return view(self, x, argument)._replace(device=1 if isinstance(x, Elsewhere) else DEVICE)

    monkeypatch.setattr(arrays.NumpyFamily, "on_gpu", True)
    monkeypatch.setattr(arrays.NumpyFamily, "view", on_device)
    monkeypatch.setattr(arrays.NumpyFamily, "empty", counted)
    monkeypatch.setattr(arrays, "cupy_family", _FakeCupy)
    monkeypatch.setattr(backend, "use_gpu", lambda: True)
    monkeypatch.setattr(device, "describe", lambda ordinal: fake.gpu)
    built = SimpleNamespace(facts={"threads": 256}, dynamic_smem=0)
    monkeypatch.setattr(loader, "obtain", lambda request: built)
    monkeypatch.setattr(
        loader, "loaded", lambda request, device, stream: launching.LoadedKernel(request.entry, device, 1)
    )
    forget()
    with driver.use(fake):  # type: ignore[arg-type]
        yield fake
    forget()


@pytest.fixture(
    params=["numpy", "recorder", pytest.param("cupy", marks=pytest.mark.gpu)],
    ids=["numpy", "recorded", "cupy"],
)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Place of the arrays; nothing may be computed or launched."""
    guard: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if request.param == "numpy":
        monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")

        def fail(operation: str, options: Any) -> Any:
            raise AssertionError(f"computed {operation}")

        monkeypatch.setattr(backend, "oracle", fail)
    elif request.param == "cupy":
        request.getfixturevalue("gpu")
        guard = no_launch()
    else:
        recorder: Recorder = request.getfixturevalue("recorder")
    with guard:
        yield request.param
    if request.param == "recorder":
        assert recorder.launches == []
        assert recorder.memsets == []
