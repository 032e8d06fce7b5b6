"""A driver that loads traced builds in place of the plain ones, and reads what they have recorded."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mla_cupy import arrays
from mla_cupy.runtime import sources
from mla_cupy.runtime.build import Build, BuildRequest
from mla_cupy.runtime.launching import ArgumentBlock, Dim3, Driver, LoadedKernel, PreparedLaunch
from mla_cupy.runtime.tensormap import TensorMapSpec
from mla_cupy.simulation import SimDriver

from ..core.errors import BenchError
from .choice import Choice

PRELUDE = "trace/waits.cuh"
OPENING = "const mla::TracedWarp mla_traced_warp;"
SYMBOL = "mla_trace_target"
WARP_THREADS = 32
EVERYWHERE = Choice()
SPILL_BYTES = 1 << 16
"""Allowance of traced builds: they may spill, and the report says so."""

RECORD = np.dtype([("end", "u4"), ("begin", "u4"), ("site", "u4"), ("unused", "u4")])
"""`WaitRecord` of `trace/waits.cuh`."""
MOMENT = np.dtype([("nanoseconds", "u8"), ("clock", "u4"), ("sm", "u4")])
"""`Moment`."""
MOMENTS = 2
TARGET = np.dtype(
    [(name, "u8") for name in ("records", "moments", "ends")] + [(name, "u4") for name in ("rows", "slots", "warps")],
    align=True,
)
"""`TraceTarget`."""
NO_SLOT = 0x7FFFFFFF
"""`kNoSlot`: indices of records are below it."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Limits:
    """Bounds of what is kept: blocks of a launch, and records of a warp."""

    blocks: int = 264
    capacity: int = 1024


class Access(Protocol):
    """Memory of the device and variables of a loaded module."""

    def read(self, address: int, nbytes: int) -> bytes:
        """Return what lies at an address, once all work has ended."""

    def set_variable(self, kernel: LoadedKernel, name: str, data: bytes) -> None:
        """Write a variable of the kernel's module."""


class CudaAccess:
    """Through the CUDA driver."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver

    def read(self, address: int, nbytes: int) -> bytes:
        """See `Access.read`."""
        self._check(self._driver.cuCtxSynchronize())
        data = ctypes.create_string_buffer(nbytes)
        self._check(self._driver.cuMemcpyDtoH(ctypes.addressof(data), address, nbytes))
        return data.raw

    def set_variable(self, kernel: LoadedKernel, name: str, data: bytes) -> None:
        """See `Access.set_variable`."""
        module = self._check(self._driver.cuFuncGetModule(self._driver.CUfunction(kernel.handle)))
        address, nbytes = self._check(self._driver.cuModuleGetGlobal(module, name.encode()))
        if nbytes != len(data):
            raise BenchError(f"{name} of {kernel.entry}: got {nbytes} bytes, expected {len(data)}")
        self._check(self._driver.cuMemcpyHtoD(address, data, len(data)))

    @staticmethod
    def _check(result: tuple[Any, ...]) -> Any:
        status, *values = result
        if int(status):
            raise BenchError(f"the CUDA driver reports {status.name} ({int(status)})")
        return values[0] if len(values) == 1 else values


class SimulatedAccess:
    """Through the simulator's memory."""

    def __init__(self, target: SimDriver) -> None:
        self._memory = target.memory

    def read(self, address: int, nbytes: int) -> bytes:
        """See `Access.read`."""
        return bytes(self._memory.slice(address, nbytes))

    def set_variable(self, kernel: LoadedKernel, name: str, data: bytes) -> None:
        """See `Access.set_variable`."""
        module: Any = kernel.owner
        _, at = module.offsets[name]
        module.constants.bytes[at : at + len(data)] = np.frombuffer(data, np.uint8)


@dataclass(frozen=True)
class Recorded:
    """Records of the last launch of a kernel.

    Attributes
    ----------
    entry, label : str
        Of the kernel and its variant.
    files : mapping
        Texts of the sources, by name.
    spills : int
        Bytes of stores that the traced build spills.
    counts : ndarray, (blocks, warps)
        Records that each warp has made, also those for which there was no room.
    records : ndarray, (blocks, warps, capacity), `RECORD`
    moments : ndarray, (blocks, warps, 2), `MOMENT`
        When the warp began, and when it ended.
    """

    entry: str
    label: str
    files: Mapping[str, bytes]
    spills: int
    counts: Array
    records: Array
    moments: Array


class _Traced:
    """A loaded traced kernel, and the memory that it writes to."""

    def __init__(self, build: Build, kernel: LoadedKernel) -> None:
        self.build, self.kernel = build, kernel
        self.grid_blocks = 0
        self.warps = 0
        self.places: dict[str, tuple[Any, int]] = {}

    def allocate(self, limits: Limits, warps: int) -> bytes:
        """Allocate zeroed memory for `warps` warps per block; returns the target's bytes."""
        self.warps = warps
        rows = limits.blocks * warps
        slots = limits.capacity * rows
        if slots >= NO_SLOT:
            raise BenchError(f"--capacity {limits.capacity} of {rows} warps: got {slots} records, expected < {NO_SLOT}")
        sizes = {
            "records": slots * RECORD.itemsize,
            "moments": rows * MOMENTS * MOMENT.itemsize,
            "ends": rows * 4,
        }
        family = arrays.cupy_family()
        target = np.zeros((), TARGET)
        for name, nbytes in sizes.items():
            memory = family.own_memory(nbytes, self.kernel.device)
            family.write(memory.ptr, np.zeros(nbytes, np.uint8), self.kernel.device)
            self.places[name] = memory, nbytes
            target[name] = memory.ptr
        target["rows"], target["slots"], target["warps"] = rows, slots, warps
        return target.tobytes()


class TracingDriver:
    """Another driver, whose kernels are replaced by traced builds of them."""

    def __init__(self, inner: Driver, access: Access, limits: Limits, choice: Choice = EVERYWHERE) -> None:
        self._inner, self._access, self._limits, self._choice = inner, access, limits, choice
        self._kernels: dict[int, _Traced] = {}

    def wanted(self, request: BuildRequest) -> BuildRequest:
        """See `Driver.wanted`: the traced build."""
        return self._inner.wanted(self._choice.of(traced(request)))

    def load(self, build: Build, device: int) -> LoadedKernel:
        """See `Driver.load`."""
        kernel = self._inner.load(build, device)
        self._kernels[id(kernel)] = _Traced(build, kernel)
        return kernel

    def prepare(
        self, kernel: LoadedKernel, grid: Dim3, block: Dim3, cluster: Dim3, smem: int, args: ArgumentBlock, pdl: bool
    ) -> PreparedLaunch:
        """Prepare a launch, and memory for its records."""
        own = self._kernels[id(kernel)]
        warps = -(-block[0] * block[1] * block[2] // WARP_THREADS)
        if own.warps != warps:
            self._access.set_variable(kernel, SYMBOL, own.allocate(self._limits, warps))
        own.grid_blocks = grid[0] * grid[1] * grid[2]
        return self._inner.prepare(kernel, grid, block, cluster, smem, args, pdl)

    def recorded(self) -> list[Recorded]:
        """Return what each kernel's last launch has left, in the order in which kernels were loaded."""
        return [self._read(each) for each in self._kernels.values() if each.places]

    def _read(self, kernel: _Traced) -> Recorded:
        limits, warps = self._limits, kernel.warps
        blocks = min(limits.blocks, kernel.grid_blocks)
        rows = limits.blocks * warps
        ends = self._array(kernel, "ends", np.dtype("u4"))
        counts = (ends - np.arange(rows, dtype="u4")) // np.uint32(rows)
        records = self._array(kernel, "records", RECORD).reshape(limits.capacity, limits.blocks, warps)
        moments = self._array(kernel, "moments", MOMENT).reshape(limits.blocks, warps, MOMENTS)
        info = kernel.build.info
        return Recorded(
            info["entry"],
            info["label"],
            sources.gather(info["source"]),
            info["spill_stores"],
            counts.reshape(limits.blocks, warps)[:blocks],
            np.moveaxis(records, 0, -1)[:blocks],
            moments[:blocks],
        )

    def _array(self, kernel: _Traced, name: str, kind: np.dtype[Any]) -> Array:
        memory, nbytes = kernel.places[name]
        return np.frombuffer(self._access.read(memory.ptr, nbytes), kind)

    def encode_tiled(self, spec: TensorMapSpec) -> bytes:
        """See `Driver.encode_tiled`."""
        return self._inner.encode_tiled(spec)

    def memset(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        """See `Driver.memset`."""
        self._inner.memset(ptr, value, nbytes, stream)

    def in_order(self, launches: Sequence[PreparedLaunch]) -> PreparedLaunch:
        """See `Driver.in_order`."""
        return self._inner.in_order(launches)

    def is_capturing(self, stream: int) -> bool:
        """See `Driver.is_capturing`."""
        return self._inner.is_capturing(stream)

    def device_guard(self, device: int) -> AbstractContextManager[object]:
        """See `Driver.device_guard`."""
        return self._inner.device_guard(device)


class Rehearsal(TracingDriver):
    """Another driver, to which no launch goes: says which kernels a call launches, before the work.

    Attributes
    ----------
    blocks : dict of str to int
        Blocks of each launched kernel's grid, by its name without "mla_".
    requests : list of BuildRequest
        Their plain builds.
    """

    def __init__(self, inner: Driver, access: Access, limits: Limits, choice: Choice = EVERYWHERE) -> None:
        super().__init__(inner, access, limits, choice)
        self.blocks: dict[str, int] = {}
        self.requests: list[BuildRequest] = []

    def wanted(self, request: BuildRequest) -> BuildRequest:
        """See `Driver.wanted`: the plain build."""
        self.requests.append(request)
        return self._inner.wanted(request)

    def prepare(
        self, kernel: LoadedKernel, grid: Dim3, block: Dim3, cluster: Dim3, smem: int, args: ArgumentBlock, pdl: bool
    ) -> PreparedLaunch:
        """Note the kernel and its grid."""
        self.blocks[kernel.entry.removeprefix("mla_")] = grid[0] * grid[1] * grid[2]
        return lambda stream: None

    def in_order(self, launches: Sequence[PreparedLaunch]) -> PreparedLaunch:
        """Launch nothing."""
        return lambda stream: None

    def memset(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        """Write nothing."""

    def finds(self, choice: Choice) -> bool:
        """True if one of the kernels has a place that is recorded."""
        return any(choice.finds(traced(request)) for request in self.requests)


def traced(request: BuildRequest) -> BuildRequest:
    """Return the request of a traced build of the same kernel."""
    return dataclasses.replace(request, spill_bytes=SPILL_BYTES, prelude=PRELUDE, opening=OPENING)
