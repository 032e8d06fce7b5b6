"""The driver Protocol on the PTX simulator, and NumPy arrays that pass for a GPU's: the public calls then run whole.

Launchers, argument packing, tensor maps, grids and workspaces are those of a GPU; only the instructions are simulated.
The self-test and the tests run kernels so where there is no GPU for them. It is slow: a million times, about.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from mla_cupy import arrays, parts
from mla_cupy.launchers import decode_sequence, sparse_backward_sequence, sparse_forward_sequence
from mla_cupy.ops import merge
from mla_cupy.runtime import device as devices
from mla_cupy.runtime import driver
from mla_cupy.runtime.build import Build
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.driver import ArgumentBlock, Dim3, Kernel, PreparedLaunch
from mla_cupy.runtime.tensormap import TensorMapSpec

DEVICE = 0


def fake_gpu(sm_count: int, cc: tuple[int, int] = (9, 0), l2_bytes: int = 50 << 20) -> DeviceInfo:
    """A GPU as small as one likes it."""
    return DeviceInfo(DEVICE, "simulated GPU", cc, sm_count, 232448, l2_bytes, 1 << 34)


def _memory() -> Any:
    return parts.simulator().Memory()


@dataclass(eq=False)
class SimDriver:
    """Runs every launch to its end, at once.

    mode, seed
        When asynchronous work completes: "early", "late" or "random", see ptxsim.
    """

    mode: str = "early"
    seed: int = 0
    memory: Any = field(default_factory=_memory)
    launched: list[str] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)

    def load(self, build: Build, device: int) -> Kernel:
        """The PTX of `build`, parsed."""
        module = parts.simulator().Module(build.ptx.decode(), strict=True, memory=self.memory)
        return Kernel(build.entry, device, 1, owner=module)

    def encode_tiled(self, spec: TensorMapSpec) -> bytes:
        """The simulator's own encoding, by the driver's rules."""
        spec.validate()
        sizes = (spec.dtype, spec.base, spec.dims, spec.strides_bytes, spec.box)
        return bytes(parts.simulator().encode_tiled(*sizes, swizzle=spec.swizzle))

    def memset(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        """Fill memory, at once."""
        self.memory.slice(ptr, nbytes, write=True)[:] = value

    def prepare(
        self, kernel: Kernel, grid: Dim3, block: Dim3, cluster: Dim3, smem: int, args: ArgumentBlock, pdl: bool
    ) -> PreparedLaunch:
        """A launch that runs when it is enqueued."""
        module: Any = kernel.owner
        taken = len(module.program(kernel.entry).function.params)

        def enqueue(stream: int) -> None:
            parameters = [bytes(view) for view in args.views[:taken]]
            report = module.launch(
                kernel.entry, grid, block, parameters, smem=smem, cluster=cluster, mode=self.mode, seed=self.seed
            )
            self.launched.append(kernel.entry)
            self.reports.append(report)

        return enqueue

    def is_capturing(self, stream: int) -> bool:
        """There are no graphs."""
        return False

    def device_guard(self, device: int) -> AbstractContextManager[object]:
        """There is one device."""
        return nullcontext()


class SimFamily(arrays.NumpyFamily):
    """NumPy arrays in the simulator's global memory."""

    name, on_gpu = "simulated", True

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def view(self, x: Any) -> arrays.View:
        """With a device address."""
        return super().view(x)._replace(ptr=self._memory.map(x), device=DEVICE)

    def peek(self, x: Any) -> tuple[int, object]:
        """With a device address."""
        return self._memory.map(x), super().peek(x)[1]

    def current_device(self) -> int:
        """The one device."""
        return DEVICE

    def from_numpy(self, x: np.ndarray[Any, Any], device: int, stream: int) -> Any:
        """A copy."""
        return x.copy()

    def own_memory(self, nbytes: int, device: int) -> Any:
        """What plans allocate."""
        memory = np.full(nbytes, 0xFF, np.uint8)
        return SimpleNamespace(memory=memory, ptr=self._memory.map(memory))

    def empty(self, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> Any:
        """Filled with NaN: whatever is not written shows."""
        made = super().empty(shape, dtype, device, stream)
        made.reshape(-1).view(np.uint8)[:] = 0xFF
        return made


@contextmanager
def simulated(
    sm_count: int = 2,
    cc: tuple[int, int] = (9, 0),
    mode: str = "early",
    seed: int = 0,
    l2_bytes: int = 50 << 20,
) -> Iterator[SimDriver]:
    """Within a with statement, NumPy arrays live on a simulated GPU with `sm_count` multiprocessors.

    That holds for the whole process: no other thread should call the package meanwhile.

    Raises
    ------
    ArgumentError
        If the simulator is neither in the package nor in a checkout.
    """
    target = SimDriver(mode, seed)
    gpu, family = fake_gpu(sm_count, cc, l2_bytes), SimFamily(target.memory)
    sequences = (decode_sequence, sparse_forward_sequence, sparse_backward_sequence)
    caches = (*(module.sequence for module in sequences), merge._kernel)
    with ExitStack() as stack:
        stack.enter_context(driver.use(target))
        stack.enter_context(_replaced(devices, "describe", lambda ordinal: gpu))
        stack.enter_context(_replaced(arrays, "NUMPY", family))
        # Where plans take their memory from:
        stack.enter_context(_replaced(arrays, "cupy_family", lambda: family))
        for cache in caches:
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        yield target


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Another value for an attribute, within a with statement."""
    previous = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, previous)
