"""A driver that runs the PTX simulator, with NumPy arrays instead of a GPU's, so that whole public calls run.

Launchers, argument packing, tensor maps, grids and workspaces are as on a GPU; only instructions are simulated.
The self-test and the tests run kernels so where there is no GPU for them. It is about a million times slower than a
GPU.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from mla_cupy import arrays, parts
from mla_cupy.arrays import Signature
from mla_cupy.dtypes import TABLE
from mla_cupy.ops.call import forget
from mla_cupy.runtime import device as devices
from mla_cupy.runtime import driver, env, launching, loader, worker
from mla_cupy.runtime.build import Build, BuildRequest
from mla_cupy.runtime.device import EVERY_KERNEL, DeviceInfo, smem_per_block, usable_smem
from mla_cupy.runtime.launching import ArgumentBlock, Dim3, LoadedKernel, PreparedLaunch
from mla_cupy.runtime.tensormap import TensorMapSpec

DEVICE = 0


def fake_gpu(sm_count: int, cc: tuple[int, int] = (9, 0), l2_bytes: int = 50 << 20) -> DeviceInfo:
    """A GPU of any size, with the shared memory of its kind; kernels that no hardware has run are chosen, too."""
    smem = usable_smem(smem_per_block(cc))
    return DeviceInfo(DEVICE, "simulated GPU", cc, sm_count, smem, l2_bytes, 1 << 34, EVERY_KERNEL)


_LAUNCH_OPTIONS = ("mode", "seed", "resident", "race_global", "race_lanes", "timeline")


def _memory() -> Any:
    return parts.simulator().Memory()


@dataclass(eq=False)
class SimDriver:
    """Runs every launch to its end, at once.

    mode, seed
        When asynchronous work completes: "early", "late" or "random", see ptxsim.
    resident
        Number of interleaved blocks: at least the blocks that wait for each other.
    race_global
        Also detect races in global memory.
    race_lanes
        Also detect races between lanes of one warp in shared memory.
    timeline
        A `ptxsim.Timeline` that records the launches, or None.
    """

    mode: str = "early"
    seed: int = 0
    memory: Any = field(default_factory=_memory)
    launched: list[str] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    resident: int = 1
    race_global: bool = False
    race_lanes: bool = False
    timeline: Any = None
    _wanted: dict[BuildRequest, BuildRequest] = field(default_factory=dict, repr=False)

    def wanted(self, request: BuildRequest) -> BuildRequest:
        """The PTX alone, unless a whole build exists already, or compiling is forbidden."""
        found = self._wanted.get(request)
        if found is None:
            whole = env.get("JIT") == "off" or worker.cached(request) is not None
            found = self._wanted[request] = request if whole else request.as_virtual()
        return found

    def load(self, build: Build, device: int) -> LoadedKernel:
        """The PTX of `build`, parsed."""
        module = parts.simulator().Module(build.ptx.decode(), strict=True, memory=self.memory)
        return LoadedKernel(build.entry, device, 1, owner=module)

    def encode_tiled(self, spec: TensorMapSpec) -> bytes:
        """The simulator's own encoding, by the driver's rules."""
        spec.validate()
        sizes = (spec.base, spec.dims, spec.strides_bytes, spec.box)
        return bytes(parts.simulator().encode_tiled(TABLE[spec.dtype].tensor_map, *sizes, swizzle=spec.swizzle))

    def memset(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        """Fill memory, at once."""
        self.memory.slice(ptr, nbytes, write=True)[:] = value

    def prepare(
        self, kernel: LoadedKernel, grid: Dim3, block: Dim3, cluster: Dim3, smem: int, args: ArgumentBlock, pdl: bool
    ) -> PreparedLaunch:
        """A launch that runs when it is enqueued."""
        module: Any = kernel.owner
        taken = len(module.program(kernel.entry).function.params)

        def enqueue(stream: int) -> None:
            parameters = [bytes(view) for view in args.views[:taken]]
            options = {name: getattr(self, name) for name in _LAUNCH_OPTIONS}
            report = module.launch(kernel.entry, grid, block, parameters, smem=smem, cluster=cluster, **options)
            self.launched.append(kernel.entry)
            self.reports.append(report)

        return enqueue

    def in_order(self, launches: Sequence[PreparedLaunch]) -> PreparedLaunch:
        """One after the other."""
        return launching.one_by_one(launches)

    def is_capturing(self, stream: int) -> bool:
        """There are no graphs."""
        return False

    def device_guard(self, device: int) -> AbstractContextManager[object]:
        """There is one device."""
        return nullcontext()


_ON_HOST = arrays.NumpyFamily()


class SimFamily(arrays.NumpyFamily):
    """NumPy arrays in the simulator's global memory."""

    name, on_gpu = "simulated", True

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def view(self, x: Any, argument: str = "an array") -> arrays.View:
        """View of an array, on the one device."""
        view = _ON_HOST.view(x, argument)  # refuses what cannot be mapped
        if x.dtype.hasobject:  # no memory for a device; the check of dtypes says so
            return view._replace(device=DEVICE)
        return view._replace(ptr=self.address(x), device=DEVICE)

    def signature(self, arrays: Sequence[Any]) -> tuple[list[int], Signature] | None:
        """None for arrays that cannot be mapped: the checks reject them by name."""
        whole = all(not isinstance(x, np.ndarray) or _in_whole_items(x) for x in arrays)
        return super().signature(arrays) if whole else None

    def address(self, x: Any) -> int:
        """The address of the first element on the device; views of one array keep their distances on the host."""
        address: int = self._memory.map(x) + int(x.ctypes.data) - _lowest(x)
        return address

    def current_device(self) -> int:
        """The one device."""
        return DEVICE

    def from_numpy(self, x: np.ndarray[Any, Any], device: int, stream: int) -> Any:
        """A copy."""
        return x.copy()

    def own_memory(self, nbytes: int, device: int) -> Any:
        """Memory that plans allocate."""
        memory = np.full(nbytes, 0xFF, np.uint8)
        return SimpleNamespace(memory=memory, ptr=self._memory.map(memory))

    def host_memory(self, nbytes: int) -> tuple[np.ndarray[Any, Any], int]:
        """Zeroed, and mapped like all memory."""
        memory = np.zeros(nbytes, np.uint8)
        return memory, self._memory.map(memory)

    def write(self, address: int, data: np.ndarray[Any, Any], device: int) -> None:
        """Copy bytes to the device."""
        self._memory.slice(address, data.nbytes, write=True)[:] = data.view(np.uint8).reshape(-1)

    def assign(self, out: arrays.View, source: arrays.View, minus: int, stream: int) -> None:
        """Write an array, minus a whole number, to one of the same shape."""
        dtype = TABLE[out.dtype].numpy
        for index in np.ndindex(*out.shape):
            here, there = (
                view.ptr + dtype.itemsize * sum(map(operator.mul, index, view.strides)) for view in (source, out)
            )
            number = self._memory.slice(here, dtype.itemsize).view(dtype)
            number = number - dtype.type(minus) if minus else number
            self._memory.slice(there, dtype.itemsize, write=True)[:] = number.view(np.uint8)

    def share(self, memory: Any) -> bytes:
        """There is no other process."""
        return b""

    def open_peers(self, device: int, others: Iterable[int]) -> None:
        """There is one device."""

    def empty(self, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> Any:
        """Filled with NaN, so that elements that are never written show."""
        made = super().empty(shape, dtype, device, stream)
        made.reshape(-1).view(np.uint8)[:] = 0xFF
        return made


def _in_whole_items(x: np.ndarray[Any, Any]) -> bool:
    """True if the array starts at, and steps by, whole items, which are no objects of Python."""
    whole = x.itemsize and not x.dtype.hasobject
    return bool(whole) and not any(step % x.itemsize for step in (x.ctypes.data, *x.strides))


def _lowest(x: np.ndarray[Any, Any]) -> int:
    """The address of the lowest byte: of an axis that runs backwards, the last element comes first."""
    reach = [(size - 1) * stride for size, stride in zip(x.shape, x.strides, strict=True)]
    return int(x.ctypes.data) + (sum(min(0, step) for step in reach) if x.size else 0)


@contextmanager
def simulated(
    sm_count: int = 2,
    cc: tuple[int, int] = (9, 0),
    mode: str = "early",
    seed: int = 0,
    l2_bytes: int = 50 << 20,
) -> Iterator[SimDriver]:
    """Put NumPy arrays, within a with statement, on a simulated GPU with `sm_count` multiprocessors.

    That holds for the whole process: no other thread should call the package meanwhile.

    Raises
    ------
    ArgumentError
        If the simulator is neither in the package nor in a checkout.
    """
    target = SimDriver(mode, seed)
    gpu, family = fake_gpu(sm_count, cc, l2_bytes), SimFamily(target.memory)
    with ExitStack() as stack:
        stack.callback(_trim_heap)
        stack.callback(loader.drop_kernels_of, target)
        stack.enter_context(driver.use(target))
        stack.enter_context(_replaced(devices, "describe", lambda ordinal: gpu))
        stack.enter_context(_replaced(arrays, "NUMPY", family))
        # Plans allocate from this family:
        stack.enter_context(_replaced(arrays, "cupy_family", lambda: family))
        forget()
        stack.callback(forget)
        yield target


def _trim_heap() -> None:
    """Give freed memory back to the system.

    glibc keeps memory between blocks in use: nine tenths of a process's memory, after tests that simulate all SMs of a
    GPU.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Another value for an attribute, within a with statement."""
    previous = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, previous)
