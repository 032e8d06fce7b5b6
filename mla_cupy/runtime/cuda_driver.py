"""The driver Protocol on CUDA: CuPy loads and holds kernels, cuda.bindings launches them.

A hot launch is one prebuilt configuration, its stream, and one call.
It never changes the current device of the caller: where a kernel's context is not current, as on another device or
in a thread that has not used CUDA yet, it is pushed for the call.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mla_cupy.errors import UnsupportedDeviceError
from mla_cupy.runtime import tensormap
from mla_cupy.runtime.build import Build
from mla_cupy.runtime.driver import ArgumentBlock, Dim3, Kernel, PreparedLaunch

_REMEDIES = {
    3: "the process was forked after CUDA was used: start workers with the spawn method, or fork before the first call",
    100: "no GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES",
    209: "the kernel was compiled for another GPU: delete it with `mla-cupy clear-cache`",
    701: "the launch asks for more registers or shared memory than the GPU has: please report it",
    900: "call once before the capture, or make a plan",
    906: "call once before the capture, or make a plan",
}
_SINGLE = (1, 1, 1)
_NO_GUARD: AbstractContextManager[object] = nullcontext()


class _PerThread(threading.local):
    """The cell that receives the current context."""

    def __init__(self) -> None:
        self.context = ctypes.c_void_p()
        self.context_cell = ctypes.byref(self.context)


class CudaDriver:
    """Loads through CuPy, launches through `cuLaunchKernelEx`."""

    def __init__(self) -> None:
        try:
            import cupy
            from cuda.bindings import driver as bindings
        except ImportError as error:
            raise UnsupportedDeviceError(
                f"launching kernels needs CuPy and cuda-bindings ({error}): "
                'run pip install "mla_cupy[cu12]" (or "mla_cupy[cu13]" for a CUDA 13 driver)'
            ) from error
        try:
            # PyDLL keeps the GIL, which is cheaper than giving it back for a call of a few nanoseconds.
            self._get_context = ctypes.PyDLL("libcuda.so.1").cuCtxGetCurrent
        except OSError as error:
            raise UnsupportedDeviceError(f"no CUDA driver: {error}; install the driver of the GPU") from error
        self._cupy = cupy
        self._bindings = bindings
        self._launch = bindings.cuLaunchKernelEx
        self._thread = _PerThread()
        self._images: list[int] = []

    def load(self, build: Build, device: int) -> Kernel:
        """Load the kernel of `build` on `device`.

        CuPy keeps loaded modules by path, so every image gets a path of its own that is never used again: a file in
        memory whose descriptor stays open. That also works where no directory is writable.
        """
        entry, smem = build.entry, build.dynamic_smem
        with self.device_guard(device):
            try:
                raw = self._cupy.RawModule(path=self._path(build.cubin, entry)).get_function(entry)
                function = raw.kernel
                if smem > 0:
                    raw.max_dynamic_shared_size_bytes = smem
            except self._cupy.cuda.driver.CUDADriverError as error:
                raise RuntimeError(_message(f"loading {entry} on device {device}", error.status, str(error))) from error
            # The function keeps its module; the raw kernel keeps the function. A bare handle would keep nothing.
            return Kernel(entry, device, function.ptr, self._context(), raw)

    def encode_tiled(self, spec: tensormap.TensorMapSpec) -> bytes:
        """See `tensormap.encode`."""
        return tensormap.encode(spec)

    def memset(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        """Enqueue a fill on `stream`, whose device must be current."""
        status = self._bindings.cuMemsetD8Async(ptr, value, nbytes, stream)[0]
        if status:
            raise RuntimeError(_message("cuMemsetD8Async", int(status), status.name))

    def prepare(
        self, kernel: Kernel, grid: Dim3, block: Dim3, cluster: Dim3, smem: int, args: ArgumentBlock, pdl: bool
    ) -> PreparedLaunch:
        """One configuration, one argument block; enqueueing sets the stream and makes one call.

        The caller's current device stays what it is: where the kernel's context is not current, it is pushed.
        """
        config = self._configure(grid, block, cluster, smem, pdl)
        bindings, launch, get_context = self._bindings, self._launch, self._get_context
        thread, context, handle, pointers = self._thread, kernel.context, kernel.handle, args.pointers

        def enqueue(stream: int) -> None:
            config.hStream = stream
            get_context(thread.context_cell)
            if thread.context.value == context:
                status = launch(config, handle, pointers, 0)[0]
            else:
                status = bindings.cuCtxPushCurrent(context)[0]
                if not status:
                    status = launch(config, handle, pointers, 0)[0]
                    bindings.cuCtxPopCurrent()
            if status:
                raise RuntimeError(_message(f"launching {kernel.entry}, grid {grid}", int(status), status.name))

        return enqueue

    def is_capturing(self, stream: int) -> bool:
        """Whether `stream` is being captured."""
        status, state = self._bindings.cuStreamIsCapturing(stream)
        return not status and int(state) != 0

    def device_guard(self, device: int) -> AbstractContextManager[object]:
        """CuPy's guard, or nothing where `device` is current."""
        if self._cupy.cuda.runtime.getDevice() == device:
            return _NO_GUARD
        guard: AbstractContextManager[object] = self._cupy.cuda.Device(device)
        return guard

    def _configure(self, grid: Dim3, block: Dim3, cluster: Dim3, smem: int, pdl: bool) -> Any:
        bindings = self._bindings
        config = bindings.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = smem
        attributes = []
        if cluster != _SINGLE:
            attribute = bindings.CUlaunchAttribute()
            attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dims = attribute.value.clusterDim
            dims.x, dims.y, dims.z = cluster
            attributes.append(attribute)
        if pdl:
            attribute = bindings.CUlaunchAttribute()
            attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config

    def _context(self) -> int:
        self._get_context(self._thread.context_cell)
        return self._thread.context.value or 0

    def _path(self, cubin: bytes, entry: str) -> str:
        try:
            descriptor = os.memfd_create(entry)
        except OSError:  # a kernel or sandbox without it
            descriptor, path = tempfile.mkstemp(prefix=entry, suffix=".cubin")
        else:
            path = f"/proc/self/fd/{descriptor}"
        self._images.append(descriptor)
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(cubin)
        return path


def _message(what: str, status: int, name: str) -> str:
    remedy = _REMEDIES.get(status)
    return f"{what}: the CUDA driver reports {name} ({status})" + (f"; {remedy}" if remedy else "")
