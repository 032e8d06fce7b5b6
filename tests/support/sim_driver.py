"""The driver Protocol on the PTX simulator, and NumPy arrays that pass for a GPU's: the public calls then run whole.

Launchers, argument packing, tensor maps, grids and workspaces are those of a GPU; only the instructions are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import ptxsim

from mla_cupy import arrays
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
    """A GPU as small as a test likes it."""
    return DeviceInfo(DEVICE, "simulated GPU", cc, sm_count, 232448, l2_bytes, 1 << 34)


@dataclass(eq=False)
class SimDriver:
    """Runs every launch to its end, at once.

    mode, seed
        When asynchronous work completes: "early", "late" or "random", see ptxsim.
    """

    mode: str = "early"
    seed: int = 0
    memory: ptxsim.Memory = field(default_factory=ptxsim.Memory)
    launched: list[str] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)

    def load(self, build: Build, device: int) -> Kernel:
        module = ptxsim.Module(build.ptx.decode(), strict=True, memory=self.memory)
        return Kernel(build.entry, device, 1, owner=module)

    def encode_tiled(self, spec: TensorMapSpec) -> bytes:
        spec.validate()
        return bytes(
            ptxsim.encode_tiled(spec.dtype, spec.base, spec.dims, spec.strides_bytes, spec.box, swizzle=spec.swizzle)
        )

    def memset(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        self.memory.slice(ptr, nbytes, write=True)[:] = value

    def prepare(
        self, kernel: Kernel, grid: Dim3, block: Dim3, cluster: Dim3, smem: int, args: ArgumentBlock, pdl: bool
    ) -> PreparedLaunch:
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
        return False

    def device_guard(self, device: int) -> AbstractContextManager[object]:
        return nullcontext()


class SimFamily(arrays.NumpyFamily):
    """NumPy arrays in the simulator's global memory."""

    name, on_gpu = "simulated", True  # type: ignore[assignment]

    def __init__(self, memory: ptxsim.Memory) -> None:
        self._memory = memory

    def view(self, x: Any) -> arrays.View:
        return super().view(x)._replace(ptr=self._memory.map(x), device=DEVICE)

    def peek(self, x: Any) -> tuple[int, object]:
        return self._memory.map(x), super().peek(x)[1]

    def current_device(self) -> int:
        return DEVICE

    def own_memory(self, nbytes: int, device: int) -> Any:
        memory = np.full(nbytes, 0xFF, np.uint8)
        return SimpleNamespace(memory=memory, ptr=self._memory.map(memory))

    def empty(self, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> Any:
        made = super().empty(shape, dtype, device, stream)
        made.reshape(-1).view(np.uint8)[:] = 0xFF  # NaN: whatever is not written shows
        return made


@contextmanager
def simulated(
    sm_count: int = 2,
    cc: tuple[int, int] = (9, 0),
    mode: str = "early",
    seed: int = 0,
    l2_bytes: int = 50 << 20,
) -> Iterator[SimDriver]:
    """Within a with statement, NumPy arrays live on a simulated GPU with `sm_count` multiprocessors."""
    target = SimDriver(mode, seed)
    gpu, family = fake_gpu(sm_count, cc, l2_bytes), SimFamily(target.memory)
    sequences = (decode_sequence, sparse_forward_sequence, sparse_backward_sequence)
    caches = (*(module.sequence for module in sequences), merge._kernel)
    with (
        driver.use(target),
        mock.patch.object(devices, "describe", return_value=gpu),
        mock.patch.object(arrays, "NUMPY", family),
        mock.patch.object(arrays, "cupy_family", return_value=family),  # where plans take their memory from
    ):
        for cache in caches:
            cache.cache_clear()
        try:
            yield target
        finally:
            for cache in caches:
                cache.cache_clear()
